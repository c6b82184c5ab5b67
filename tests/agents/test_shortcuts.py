"""``evaluate`` in scripts and in notebooks, and the picture of an episode."""

import asyncio
import builtins
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from spear_agents import compare, evaluate, load, view
from spear_agents.cli import evaluate as command
from spear_agents.evaluation.panels import OFFICIAL
from spear_agents.evaluation.run import run_evaluation
from spear_agents.evaluation.settings import EngineKind, EvalSettings
from spear_agents.play.trajectory import Trajectory
from spear_agents.viewer.gif import render_episode_gif, replay_frames
from spear_envs.core.errors import SpearError
from tests.agents.chat_server import Script, complete, say

SOKOBAN = "spear/Sokoban-v1"


def test_it_does_what_the_command_does(tmp_path: Path) -> None:
    keywords = {"text_format": "spaced"}
    result = evaluate(SOKOBAN, engine=EngineKind.RANDOM, tasks=3, temperature=0.5, env_kwargs=keywords, seed=2)
    text = "--engine random --tasks 3 --temperature 0.5 --env text_format=spaced --seed 2 --out"
    done = CliRunner().invoke(command, [SOKOBAN, *text.split(), str(tmp_path)])
    assert done.exit_code == 0, done.output
    again = evaluate(SOKOBAN, engine="random", tasks=3, temperature=0.5, env_kwargs=keywords, seed=2, out=tmp_path)
    assert again.identity == result.identity
    assert [t.to_json() for t in again.trajectories] == [t.to_json() for t in result.trajectories]


def test_it_runs_where_a_loop_runs_already() -> None:
    async def cell() -> Any:
        return evaluate(SOKOBAN, engine="random", tasks=2, progress=False)

    found = asyncio.run(cell())
    assert found.trajectories == evaluate(SOKOBAN, engine="random", tasks=2).trajectories


def test_tasks_may_be_ids_and_those_of_a_panel_may_be_overridden() -> None:
    first = evaluate(SOKOBAN, engine="expert", tasks=2, progress=False)
    ids = [trajectory.task_id for trajectory in first.trajectories]
    assert evaluate(SOKOBAN, engine="expert", tasks=ids, progress=False).trajectories == first.trajectories
    tasks = next(iter(OFFICIAL))
    with pytest.raises(SpearError, match="decides the environment"):
        evaluate(SOKOBAN, panel=tasks, engine="expert")
    options = {"tasks": ids, "episodes_per_task": 1, "temperature": 0.0, "env_kwargs": {"max_turns": 3}}
    found = evaluate(panel=tasks, engine="expert", progress=False, **options).settings
    assert found.panel is not None and found.env_kwargs == {"modality": "text", "max_turns": 3}
    assert found.panel.overrides == {"tasks": ",".join(ids), "temperature": 0.0, "episodes_per_task": 1,
                                     "env_kwargs.max_turns": 3}  # fmt: skip


def test_a_kept_evaluation_is_read_compared_and_shown(tmp_path: Path) -> None:
    made = evaluate(SOKOBAN, engine="random", tasks=4, seed=3, out=tmp_path / "a")
    evaluate(SOKOBAN, engine="expert", tasks=4, out=tmp_path / "b")
    read = load(tmp_path / "a")
    assert (read.settings, read.identity, read.overall) == (made.settings, made.identity, made.overall)
    assert read.trajectories == made.trajectories and read.usage == made.usage
    for first in (tmp_path / "a", read):
        found = compare(first, tmp_path / "b")
        assert found.comparison.after.mean == 1.0 and found.sentences[0] in repr(found)
        assert found.sentences[0].split("(")[0] in found._repr_html_()
    shown = view(tmp_path / "a")
    assert shown.address in repr(shown) and f'href="{shown.address}"' in shown._repr_html_()
    assert "<html" in urlopen(shown.address).read().decode()
    shown.close()


def test_what_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    evaluate(SOKOBAN, engine="random", tasks=1, out=tmp_path)
    with pytest.raises(SpearError, match="metric 'wins' is not one of success, score"):
        compare(tmp_path, tmp_path, "wins")
    (tmp_path / "summary.json").unlink()
    with pytest.raises(SpearError, match=r"does not contain summary\.json"):
        load(tmp_path)
    for call in (load, view):
        with pytest.raises(SpearError) as caught:
            call(tmp_path / "absent")
        assert caught.value._render_traceback_() == [f"{type(caught.value).__name__}: {caught.value}"]


def test_pandas_has_a_row_for_each_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    result = evaluate(SOKOBAN, engine="expert", tasks=3, episodes_per_task=2)
    table = result.to_pandas()
    assert len(table) == 6 and table["won"].all() and table["turns"].min() >= 1
    assert set(table["model"]) == {"expert"} and set(table["environment"]) == {SOKOBAN}
    assert table["seconds"].min() >= 0 and "cost" in table
    real = builtins.__import__

    def refuse(name: str, *args: Any, **keywords: Any) -> Any:
        if name == "pandas":
            raise ImportError(name)
        return real(name, *args, **keywords)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(SpearError, match="pip install pandas"):
        result.to_pandas()


@pytest.mark.parametrize(
    ("keywords", "words"),
    [
        ({"tempereture": 1}, "Did you mean 'temperature'?"),
        ({"env": {"modality": "text"}}, "Did you mean 'env_kwargs'?"),
        ({"template_kwarg": {}}, "Did you mean 'template_kwargs'?"),
        ({"temperature": "warm"}, "temperature='warm': 'warm' is not a valid float"),
        ({"method": "react!"}, "not one of 'plain', 'io', 'react'"),
        ({"tasks": 0}, "has 256 tasks"),
        ({"tasks": [0, 1]}, "Unknown task '0'"),
        ({"seed": -1}, "seed=-1: -1 is not in the range x>=0"),
        ({"history": -1}, "history=-1"),
        ({"max_tokens": 0}, "max_tokens=0: 0 is not in the range x>=1"),
        ({"max_prompt_tokens": 0}, "max_prompt_tokens=0"),
        ({"env_kwargs": {"split": "train"}}, "split is not a keyword here"),
        ({"panel": "sokoban-tiny"}, "leave spear/Sokoban-v1 out"),
        ({"engine": None}, "who plays?"),
        ({"env_id": None}, "which tasks?"),
        ({"env_kwargs": {"romm": 3}}, "romm"),
        ({"base_url": "http://127.0.0.1:1/v1"}, "--engine openai"),
    ],
)
def test_bad_input_is_one_clear_error(keywords: dict[str, Any], words: str) -> None:
    with pytest.raises(SpearError) as caught:
        evaluate(**{"env_id": SOKOBAN, "engine": "random", "progress": False, **keywords})
    assert words in str(caught.value)


@pytest.mark.parametrize("headers", [["X-Key=1", "Y=2"], "X-Key=1"])
def test_headers_are_a_list_or_one(script: Script, headers: Any) -> None:
    pytest.importorskip("openai", reason="needs the extra 'api'")
    script.answers = [say(complete("<think>t</think><action>up</action>"))]
    given: dict[str, Any] = {"env_kwargs": {"modality": "text", "max_turns": 1}, "tasks": "1", "progress": False}
    found = evaluate(SOKOBAN, base_url=script.url, model="m", headers=headers, **given)
    assert found.settings.server is not None and found.settings.server.headers["X-Key"] == "1"


ENV, KEYWORDS = "spear/Sokoban-v1", {"modality": "text"}


@pytest.fixture(scope="module")
def episode() -> Trajectory:
    settings = EvalSettings(ENV, EngineKind.EXPERT, env_kwargs=KEYWORDS, tasks="1")
    return run_evaluation(settings).trajectories[0]


def test_a_gif_shows_every_turn_and_holds_the_last(episode: Trajectory, tmp_path: Path) -> None:
    path = tmp_path / "new" / "episode.gif"
    count = render_episode_gif(ENV, KEYWORDS, episode, path)
    assert count == len(episode.turns) + 1
    with Image.open(path) as gif:
        assert gif.n_frames == count
        assert gif.size == (288, 312)
        durations = []
        for i in range(count):
            gif.seek(i)
            durations.append(gif.info["duration"])
        last = np.asarray(gif.convert("RGB"))[:288]
    assert durations == [500] * (count - 1) + [2500]
    frame = replay_frames(ENV, KEYWORDS, episode)[-1]
    enlarged = frame.repeat(3, 0).repeat(3, 1)
    assert np.abs(last.astype(int) - enlarged).max() <= 8  # one palette of 256 colours for all frames
    assert os.listdir(path.parent) == ["episode.gif"]


def test_an_episode_of_another_environment_is_noticed(episode: Trajectory, tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="ends differently"):
        render_episode_gif(ENV, KEYWORDS, replace(episode, won=False), tmp_path / "x.gif")
    with pytest.raises(SpearError, match="Unknown task"):
        render_episode_gif(ENV, {**KEYWORDS, "boxes": 2, "room": "7x7"}, episode, tmp_path / "x.gif")
    with pytest.raises(SpearError, match="does not name a split"):
        render_episode_gif(ENV, KEYWORDS, replace(episode, task_id="1"), tmp_path / "x.gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(SpearError, match="cannot be written"):
        render_episode_gif(ENV, KEYWORDS, episode, tmp_path / "file" / "x.gif")


def test_an_episode_and_a_turn_are_shown_short() -> None:
    (episode,) = evaluate(SOKOBAN, engine="expert", tasks=1).trajectories
    for shown in (episode, episode.turns[0], [episode]):
        assert len(repr(shown)) < 300 and "\n" not in repr(shown)
    assert "won" in repr(episode) and "action" in repr(episode.turns[0])
    page = episode._repr_html_()
    assert page.count("<details>") == len(episode.turns) and episode.instruction in page
    assert "<think>" not in page and "&lt;think&gt;" in page


def test_importing_the_package_imports_nothing_of_it() -> None:
    import subprocess

    code = "import spear_agents, sys; print(any(name.startswith('spear_agents.') for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"

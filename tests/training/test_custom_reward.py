"""A user's own reward function, from its file to the reward of an episode."""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("omegaconf", reason="needs the extra 'train'")

from omegaconf import DictConfig, OmegaConf

from spear_agents.trajectory import StopReason, Trajectory
from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import ListTaskSet, Task
from spear_training.custom_reward import CUSTOM, CustomReward, read_custom_reward, resolve_custom_reward
from tests.training.test_recording import make_episode

TASKS = ListTaskSet(
    [
        Task("t/train/0", "train", "easy", "add", {"answer": "42"}),
        Task("t/train/1", "train", "easy", "ask", {"golden_answers": ["a", "b"]}),
        Task("t/train/2", "train", "easy", "walk", {"board": 1}),
    ],
)


def configure(path: Any = None, **node: Any) -> DictConfig:
    return OmegaConf.create({"reward": {"custom_reward_function": {"path": path and str(path), **node}}})


def load(tmp_path: Path, text: str, **node: Any) -> CustomReward:
    path = tmp_path / "reward.py"
    path.write_text(text)
    reward = read_custom_reward(configure(path, **node))
    assert reward is not None
    return reward


def play(number: int) -> Trajectory:
    episode = replace(make_episode(number), task_id=f"t/train/{number}", reward_terms={"outcome": -1.0})
    return replace(episode, turns=(*episode.turns, replace(episode.turns[0], response="stop")))


def score(reward: CustomReward, *episodes: Trajectory) -> list[Trajectory]:
    return asyncio.run(reward.score_all(episodes, TASKS, "train"))


SEEN = """
seen = []
{0}def compute_score(data_source, solution_str, ground_truth, extra_info, **kwargs):
    seen.append((data_source, solution_str, ground_truth, extra_info, kwargs))
    return {1}
"""


@pytest.mark.parametrize("kind", ["", "async "])
@pytest.mark.parametrize("answer", ["0.5", "{'score': 0.5, 'acc': 1}", "__import__('numpy').float32(0.5)"])
def test_the_function_is_called_as_verl_calls_it(tmp_path: Path, kind: str, answer: str) -> None:
    reward = load(tmp_path, SEEN.format(kind, answer), reward_kwargs={"bonus": 2})
    scored = score(reward, play(0), play(1), play(2))
    assert [episode.reward_terms for episode in scored] == [{"outcome": -1.0, CUSTOM: 0.5}] * 3
    assert scored[0] == replace(play(0), reward_terms=scored[0].reward_terms), "nothing else of an episode changes"
    calls = sorted(reward.function.__globals__["seen"], key=lambda call: call[3]["task_id"])
    assert [call[2] for call in calls] == ["42", ["a", "b"], None]
    source, solution, _, extra, keywords = calls[0]
    assert (source, solution, keywords) == ("env", "go\nstop", {"bonus": 2})
    assert extra == {
        "task_id": "t/train/0",
        "split": "train",
        "reward_terms": {"outcome": -1.0},
        "won": True,
        "num_turns": 2,
        "turns": [{"observation": "_P_", "response": word, "action": "go"} for word in ("go", "stop")],
    }


def test_a_file_may_have_dataclasses_and_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour_of_reward.py").write_text("def halve(x): return x / 2")
    text = """from __future__ import annotations
from dataclasses import dataclass
from neighbour_of_reward import halve

@dataclass
class Score:
    value: float
    before: Score | None = None

def compute_score(**_): return halve(Score(1.0).value)
"""
    assert score(load(tmp_path, text), play(0))[0].reward_terms[CUSTOM] == 0.5


def test_an_episode_that_a_fault_cut_short_is_not_scored(tmp_path: Path) -> None:
    broken = replace(play(0), fault="backend", stop=StopReason.FAULT)
    assert score(load(tmp_path, SEEN.format("", "1")), broken, play(1))[0] is broken


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "def helper(t):\n    return int(t)\ndef compute_score(solution_str, **_): return helper(solution_str)",
            "reward.py, line 2, in helper: ValueError: invalid literal for int() with base 10: 'go\\nstop' (task t/tr",
        ),
        ("def compute_score(text):\n    return 1", "reward.py, compute_score: TypeError: compute_score() got an unexp"),
        ("async def compute_score(**_):\n\n    raise KeyError('a\\nb')", "reward.py, line 3, in compute_score: KeyErr"),
        ("def compute_score(**_):\n    return next(iter([]))", "line 2, in compute_score: RuntimeError: Stop"),
        ("def compute_score(**_): return None", "compute_score returned None for task t/train/0, which is neither"),
        ("def compute_score(**_): return {'acc': 1}", "nor a dict with one under 'score'"),
        ("def compute_score(**_): return float('nan')", "returned nan for task t/train/0"),
    ],
)
def test_an_error_of_the_function_names_its_place(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SpearError) as caught:
        score(load(tmp_path, text), play(0))
    assert message in str(caught.value) and str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "node", "message"),
    [
        ("x = 1\n1 / 0", {}, "reward.py, line 2 cannot be loaded: ZeroDivisionError: division by zero"),
        ("def compute_score(:", {}, "reward.py cannot be loaded: SyntaxError: invalid syntax (reward.py, line 1)"),
        ("x = 1", {}, "reward.py has no function 'compute_score': see reward.custom_reward_function.name"),
        ("x = 1", {"name": "x"}, "has no function 'x'"),
        ("x = 1", {"nam": "x"}, "unknown key reward.custom_reward_function.nam; known are path, name, reward_kwargs"),
    ],
)
def test_a_file_that_cannot_be_used_is_told_before_anything_starts(
    tmp_path: Path, text: str, node: dict[str, Any], message: str
) -> None:
    path = tmp_path / "reward.py"
    path.write_text(text)
    with pytest.raises(SpearError) as caught:
        resolve_custom_reward(configure(path, **node))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_a_composed_training_knows_the_function(tmp_path: Path, model_folder: Path) -> None:
    pytest.importorskip("verl", reason="needs the extra 'train'")
    from spear_training.launch import compose_config

    path = tmp_path / "reward.py"
    path.write_text("def mine(bonus, **_): return bonus")
    overrides = (
        "preset=demo",
        f"actor_rollout_ref.model.path={model_folder}",
        f"custom_reward_function.path={path}",
        "custom_reward_function.name=mine",
        "+custom_reward_function.reward_kwargs.bonus=3",
    )
    reward = read_custom_reward(compose_config(overrides, tmp_path / "run"))
    assert reward is not None and (reward.name, reward.kwargs) == ("mine", {"bonus": 3})
    with pytest.raises(SpearError, match="is not a file"):
        compose_config((*overrides[:2], "reward.custom_reward_function.path=missing.py"), tmp_path / "run")

"""Evaluations of models that are broken, that know no form, that ask for too much: with transformers, nothing faked."""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from spear_agents.chat import Chat  # noqa: E402
from spear_agents.engines.hf import HFModel, load_tokenizer, quiet_transformers  # noqa: E402
from spear_agents.evaluation import run_evaluation  # noqa: E402
from spear_agents.prompting import Overlong  # noqa: E402
from spear_agents.records import EPISODES  # noqa: E402
from spear_agents.settings import EvalSettings  # noqa: E402
from spear_agents.trajectory import StopReason, read_trajectories  # noqa: E402
from spear_envs.core.errors import SpearError  # noqa: E402
from spear_envs.core.registration import register_env  # noqa: E402
from spear_training.warmstart.policy import PolicyShape, make_model  # noqa: E402
from tests.agents.test_evaluation import SplitCorridor  # noqa: E402


@pytest.fixture
def settings(corridor_id: str, tiny_model: Path) -> EvalSettings:
    register_env(corridor_id, SplitCorridor)
    return EvalSettings(corridor_id, model=str(tiny_model), episodes_per_task=2)


def test_broken_weights_are_faults_and_no_lost_episodes(
    settings: EvalSettings, tiny_model: Path, tmp_path: Path
) -> None:
    model = HFModel(tiny_model).model
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    with quiet_transformers():
        model.save_pretrained(tmp_path / "broken")
    load_tokenizer(tiny_model).save_pretrained(tmp_path / "broken")
    with pytest.raises(SpearError, match=r"failed 5 episodes in a row \(engine_nan"):
        run_evaluation(replace(settings, model=str(tmp_path / "broken")), tmp_path / "out", concurrency=1)
    played = list(read_trajectories(tmp_path / "out" / EPISODES))
    assert {(t.stop, t.fault, t.reward) for t in played} == {(StopReason.FAULT, "engine_nan", 0.0)}
    assert "NaN" not in (tmp_path / "out" / EPISODES).read_text()


def test_history_that_does_not_fit_is_left_out_and_the_record_says_so(tiny_model: Path) -> None:
    settings = EvalSettings(
        "spear/Sokoban-v1",
        model=str(tiny_model),
        env_kwargs={"modality": "text", "max_turns": 5},
        template="default",
        history=3,
        tasks="2",
        max_tokens=4,
    )
    whole = run_evaluation(settings)
    sizes = [[len(turn.prompt_ids) for turn in t.turns] for t in whole.trajectories]
    limit = max(first for first, *_ in sizes) + 60  # room for a later step's words, not for a turn of history
    assert max(map(max, sizes)) > limit
    short = replace(settings, max_prompt_tokens=limit)
    ended = run_evaluation(short)
    assert StopReason.CONTEXT_LIMIT in {t.stop for t in ended.trajectories}
    found = run_evaluation(replace(short, overlong=Overlong.DROP_HISTORY))
    turns = [turn for t in found.trajectories for turn in t.turns]
    assert all(len(turn.prompt_ids) <= limit for turn in turns)
    assert any(turn.dropped_turns for turn in turns) and not any(t.turns[0].dropped_turns for t in found.trajectories)
    assert len(turns) > sum(len(t.turns) for t in ended.trajectories), "the episodes go on"


LIMITED = """
import resource, sys
from pathlib import Path
import torch, transformers, spear_agents.engines.hf
from spear_envs.cli import main
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 200 * 2**20,) * 2)
main(sys.argv[1:])
"""


@pytest.mark.slow  # two processes that import torch; and neither is quick without memory
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/statm")
def test_memory_that_runs_out_is_one_clear_error_and_the_run_goes_on_later(tiny_model: Path, tmp_path: Path) -> None:
    # 28 prompts at a time need more than 300 MiB for the activations of a layer, two less than 100.
    tokenizer = load_tokenizer(tiny_model)
    model = make_model(PolicyShape(hidden=16, layers=1, heads=2, mlp=2**17), tokenizer, 64, seed=0)
    with quiet_transformers():
        model.save_pretrained(tmp_path / "wide")
    tokenizer.save_pretrained(tmp_path / "wide")

    keywords, out = {"modality": "text", "max_turns": 1}, tmp_path / "out"
    wide = EvalSettings("spear/Sokoban-v1", model=str(tmp_path / "wide"), env_kwargs=keywords, max_tokens=2, tasks="4")
    run_evaluation(wide, out, concurrency=2)

    def evaluate(concurrency: int) -> subprocess.CompletedProcess[str]:
        options = ["--env", "modality=text", "--env", "max_turns=1", "--max-tokens", "2", "--tasks", "32"]
        options += ["--model", str(wide.model), "--out", str(out), "--concurrency", str(concurrency)]
        command = [sys.executable, "-c", LIMITED, "eval", "spear/Sokoban-v1", *options]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    before = (out / EPISODES).read_bytes()
    many = evaluate(32)
    assert many.returncode == 1
    assert "out of memory with 28 responses at a time: play fewer (--concurrency)" in many.stderr
    assert "Traceback" not in many.stderr
    assert (out / EPISODES).read_bytes() == before, "what was played is still there"
    assert evaluate(2).returncode == 0
    played = Counter((t.task_id, t.seed) for t in read_trajectories(out / EPISODES))
    assert len(played) == 32 and set(played.values()) == {1}


def test_a_chat_template_that_loops_is_one_error(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spear_agents.chat.RENDER_S", 0.3)
    tokenizer = load_tokenizer(tiny_model)
    loops = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + "{% endfor %}" * 3
    tokenizer.chat_template = loops + "{{ messages[0].content }}"
    started = time.monotonic()
    with pytest.raises(SpearError, match="template"):
        Chat(tokenizer).render([{"role": "user", "content": "x"}])
    assert time.monotonic() - started < 10

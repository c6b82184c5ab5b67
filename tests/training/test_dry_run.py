"""Dry runs of the paper's presets: what they cut down, and real ones of two steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from rich.console import Console

from agents.metrics import read_history
from agents.trajectory import Layout, StopReason
from spear_envs.core.errors import SpearError
from training.dry_run import choose_warm_start, list_cuts, show_cuts
from training.launch import compose_config, flatten_config
from training.planning.step import Texts, count_optimiser_steps, measure_row
from training.presets import list_presets, load_preset
from training.warmstart import WarmStartSettings

METRICS = (
    *("spear/gamma", "spear/mu", "baseline/p50", "baseline/size", "replay/size", "replay/kept"),
    *("replay/dropped_nonpositive", "replay/dropped_other", "replay/evicted_age", "replay/considered"),
    *("replay/eligible", "replay/drawn", "replay/discarded", "replay/mean_age", "replay/bytes", "replay/n_sil"),
    *("loss/on_policy", "loss/sil", "clip/ppo_fraction", "clip/dual_fraction", "clip/cov_fraction"),
    *("cov/lower", "cov/upper", "entropy/seq-mean-token-sum-norm", "entropy/seq-mean-token-sum"),
    *("reward/total", "reward/outcome", "reward/tool_call", "reward/format", "success/all", "score/mean"),
    *("tool_calls/mean", "turns/mean", "mask/overlong", "mask/void", "mask/repetition", "mask/low_variance"),
    *("rollout/wasted_generations", "perf/spear_driver_seconds", "perf/step_seconds"),
    *(f"stop/{reason.value}" for reason in StopReason),
)
"""What a run with a replay tells, besides success by subtask and faults by kind."""


def compose(*overrides: str) -> Any:
    return compose_config(overrides, Path("runs/x"), check=False)


def test_the_policy_of_a_dry_run_is_made_for_its_environment() -> None:
    config = compose("preset=math_qwen3_32b_16k", "model=tiny", "spear.warm_start.episodes=9")
    settings = choose_warm_start(config)
    assert isinstance(settings, WarmStartSettings)
    assert settings.env_id == "spear/CodeInterpreter-v0" and settings.env_kwargs == dict(config.spear.env.kwargs)
    assert (settings.layout, settings.template) == (Layout.CONVERSATION, "compact")
    assert (settings.episodes, settings.panel_tasks) == (9, 0)
    assert settings.learning_rate == 2e-3, "the rest is the environment's recipe"


def test_pictures_have_a_policy_that_sees_them() -> None:
    from training.warmstart.vision import TinyVisionSettings

    config = compose_config(("preset=sokoban_qwen2.5_vl_3b", "model=tiny_vl"), Path("runs/x"))
    assert config.actor_rollout_ref.model.path == str(Path("runs/x/policy").resolve())
    settings = choose_warm_start(config)
    assert isinstance(settings, TinyVisionSettings)
    assert settings.env_kwargs["modality"] == "image" and (settings.template, settings.steps) == ("default", 25)


def test_a_wrong_setting_of_the_policy_is_told() -> None:
    with pytest.raises(SpearError, match=r"spear\.warm_start: .*'episode'"):
        choose_warm_start(compose("model=tiny", "+spear.warm_start.episode=9"))


def test_what_is_cut_down_is_said(tmp_path: Path) -> None:
    overrides = ("preset=webshop_qwen2.5_7b", "model=tiny", "algorithm=grpo_sil")
    cuts = {key: (before, after) for key, before, after in list_cuts(overrides)}
    assert cuts["data.train_batch_size"] == (32, 6) and cuts["spear.replay.capacity"] == (2048, 8)
    assert cuts["spear.env.kwargs.catalog"] == ("small", "mini")
    assert not any(key.startswith(("spear.sil", "spear.clip", "spear.advantage", "spear.filter")) for key in cuts)
    path = tmp_path / "console.txt"
    with path.open("w") as file:
        show_cuts(overrides, Console(file=file, width=160))
    text = path.read_text()
    assert "every other setting is the preset's" in text and "data.train_batch_size" in text


def test_rows_of_one_experiment_have_the_same_dry_run() -> None:
    """So that one run speaks for all of them: they differ in the model alone, and in lengths that are cut anyway."""
    runs: dict[str, dict[str, Any]] = {}
    for name in list_presets():
        if load_preset(name)["model"]:
            flat = flatten_config(compose(f"preset={name}", "model=tiny"))
            assert runs.setdefault(name.partition("_")[0], flat) == flat, name
    assert set(runs) == {"alfworld", "webshop", "sokoban", "math", "search"}


def start(preset: str, out: Path, *overrides: str) -> None:
    command = [sys.executable, "-m", "training", f"preset={preset}", "cluster=cpu", "model=tiny", "--out", str(out)]
    variables = {**os.environ, "WANDB_MODE": "offline"}
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=900, env=variables)
    log = (out / "train.log").read_text(errors="replace")[-3000:] if (out / "train.log").exists() else ""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{log}"
    assert "Cut down; every other setting is the preset's" in done.stdout


@pytest.mark.slow
def test_a_dry_run_tells_everything_everywhere(tmp_path: Path) -> None:
    out = tmp_path / "sokoban"
    start("sokoban_qwen2.5_vl_3b", out, "trainer.logger=[console,tensorboard,file,wandb]")
    steps = [record for record in read_history(out) if "training/global_step" in record]
    assert [record["step"] for record in steps] == [1, 2]
    told = {name for record in steps for name, value in record.items() if value is not None}
    assert set(METRICS) <= told
    assert any(name.startswith("success/") and name != "success/all" for name in told)
    assert all(record["rollout/wasted_generations"] == 0 for record in steps)

    log = (out / "train.log").read_text(errors="replace")
    (wandb,) = out.glob("wandb/offline-run-*/run-*.wandb")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    recorded = wandb.read_bytes()
    for name in METRICS:
        assert name in log and name in events.Tags()["scalars"] and name.encode() in recorded, name

    # `spear plan --like` gives back what was measured.
    config = compose("preset=sokoban_qwen2.5_vl_3b", "model=tiny")
    from training.planning import make_plan

    plan = make_plan(config, {}, Texts.measure(steps), 2**30)
    measured = {
        name: sum(record[name] for record in steps) / 2 for name in steps[0] if name.startswith(("rows", "tok"))
    }
    assert plan.step.rows == pytest.approx(measured["rows/total"])
    assert plan.step.tokens == pytest.approx(measured["tokens/prompt"] + measured["tokens/response"])
    assert plan.step.written == pytest.approx(measured["tokens/written"])
    assert plan.step.trained >= measured["rows/trained"], "filters of single rows are not foreseen"
    first = steps[0]
    rows = config.actor_rollout_ref.actor.ppo_mini_batch_size * config.actor_rollout_ref.rollout.n
    assert first["actor/optimizer_steps"] == count_optimiser_steps(first["rows/trained"], rows)
    row = [first[f"tokens/{part}"] / first["rows/total"] for part in ("prompt", "response", "written")]
    assert first["replay/bytes"] / first["replay/size"] == pytest.approx(measure_row(*row), rel=0.02)
    drawn = [record["step"] for record in steps if record.get("replay/drawn")]
    assert plan.step.first_replay == drawn[0] == 2


@pytest.mark.slow
def test_a_dry_run_of_conversations(tmp_path: Path) -> None:
    out = tmp_path / "search"
    start("search_qwen2.5_7b", out)
    steps = [record for record in read_history(out) if "training/global_step" in record]
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["rows/total"] == 24 for record in steps), "a conversation is one row"

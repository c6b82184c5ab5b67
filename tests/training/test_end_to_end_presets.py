"""Dry runs of the paper's presets through verl and Ray: every experiment, each with another algorithm or cluster."""

import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_agents.play.trajectory import StopReason
from spear_training.run.compose import compose
from spear_training.run.supervise import supervise_training
from spear_training.step.minibatches import count_minibatches
from tests.rooms import ROOT
from tests.training.every_algorithm import ALGORITHMS, NAME, OWN, STEPS_EACH, settings_of
from tests.training.trainings import get_steps, write_run

pytestmark = pytest.mark.slow

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


LOGGERS = "log.to=[console,tensorboard,file,wandb]"
EPISODES = 24


@dataclass(frozen=True)
class DryRun:
    """A preset's two steps: how it is started, and what its episodes are of."""

    preset: str
    overrides: tuple[str, ...]
    subtasks: frozenset[str]
    conversation: bool = False
    """Whether an episode is one row."""


RUNS = (
    DryRun(
        "webshop_qwen2.5_7b", ("algorithm=gigpo",), frozenset({"beauty", "electronics", "fashion", "garden", "grocery"})
    ),
    DryRun(
        "math_qwen3_32b_16k",
        ("algorithm=rloo_sil",),
        frozenset(
            [
                "powers",
                "squares",
                "multiples",
                "digits",
                "products",
                "remainders",
                "factorials",
                "common_multiples",
                "coprime",
                "loops",
            ]
        ),
        conversation=True,
    ),
)


def run(out: Path, *overrides: str, address: str | None = None) -> dict[int, dict[str, float]]:
    """``spear train`` in a process of its own; its metrics by step."""
    command = [sys.executable, "-m", "spear_training", "--out", str(out), *overrides]
    variables = {**os.environ, "WANDB_MODE": "offline"} | ({"RAY_ADDRESS": address} if address else {})
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=variables)
    log = (out / "train.log").read_text(errors="replace")[-3000:] if (out / "train.log").exists() else ""
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{log}"
    assert "Dry run: reduced settings (all others are the preset's)" in " ".join(done.stdout.split())
    return check(get_steps(out))


def check(steps: dict[int, dict[str, float]]) -> dict[int, dict[str, float]]:
    """What holds for each of these runs."""
    assert sorted(steps) == [1, 2]
    for metrics in steps.values():
        assert metrics["rollout/wasted_generations"] == 0
        # Prompts of unequal length: padded on the left where they are played, not at all where they are learnt.
        assert metrics["training/rollout_log_probs_diff_max"] < 1e-4
        assert metrics["rows/trained"] > 0 and math.isfinite(metrics["loss/on_policy"])
        # Groups that all win or all lose are filtered out.
        assert metrics["actor/grad_norm"] > 0 or metrics["success/all"] in (0, 1)
        assert 0 <= metrics["turns/valid_action"] <= 1
    assert 0 <= steps[2]["val/success/all"] <= 1
    return steps


@pytest.mark.nightly
@pytest.mark.parametrize("dry", RUNS, ids=lambda dry: dry.preset)
def test_a_preset_trains_two_steps(dry: DryRun, tmp_path: Path) -> None:
    steps = run(tmp_path / "run", f"preset={dry.preset}", "model=tiny", *dry.overrides)
    for metrics in steps.values():
        played = {name.removeprefix("success/") for name in metrics if name.startswith("success/")} - {"all"}
        assert played and played <= dry.subtasks
        assert (metrics["rows/total"] == EPISODES) == dry.conversation


@pytest.fixture
def two_nodes() -> Iterator[str]:
    """Address of a Ray cluster of two nodes on this machine, each with room for two ranks."""
    from ray.cluster_utils import Cluster

    folder = tempfile.mkdtemp(prefix="ray")  # the paths of Ray's sockets must be short
    node = {"num_cpus": 11, "num_gpus": 2, "object_store_memory": 200_000_000}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "temp_dir": folder, "include_dashboard": False})
    try:
        cluster.add_node(**node)
        yield cluster.address
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.nightly
def test_a_preset_trains_on_four_ranks_of_two_nodes(two_nodes: str, tmp_path: Path) -> None:
    ranks = ("cluster.nodes=2", "cluster.gpus_per_node=2")
    overrides = ("preset=alfworld_qwen2.5_7b", "model=tiny", "algorithm=drbot_gigpo_spear", *ranks)
    steps = run(tmp_path / "run", *overrides, address=two_nodes)
    assert steps[2]["replay/drawn"] == 8 and steps[2]["loss/sil"] < 0
    saved = (tmp_path / "run" / "checkpoints" / "global_step_2" / "actor").glob("model_world_size_4_rank_*.pt")
    assert len(list(saved)) == 4, "a node has room for two ranks, so both have taken part"


def test_a_tiny_vision_policy_trains_on_pictures_and_tells_everything_everywhere(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from spear_agents.engines.hf import HFModel
    from spear_agents.evaluation.records import read_history
    from spear_training.planning.cli import make_plan
    from spear_training.run.store import export_policy

    out = tmp_path / "sokoban"
    words = ("preset=sokoban_qwen2.5_vl_3b", "model=tiny_vl")
    trained = run(out, *words, "checkpoint.every=2", LOGGERS)
    assert trained[2]["replay/drawn"] > 0
    made = export_policy(out, tmp_path / "policy")
    before, after = (load_file(folder / "model.safetensors") for folder in (out / "policy", made.folder))
    moved = {name for name in before if not before[name].equal(after[name])}
    assert "visual.patch_embed.proj.weight" in moved, "no gradient reached the vision tower"
    assert HFModel(made.folder).reader is not None, "the image processor is part of the export"

    steps = [record for record in read_history(out) if "training/global_step" in record]
    text = {name for record in steps for name, value in record.items() if value is not None}
    assert set(METRICS) <= text
    assert any(name.startswith("success/") and name != "success/all" for name in text)

    log = (out / "train.log").read_text(errors="replace")
    (wandb,) = out.glob("wandb/offline-run-*/run-*.wandb")
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    recorded = wandb.read_bytes()
    for name in METRICS:
        assert name in log and name in events.Tags()["scalars"] and name.encode() in recorded, name

    # `spear plan` counts what is trained on.
    request = compose(words)
    names = ("rows/total", "tokens/prompt", "tokens/response", "tokens/written")
    rows = [sum(record[name] for record in steps) / 2 for name in names]
    turns = sum(record["turns/mean"] for record in steps) / 2
    given = {"turns": turns, "prompt": rows[1] / rows[0], "response": rows[2] / rows[0], "written": rows[3] / rows[0]}
    plan = make_plan(request, given, 2**30)
    assert plan.step["rows"] == pytest.approx(rows[0]) and plan.step["written"] == pytest.approx(rows[3])
    assert plan.step["tokens"] == pytest.approx(rows[1] + rows[2])
    first = steps[0]
    mini_batch = request.config.train.mini_batch_size * request.config.rollout.group_size
    assert first["actor/optimizer_steps"] == count_minibatches(first["rows/trained"], mini_batch)


SMALLER = (
    f"train.steps={STEPS_EACH * len(ALGORITHMS)}",
    "checkpoint.every=null",
    "validation.every=null",
    "validation.at_start=false",
    "train.batch_size=6",
    "validation.tasks=4",
    "rollout.group_size=4",
    "train.mini_batch_size=24",
)


@pytest.fixture(scope="module")
def steps(sokoban_policy: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, float]]:
    out = tmp_path_factory.mktemp("runs") / "all"
    model = f"model.path={sokoban_policy}"
    words = (*settings_of("ppo_spear"), *SMALLER, model, f"verl.trainer.v1.trainer_mode={NAME}")  # PPO has a critic
    write_run(out, *words)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # before the package ``tests`` that verl installs
        supervise_training(out, "cpu", lambda history: None, module=OWN)
    return get_steps(out)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_trains(steps: dict[int, dict[str, float]], algorithm: str) -> None:
    start = 1 + STEPS_EACH * ALGORITHMS.index(algorithm)
    first, second = steps[start], steps[start + 1]
    imitates, rewards_tools = algorithm.endswith(("_sil", "_spear")), algorithm.endswith("_spear")
    for metrics in (first, second):
        assert metrics["rows/trained"] > 0 and math.isfinite(metrics["loss/on_policy"])
        assert metrics["actor/grad_norm"] > 0 or metrics["groups/equal"] == 1
        assert metrics["rollout/wasted_generations"] == 0
        assert (metrics["spear/mu"] > 0) == rewards_tools and metrics["reward/tool_call"] > 0
        assert ("critic/loss" in metrics) == algorithm.startswith("ppo")
        if algorithm.startswith("ppo"):
            assert metrics["critic/loss"] > 0 and metrics["critic/grad_norm"] > 0
        if algorithm.startswith("drbot"):
            assert metrics["rows/trained"] < metrics["rows/total"], "the filter of groups"
    assert ("replay/kept" in first) == imitates and first.get("replay/drawn", 0) == 0
    if imitates and first["replay/size"] >= 8:
        assert second["replay/considered"] == first["replay/size"]
        assert second["replay/drawn"] == min(8, second["replay/eligible"])
    if second.get("replay/drawn"):
        assert second["loss/sil"] < 0 and second["replay/n_sil"] > 0
        assert {"cov/lower", "cov/upper"} <= second.keys() and 0 < second["replay/ess"] <= 1
    assert ("loss/sil" in second) == bool(second.get("replay/drawn"))


def test_most_of_them_replayed(steps: dict[int, dict[str, float]]) -> None:
    replayed = [step for step, metrics in steps.items() if metrics.get("replay/drawn")]
    assert len(replayed) >= 10 and all(step % STEPS_EACH == 0 for step in replayed)

"""Comparisons that run the trainer, whose step is that of the lab."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch

from benchmarks.lab import trainer_runs
from benchmarks.lab.actor import LabActor
from benchmarks.lab.comparison import Comparison, RunPlan, TrainerComparison
from benchmarks.lab.report import Findings
from benchmarks.lab.runs import Registry, run_all
from benchmarks.lab.trainer_runs import TrainerBench, find_end, list_overrides
from spear_agents.evaluation.records import METRICS_FOLDER, read_history
from spear_envs.core.errors import SpearError
from spear_training.algorithms import SpearSettings
from spear_training.run.compose import compose
from tests.benchmarks.lab import real_trainer
from tests.benchmarks.lab.pairs import SETTINGS, TablePolicy, count_replayed, measure_differences, run_both, score_with
from tests.training.verl_plugin.fakes import FakeQueue
from tests.training.verl_plugin.steps import RATE, FakeWorkers

CONTENT: dict[str, Any] = {
    "engine": "trainer",
    "title": "Trial",
    "panel": "train",
    "samples": 2,
    "rates": [0.0004],
    "seeds": 2,
    "levels": {"shortest": 2, "longest": 4},
    "start": {"episodes": 6, "epochs": 1, "most": 0.9},
    "training": {"levels": 4, "tasks": 2, "group": 2, "turns": 3, "minibatch": 8, "budget": 60},
    "arms": {
        "grpo": {},
        "thompson": {
            "algorithm": "grpo_sil",
            "spear": {"replay": {"capacity": 8}},
            "curriculum": {"choice": "thompson", "forget": 0.5},
            "branch": {"share": 0.5, "mode": "near_miss"},
        },
    },
    "compare": [["thompson", "grpo"]],
}
COMPARISON = Comparison.of(CONTENT)
assert isinstance(COMPARISON, TrainerComparison)


def test_a_training_has_the_settings_of_its_arm(tmp_path: Path) -> None:
    overrides = list_overrides(COMPARISON, RunPlan("thompson", 0.0004, 7), tmp_path / "it's here")
    run = compose(overrides).config
    assert run.algorithm == COMPARISON.arms["thompson"].compose(COMPARISON.training)
    assert run.seed == 7 and run.optimizer.lr == 0.0004
    assert run.train.mini_batch_size * run.rollout.group_size == 8
    assert dict(run.env.kwargs) == {
        "modality": "text", "room": "6x6", "shortest": 2, "longest": 4, "max_turns": 3
    }  # fmt: skip
    assert (run.train.max_tasks, run.train.batch_size) == (4, 2)
    assert run.model.path == str((tmp_path / "it's here").resolve())


def test_a_budget_ends_with_the_step_that_uses_it_up() -> None:
    history = [{"step": 0, "val/success/all": 0.1}, *({"step": n, "tokens/written": 25.0} for n in (1, 2, 3))]
    assert [find_end(history, budget) for budget in (1, 25, 26, 75, 76)] == [1, 1, 2, 3, None]


class FakeTrainer:
    """Metrics and checkpoints of 25 tokens a step, until it is told to stop."""

    def __init__(self, policy: Path) -> None:
        self.policy, self.launches, self.stops_after = policy, 0, 100

    def __call__(
        self, out: Path, device: str, observer: Callable[[list[dict[str, Any]]], None], *, poll_seconds: float
    ) -> None:
        self.launches += 1
        (out / METRICS_FOLDER).mkdir(parents=True, exist_ok=True)
        begun = max((record["step"] for record in read_history(out)), default=0)
        for step in range(begun + 1, begun + self.stops_after + 1):
            folder = out / "checkpoints" / f"global_step_{step}" / "actor"
            folder.mkdir(parents=True)
            shutil.copytree(self.policy, folder / "huggingface")
            data = {"training/global_step": step, "tokens/written": 25.0, "rows/total": 6.0, "success/all": 0.25}
            with (out / METRICS_FOLDER / f"{self.launches}.jsonl").open("a") as file:
                file.write(json.dumps({"step": step, "data": data | {"replay/drawn": 2.0}}) + "\n")
            if step % 2 == 0:  # it looks now and then: the step after the last may be made already
                observer(read_history(out))


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeTrainer:
    made = FakeTrainer(tmp_path / "cache" / "policy-6-1")
    monkeypatch.setattr(trainer_runs, "supervise_training", made)
    return made


def test_a_stopped_comparison_goes_on_and_is_reported(tmp_path: Path, trainer: FakeTrainer) -> None:
    """Policy, panels, registry and report are the real ones; what trains is not."""
    registry = Registry(COMPARISON, tmp_path / "out")
    trainer.stops_after = 1
    with pytest.raises(SpearError, match="ended before 60 tokens"):
        run_all(registry, 2, lambda: None)
    trainer.stops_after = 100
    run_all(registry, 2, lambda: None)
    run = registry.read(RunPlan("grpo", 0.0004, 0))
    assert run is not None and (run["steps"], run["tokens"], run["turns"], run["replayed"]) == (3, 75, 18, 6)
    assert len(run["won"]) == 4 and run["rollouts"] == [0.25] * 3
    assert trainer.launches == 5, "four runs, one of which was stopped"
    text = Findings(COMPARISON, tmp_path / "out" / "result.json").write_tables()
    assert "success is of 2 episodes a level, on 4 levels (train)" in text and "| thompson | grpo |" in text
    folder = tmp_path / "out" / "trainings" / "grpo-0.0004-0"
    assert len(read_history(folder)) == 4 and not (folder / "checkpoints").exists()
    # Killed after its checkpoints were thrown away and before its result was written.
    (tmp_path / "out" / "runs" / "grpo-0.0004-0.json").unlink()
    run_all(registry, 2, lambda: None)
    assert trainer.launches == 6 and registry.read(RunPlan("grpo", 0.0004, 0)) == run


@pytest.mark.nightly
def test_a_real_training_stops_when_its_budget_is_used(tmp_path: Path) -> None:
    bench = TrainerBench(COMPARISON, tmp_path, tmp_path / "out")
    plan = RunPlan("thompson", 0.0004, 0)
    result = bench.run(plan)
    history = read_history(tmp_path / "out" / "trainings" / plan.name)
    end = history[result["steps"] - 1]
    assert result["tokens"] >= 60 > result["tokens"] - end["tokens/written"] and end["curriculum/met"] > 0
    assert len(history) <= result["steps"] + 2


class CutWorkers(FakeWorkers):
    """Workers that cut a mini-batch as they are told to: covariance bounds are those of a micro-batch."""

    def update_actor(self, meta: Any) -> Any:
        self.micro = meta.extra_info["micro_batch_size_per_gpu"]
        return super().update_actor(meta)


@pytest.mark.parametrize(
    "nodes",
    [{}, {"sil": {"coupling": "sequential"}, "cov": {"ratio": 0.2}}, {"advantage": {"estimator": "stepwise"}}],
    ids=["joint", "sequential", "tokens"],
)
def test_it_is_the_step_over_the_trainers_actor(nodes: dict[str, Any]) -> None:
    merged = {name: {**SETTINGS.get(name, {}), **nodes.get(name, {})} for name in {*SETTINGS, *nodes}}
    settings = SpearSettings.from_mapping(merged)
    queue = FakeQueue()
    workers = CutWorkers(queue, settings, ranks=1, micro=1000)
    policy = TablePolicy(workers.parameters)
    score = score_with(TablePolicy(workers.parameters))
    optimizer = torch.optim.SGD([policy.table], lr=RATE)
    lab = LabActor(settings, policy, optimizer, clip=float("inf"))
    before = policy.table.detach().clone()
    trainer, own = run_both(settings, score, workers, lab)
    differences = measure_differences(trainer, own)
    assert count_replayed(own) > 0
    # The entropy alone is a mean in single precision, which numpy and torch add up in another order.
    assert differences.pop("entropy/token-mean") < 1e-6
    assert {name: gap for name, gap in differences.items() if gap > 1e-12} == {}
    assert float((policy.table.detach() - before).abs().max()) > 0.05
    torch.testing.assert_close(policy.table.detach(), workers.parameters.detach(), atol=1e-12, rtol=0)


@pytest.mark.slow
def test_it_is_the_step_over_verls_own_worker_with_a_real_model() -> None:
    """A language model of transformers, verl's worker, engine and AdamW on one side; the lab's actor on the other.

    verl packs the rows of a mini-batch into one, so that sums are taken in another order: hence not bit for bit.
    """
    found = real_trainer.run_alone()
    assert found["replayed"] > 0 and found["moved"] > 1e-3
    exact = {"gamma", *(name for name in found["differences"] if name.startswith("row/"))}
    assert {name: gap for name, gap in found["differences"].items() if gap > (1e-12 if name in exact else 1e-5)} == {}
    assert found["weights"] < 1e-5

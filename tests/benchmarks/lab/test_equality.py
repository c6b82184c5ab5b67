"""The lab's step is the trainer's: same rows, advantages, loss and weights."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch

from benchmarks.lab.actor import LabActor
from spear_training.algorithms import SpearSettings
from tests.benchmarks.lab import real_trainer
from tests.benchmarks.lab.pairs import SETTINGS, TablePolicy, count_replayed, measure_differences, run_both, score_with
from tests.training.verl_plugin.fakes import FakeQueue
from tests.training.verl_plugin.steps import RATE, FakeWorkers


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
def test_it_is_the_step_over_the_trainers_actor(monkeypatch: pytest.MonkeyPatch, nodes: dict[str, Any]) -> None:
    merged = {name: {**SETTINGS.get(name, {}), **nodes.get(name, {})} for name in {*SETTINGS, *nodes}}
    settings = SpearSettings.from_mapping(merged)
    queue = FakeQueue()
    queue.install(monkeypatch)
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
    assert found["weights"] < 1e-6

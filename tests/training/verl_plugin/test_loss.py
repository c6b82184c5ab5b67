"""verl's workers compute ``spear_training.algorithms.spear_loss`` from the columns of the queue."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from spear_training.algorithms import RowTable, SpearSettings
from spear_training.step.loss import measure_loss
from spear_training.verl_plugin.actor import STEERING, actor_loss
from spear_training.verl_plugin.queue import build_columns, nest_flat
from tests.training.step.batches import CASES, GAMMA, Batch, draw_batch, find_bounds


def lay_out(batch: Batch, settings: SpearSettings, *, ranks: int) -> tuple[dict[str, Tensor], TensorDict]:
    """The mini-batch in verl's columns: log-probs stand one to the left of their tokens, as a model's do."""
    lengths = [int(row.nonzero().max()) + 1 if row.any() else 1 for row in batch.mask]
    prompts = [2 + n % 3 for n in range(len(lengths))]
    totals = [prompt + length for prompt, length in zip(prompts, lengths, strict=True)]

    def flatten(values: Tensor) -> Tensor:
        return torch.cat([values[n, :length] for n, length in enumerate(lengths)])

    def frame(n: int, prompt: int) -> list[Tensor]:
        """What the model says of a row; of places that predict no response it says anything."""
        before, after = (torch.full((size,), 99.0, dtype=torch.float64) for size in (prompt - 1, 1))
        return [before, batch.log_probs[n, : lengths[n]], after]

    rows = RowTable(
        prompt_length=prompts, response_length=lengths, ids=np.ones(sum(totals)), mask=flatten(batch.mask).numpy()
    )
    data = build_columns(rows)
    for name, values in batch.columns(settings).items():
        if name != "loss_mask":
            data[name] = nest_flat(
                flatten(values if values.dim() == 2 else values[:, None].expand_as(batch.mask)), lengths
            )
    data[STEERING] = batch.steering(settings)
    lower, upper = find_bounds(settings) or (float("nan"), float("nan"))
    tu.assign_non_tensor(data, gamma=GAMMA, cov_lower=lower, cov_upper=upper, dp_size=ranks)
    flat = torch.cat([part for n, prompt in enumerate(prompts) for part in frame(n, prompt)]).requires_grad_()
    return {"log_probs": nest_flat(flat, totals), "flat": flat}, data


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_verls_loss_function_reads_the_columns_as_the_paper_means_them(name: str, ranks: int) -> None:
    settings, batch = CASES[name], draw_batch(10)
    output, data = lay_out(batch, settings, ranks=ranks)
    loss, metrics = actor_loss(settings, output, data)
    expected, wanted = batch.specify(settings)
    # FSDP averages over ranks, so every rank's share is multiplied by their number.
    assert loss.item() == pytest.approx(ranks * expected.loss.item(), abs=1e-6)
    loss.backward()
    gradient: Any = output["flat"].grad
    assert float(gradient.sum()) == pytest.approx(ranks * float(wanted.sum()), abs=1e-6)
    assert gradient.norm() == pytest.approx(ranks * float(wanted.norm()), abs=1e-6)
    # verl averages a sum over ranks too: counts are read as shares of each other, losses as they are.
    scale = {"on_policy": ranks, "self_imitation": ranks}
    sums = {name: value * scale.get(name, 1) for name, value in measure_loss(expected).items()}
    assert {name: metric.aggregate() for name, metric in metrics.items()} == pytest.approx(sums, abs=1e-6)

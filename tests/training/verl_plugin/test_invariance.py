"""The actor's gradient does not depend on how a mini-batch is cut into micro-batches or dealt to ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn
from verl.utils import tensordict_utils as tu

from spear_training.algorithms import SpearSettings
from spear_training.verl_plugin.batch import RowTokens, build_columns, deal_rows, nest_flat, weigh_rows
from spear_training.verl_plugin.loss import STEERING, actor_loss

ROWS, PADDING = 11, 1
VOCABULARY = 13
BOUNDS = (-1.0, 1.0)


class Policy(nn.Module):
    """A next-token model without attention: enough for a gradient in which every row counts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8, dtype=torch.float64)
        self.head = nn.Linear(8, VOCABULARY, dtype=torch.float64)

    def log_probs(self, batch: TensorDict) -> torch.Tensor:
        """Jagged [B, *] of the token to the right of each position."""
        ids = batch["input_ids"].values()
        logits = self.head(self.embed(ids))
        picked = torch.log_softmax(logits, -1).gather(-1, ids.roll(-1)[:, None])[:, 0]
        return torch.nested.nested_tensor_from_jagged(picked, batch["input_ids"].offsets())


def make_rows(settings: SpearSettings) -> list[RowTokens]:
    dice = np.random.default_rng(1)
    rows = []
    for _ in range(ROWS):
        prompt, response = (dice.integers(1, VOCABULARY, dice.integers(2, 6)) for _ in range(2))
        rows.append(RowTokens(prompt, response, dice.integers(0, 2, len(response)) | (np.arange(len(response)) == 0),
                              -dice.random(len(response)) - 1.5))  # fmt: skip
    return [*rows, *[RowTokens([0], [0], [0], [0.0])] * PADDING]


def take(rows: Sequence[RowTokens], steering: torch.Tensor, members: Sequence[int], ranks: int) -> TensorDict:
    """The columns of some rows as a worker gets them."""
    part = [rows[n] for n in members]
    batch = build_columns(part)
    flat = torch.cat([torch.as_tensor(np.asarray(row.log_probs), dtype=torch.float64) for row in part])
    batch["old_log_probs"] = nest_flat(flat, [len(row.response_ids) for row in part])
    batch[STEERING] = steering[list(members)]
    tu.assign_non_tensor(batch, cov_lower=BOUNDS[0], cov_upper=BOUNDS[1], dp_size=ranks)
    return batch


def cut(members: Sequence[int], size: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(members), size):
        yield members[start : start + size]


def find_gradient(settings: SpearSettings, *, ranks: int, micro: int) -> torch.Tensor:
    """The mean over ranks of their summed gradients, which is what FSDP leaves; flat."""
    torch.manual_seed(0)
    policy = Policy()
    rows = make_rows(settings)
    replay = [n % 3 == 0 for n in range(ROWS)]
    order = list(range(ROWS + PADDING))
    weights = weigh_rows(
        [range(ROWS)],
        [int(np.sum(row.loss_mask)) for row in rows[:ROWS]],
        replay,
        aggregation=settings.loss.aggregation,
        scale_factor=8.0,
    )
    dice = np.random.default_rng(2)
    steering = torch.zeros(ROWS + PADDING, 4, dtype=torch.float64)
    steering[:ROWS, 0] = torch.from_numpy(np.where(replay, dice.random(ROWS), dice.normal(size=ROWS)))
    steering[:ROWS, 1] = torch.from_numpy(weights)
    steering[:ROWS, 2] = torch.tensor(replay)
    steering[:ROWS, 3] = torch.from_numpy(dice.integers(2**20, size=ROWS))
    share = len(order) // ranks
    for rank in range(ranks):
        for members in cut(order[rank * share : (rank + 1) * share], micro):
            batch = take(rows, steering, members, ranks)
            loss, _ = actor_loss(settings, {"log_probs": policy.log_probs(batch)}, batch)
            (loss / ranks).backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None])


def choose(**nodes: Any) -> SpearSettings:
    return SpearSettings.from_mapping({"cov": {"ratio": 0.0}} | nodes)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2, 3, 12])
@pytest.mark.parametrize("mode", ["seq-mean-token-sum-norm", "token-mean", "seq-mean-token-mean"])
def test_ranks_and_micro_batches_change_no_gradient(mode: str, ranks: int, micro: int) -> None:
    settings = choose(loss={"aggregation": mode})
    whole = find_gradient(settings, ranks=1, micro=12)
    assert float(whole.norm()) > 1e-3
    torch.testing.assert_close(find_gradient(settings, ranks=ranks, micro=micro), whole, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_are_dealt_so_that_ranks_share_each_minibatch(ranks: int) -> None:
    deal = deal_rows([range(ROWS)], 4, ranks, np.random.default_rng(0))
    share = deal.size // ranks
    order = deal.order(ranks)
    for number, part in enumerate(deal.minibatches):
        starts = [rank * share * len(deal.minibatches) + number * share for rank in range(ranks)]
        assert [row for start in starts for row in order[start : start + share]] == list(part)

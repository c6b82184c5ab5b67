"""The actor's gradient does not depend on how a mini-batch is cut into micro-batches or dealt to ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn
from verl.utils import tensordict_utils as tu

from spear_training.algorithms import RowTable, SpearSettings, weigh_rows
from spear_training.verl_plugin.actor import STEERING, actor_loss
from spear_training.verl_plugin.queue import build_columns, nest_flat

ROWS, PADDING = 11, 1
VOCABULARY = 13


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


def make_rows(settings: SpearSettings) -> RowTable:
    """Rows with their weights, and padding after them."""
    dice = np.random.default_rng(1)
    prompts, responses = (np.append(dice.integers(2, 6, ROWS), [1] * PADDING) for _ in range(2))
    first = np.cumsum(responses) - responses
    mask = dice.integers(0, 2, int(responses.sum())) > 0
    mask[first], mask[first[ROWS:]] = True, False
    tokens = np.add.reduceat(mask, first)
    replayed = np.arange(ROWS + PADDING) % 3 == 0
    return RowTable(
        prompt_length=prompts,
        response_length=responses,
        loss_tokens=tokens,
        ids=dice.integers(1, VOCABULARY, int((prompts + responses).sum())),
        mask=mask,
        log_probs=-dice.random(len(mask)) - 1.5,
        advantage=np.where(replayed, dice.random(ROWS + PADDING), dice.normal(size=ROWS + PADDING)),
        replayed=replayed,
        weight=weigh_rows(tokens, replayed, mode=settings.loss.aggregation.value, loss_scale_factor=8.0),
        seed=dice.integers(2**20, size=ROWS + PADDING),
    )


def take(rows: RowTable, members: Sequence[int], ranks: int) -> TensorDict:
    """The columns of some rows as a worker gets them."""
    part = rows.take(members)
    batch = build_columns(part)
    batch["old_log_probs"] = nest_flat(torch.from_numpy(part.log_probs).double(), part.response_length)
    batch[STEERING] = torch.from_numpy(np.stack([part.advantage, part.weight, part.replayed, part.seed], 1))
    tu.assign_non_tensor(batch, gamma=0.4, cov_lower=-1.0, cov_upper=1.0, dp_size=ranks)
    return batch


def find_gradient(settings: SpearSettings, *, ranks: int, micro: int) -> torch.Tensor:
    """The mean over ranks of their summed gradients, which is what FSDP leaves; flat."""
    torch.manual_seed(0)
    policy, rows = Policy(), make_rows(settings)
    for share in np.arange(ROWS + PADDING).reshape(ranks, -1).tolist():
        for start in range(0, len(share), micro):
            batch = take(rows, share[start : start + micro], ranks)
            loss, _ = actor_loss(settings, {"log_probs": policy.log_probs(batch)}, batch)
            (loss / ranks).backward()
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("micro", [1, 2, 3, 12])
@pytest.mark.parametrize("mode", ["seq-mean-token-sum-norm", "token-mean", "seq-mean-token-mean", "sum-norm"])
def test_ranks_and_micro_batches_change_no_gradient(mode: str, ranks: int, micro: int) -> None:
    settings = SpearSettings.from_mapping({"cov": {"ratio": 0.0}, "loss": {"aggregation": mode}})
    whole = find_gradient(settings, ranks=1, micro=12)
    assert float(whole.norm()) > 1e-3
    torch.testing.assert_close(find_gradient(settings, ranks=ranks, micro=micro), whole, atol=1e-9, rtol=1e-9)

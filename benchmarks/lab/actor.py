"""The trainer's policy protocol over a model in this process."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from benchmarks.lab.policy import Policy
from spear_training.algorithms import RowTable, SettingsError, SpearSettings
from spear_training.algorithms.rows import Array
from spear_training.step.update import Pass, Sums, compute_loss, measure_loss

TOKENS = ("ids", "mask", "rollout_log_probs")
"""Columns kept here, like those in the trainer's queue; the step gets the others."""


@dataclass(eq=False)
class LabActor:
    """:class:`spear_training.step.update.Actor` with one rank.

    Old log-probs are the rollout's own, here exactly the policy's (the trainer's
    ``rollout.correction.bypass_mode``). ``epochs`` are passes over the mini-batches of a step, ``clip`` is
    the maximum norm of gradients, as in verl. Raises SettingsError if the algorithm needs a critic or a reference
    policy.
    """

    settings: SpearSettings
    policy: Policy
    optimizer: torch.optim.Optimizer
    _: KW_ONLY
    epochs: int = 1
    clip: float = 1.0
    ranks: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.settings.advantage.needs_critic or self.settings.kl.coefficient > 0:
            raise SettingsError("the lab has neither a critic nor a reference policy: choose another algorithm")
        self.release()

    def hold(self, rows: RowTable) -> RowTable:
        """Keep the tokens of rows until the step ends; return the rows without them."""
        self._places.update(zip(rows.key.tolist(), range(self._rows, self._rows + len(rows)), strict=True))
        kept = (*TOKENS[:2], "prompt_length", "response_length", *(name for name in TOKENS[2:] if name in rows))
        self._held.append(rows.select(kept))
        self._rows += len(rows)
        return rows.drop(*TOKENS)

    def release(self) -> None:
        """Drop all tokens at the end of a step."""
        self._places: dict[str, int] = {}
        self._held: list[RowTable] = []
        self._rows = 0

    def _find(self, rows: RowTable) -> RowTable:
        """The tokens of rows."""
        if len(self._held) > 1:
            self._held = [RowTable.join(self._held)]
        return self._held[0].take([self._places[key] for key in rows.key.tolist()])

    # ---- the protocol ------------------------------------------------------------------------------------------------
    def collect(self, rows: RowTable, metrics: dict[str, Any]) -> RowTable:
        """Add ``mask`` and the rollout's log-probs; estimate the entropy from them."""
        held = self._find(rows)
        metrics["entropy/token-mean"] = -float(held.rollout_log_probs[held.mask].mean())
        return rows.add(mask=held.mask, log_probs=held.rollout_log_probs)

    def read_tokens(self, rows: RowTable) -> RowTable:
        """Add ``ids``."""
        return rows.add(ids=self._find(rows).ids)

    def write(self, rows: RowTable) -> RowTable:
        """Add keys to replayed rows, and hold their tokens."""
        rows = rows.add(key=[f"replay_{number}_0" for number in range(len(rows))])
        self.hold(rows)
        return rows

    def train(self, update: Pass) -> Sums:
        """Make an optimiser step for each mini-batch, accumulating the gradients of its pieces."""
        start, rows, held = time.perf_counter(), update.rows, self._find(update.rows)
        inputs = self.policy.encode(held)
        columns = {"loss_mask": _pad(held.mask, rows), "old_log_probs": _pad(rows.log_probs, rows)}
        if "token_advantages" in rows:
            columns["advantages"] = _pad(rows.token_advantages.astype(np.float32), rows)
        # Single precision, like the columns of the trainer's queue.
        stacked = np.stack([rows.advantage, rows.weight, rows.replayed, rows.seed], 1)
        steering = torch.from_numpy(stacked.astype(np.float32))
        found: list[dict[str, float]] = []
        for part in update.deal.minibatches * self.epochs:
            sums: Counter[str] = Counter()  # of floats
            self.optimizer.zero_grad()
            for share in np.split(np.asarray(part), update.pieces):
                members = torch.from_numpy(share[share >= 0])
                if len(members):
                    taken = {name: column[members] for name, column in columns.items()}
                    sums.update(self._learn(inputs[members], steering[members], taken, update))
            norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.clip)
            self.optimizer.step()
            found.append({**sums, "grad_norm": float(norm)})
        means = {name: float(np.mean([sums[name] for sums in found])) for name in found[0]}
        rate = {} if update.hold_learning_rate else {"lr": float(self.optimizer.param_groups[0]["lr"])}
        return means | rate | {"seconds": time.perf_counter() - start}

    def _learn(self, inputs: Tensor, steering: Tensor, columns: dict[str, Tensor], update: Pass) -> dict[str, float]:
        log_probs = self.policy.score(inputs)
        cut = {name: column[:, : log_probs.shape[1]] for name, column in columns.items()}
        result = compute_loss(self.settings, log_probs, steering, cut, gamma=update.gamma, bounds=update.bounds)
        result.loss.backward()
        return measure_loss(result)


def _pad(values: Array, rows: RowTable) -> Tensor:
    """Pad entries of response tokens with 0 to a matrix [N, longest response]."""
    lengths = rows.response_length
    matrix = np.zeros((len(rows), int(lengths.max())), dtype=values.dtype)
    matrix[np.arange(matrix.shape[1]) < lengths[:, None]] = values
    return torch.from_numpy(matrix)

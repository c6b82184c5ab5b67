"""A policy for a step: a table of log-probs that Adam or plain descent changes, in this process and without verl."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from spear_training.algorithms import RowTable, SpearSettings
from spear_training.step.records import Rollout
from spear_training.step.update import Pass, Sums, compute_loss, measure_loss

VOCABULARY = 13
Optimiser = Callable[[list[torch.Tensor]], torch.optim.Optimizer]


def descend(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.7)


class TableActor:
    """:class:`spear_training.step.update.Actor`: log pi of a token is its entry in a table, whatever came before.

    Args:
        settings: of the algorithm.
        ranks: that share a mini-batch; one after another here.
        optimiser: made of the table.
    """

    def __init__(self, settings: SpearSettings, *, ranks: int = 1, optimiser: Optimiser = descend) -> None:
        self.settings, self.ranks = settings, ranks
        table = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        self.table = (0.3 * table - 2.0).requires_grad_()
        self.optimiser = optimiser([self.table])
        self.tokens: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        """Ids and mask of the rows that were played, by key."""
        self.passes: list[Pass] = []
        self.read: list[str] = []
        self._responses: dict[str, np.ndarray] = {}

    def play(self, rollout: Rollout, seed: int = 0) -> Rollout:
        """Give the rows of ``rollout`` tokens, as a rollout would leave them in the queue."""
        random = np.random.default_rng(seed)
        for key, prompt, response, loss_tokens in zip(
            *(getattr(rollout.rows, name) for name in ("key", "prompt_length", "response_length", "loss_tokens")),
            strict=True,
        ):
            mask = np.arange(response) < loss_tokens
            self.tokens[key] = random.integers(VOCABULARY, size=prompt + response), mask
        return rollout

    def collect(self, rows: RowTable, metrics: dict[str, Any]) -> RowTable:
        metrics["entropy/token-mean"] = float(-self.table.detach().mean())
        keys = rows.key.tolist()
        for key, prompt in zip(keys, rows.prompt_length, strict=True):
            self._responses[key] = self.tokens[key][0][prompt:]
        mask = np.concatenate([self.tokens[key][1] for key in keys])
        log_probs = self.table.detach().numpy()[np.concatenate([self._responses[key] for key in keys])]
        return rows.add(mask=mask, log_probs=log_probs)

    def read_tokens(self, rows: RowTable) -> RowTable:
        self.read += rows.key.tolist()
        return rows.add(ids=np.concatenate([self.tokens[key][0] for key in rows.key]))

    def write(self, rows: RowTable) -> RowTable:
        keys = [f"replay_{n}" for n in range(len(rows))]
        for key, ids, mask, prompt in zip(keys, rows.split("ids"), rows.split("mask"), rows.prompt_length, strict=True):
            self.tokens[key], self._responses[key] = (ids, mask), ids[prompt:]
        return rows.add(key=keys)

    def train(self, update: Pass) -> Sums:
        self.passes.append(update)
        found: list[Mapping[str, float]] = []
        for part in update.deal.minibatches:
            self.optimiser.zero_grad()
            sums: dict[str, float] = {}
            for share in np.split(np.asarray(part), self.ranks * update.pieces):
                members = share[share >= 0]
                if not len(members):
                    continue
                result = self._compute(update, update.rows.take(members))
                result.loss.backward()
                for name, value in measure_loss(result).items():
                    sums[name] = sums.get(name, 0.0) + value
            assert self.table.grad is not None
            found.append(sums | {"grad_norm": float(self.table.grad.norm())})
            self.optimiser.step()
        means = {name: float(np.mean([sums[name] for sums in found])) for name in found[0]}
        return means | {"seconds": 0.0} | ({} if update.hold_learning_rate else {"lr": 0.7})

    def _compute(self, update: Pass, rows: RowTable) -> Any:
        width = int(rows.response_length.max())

        def pad(values: list[np.ndarray]) -> torch.Tensor:
            return torch.from_numpy(np.stack([np.pad(value, (0, width - len(value))) for value in values]))

        keys = rows.key.tolist()
        columns = {
            "loss_mask": pad([self.tokens[key][1] for key in keys]),
            "old_log_probs": pad(rows.split("log_probs")).double(),
        }
        if "token_advantages" in rows:
            columns["advantages"] = pad(rows.split("token_advantages"))
        steering = np.stack([rows.advantage, rows.weight, rows.replayed, rows.seed], 1)
        log_probs = self.table[pad([self._responses[key] for key in keys])]
        return compute_loss(
            self.settings, log_probs, torch.from_numpy(steering), columns, gamma=update.gamma, bounds=update.bounds
        )


class TableCritic:
    """:class:`spear_training.step.step.Critic`: a value for each token of the vocabulary."""

    def __init__(self, actor: TableActor) -> None:
        self.actor = actor
        self.values = np.linspace(-1, 1, VOCABULARY)
        self.valued: list[str] = []
        self.updates: list[RowTable] = []

    def value(self, rows: RowTable) -> RowTable:
        self.valued = rows.key.tolist()
        tokens = [self.actor.tokens[key] for key in self.valued]
        responses = [ids[len(ids) - len(mask) :] for ids, mask in tokens]
        return rows.add(
            values=self.values[np.concatenate(responses)], mask=np.concatenate([mask for _, mask in tokens])
        )

    def update(self, rows: RowTable, metrics: dict[str, Any]) -> None:
        self.updates.append(rows)
        metrics["critic/loss"] = 0.0


class Played:
    """Rollouts of a step: batches made beforehand, played when they are asked for."""

    def __init__(self, actor: TableActor, *batches: Rollout) -> None:
        self.batches = [actor.play(batch, seed) for seed, batch in enumerate(batches)]
        self.asked: list[int] = []
        self.finished = 0

    def play(self, number: int) -> Rollout:
        assert not self.finished
        self.asked.append(number)
        return self.batches[number]

    def finish(self) -> None:
        self.finished += 1

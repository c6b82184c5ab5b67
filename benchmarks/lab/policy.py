"""Policies of the lab: their protocol, and a small one that maps a board to one token, its move."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from benchmarks.lab.rooms import CODES, FAR, MOVES, Rooms
from spear_envs.core.errors import SpearError
from spear_training.algorithms import RowTable
from spear_training.algorithms.rows import Array


class Policy(Protocol):
    """A model for :class:`~benchmarks.lab.actor.LabActor`."""

    def parameters(self) -> Any:
        """Parameters for the optimiser."""

    def encode(self, rows: RowTable) -> Tensor:
        """Encode rows with ``ids`` for :meth:`score`: [N, ...]."""

    def score(self, inputs: Tensor) -> Tensor:
        """Log-probs of the response tokens of encoded rows, [N, R]; arbitrary after the end of a response."""


class BoardPolicy(nn.Module):
    """Two hidden layers over the cells of a board, one of :data:`CODES` each; a response is one of four moves."""

    def __init__(self, cells: int, hidden: int = 128, seed: int = 0) -> None:
        super().__init__()
        self.cells = cells
        generator = torch.Generator().manual_seed(seed)
        layers = (nn.Linear(cells * CODES, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, MOVES))
        for layer in layers:  # torch's initialisation, from a separate stream
            nn.init.kaiming_uniform_(layer.weight, a=math.sqrt(5), generator=generator)
            bound = 1 / math.sqrt(layer.in_features)
            nn.init.uniform_(layer.bias, -bound, bound, generator=generator)
        self.net = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    def forward(self, codes: Tensor) -> Tensor:
        """Log-probs of the moves [B, 4] on boards [B, C]."""
        return torch.log_softmax(self.net(one_hot(codes, CODES).flatten(1).float()), 1)

    @torch.no_grad()
    def decide(self, codes: Array) -> Array:
        """Log-probs of the moves [B, 4], float32, without gradient."""
        return self(torch.from_numpy(codes.astype(np.int64))).numpy()

    def encode(self, rows: RowTable) -> Tensor:
        """Boards and moves [N, C + 1]."""
        return torch.from_numpy(rows.ids.reshape(len(rows), self.cells + 1).astype(np.int64))

    def score(self, inputs: Tensor) -> Tensor:
        """Log-probs of the played moves [N, 1]."""
        return self(inputs[:, :-1]).gather(1, inputs[:, -1:])


class Examiner:
    """Exact success of a :class:`BoardPolicy` on levels, within ``turns``."""

    def __init__(self, rooms: Rooms, turns: int) -> None:
        self._rooms, self._turns = rooms, turns
        self._places = rooms.find_reachable(turns)
        self._codes = rooms.observe(*self._places)

    def examine(self, policy: BoardPolicy) -> Array:
        """Probability of winning each level [L]."""
        return self._rooms.solve(*self._places, np.exp(policy.decide(self._codes).astype(np.float64)), self._turns)


BATCH, RATE, SURE = 64, 1e-3, 20
"""Cloning: rows of a step, learning rate, steps between two measurements of success."""
NOISE = 0.5
"""Share of random moves of the expert, for states of a beginner."""


def clone_expert(rooms: Rooms, examiner: Examiner, success: float, *, turns: int, hidden: int) -> BoardPolicy:
    """A policy that imitates shortest solutions until its exact success reaches ``success``.

    Raises SpearError if the untrained policy is already better, or these levels do not teach enough.
    """
    policy = BoardPolicy(rooms.cells, hidden)
    first = examiner.examine(policy).mean()
    if first >= success:
        raise SpearError(f"an untrained policy already wins {first:.2%}: raise start.success above it")
    codes, moves = _show_expert(rooms, turns)
    generator = torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=RATE)
    number = 0
    for _ in range(20):
        for part in torch.randperm(len(codes), generator=generator).split(BATCH):
            loss = cross_entropy(policy.net(one_hot(codes[part], CODES).flatten(1).float()), moves[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            number += 1
            if number % SURE == 0 and (found := examiner.examine(policy).mean()) >= success:
                return policy
    raise SpearError(f"imitation of the expert ends at {found:.2%}: lower start.success below it, or add levels")


def _show_expert(rooms: Rooms, turns: int) -> tuple[Tensor, Tensor]:
    """Boards and moves of a noisy expert's episodes, one a level."""
    dice = np.random.default_rng(0)
    distance, levels, states = rooms.measure_distances(), np.arange(len(rooms)), rooms.start.copy()
    codes, moves = [], []
    for _ in range(turns):
        open_ = ~rooms.won[levels, states] & (distance[levels, states] < FAR)
        levels, states = levels[open_], states[open_]
        ahead = distance[levels[:, None], rooms.after[levels, states]]
        best = np.argmax((ahead == ahead.min(1, keepdims=True)) + dice.random(ahead.shape) * 0.5, axis=1)
        move = np.where(dice.random(len(levels)) < NOISE, dice.integers(MOVES, size=len(levels)), best)
        codes.append(rooms.observe(levels, states))
        moves.append(move)
        states = rooms.after[levels, states, move].astype(np.int64)
    return torch.from_numpy(np.concatenate(codes).astype(np.int64)), torch.from_numpy(np.concatenate(moves))

"""Advantages, filters, loss and buffers at the paper's sizes."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.runner.figures import Bar, Figure, make_parser, measure_cpu, run_benchmark
from spear_training.algorithms import (
    BaselineBuffer,
    CovarianceClip,
    ReplayBuffer,
    ReplayEntry,
    calibrate_covariance_bounds,
    covariance_clip_mask,
    gae_advantages,
    gigpo_advantages,
    group_advantages,
    has_repetition,
    keep_high_variance_groups,
    spear_loss,
)
from spear_training.algorithms.replay import tabulate_entries

ROWS, REPLAY_ROWS, REPLAY_TOKENS = 65_536, 2_048, 6_000


BARS = (
    Bar("group_advantages, 65,536 rows", "s", at_most=2.0),
    Bar("gigpo_advantages, 65,536 rows", "s", at_most=2.0),
    Bar("keep_high_variance_groups, 65,536 rows", "s", at_most=2.0),
    Bar("P50 of 10,240 values", "ms", at_most=1.0),
    Bar("add of 2,048 rows of 6,000 tokens", "ms", at_most=50.0),
    Bar("evict by age from these", "ms", at_most=50.0),
    Bar("draw of all of these", "ms", at_most=50.0),
    Bar("memory of these rows", "MB", at_most=100.0),
    Bar("memory of these rows, a token", "B", at_most=8.2),
    Bar("memory of a token, where every token is a loss token", "B", at_most=8.2),
)


def measure_least(function: Callable[[], Any], repeats: int = 3) -> float:
    """Least CPU seconds of a call."""
    return min(measure_cpu(function) for _ in range(repeats))


def measure_advantages() -> Iterator[Figure]:
    """Estimators and the group filter on 65,536 turn rows: 512 groups of 8 trajectories of 16 turns, shuffled."""
    rng = np.random.default_rng(0)
    order = rng.permutation(ROWS)
    trajectory = order // 16
    groups = [f"task-{i}" for i in trajectory // 8]
    trajectories = [f"trajectory-{i}" for i in trajectory]
    anchors = [f"state-{i}" for i in rng.integers(0, 40, ROWS)]
    rewards = torch.from_numpy(rng.choice([1.1, -0.9, -1.0], ROWS // 16)[trajectory])
    steps = torch.from_numpy(rng.random(ROWS))
    turns = (order % 16).tolist()
    yield Figure(
        "group_advantages, 65,536 rows",
        measure_least(lambda: group_advantages(rewards, groups, trajectory_ids=trajectories)),
        "s",
    )
    yield Figure(
        "gigpo_advantages, 65,536 rows",
        measure_least(lambda: gigpo_advantages(rewards, steps, groups, trajectories, anchors, turn_ids=turns)),
        "s",
    )
    yield Figure(
        "keep_high_variance_groups, 65,536 rows",
        measure_least(lambda: keep_high_variance_groups(rewards, groups, trajectory_ids=trajectories)),
        "s",
    )


def measure_buffers() -> Iterator[Figure]:
    """Replay of 2,048 rows of 6,000 tokens, the response in turns of 250, and the baseline percentile.

    Least of several times, in memory that the process has already: pages that the system has yet to give cost more
    than the work on them.
    """
    rng = np.random.default_rng(0)
    baseline = BaselineBuffer(10_240)
    baseline.extend(rng.normal(size=10_240))
    yield Figure("P50 of 10,240 values", 1e3 * measure_least(baseline.percentile, 20), "ms")

    prompt, response = 1_000, REPLAY_TOKENS - 1_000
    ids = rng.integers(0, 150_000, (REPLAY_ROWS, REPLAY_TOKENS)).astype(np.int32)
    mask = np.arange(response) // 250 % 2 == 0
    log_probs = -rng.random(response).astype(np.float32)
    rows = tabulate_entries(
        [
            ReplayEntry(row[:prompt], row[prompt:], mask, log_probs, 3.0 + index, 1.0, 1, str(index))
            for index, row in enumerate(ids)
        ]
    )
    buffer = ReplayBuffer(REPLAY_ROWS)
    yield Figure("the first add of 2,048 rows of 6,000 tokens", 1e3 * measure_cpu(lambda: buffer.add(rows)), "ms")
    yield Figure("memory of these rows", buffer.nbytes / 1e6, "MB")
    yield Figure("memory of these rows, a token", buffer.nbytes / (REPLAY_ROWS * REPLAY_TOKENS), "B")
    yield Figure("state_dict of these rows", measure_least(buffer.state_dict, 1), "s")
    filled, filtered, drawn = [], [], []
    for _ in range(5):
        buffer = ReplayBuffer(REPLAY_ROWS)
        filled.append(measure_cpu(lambda: buffer.add(rows)))  # noqa: B023 - called at once
        filtered.append(measure_cpu(lambda: buffer.evict(2)))  # noqa: B023
        drawn.append(measure_cpu(lambda: buffer.draw(baseline)))  # noqa: B023
    yield Figure("add of 2,048 rows of 6,000 tokens", 1e3 * min(filled), "ms")
    yield Figure("evict by age from these", 1e3 * min(filtered), "ms")
    yield Figure("draw of all of these", 1e3 * min(drawn), "ms")

    full = ReplayBuffer(REPLAY_ROWS)
    everything = np.ones(REPLAY_TOKENS, np.uint8)
    full.add(
        ReplayEntry(row[:0], row, everything, np.zeros(REPLAY_TOKENS, np.float32), 1.0, 1.0, 1, str(index))
        for index, row in enumerate(ids)
    )
    tokens = REPLAY_ROWS * REPLAY_TOKENS
    yield Figure("memory of a token, where every token is a loss token", full.nbytes / tokens, "B")


def measure_tokens() -> Iterator[Figure]:
    """Token work: the loss, the covariance clip, GAE and the repetition filter."""
    generator = torch.Generator().manual_seed(0)
    shape = (64, 4_096)
    log_probs = -torch.rand(shape, generator=generator)
    old = log_probs + 0.1 * torch.randn(shape, generator=generator)
    advantages = torch.randn(64, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.5
    replay = torch.arange(64) >= 32

    def step() -> None:
        leaf = log_probs.clone().requires_grad_(True)
        cov = CovarianceClip(lower=0.2)
        spear_loss(leaf, old, advantages, mask, replay, gamma=0.5, cov=cov, generator=generator).loss.backward()

    yield Figure("spear_loss and its gradient, 64 x 4,096 tokens", measure_least(step), "s")
    clip = {"ratio": 0.02, "lower": 0.2, "upper": 40.0, "budget": "trajectory", "generator": generator}
    yield Figure(
        "covariance_clip_mask per trajectory, 64 x 4,096 tokens",
        measure_least(lambda: covariance_clip_mask(log_probs, advantages, mask, **clip)),
        "s",
    )
    yield Figure(
        "calibrate_covariance_bounds, 64 x 4,096 tokens",
        measure_least(lambda: calibrate_covariance_bounds(log_probs, advantages, mask)),
        "s",
    )
    yield Figure("gae_advantages, 64 x 4,096 tokens", measure_least(lambda: gae_advantages(old, log_probs, mask)), "s")
    ids = np.random.default_rng(0).integers(0, 150_000, 16_384)
    yield Figure("has_repetition, 16,384 tokens", 1e3 * measure_least(lambda: has_repetition(ids)), "ms")


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures; they take seconds at any size."""
    torch.set_num_threads(1)
    yield from measure_advantages()
    yield from measure_buffers()
    yield from measure_tokens()


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    return run_benchmark(measure, make_parser(__doc__).parse_args(), BARS, ("torch", "numpy"))


if __name__ == "__main__":
    raise SystemExit(main())

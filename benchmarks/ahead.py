"""Steps an hour when episodes are played ahead, simulated.

No model and no waiting: requests share an engine whose decoding step takes longer the more of them there are, lengths
of responses are log-normal, episodes have from a few to all of their turns, and the environment answers after a while.
Which batch is begun when is decided by the trainer's own :class:`~spear_training.step.tasks.BatchesAhead`. The
engine has devices of its own; where it shares the trainer's, nothing is played while the trainer computes, and nothing
is gained.
"""

from __future__ import annotations

import argparse
import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.runner.figures import Bar, Figure, Size, make_parser, run_benchmark
from spear_training.step.tasks import BatchesAhead

BARS = (
    Bar("steps an hour, 1 step ahead", "times", at_least=1.2),
    Bar("age of weights, 1 step ahead", "versions", at_most=1.0),
)


@dataclass(frozen=True)
class Setup:
    """An agent of 7B on one machine, in round numbers that are assumed, not measured.

    Attributes:
        episodes: of a step.
        turns: of an episode at most; a fifth of the episodes uses all of them.
        tokens, spread: median of a response, and the sigma of its logarithm.
        decode_s, decode_each_s: a decoding step of the engine, and what each further request adds to it.
        environment_s: mean wait for the environment.
        update_s: the trainer's part of a step.
        push_s: bringing the weights over; nothing is decoded meanwhile.
    """

    episodes: int = 128
    turns: int = 30
    tokens: float = 90.0
    spread: float = 0.6
    decode_s: float = 0.015
    decode_each_s: float = 0.00005
    environment_s: float = 0.3
    update_s: float = 60.0
    push_s: float = 3.0


@dataclass
class Clock:
    """An engine and episodes that wait for it, under a clock that jumps from event to event.

    A request is done when the engine has made its tokens, one a decoding step for all: the engine's own progress, in
    tokens, orders the requests, and time follows from how many share a step.
    """

    setup: Setup
    rng: np.random.Generator
    now: float = 0.0
    made: float = 0.0
    """Tokens that each request under way has been given since the start."""
    version: int = 0
    decoding: list[tuple[float, int, int]] = field(default_factory=list)
    """Requests by the value of ``made`` at which they end: end, episode, turns left."""
    waiting: list[tuple[float, int, int]] = field(default_factory=list)
    """Episodes by the time at which their environment answers."""
    left: dict[int, int] = field(default_factory=dict)
    """Episodes under way of each batch."""
    oldest: dict[int, int] = field(default_factory=dict)
    """Version of the first weights that wrote for a batch."""
    batch_of: list[int] = field(default_factory=list)

    def begin(self, step: int, _: list[str]) -> int:
        """Begin the episodes of a step."""
        setup = self.setup
        self.left[step], self.oldest[step] = setup.episodes, self.version
        lengths = np.minimum(setup.turns, np.ceil(self.rng.lognormal(np.log(12), 0.9, setup.episodes))).astype(int)
        for turns in lengths.tolist():
            self.batch_of.append(step)
            heapq.heappush(self.waiting, (self.now, len(self.batch_of) - 1, turns))
        return step

    def run(self, *, until: float = np.inf, batch: int | None = None) -> None:
        """Let time go on until a moment, or until no episode of a batch is under way."""
        setup = self.setup
        while self.now < until and (batch is None or self.left[batch]):
            pace = setup.decode_s + setup.decode_each_s * len(self.decoding)
            ends = self.now + (self.decoding[0][0] - self.made) * pace if self.decoding else np.inf
            answers = self.waiting[0][0] if self.waiting else np.inf
            then = min(until, ends, answers)
            if then == np.inf:
                return
            self.made += (then - self.now) / pace
            self.now = then
            if then == answers:
                _, episode, turns = heapq.heappop(self.waiting)
                tokens = self.rng.lognormal(np.log(setup.tokens), setup.spread)
                heapq.heappush(self.decoding, (self.made + tokens, episode, turns))
            elif then == ends:
                _, episode, turns = heapq.heappop(self.decoding)
                if turns > 1:
                    wait = self.rng.exponential(setup.environment_s)
                    heapq.heappush(self.waiting, (self.now + wait, episode, turns - 1))
                else:
                    self.left[self.batch_of[episode]] -= 1


def simulate(lead: int, steps: int, setup: Setup) -> tuple[float, float]:
    """Steps an hour of the last half of a training, and the mean age of the weights that its batches began with."""
    clock = Clock(setup, np.random.default_rng(0))
    batches: BatchesAhead[int] = BatchesAhead(lead, lambda: [], clock.begin)
    ages, half = [], 0.0
    for step in range(1, steps + 1):
        batches.reach(step, steps + lead)
        batch = batches.take()
        clock.run(batch=batch)
        ages.append(clock.version - clock.oldest[batch])
        clock.run(until=clock.now + setup.update_s)  # the trainer computes, whoever is under way plays on
        clock.now += setup.push_s
        clock.waiting = [(max(at, clock.now), *rest) for at, *rest in clock.waiting]  # type: ignore[misc]
        heapq.heapify(clock.waiting)
        clock.version += 1
        if step == steps // 2:
            half = clock.now
    return 3600.0 * (steps - steps // 2) / (clock.now - half), float(np.mean(ages[steps // 2 :]))


def measure(options: argparse.Namespace) -> Iterator[Figure]:
    """All figures."""
    setup, steps = Setup(), 12 if options.size is Size.QUICK else 60
    base, _ = simulate(0, steps, setup)
    yield Figure("steps an hour, none ahead", base, "steps", note=f"{setup.episodes} episodes a step, simulated")
    for lead in (1, 2, 3):
        rate, age = simulate(lead, steps, setup)
        yield Figure(
            f"steps an hour, {lead} step{'s' * (lead > 1)} ahead", rate / base, "times", note=f"{rate:.1f} steps"
        )
        yield Figure(f"age of weights, {lead} step{'s' * (lead > 1)} ahead", age, "versions")


def main() -> int:
    """Do what the command line asks for; exit code 1 if a bar does not hold."""
    return run_benchmark(measure, make_parser(__doc__).parse_args(), BARS, packages=("numpy",))


if __name__ == "__main__":
    raise SystemExit(main())

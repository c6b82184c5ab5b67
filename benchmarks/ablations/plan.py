"""Plan of the ablation: scenarios (an environment and the warm start that all of its runs begin with), arms, seeds.

A scenario fixes everything that the arms share: tasks, prompts, batch sizes, schedules, number of rollouts. An arm is
an algorithm; it may differ from the others in the keys that its row of the configuration sets, and in the learning
rate, which is chosen for each arm by itself, from the same candidates, with the same number of runs, on the valid
panel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from spear_training.warmstart import Answers, WarmStartSettings
from spear_training.warmstart.policy import RECIPES, PolicyShape

__all__ = ["ARMS", "BASES", "SCENARIOS", "TUNING_SEED", "Scenario", "Trial", "list_trials"]

ARMS: Mapping[str, str] = MappingProxyType(
    {
        "grpo": "GRPO",
        "grpo_sil": "GRPO + SI",
        "grpo_spear": "GRPO + SI + IR (SPEAR)",
        "drbot": "Dr.BoT",
        "drbot_spear": "Dr.BoT + SPEAR",
        "gigpo": "GiGPO",
        "gigpo_spear": "GiGPO + SPEAR",
    }
)
"""Rows of the configuration group ``algorithm``, with their names in tables."""
BASES: Mapping[str, str] = MappingProxyType(
    {"grpo_sil": "grpo", "grpo_spear": "grpo", "drbot_spear": "drbot", "gigpo_spear": "gigpo"}
)
"""The arm without self-imitation that an arm is compared with, task by task."""
TUNING_SEED = 9
"""Seed of the runs by which a learning rate is chosen; no result is reported from them."""


@dataclass(frozen=True)
class Scenario:
    """One environment of the ablation.

    Attributes:
        preset: configuration that the scenario changes.
        overrides: its changes, the same for all arms.
        warm_start: makes the policy that all runs begin with.
        steps: training steps of every run.
        test_split: where the result is reported; the split that settings are chosen on is the configuration's.
        samples: episodes of each task of a panel.
        rates: candidates for the learning rate of every arm; where there is one, nothing is tuned.
        seeds: of the reported runs.
    """

    name: str
    title: str
    preset: str
    overrides: tuple[str, ...]
    warm_start: WarmStartSettings
    steps: int
    test_split: str
    samples: int
    arms: tuple[str, ...] = tuple(ARMS)
    rates: tuple[str, ...] = ("1e-4", "3e-4")
    seeds: tuple[int, ...] = (0, 1, 2)
    closed: bool = False
    """Recorded in an environment that is there no more: nothing is added to it."""

    def list_tuning(self, arm: str) -> list[Trial]:
        """The trials that the learning rate of an arm is chosen by."""
        return [Trial(self, arm, rate, TUNING_SEED) for rate in self.rates] if len(self.rates) > 1 else []

    def list_reported(self, arm: str, rate: str) -> list[Trial]:
        """The trials of an arm that are reported."""
        return [Trial(self, arm, rate, seed) for seed in self.seeds]


@dataclass(frozen=True)
class Trial:
    """One training: an arm of a scenario with a learning rate and a seed."""

    scenario: Scenario
    arm: str
    rate: str
    seed: int

    @property
    def name(self) -> str:
        """Folder of the run and stem of its result."""
        return f"{self.arm}-lr{self.rate}-seed{self.seed}"

    @property
    def tuning(self) -> bool:
        """Whether it only serves to choose a learning rate."""
        return self.seed == TUNING_SEED

    def list_overrides(self, policy: str) -> tuple[str, ...]:
        """Arguments of ``spear train`` besides the run folder; ``policy`` is the quoted folder of the warm start."""
        return (
            f"preset={self.scenario.preset}",
            f"algorithm={self.arm}",
            *COMMON,
            *self.scenario.overrides,
            f"train.steps={self.scenario.steps}",
            f"optimizer.lr={self.rate}",
            f"model.path={policy}",
            f"seed={self.seed}",
        )


COMMON = (
    "log.to=[file]",
    "validation.at_start=false",
    "validation.every=20",
    "checkpoint.every=10",
    "checkpoint.keep=1",
    "record.episodes=0",
    # The engine's log-probs are the trainer's to the last digit: a second forward pass would tell nothing.
    "rollout.correction.bypass_mode=true",
    "optimizer.schedule=cosine",
    "optimizer.min_lr_ratio=0.05",
    "optimizer.warmup_steps=5",
)


def list_trials(scenario: Scenario, rates: Mapping[str, str]) -> Iterator[Trial]:
    """The trials of a scenario in the order they are run: tuning first, then seed by seed.

    Args:
        rates: the learning rate of each arm whose tuning is over; the other arms have tuning trials only.
    """
    tuning = [scenario.list_tuning(arm) for arm in scenario.arms]
    reported = [scenario.list_reported(arm, rates[arm]) for arm in scenario.arms if arm in rates]
    for group in (tuning, reported):
        for trials in zip(*group, strict=True):
            yield from trials


FIRST_ARMS = ("grpo", "grpo_sil", "grpo_spear")

_RECORDED: Mapping[str, Scenario] = MappingProxyType(
    {
        scenario.name: scenario
        for scenario in (
            Scenario(
                "sokoban",
                "Sokoban (v0), 6x6, one box, 6 to 10 moves",
                "demo",
                (
                    "env.kwargs.shortest=6",
                    "env.kwargs.longest=10",
                    "env.kwargs.max_turns=12",
                    "sil.warmup_steps=30",
                    # The policy has learnt to move: the paper's rule is a decay of nearly no steps then.
                    "reward.decay_steps=6",
                    "replay.capacity=512",  # four times the episodes of a step, as the paper advises
                    "train.mini_batch_size=64",
                ),
                # Made on levels of 3 to 12 moves: it knows the form, and wins one in ten of these.
                WarmStartSettings(
                    "spear/Sokoban-v1",
                    {"modality": "text"},
                    history=0,
                    episodes=5000,
                    epochs=4,
                    shape=PolicyShape(hidden=64, layers=3, heads=2, mlp=160),
                    panel_tasks=0,
                ),
                steps=60,
                test_split="test",
                samples=8,
                rates=("4e-4",),
                closed=True,
            ),
            Scenario(
                "alfworld",
                "ALFWorld, embedded games in small rooms, 12 turns",
                "alfworld_tiny",
                (
                    "env.kwargs.max_turns=12",
                    "sil.warmup_steps=20",
                    "reward.decay_steps=4",
                    "replay.capacity=512",
                    "train.batch_size=16",
                    "rollout.group_size=8",
                    "train.mini_batch_size=32",
                    "validation.tasks=240",
                ),
                # Three of ten commands it is shown are random admissible ones: it has learnt which there are.
                WarmStartSettings(
                    "spear/ALFWorld-v0",
                    {"dataset": "embedded", "rooms": "small", "max_turns": 20},
                    history=4,
                    episodes=1800,
                    noise=0.3,
                    answers=Answers.PLAYED,
                    prompt_weight=0.05,
                    renamed=0.3,
                    epochs=4,
                    learning_rate=2e-3,
                    shape=PolicyShape(hidden=96, layers=3, heads=3, mlp=256),
                    panel_tasks=0,
                ),
                steps=40,
                test_split="valid_unseen",
                samples=3,
                arms=FIRST_ARMS,
                rates=("6e-4",),
            ),
            Scenario(
                "webshop",
                "WebShop, mini catalogue, 6 turns",
                "webshop_tiny",
                (
                    "env.kwargs.max_turns=6",
                    "sil.warmup_steps=15",
                    # Two clicks in three are on what is not there: valid calls are what it has to learn.
                    "reward.decay_steps=15",
                    "replay.capacity=256",
                    "train.batch_size=16",
                    "rollout.group_size=8",
                    "train.mini_batch_size=32",
                    "validation.tasks=100",
                ),
                RECIPES["spear/WebShop-v0"],
                steps=30,
                test_split="test",
                samples=8,
                arms=FIRST_ARMS,
                rates=("6e-4",),
            ),
        )
    }
)

SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        **_RECORDED,
        "sokoban_v1": replace(
            _RECORDED["sokoban"],
            name="sokoban_v1",
            title="Sokoban (v1: rooms held out), 6x6, one box, 6 to 10 moves",
            arms=FIRST_ARMS,
            closed=False,
        ),
    }
)

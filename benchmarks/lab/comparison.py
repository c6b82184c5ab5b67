"""Comparisons as files, registered before they are run."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, field
from enum import Enum
from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic.dataclasses import dataclass

from benchmarks.lab.tree import ESTIMATOR, TreeSettings
from spear_envs.core.errors import SpearError
from spear_envs.sokoban.generate import Recipe
from spear_training.algorithms import SettingsError, SpearSettings
from spear_training.algorithms.curriculum import BranchSettings, CurriculumSettings
from spear_training.algorithms.schema import STRICT, Record, number
from spear_training.run.compose import check_choice, read_config, read_layers

TUNING_SEED = 1000
"""First seed of the runs that choose learning rates; reported seeds start at 0."""


class Engine(str, Enum):
    """Trainer of a comparison, other than the lab."""

    TRAINER = "trainer"
    """``spear train``, with the tiny policy of the demo."""


class Panel(str, Enum):
    """Levels on which success is measured."""

    TEST = "test"
    """Levels of unseen rooms; rates are chosen on the split ``valid``."""
    TRAIN = "train"
    """The training levels; rates are chosen on them too, by runs of other seeds."""


@dataclass(frozen=True, config=STRICT)
class LevelSettings(Record, path="levels"):
    """Rooms of one box; a level's shortest solution has ``shortest`` to ``longest`` moves."""

    height: int = number(6, at_least=5, at_most=10)
    width: int = number(6, at_least=5, at_most=10)
    shortest: int = number(6, at_least=1)
    longest: int = number(10, at_least=1)

    @property
    def recipe(self) -> Recipe:
        """Recipe for :func:`spear_envs.sokoban.tasks.make_task_set`."""
        return Recipe(**asdict(self))

    def check(self) -> None:
        self.recipe  # noqa: B018 - raises if invalid


@dataclass(frozen=True, config=STRICT)
class StartSettings(Record, path="start"):
    """The policy that all runs start from: clones a noisy expert until it wins ``success`` of the valid levels."""

    success: float = number(0.03, above=0, below=1)
    levels: int = number(5000, at_least=1)
    """Levels of the expert, of 3 to 12 moves."""
    hidden: int = number(128, at_least=1)


@dataclass(frozen=True, config=STRICT)
class TrainingSettings(Record, path="training"):
    """Settings that all arms share."""

    levels: int = number(4000, at_least=1)
    """Number of training tasks; a run of fresh tasks has more than it draws."""
    tasks: int = number(16, at_least=1)
    """Groups of a step."""
    group: int = number(8, at_least=2)
    turns: int = number(12, at_least=1)
    minibatch: int = number(512, at_least=1)
    """Rows of an optimiser step."""
    budget: int = number(80_000, at_least=1)
    """Tokens that a run generates, one per turn; it ends with the step that reaches them."""
    spear: Mapping[str, Any] = field(default_factory=dict)
    """Settings shared by all arms."""


@dataclass(frozen=True, config=STRICT)
class Arm(Record, path="arm"):
    """One way to train: a choice of ``spear algorithms``, and its changes."""

    title: str = ""
    algorithm: str = "grpo"
    spear: Mapping[str, Any] = field(default_factory=dict)
    epochs: int = number(1, at_least=1)
    """Passes over the mini-batches of a step (``ppo_epochs``)."""
    branch: BranchSettings = field(default_factory=BranchSettings)
    curriculum: CurriculumSettings = field(default_factory=CurriculumSettings)
    # Omitted if None, so that earlier comparisons keep their digest.
    tree: TreeSettings | None = Field(default=None, exclude_if=lambda tree: tree is None)

    def check(self) -> None:
        if self.tree and self.branch.share:
            raise SettingsError("arm.tree: trees start at the start of their task; leave out branch, or tree")
        for name in ("branch", "curriculum"):
            if name in self.spear:
                raise SettingsError(f"arm.spear.{name}: {name} is a key of the arm, arm.{name}")

    def compose(self, settings: TrainingSettings) -> SpearSettings:
        """Settings of the algorithm: the trainer's defaults, the algorithm's file, those of all arms, the arm's own.

        Raises SpearError for an unknown algorithm or an invalid setting.
        """
        made = SpearSettings()
        for layer in (*read_algorithm(self.algorithm), settings.spear, self.spear):
            made = made.override(layer)
        if tree := self.tree:
            if made.advantage.estimator != "grpo":
                raise SettingsError(
                    "arm.tree compares siblings itself: take an algorithm of estimator grpo, not "
                    f"{made.advantage.estimator}"
                )
            if settings.group % tree.leaves or tree.turns[-1] >= settings.turns:
                raise SettingsError(
                    f"arm.tree has {tree.leaves} leaves and splits before turn {tree.turns[-1]}: training.group "
                    f"({settings.group}) must be a multiple of the leaves, training.turns ({settings.turns}) above the "
                    "turn"
                )
            made = made.override({"advantage": {"estimator": ESTIMATOR}})
        return made.override({"branch": self.branch.to_mapping(), "curriculum": self.curriculum.to_mapping()})


def read_algorithm(name: str) -> list[Mapping[str, Any]]:
    """Settings of an algorithm's file and its bases, deepest first. Raises SpearError if it is unknown."""
    check_choice("algorithm", name)
    return list(read_layers("algorithm", name)[0])


@dataclass(frozen=True, config=STRICT)
class TrainerStart(Record, path="start"):
    """The policy that all trainings start from: the demo's warm start, trained so little that it hardly wins."""

    episodes: int = number(800, at_least=1)
    """Episodes of the expert, on levels of 3 to 12 moves."""
    epochs: int = number(2, at_least=1)
    most: float = number(0.03, above=0, below=1)
    """Maximum success on the panel for the comparison to run."""


@dataclass(frozen=True)
class RunPlan:
    """One training: an arm, a learning rate, a seed; ``tuning`` runs only choose the rate."""

    arm: str
    rate: float
    seed: int

    @property
    def tuning(self) -> bool:
        """Whether it only chooses the rate."""
        return self.seed >= TUNING_SEED

    @property
    def name(self) -> str:
        """Stem of its file."""
        return f"{self.arm}-{self.rate:g}-{self.seed}"


@dataclass(frozen=True, config=STRICT)
class Comparison(Record, ABC, path="comparison"):
    """A comparison. The primary measure is the success on ``panel`` at the end of the budget.

    Attributes:
        arms: ways to train by name.
        rates: learning rates; each arm uses its best in the tuning runs. A single one needs no tuning.
        tuning_seeds: tuning runs of each rate of each arm.
        seeds: reported runs of each arm.
        compare: pairs ``[arm, base]`` whose difference is reported.
    """

    title: str
    arms: Mapping[str, Arm]
    compare: tuple[tuple[str, str], ...]
    rates: tuple[float, ...]
    seeds: int = number(10, at_least=2)
    tuning_seeds: int = number(2, at_least=1)
    panel: Panel = Panel.TEST
    levels: LevelSettings = field(default_factory=LevelSettings)
    training: TrainingSettings = field(default_factory=TrainingSettings)

    def check(self) -> None:
        if not self.arms or not self.rates or min(self.rates) <= 0:
            raise SettingsError("comparison needs arms, and rates above 0")
        for name, arm in self.arms.items():
            if not re.fullmatch(r"[a-z0-9_]+", name):
                raise SettingsError(f"comparison.arms: {name!r} cannot name a file: use a-z, 0-9 and _")
            self.check_arm(name, arm)
        for pair in self.compare:
            self.check_pair(pair)

    @abstractmethod
    def check_arm(self, name: str, arm: Arm) -> None:
        """Raise SpearError if the arm cannot be run."""

    @abstractmethod
    def describe_measure(self) -> str:
        """Describe the measure of success, for the report."""

    def check_pair(self, pair: tuple[str, str]) -> None:
        """Raise SettingsError unless both are arms."""
        for name in pair:
            if name not in self.arms:
                raise SettingsError(f"{name!r} is not an arm: choose {', '.join(self.arms)}")

    @property
    def digest(self) -> str:
        """SHA-256 of all settings with defaults, independent of comments and the order of keys."""
        return hashlib.sha256(json.dumps(self.to_mapping(), sort_keys=True).encode()).hexdigest()

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Comparison:
        """The comparison of a mapping: of the trainer if it names an engine, else of the lab."""
        return (TrainerComparison if "engine" in content else LabComparison).from_mapping(content)

    @classmethod
    def read(cls, path: Path) -> Comparison:
        """Read the comparison of a YAML file. Raises SpearError if it cannot be read or a setting is invalid."""
        content = read_config(path)
        try:
            return cls.of(content)
        except SettingsError as error:
            raise SpearError(f"{path}: {error}") from None


@dataclass(frozen=True, config=STRICT)
class LabComparison(Comparison):
    """With the lab's policy, whose success is computed; ``looks`` counts examinations of a run on the panel."""

    looks: int = number(8, at_least=1)
    start: StartSettings = field(default_factory=StartSettings)

    def check_arm(self, name: str, arm: Arm) -> None:
        spear = arm.compose(self.training)
        if spear.advantage.needs_critic or spear.kl.coefficient > 0 or spear.loss.entropy_coefficient > 0:
            raise SettingsError(f"arm {name}: the lab has no critic, no reference policy and no entropy bonus")

    def describe_measure(self) -> str:
        return "success is exact"


@dataclass(frozen=True, config=STRICT)
class TrainerComparison(Comparison):
    """With trainings of ``spear train``, whose success is sampled: ``samples`` episodes of each level, at temperature
    1.
    """

    engine: Engine = Engine.TRAINER
    samples: int = number(16, at_least=1)
    start: TrainerStart = field(default_factory=TrainerStart)

    def check_arm(self, name: str, arm: Arm) -> None:
        arm.compose(self.training)
        if arm.tree:
            raise SettingsError(f"arm {name}: the trainer does not support trees; leave out tree, or engine: trainer")
        if self.training.minibatch % self.training.group:
            raise SettingsError(
                "training.minibatch: the trainer counts it in groups; take a multiple of training.group"
            )

    def describe_measure(self) -> str:
        return f"success is of {self.samples} episodes a level"

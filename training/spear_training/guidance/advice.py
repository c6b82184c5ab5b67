"""Advice, and the sizes of a run that settings depend on."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from spear_agents.trajectory import Layout


@dataclass(frozen=True)
class Advice:
    """One finding: ``topic`` names its rule, ``mend`` the setting to change."""

    topic: str
    finding: str
    mend: str

    def __str__(self) -> str:
        return f"{self.finding}: {self.mend}"


@dataclass(frozen=True)
class RunShape:
    """Sizes of a run."""

    tasks: int
    """Tasks a step."""
    group_size: int
    """Episodes of each task."""
    max_turns: int
    per_turn: bool
    """Each turn is a row; else each episode."""
    steps: int

    @classmethod
    def of_config(cls, config: DictConfig, max_turns: int) -> RunShape:
        """Read the sizes of a composed configuration; ``max_turns`` is the environment's."""
        return cls(
            tasks=int(config.data.train_batch_size),
            group_size=int(config.actor_rollout_ref.rollout.n),
            max_turns=max_turns,
            per_turn=Layout(config.spear.env.layout) is Layout.PER_TURN,
            steps=int(config.trainer.total_training_steps),
        )

    @property
    def most_rows(self) -> int:
        """Rows of a step, if every episode takes all its turns."""
        return self.tasks * self.group_size * (self.max_turns if self.per_turn else 1)

"""What the rules of both kinds share: a piece of advice, and the sizes of a run."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from spear_agents.trajectory import Layout

PAPER_BOUNDS = "the paper fixes 2 to 60 for agents (outcome 10 or 0) and 1 to 40 for mathematics"


@dataclass(frozen=True)
class Advice:
    """One finding: ``topic`` names its rule, ``mend`` the setting to change, if any."""

    topic: str
    finding: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.finding}: {self.mend}" if self.mend else self.finding


@dataclass(frozen=True)
class RunShape:
    """Sizes of a run that the settings of the algorithm couple with."""

    tasks: int
    """Tasks a step."""
    group_size: int
    """Episodes of each task."""
    max_turns: int
    per_turn: bool
    """Each turn is a row; else each episode."""
    steps: int
    response_limit: int
    """Tokens a row's response may have."""

    @classmethod
    def of_config(cls, config: DictConfig, max_turns: int) -> RunShape:
        """Sizes in a composed configuration; ``max_turns`` is the environment's."""
        return cls(
            tasks=int(config.data.train_batch_size),
            group_size=int(config.actor_rollout_ref.rollout.n),
            max_turns=max_turns,
            per_turn=Layout(config.spear.env.layout) is Layout.PER_TURN,
            steps=int(config.trainer.total_training_steps),
            response_limit=int(config.data.max_response_length),
        )

    @property
    def most_rows(self) -> int:
        """Rows of a step, if every episode takes all its turns."""
        return self.tasks * self.group_size * (self.max_turns if self.per_turn else 1)

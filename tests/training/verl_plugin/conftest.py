"""Hand-made episodes: trajectories for the recorder, records for what comes after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest


@dataclass
class RecordMaker:
    """Makes records of episodes; every keyword of an episode or of its rows can be given."""

    template: dict[str, Any] = field(
        default_factory=lambda: {
            "task_id": "t",
            "subtask": "s",
            "won": False,
            "score": 0.0,
            "tool_calls": 0,
            "stop": "turn_limit",
            "fault": None,
        }
    )

    def row(self, key: str, turn: int, **changes: Any) -> Any:
        """One row of three tokens."""
        from spear_training.verl_plugin.records import RowRecord

        values: dict[str, Any] = {
            "prompt_length": 4,
            "response_length": 3,
            "loss_tokens": 3,
            "finished": True,
            "void": False,
            "repetitive": False,
            "anchor": f"a{turn}",
            "step_reward": -0.1,
        }
        return RowRecord(key=key, turn=turn, **(values | changes))

    def episode(
        self, group: str, sample: int, *, won: bool = False, turns: int = 2, rows: Sequence[dict] = (), **changes: Any
    ) -> Any:
        """An episode of ``turns`` rows; ``rows`` changes single ones (``{}`` leaves one as it is)."""
        from spear_training.verl_plugin.records import EpisodeRecord

        edits = [*rows, *({} for _ in range(turns - len(rows)))]
        made = tuple(self.row(f"{group}_{sample}_{n}", n, **edit) for n, edit in enumerate(edits))
        values = self.template | {
            "terms": {"outcome": 1.0 if won else -1.0, "format": 0.1, "tool_call": 0.0},
            "won": won,
            "score": float(won),
            "stop": "won" if won else "turn_limit",
            "turns": turns,
            "well_formed_turns": turns,
            "valid_actions": turns,
            "rows": made,
        }
        return EpisodeRecord(group=group, sample=sample, **(values | changes))


@pytest.fixture
def make() -> RecordMaker:
    """Makes records of episodes."""
    return RecordMaker()

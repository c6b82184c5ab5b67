"""Hand-made episodes: their records and rows, for what comes after a rollout."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from spear_training.algorithms import RowTable
from spear_training.step.records import EpisodeRecord, Rollout

ROW: dict[str, Any] = {
    "prompt_length": 4,
    "response_length": 3,
    "loss_tokens": 3,
    "finished": True,
    "void": False,
    "repetitive": False,
    "unreadable": False,
    "incomplete": False,
    "malformed": 0,
    "step_reward": -0.1,
}


@dataclass(frozen=True)
class Episode:
    """A record, and what is special about its rows."""

    record: EpisodeRecord
    rows: tuple[dict[str, Any], ...]


def make_episode(
    group: str, sample: int, *, won: bool = False, turns: int = 2, rows: Sequence[dict] = (), **changes: Any
) -> Episode:
    """An episode of ``turns`` rows of three tokens; ``rows`` changes single ones (``{}`` leaves one as it is)."""
    edits = tuple({**ROW, "anchor": f"a{n}", **edit} for n, edit in enumerate([*rows, *[{}] * (turns - len(rows))]))
    values = {
        "task_id": "t",
        "subtask": "s",
        "terms": {"outcome": 1.0 if won else -1.0, "format": 0.1, "tool_call": 0.0},
        "won": won,
        "score": float(won),
        "tool_calls": 0,
        "stop": "won" if won else "turn_limit",
        "fault": None,
        "turns": turns,
        "well_formed_turns": turns,
        "valid_actions": turns,
        "rows": 0 if changes.get("fault") else len(edits),
    }
    return Episode(EpisodeRecord(group=group, sample=sample, **(values | changes)), edits)


def play(episodes: Sequence[Episode]) -> Rollout:
    """What a rollout of these episodes leaves."""
    pairs = [(e.record, n, row) for e in episodes if e.record.fault is None for n, row in enumerate(e.rows)]
    columns = {name: [row[name] for _, _, row in pairs] for name in (*ROW, "anchor")}
    ends = [row["response_length"] for _, _, row in pairs]
    rows = RowTable(
        key=[f"{record.trajectory}_{n}" for record, n, _ in pairs],
        group=[record.group for record, _, _ in pairs],
        trajectory=[record.trajectory for record, _, _ in pairs],
        turn=[n for _, n, _ in pairs],
        won=[record.won for record, _, _ in pairs],
        tool_calls=[record.tool_calls for record, _, _ in pairs],
        truncated=[record.stop == "context_limit" for record, _, _ in pairs],
        turns=[1] * len(pairs),
        turn_number=[n for _, n, _ in pairs],
        turn_end=ends,
        turn_reward=columns["step_reward"],
        **columns,
    )
    turns = sum(e.record.turns for e in episodes)
    return Rollout(tuple(e.record for e in episodes), rows, turns)


def without_rows(episode: Episode) -> Episode:
    """The same episode, whose first prompt already had no room."""
    return Episode(replace(episode.record, rows=0, turns=0), ())

"""What ``reset`` and ``step`` put into ``info``: the same keys in every environment."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypedDict


class RewardTerms(TypedDict):
    """The raw parts of the reward, running over the episode, so that a trainer can weigh them anew.

    An environment may add keys of its own, such as ``f1``; ``compose_reward`` does not read them.
    """

    outcome: float
    """+1 once the task is won, -1 before (``eq:outcomereward``)."""
    tool_call: float
    """min(1, 0.1 n) for n tool calls so far, before mu (``eq:actionreward``)."""
    format: float
    """0.1 while there was a response and every one was well formed, else 0 (``eq:formatreward``)."""
    native_return: float
    """Sum of the native rewards so far."""


class StepInfo(TypedDict):
    """Keys of ``info``. Environments may add their own behind these."""

    task_id: str
    """Stable id of the task, such as ``sokoban-v1/6x6-1/train/00000017``."""
    task_fingerprint: str
    """SHA-256 (hex) of the task set the task comes from: equal fingerprints, same tasks."""
    subtask: str
    """Kind of task that success is reported by."""
    instruction: str
    """What is to be done, in words."""
    turn: int
    """Responses taken so far: 0 after ``reset``."""
    admissible_actions: list[str] | None
    """Actions that the environment would accept now, in plain form; None where they cannot be listed."""
    anchor: Hashable
    """Key of the state: steps of one group that share it start from the same state (GiGPO)."""
    action: str
    """The action that was played, in the environment's canonical form; empty if nothing was."""
    format_ok: bool
    """The last response was well formed."""
    action_ok: bool
    """The last action did something."""
    tool_calls: int
    """Tool calls so far."""
    won: bool
    """The task is solved."""
    score: float
    """The benchmark's own score so far, in [0, 1]."""
    reward_terms: RewardTerms
    """Raw reward terms so far."""
    fault: str | None
    """Kind of the fault that cut the episode short, which is not the policy's doing; None if there was none."""


INFO_KEYS: frozenset[str] = frozenset(StepInfo.__annotations__)
"""Names of all keys that every ``info`` holds."""

REWARD_TERM_KEYS: frozenset[str] = frozenset(RewardTerms.__annotations__)
"""Names of all keys that every ``info["reward_terms"]`` holds."""

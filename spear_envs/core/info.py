"""The keys of ``info``, the same in every environment."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TypedDict


class RewardTerms(TypedDict):
    """The raw parts of the reward so far, so that a trainer can weigh them itself.

    Environments may add keys, such as ``f1``; ``compose_reward`` does not read them.
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
    """Keys of ``info``; environments may add others."""

    task_id: str
    """Stable id of the task, such as ``sokoban-v1/6x6-1/train/00000017``."""
    task_fingerprint: str
    """SHA-256 (hex) of the task set: equal fingerprints, same tasks."""
    subtask: str
    """Kind of task, for reports of success."""
    instruction: str
    """The task in words."""
    turn: int
    """Responses taken so far: 0 after ``reset``."""
    admissible_actions: list[str] | None
    """Actions that the environment would accept now, in plain form; None if they cannot be listed."""
    anchor: Hashable
    """Key of the state: steps of a group with equal keys start from the same state (GiGPO)."""
    action: str
    """The action that was played, in the environment's canonical form; empty if nothing was."""
    format_ok: bool
    """The last response was well formed."""
    native_thought: bool
    """The last response had a thought that a reasoning model writes by itself, see ``cut_native_thought``."""
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
    """Kind of the fault that ended the episode, which is not the policy's; None without a fault."""


INFO_KEYS: frozenset[str] = frozenset(StepInfo.__annotations__)
"""Keys of every ``info``."""

REWARD_TERM_KEYS: frozenset[str] = frozenset(RewardTerms.__annotations__)
"""Keys of every ``info["reward_terms"]``."""

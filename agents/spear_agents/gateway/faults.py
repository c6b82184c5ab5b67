"""Faults of agent programs."""

from __future__ import annotations

from enum import Enum


class AgentFaultKind(str, Enum):
    """Fault of an agent program."""

    FAILED = "agent_failed"
    """It raised an error."""
    TIMEOUT = "agent_timeout"
    """It did not end in time."""

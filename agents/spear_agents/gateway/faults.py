"""What may go wrong in a program that plays."""

from __future__ import annotations

from enum import Enum


class AgentFaultKind(str, Enum):
    """What went wrong in a program that plays."""

    FAILED = "agent_failed"
    """It raised an error."""
    TIMEOUT = "agent_timeout"
    """It did not end in time."""

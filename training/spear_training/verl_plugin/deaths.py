"""What to say when a process of a training died under it."""

from __future__ import annotations

import re

import ray

from spear_agents.engines.base import EngineFault, EngineFaultKind
from spear_envs.core.errors import SpearError

_RESUMES = "The run stopped; the same command resumes it from its last checkpoint"
_LOST_PEER = re.compile(r"(Connection (closed|reset) by peer|Connection refused|Broken pipe|recv.* timed out)", re.I)


def explain_death(error: BaseException) -> str | None:
    """One line about the process that died, or None if ``error`` is about something else.

    A rank that dies takes the others down with it: they lose their peer in the middle of a collective operation, and
    which of the errors arrives first is chance.
    """
    found = _find_death(error)
    if found is None:
        return None
    return f"{found} died in the middle of a step (killed, or out of memory: `dmesg` tells). {_RESUMES}"


def stop_if_dead(fault: EngineFault) -> None:
    """Raise SpearError if a rollout engine has died: as a fault it would end this episode, and then all others."""
    if fault.kind in (EngineFaultKind.DEAD, EngineFaultKind.OUT_OF_MEMORY):
        raise SpearError(f"{fault.message}. {_RESUMES}") from fault


def _find_death(error: BaseException | None) -> str | None:
    if error is None:
        return None
    if isinstance(error, (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError)):
        name = re.search(r"class_name: (?:.*[.])?(\w+)", str(error))
        return f"the worker process {name[1]}" if name else "a worker process"
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "a worker process that used too much memory"
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        return "a process of the trainer"
    return _find_death(getattr(error, "cause", None) or error.__cause__)

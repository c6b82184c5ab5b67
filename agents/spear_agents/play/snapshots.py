"""Snapshots of an episode, from which other episodes may start."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spear_envs.core.errors import SpearError

STREAM = "np_random"
"""Key of a state's random stream, which snapshots leave out."""
_MEND = "a snapshot keeps plain values, so get_state() may return numbers, texts, lists, tuples, sets and dicts only"

_DAMAGES = (
    *(pickle.UnpicklingError, EOFError, ValueError, LookupError),
    *(TypeError, AttributeError, OverflowError, MemoryError),
)
"""Raised by damaged bytes; a length in them may be of any size."""


@dataclass(frozen=True)
class Snapshot:
    """The moment before a response, after ``turn`` others, from which an episode in the layout ``per_turn`` can start.

    ``state`` is the environment's, packed; small enough to keep thousands. ``history`` has observation and action of
    the earlier turns that a prompt shows, the latest last.
    """

    turn: int
    state: bytes
    history: tuple[tuple[str, str], ...]

    @classmethod
    def take(cls, core: Any, history: tuple[tuple[str, str], ...]) -> Snapshot:
        """Take a snapshot of an environment. Raises SpearError if its state is not made of plain values."""
        state = core.get_state()
        del state[STREAM]
        try:
            packed = pickle.dumps(state, protocol=5)
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise SpearError(f"the state cannot be packed ({error}): {_MEND}") from error
        _unpack(packed)
        return cls(core.turn, packed, history)

    def restore(self, core: Any) -> tuple[Any, Mapping[str, Any]]:
        """Restore the snapshot in an environment that has been reset; return its observation and info.

        The random stream stays the environment's own, so episodes of several seeds differ from here on if the world is
        random, as they do from the start of a task. Raises SpearError if the state is damaged.
        """
        stream = core.np_random.bit_generator.state
        found: tuple[Any, Mapping[str, Any]] = core.set_state({**_unpack(self.state), STREAM: stream})
        return found


class _Reader(pickle.Unpickler):
    """Unpickles numbers, texts and containers only: a checkpoint may have been tampered with."""

    def find_class(self, module: str, name: str) -> Any:
        raise SpearError(f"the state holds {module}.{name}: {_MEND}")


def _unpack(packed: bytes) -> dict[str, Any]:
    try:
        state = _Reader(io.BytesIO(packed)).load()
    except _DAMAGES as error:
        raise SpearError(f"the state of a snapshot is damaged ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise SpearError(f"the state of a snapshot is damaged ({type(state).__name__})")
    return state

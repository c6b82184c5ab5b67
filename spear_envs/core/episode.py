"""What the base class keeps of an episode, and reading it back from a saved state."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from spear_envs.core.errors import SpearError


@dataclass(slots=True)
class Episode:
    """An episode so far, beside the world itself."""

    turn: int = 0
    """Responses taken."""
    done: bool = True
    """The episode has ended, or none has begun."""
    won: bool = False
    outcome: float | None = None
    """Outcome term where it is not simply +1 when won and -1 otherwise."""
    well_formed: bool = True
    """Every response was well formed."""
    tool_calls: int = 0
    native_return: float = 0.0
    """Sum of the native rewards."""
    extra_terms: dict[str, float] = field(default_factory=dict)
    """Terms of the environment's own."""
    fault: str | None = None
    action: str = ""
    """What was played last, in canonical form."""
    format_ok: bool = True
    """The last response was well formed."""
    distinct_calls: int = 0
    """Tool calls that led to something new, where those are counted."""
    met: dict[Hashable, None] = field(default_factory=dict)
    """What the episode has led to, where distinct calls are counted: a set in the order of its making."""

    def save(self) -> dict[str, Any]:
        """All fields as plain values."""
        return asdict(self)

    @classmethod
    def load(cls, state: Any) -> Episode:
        """The episode that :meth:`save` wrote.

        Raises:
            SpearError: a field is missing or has no value that an episode could have.
        """
        if not isinstance(state, Mapping):
            raise SpearError(f"the state is damaged (its episode is {state!r:.80}): {_MEND}")
        for known in fields(cls):
            if known.name not in state:
                raise SpearError(f"the state is damaged (it lacks {known.name!r}): {_MEND}")
            if not _FITS[known.type](state[known.name]):  # type: ignore[index]  # annotations are strings here
                raise SpearError(f"the state is damaged ({known.name}={state[known.name]!r:.80}): {_MEND}")
        return cls(**{known.name: state[known.name] for known in fields(cls)})


_MEND = "give set_state() what get_state() gave."
_FITS = {
    "int": lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
    "bool": lambda value: isinstance(value, bool),
    "float": lambda value: isinstance(value, (int, float)),
    "str": lambda value: isinstance(value, str),
    "float | None": lambda value: value is None or isinstance(value, (int, float)),
    "str | None": lambda value: value is None or isinstance(value, str),
    "dict[str, float]": lambda value: isinstance(value, dict),
    "dict[Hashable, None]": lambda value: isinstance(value, dict),
}

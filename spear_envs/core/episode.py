"""The base class's record of an episode, reading it from a saved state, and what reaches it through wrappers."""

from __future__ import annotations

import inspect
import math
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import gymnasium as gym

from spear_envs.core.errors import SpearError


@dataclass(slots=True)
class Episode:
    """An episode so far, apart from the world."""

    turn: int = 0
    """Responses taken."""
    done: bool = True
    """The episode has ended, or none has begun."""
    won: bool = False
    outcome: float | None = None
    """Outcome term, if it is not +1 when won and -1 otherwise."""
    well_formed: bool = True
    """Every response was well formed."""
    tool_calls: int = 0
    native_return: float = 0.0
    """Sum of the native rewards."""
    extra_terms: dict[str, float] = field(default_factory=dict)
    """The environment's own terms."""
    fault: str | None = None
    action: str = ""
    """What was played last, in canonical form."""
    format_ok: bool = True
    """The last response was well formed."""
    native_thought: bool = False
    """The last response had a native thought."""
    distinct_calls: int = 0
    """Tool calls with a new result, if those are counted."""
    met: dict[Hashable, None] = field(default_factory=dict)
    """Results so far, if distinct calls are counted: an ordered set."""

    def save(self) -> dict[str, Any]:
        """Return all fields as plain values."""
        return asdict(self)

    @classmethod
    def load(cls, state: Any) -> Episode:
        """Load what :meth:`save` returned.

        Raises:
            SpearError: a field is missing or has an impossible value.
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


def find_time_limit(env: gym.Env[Any, Any]) -> float:
    """Return the least limit of the ``TimeLimit`` wrappers around an environment that is being reset.

    They end an episode without a word to the environment, which would pay no terminal reward: stalling would beat
    losing. An environment knows no wrappers, but their ``reset`` is what calls its own.
    """
    least = math.inf
    frame = inspect.currentframe()
    frame = frame.f_back and frame.f_back.f_back if frame else None  # what called reset()
    while frame is not None:
        caller = frame.f_locals.get("self")
        around = caller is env or (isinstance(caller, gym.Wrapper) and caller.unwrapped is env)
        if isinstance(caller, gym.wrappers.TimeLimit) and around:
            least = min(least, caller._max_episode_steps)
        elif not around and not frame.f_globals.get("__name__", "").startswith("gymnasium."):
            break
        frame = frame.f_back
    return least


def set_training_step(env: Any, step: int) -> None:
    """Set the global training step of an environment, through wrappers and vector environments.

    Raises:
        SpearError: it is neither a SPEAR environment nor a vector environment of SPEAR environments.
    """
    base = env.unwrapped
    if isinstance(base, gym.vector.VectorEnv) and hasattr(base, "call"):
        base.call("set_training_step", step)
    elif hasattr(base, "set_training_step"):
        base.set_training_step(step)
    else:
        raise SpearError(f"{env} has no training step: it is not an environment of spear_envs.")

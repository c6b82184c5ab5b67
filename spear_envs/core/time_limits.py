"""Time limits of gymnasium around an environment."""

from __future__ import annotations

import inspect
import math
from typing import Any

import gymnasium as gym


def find_time_limit(env: gym.Env[Any, Any]) -> float:
    """The least limit of the ``TimeLimit`` wrappers around an environment that is being reset.

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

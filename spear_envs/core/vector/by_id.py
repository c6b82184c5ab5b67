"""The generic vector environments as attributes named by their ids, for gymnasium's ``"module:attribute"``."""

from __future__ import annotations

from functools import partial
from typing import Any

from spear_envs.core.vector.env import make_vector_env

__all__: list[str] = []


def __getattr__(id: str) -> Any:
    if "/" not in id:
        raise AttributeError(id)
    return partial(make_vector_env, id)

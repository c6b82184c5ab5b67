"""Open registries: what a setting may name, and how a user adds to it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, Generic, TypeVar

from spear_training.algorithms.errors import SettingsError

F = TypeVar("F", bound=Callable[..., Any])


class Registry(Generic[F]):
    """Functions by name. A setting names one of them, or a user's own as ``package.module:function``.

    Args:
        setting: the setting whose values these are, as ``spear.advantage.estimator``.
    """

    def __init__(self, setting: str) -> None:
        self.setting = setting
        self._functions: dict[str, F] = {}

    @property
    def names(self) -> list[str]:
        """Registered names, in the order of registration."""
        return list(self._functions)

    def register(self, name: str) -> Callable[[F], F]:
        """Decorate a function that the setting can then name.

        Raises:
            ValueError: the name is taken, or has a colon.
        """
        if name in self._functions or ":" in name:
            raise ValueError(f"{self.setting}={name} is taken, or not a plain name")

        def put(function: F) -> F:
            self._functions[name] = function
            return function

        return put

    def find(self, name: str) -> F:
        """The function that ``name`` stands for.

        Raises:
            SettingsError: nothing has this name (the nearest one is given), or the user's module cannot be imported.
        """
        if name in self._functions:
            return self._functions[name]
        if ":" in str(name):
            return self._import(str(name))
        near = difflib.get_close_matches(str(name), self.names, 1)
        hint = f"did you mean {near[0]}?" if near else f"choose {', '.join(self.names)}"
        raise SettingsError(f"{self.setting} cannot be {name!r}; {hint} A function of yours is package.module:function")

    def check(self, name: str, *arguments: Any, **keywords: Any) -> None:
        """See that the function of ``name`` can be called with these.

        Raises:
            SettingsError: it cannot, or as :meth:`find`.
        """
        try:
            inspect.signature(self.find(name)).bind(*arguments, **keywords)
        except TypeError as error:
            raise SettingsError(f"{self.setting}={name} and its options do not fit: {error}") from error

    def _import(self, name: str) -> F:
        path, _, attribute = name.partition(":")
        try:
            found = getattr(import_module(path), attribute)
        except (ImportError, AttributeError, ValueError) as error:
            raise SettingsError(
                f"{self.setting}={name} cannot be imported ({error}): start from the folder of the module, install it, "
                "or put its folder on PYTHONPATH"
            ) from error
        if not callable(found):
            raise SettingsError(f"{self.setting}={name} is no function but {type(found).__name__}")
        return found


ESTIMATORS: Registry[Callable[..., Any]] = Registry("spear.advantage.estimator")
"""``f(rows, settings) -> advantages``; see :mod:`spear_training.algorithms.estimators`."""
POLICY_LOSSES: Registry[Callable[..., Any]] = Registry("spear.loss.policy")
"""Losses of tokens; see :mod:`spear_training.algorithms.losses`."""
FILTERS: Registry[Callable[..., Any]] = Registry("spear.filter.custom")
"""``f(rows, settings) -> flags``; see :mod:`spear_training.algorithms.filters`."""
GAMMA: Registry[Callable[..., float]] = Registry("spear.sil.gamma")
"""Weights of the self-imitation term; see :mod:`spear_training.algorithms.schedules`."""
MU: Registry[Callable[..., float]] = Registry("spear.reward.mu")
"""Weights of the tool-call reward; see :mod:`spear_training.algorithms.schedules`."""

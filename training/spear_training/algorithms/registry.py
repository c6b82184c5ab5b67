"""Registries of the functions that a setting may name, and the schedules of gamma and mu."""

from __future__ import annotations

import difflib
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from spear_envs.core.machine import import_module
from spear_envs.core.rewards import cosine_decay, cosine_warmup
from spear_training.algorithms.schema import SettingsError, is_number

F = TypeVar("F", bound=Callable[..., Any])
NO_OPTIONS: Mapping[str, Any] = {}
Metrics = Mapping[str, float]


class Registry(Generic[F]):
    """Functions by name. A setting names one of them, or a user's own as ``package.module:function``.

    Args:
        setting: the setting whose values these are, such as ``advantage.estimator``.
        home: module that registers our own, imported when a function is called: it needs torch.
        own: their names, for a setting to be checked without that module.
    """

    def __init__(self, setting: str, home: str = "", own: Sequence[str] = ()) -> None:
        self.setting = setting
        self._home = home
        self.own = tuple(own)
        self._functions: dict[str, F] = {}

    @property
    def names(self) -> list[str]:
        """Registered names, in the order of registration."""
        self._load()
        return list(self._functions)

    def _load(self) -> None:
        if self._home:
            import_module(self._home)

    def register(self, name: str) -> Callable[[F], F]:
        """Register the decorated function. Raises ValueError if the name is taken or has a colon."""
        if name in self._functions or ":" in name:
            raise ValueError(f"{self.setting}={name} is taken, or not a plain name")

        def put(function: F) -> F:
            self._functions[name] = function
            return function

        return put

    def find(self, name: str) -> F:
        """Find the function ``name``.

        Raises:
            SettingsError: an unknown name (with the nearest one), or the user's module cannot be imported.
        """
        known = dict.fromkeys((*self.own, *self._functions))
        if name in known:
            self._load()
            return self._functions[name]
        if ":" in str(name):
            return self._import(str(name))
        near = difflib.get_close_matches(str(name), known, 1)
        hint = f"did you mean {near[0]}? " if near else f"choose {', '.join(known)}. " if known else ""
        raise SettingsError(f"{self.setting} cannot be {name!r}; {hint}A function of yours is package.module:function")

    def check(self, name: str, *arguments: Any, options: Mapping[str, Any] = NO_OPTIONS, **keywords: Any) -> None:
        """Raise SettingsError unless the function ``name`` takes these arguments and names each of the ``options``.

        One whose default is a number takes a number.
        """
        if name in self.own and not options:
            return
        signature = inspect.signature(self.find(name))
        # A misspelt option would vanish in a function's **keywords: options must be named, so that a typo is an error
        # before the run and not a setting without effect.
        named = [key for key, one in signature.parameters.items() if one.kind is not one.VAR_KEYWORD]
        for key in options:
            if key in keywords or key not in named:
                own = [one for one in named[len(arguments) :] if one not in keywords]
                raise SettingsError(
                    f"{self.setting}={name} has no option {key!r}; it has {', '.join(own) or 'none that it names'}"
                )
            if is_number(signature.parameters[key].default) and not is_number(options[key]):
                raise SettingsError(f"{self.setting}={name}: its option {key} must be a number, not {options[key]!r}")
        try:
            signature.bind(*arguments, **keywords, **options)
        except TypeError as error:
            raise SettingsError(f"{self.setting}={name}{signature} has the wrong arguments: {error}") from error

    def call(self, name: str, *arguments: Any, **keywords: Any) -> Any:
        """Call the function ``name``. Raises SettingsError with the place if a user's function raised."""
        function = self.find(name)
        try:
            return function(*arguments, **keywords)
        except (Exception, SystemExit) as error:
            if name in self._functions:
                raise
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{place.filename}, line {place.lineno}, in {place.name}"
            raise SettingsError(f"{self.setting}={name} raised {_describe(error)} ({where})") from error

    def _import(self, name: str) -> F:
        path, _, attribute = name.partition(":")
        try:
            module = import_module(path)
        except Exception as error:  # a user's module may raise anything
            mend = ""
            if isinstance(error, ModuleNotFoundError) and error.name == path.partition(".")[0]:
                mend = ": start from the folder of the module, install it, or put its folder on PYTHONPATH"
            raise SettingsError(f"{self.setting}={name} cannot be imported ({_describe(error)}){mend}") from error
        found = getattr(module, attribute, None)
        if not callable(found):
            near = difflib.get_close_matches(attribute, [key for key in vars(module) if not key.startswith("_")], 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise SettingsError(f"{self.setting}={name}: {path} has no function {attribute!r}{hint}")
        return found


def _describe(error: BaseException) -> str:
    """Describe an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


ESTIMATORS: Registry[Callable[..., Any]] = Registry(
    "advantage.estimator", "spear_training.algorithms.estimators", ("grpo", "rloo", "gigpo", "gae", "stepwise")
)
"""``f(rows, settings) -> advantages``; see :mod:`spear_training.algorithms.estimators`."""
POLICY_LOSSES: Registry[Callable[..., Any]] = Registry(
    "loss.policy", "spear_training.algorithms.losses", ("vanilla", "gspo", "cispo", "kl_cov")
)
"""Losses of tokens; see :mod:`spear_training.algorithms.losses`."""
FILTERS: Registry[Callable[..., Any]] = Registry("filter.custom", "spear_training.algorithms.filters")
"""``f(rows, settings) -> flags``; see :mod:`spear_training.algorithms.filters`."""
GAMMA: Registry[Callable[..., float]] = Registry("sil.gamma")
"""Schedules of the weight of the self-imitation term: ``f(t, steps, metrics, **options) -> weight``.

``t`` is the global step, from 1; ``steps`` is the setting of the length (``warmup_steps``, ``decay_steps``);
``metrics`` are those of the previous step, empty at the first; ``options`` is the setting of that name.
"""
MU: Registry[Callable[..., float]] = Registry("reward.mu")
"""Schedules of the weight of the tool-call reward, called as those of :data:`GAMMA`."""


# ---- schedules -------------------------------------------------------------------------------------------------------
@GAMMA.register("cosine")
def warm_up(t: int, steps: int, metrics: Metrics) -> float:
    """Rise from 0 to 1 along a half cosine of ``steps`` (``eq:gamma``)."""
    return cosine_warmup(t, steps)


@MU.register("cosine")
def decay(t: int, steps: int, metrics: Metrics) -> float:
    """Fall from 1 to 0 along a half cosine of ``steps`` (``eq:mudecay``)."""
    return cosine_decay(t, steps)


@GAMMA.register("constant")
@MU.register("constant")
def stay(t: int, steps: int, metrics: Metrics, value: float = 1.0) -> float:
    """Return ``value`` at every step."""
    return value


@GAMMA.register("none")
@MU.register("none")
def leave_out(t: int, steps: int, metrics: Metrics) -> float:
    """Return 0 at every step."""
    return 0.0


@GAMMA.register("entropy")
def follow_entropy(t: int, steps: int, metrics: Metrics, low: float = 0.1, high: float = 0.5) -> float:
    """Return the cosine warm-up, times the position of the policy's entropy between ``low`` (0) and ``high`` (1), nats
    per token.

    Self-imitation sharpens a policy; this schedule stops when little entropy is left for exploration.
    """
    # The first step has no metrics yet: it counts as a policy of high entropy, which a fresh one is.
    return cosine_warmup(t, steps) * _rise(metrics.get("entropy/token-mean", high), low, high)


@GAMMA.register("success")
def follow_success(t: int, steps: int, metrics: Metrics, target: float = 0.5) -> float:
    """Return the success rate of the previous step over ``target``, at most 1: rare successes are not yet imitated."""
    return _rise(metrics.get("success/all", 0.0), 0.0, target)


@MU.register("success")
def fade_with_success(t: int, steps: int, metrics: Metrics, target: float = 0.5) -> float:
    """Return 1 without success, 0 from ``target`` on: a policy that solves tasks needs no reward for tool calls."""
    return 1.0 - _rise(metrics.get("success/all", 0.0), 0.0, target)


@MU.register("novelty")
def follow_novelty(t: int, steps: int, metrics: Metrics, target: float = 0.5) -> float:
    """Return the share of new states over ``target``, at most 1: reward tool calls while they lead to new states."""
    # Without metrics, at the first step, every state is new.
    return _rise(metrics.get("anchors/new", target), 0.0, target)


def _rise(value: float, low: float, high: float) -> float:
    """Return 0 up to ``low``, 1 from ``high`` on, linear between."""
    if value >= high:
        return 1.0
    return 0.0 if value <= low else (value - low) / (high - low)

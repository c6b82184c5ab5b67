"""A few environments stepped one after the other: what one process of a vector environment does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import gymnasium as gym

__all__ = ["Description", "EnvGroup", "LocalGroup", "Order", "Outcome"]


class Description(NamedTuple):
    """What all environments of a group have in common."""

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    metadata: dict[str, Any]
    render_mode: str | None


class Order(NamedTuple):
    """What one environment is to do: reset if there is no action, else step."""

    place: int
    """Index of the environment within its group."""
    action: Any = None
    seed: int | None = None
    options: dict[str, Any] | None = None
    reset_after_end: bool = False
    """Reset at once if this step ends the episode."""


class Outcome(NamedTuple):
    """What came of an order."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]
    final: tuple[Any, dict[str, Any]] | None = None
    """Observation and info of the end of the episode, if the environment was reset behind it."""


class EnvGroup(Protocol):
    """Environments that are ordered about together. A request is begun, then finished, so that groups overlap."""

    indices: list[int]
    """Indices of its environments within the vector environment."""

    def begin(self, request: str, payload: Any) -> None:
        """Start ``"describe"``, ``"run"`` (a list of orders), ``"call"`` or ``"set"``."""
        ...

    def finish(self) -> Any:
        """The answer to the request begun last; raises what the environment raised."""
        ...

    def close(self) -> None:
        """Close the environments and let go of all resources; more than once does no harm."""
        ...


class LocalGroup:
    """Environments of this very process."""

    def __init__(self, make_env: Callable[[], gym.Env[Any, Any]], indices: Sequence[int]) -> None:
        self.indices = list(indices)
        self.envs = [make_env() for _ in self.indices]
        self._request: tuple[str, Any] = ("", None)

    def begin(self, request: str, payload: Any) -> None:
        """Note the request; the work is done in :meth:`finish`."""
        self._request = (request, payload)

    def finish(self) -> Any:
        """Do what was requested."""
        request, payload = self._request
        return self.answer(request, payload)

    def answer(self, request: str, payload: Any) -> Any:
        """Do what is requested and return the answer."""
        if request == "run":
            return [self._obey(order) for order in payload]
        if request == "call":
            return self._call(**payload)
        if request == "set":
            name, values = payload
            for env, value in zip(self.envs, values, strict=True):
                env.set_wrapper_attr(name, value)
            return None
        if request == "describe":
            first = self.envs[0]
            return Description(first.observation_space, first.action_space, dict(first.metadata), first.render_mode)
        raise ValueError(f"unknown request {request!r}")

    def close(self) -> None:
        """Close all environments."""
        for env in self.envs:
            env.close()
        self.envs = []

    def _obey(self, order: Order) -> Outcome:
        env = self.envs[order.place]
        if order.action is None:
            observation, info = env.reset(seed=order.seed, options=order.options)
            return Outcome(observation, 0.0, False, False, info)
        observation, reward, terminated, truncated, info = env.step(order.action)
        final = None
        if order.reset_after_end and (terminated or truncated):
            final = (observation, info)
            observation, info = env.reset()
        return Outcome(observation, float(reward), terminated, truncated, info, final)

    def _call(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        results = []
        for env in self.envs:
            attribute = env.get_wrapper_attr(name)
            results.append(attribute(*args, **kwargs) if callable(attribute) else attribute)
        return results

"""The generic vector environment: any SPEAR environment, N times."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from spear_envs.core.errors import SpearError
from spear_envs.core.vector.batching import batch_infos, batch_observations
from spear_envs.core.vector.group import Description, EnvGroup, LocalGroup, Order, Outcome
from spear_envs.core.vector.worker import ProcessGroup

__all__ = [
    "SpearVectorEnv",
    "make_vector_env",
    "read_autoreset_mode",
    "read_indices",
    "read_reset_mask",
    "read_seeds",
]

StepReturn = tuple[Any, np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]


class SpearVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """N environments with one interface; texts are tuples of str, not shared memory.

    Beside gymnasium's interface: ``step_subset`` steps some environments only, ``reset`` takes
    ``options={"task": id}`` (one task for all: a group), ``{"tasks": [id, …]}`` (one for each) and
    ``{"reset_mask": bool [N]}`` (resets those only).

    If an environment raises, others of the same call may have been stepped already: reset before going on.

    Args:
        make_env: makes one environment; must survive cloudpickle if there are workers.
        num_envs: N.
        workers: how many processes the environments are spread over; 0 steps them in this process, one by one. Worth
            its cost only where a step takes longer than about 0.2 ms.
        autoreset_mode: ``AutoresetMode``, or its name: ``"next_step"``, ``"same_step"``, ``"disabled"``.

    Raises:
        SpearError: a bad argument; or, from any method, a worker has died (all others are stopped then).
    """

    def __init__(
        self,
        make_env: Callable[[], gym.Env[Any, Any]],
        num_envs: int,
        *,
        workers: int = 0,
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    ) -> None:
        if num_envs < 1:
            raise SpearError(f"num_envs={num_envs} is not valid: give at least 1.")
        if workers < 0:
            raise SpearError(f"workers={workers} is not valid: give 0 (this process) or more.")
        self.num_envs = num_envs
        self.autoreset_mode = read_autoreset_mode(autoreset_mode)
        self._groups: list[EnvGroup] = []
        try:
            if workers == 0:
                self._groups.append(LocalGroup(make_env, range(num_envs)))
            else:
                for share in np.array_split(np.arange(num_envs), min(workers, num_envs)):
                    self._groups.append(ProcessGroup(make_env, share.tolist()))
            self._home = {index: (group, place) for group in self._groups for place, index in enumerate(group.indices)}
            about: Description = self._ask_all("describe", [None] * len(self._groups))[0]
        except BaseException:
            self.close_extras()
            raise
        self.metadata = {**about.metadata, "autoreset_mode": self.autoreset_mode}
        self.render_mode = about.render_mode
        self.single_observation_space = about.observation_space
        self.single_action_space = about.action_space
        self.observation_space = batch_space(about.observation_space, num_envs)
        self.action_space = batch_space(about.action_space, num_envs)
        self._observations: list[Any] = [None] * num_envs
        self._begun = np.zeros(num_envs, dtype=np.bool_)
        self._ended = np.zeros(num_envs, dtype=np.bool_)

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments, or those of ``options["reset_mask"]``.

        Args:
            seed: environment i gets ``seed + i``, or the i-th of a sequence.
            options: see the class; other keys go to every environment.

        Returns:
            Observations of all N (unreset ones show what they showed last) and the infos of those that were reset.
        """
        seeds = read_seeds(seed, self.num_envs)
        rest = dict(options or {})
        mask = read_reset_mask(rest.pop("reset_mask", None), self.num_envs)
        tasks = rest.pop("tasks", None)
        if tasks is not None and len(tasks) != self.num_envs:
            raise SpearError(
                f"options['tasks'] has {len(tasks)} ids: give one for each of {self.num_envs} environments."
            )
        if not np.all(self._begun | mask):
            missing = np.flatnonzero(~(self._begun | mask)).tolist()
            raise SpearError(f"Environments {missing} were never reset: the first reset must take in all of them.")
        orders = {}
        for i in np.flatnonzero(mask).tolist():
            own = {**rest, "task": tasks[i]} if tasks is not None else rest
            orders[i] = Order(0, seed=seeds[i], options=dict(own) or None)
        outcomes = self._run(orders)
        self._begun |= mask
        infos: list[dict[str, Any] | None] = [None] * self.num_envs
        for i, outcome in outcomes.items():
            infos[i] = outcome.info
        return batch_observations(self.single_observation_space, self._observations), batch_infos(infos)

    def step(self, actions: Sequence[str]) -> StepReturn:
        """Step all environments.

        Returns:
            Observations, rewards float64 [N], terminations bool [N], truncations bool [N], infos.
        """
        if len(actions) != self.num_envs:
            raise SpearError(f"step() got {len(actions)} responses for {self.num_envs} environments: give one each.")
        return self.step_subset(range(self.num_envs), actions)

    def step_subset(self, indices: Sequence[int], actions: Sequence[str]) -> StepReturn:
        """Step some environments and leave the others as they are.

        Args:
            indices: K different indices in [0, N).
            actions: K responses, in the same order.

        Returns:
            As :meth:`step`, but of the K environments, in the order of ``indices``; arrays of infos have length K too.
        """
        chosen = read_indices(indices, actions, self.num_envs)
        if not all(self._begun[i] for i in chosen):
            raise ResetNeeded("Call reset() before step().")
        ended = [i for i in chosen if self._ended[i]]
        if ended and self.autoreset_mode is AutoresetMode.DISABLED:
            raise ResetNeeded(
                f"Environments {ended} have ended: reset them with options={{'reset_mask': …}} or step the others"
                " with step_subset()."
            )
        same_step = self.autoreset_mode is AutoresetMode.SAME_STEP
        orders = {
            i: Order(0) if self._ended[i] else Order(0, action=action, reset_after_end=same_step)
            for i, action in zip(chosen, actions, strict=True)
        }
        outcomes = self._run(orders)
        results = [outcomes[i] for i in chosen]
        if same_step:
            self._ended[chosen] = False
        infos = []
        for outcome in results:
            info = outcome.info
            if outcome.final is not None:
                info = {**info, "final_obs": outcome.final[0], "final_info": outcome.final[1]}
            infos.append(info)
        return (
            batch_observations(self.single_observation_space, [outcome.observation for outcome in results]),
            np.array([outcome.reward for outcome in results], dtype=np.float64),
            np.array([outcome.terminated for outcome in results], dtype=np.bool_),
            np.array([outcome.truncated for outcome in results], dtype=np.bool_),
            batch_infos(infos),
        )

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Call a method of every environment, or get an attribute of it; N results in order."""
        payload = {"name": name, "args": args, "kwargs": kwargs}
        return self._in_order(self._ask_all("call", [payload] * len(self._groups)))

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of every environment."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Set an attribute of every environment: a list or tuple of N values, or one value for all."""
        if not isinstance(values, (list, tuple)):
            values = [values] * self.num_envs
        if len(values) != self.num_envs:
            raise SpearError(f"set_attr() got {len(values)} values for {self.num_envs} environments: give one each.")
        self._ask_all("set", [(name, [values[i] for i in group.indices]) for group in self._groups])

    def render(self) -> tuple[Any, ...]:
        """What every environment renders."""
        return self.call("render")

    def close_extras(self, **kwargs: Any) -> None:
        """Close all environments and stop all workers."""
        for group in getattr(self, "_groups", []):
            group.close()

    def _run(self, orders: Mapping[int, Order]) -> dict[int, Outcome]:
        """Carry out orders by index of the environment; their ``place`` is filled in here."""
        payloads: dict[int, list[Order]] = {}
        for i, order in orders.items():
            group, place = self._home[i]
            payloads.setdefault(id(group), []).append(order._replace(place=place))
        groups = [group for group in self._groups if id(group) in payloads]
        answers = self._ask(groups, "run", [payloads[id(group)] for group in groups])
        outcomes: dict[int, Outcome] = {}
        for group, answer in zip(groups, answers, strict=True):
            for order, outcome in zip(payloads[id(group)], answer, strict=True):
                i = group.indices[order.place]
                outcomes[i] = outcome
                self._observations[i] = outcome.observation
                self._ended[i] = outcome.terminated or outcome.truncated
        return outcomes

    def _ask_all(self, request: str, payloads: Sequence[Any]) -> list[Any]:
        return self._ask(self._groups, request, payloads)

    def _ask(self, groups: Sequence[EnvGroup], request: str, payloads: Sequence[Any]) -> list[Any]:
        """Put a request to several groups at once; all answers are awaited even if one fails, so that none is left."""
        if self.closed:
            raise SpearError("This vector environment is closed: make a new one.")
        answers: list[Any] = []
        begun: list[EnvGroup] = []
        failure: Exception | None = None
        try:
            for group, payload in zip(groups, payloads, strict=True):
                try:
                    group.begin(request, payload)
                    begun.append(group)
                except Exception as error:
                    failure = failure or error
            for group in begun:
                try:
                    answers.append(group.finish())
                except Exception as error:
                    failure = failure or error
        except BaseException:  # Ctrl-C: answers that nobody waits for would be taken for those of the next request
            self.close()
            raise
        if failure is not None:
            if any(isinstance(group, ProcessGroup) and group.dead for group in groups):
                self.close()
            raise failure
        return answers

    def _in_order(self, answers: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        results: list[Any] = [None] * self.num_envs
        for group, answer in zip(self._groups, answers, strict=True):
            for i, value in zip(group.indices, answer, strict=True):
                results[i] = value
        return tuple(results)


def make_vector_env(
    id: str,
    num_envs: int = 1,
    *,
    workers: int = 0,
    autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
    **kwargs: Any,
) -> SpearVectorEnv:
    """The generic vector environment of a registered id; what ``gym.make_vec`` builds unless told otherwise.

    Args:
        id, kwargs: as for ``gym.make``.
        num_envs, workers, autoreset_mode: as for :class:`SpearVectorEnv`.
    """
    # The spec itself goes to the workers, whose registry does not know ids that were registered by hand.
    make_env = partial(gym.make, gym.spec(id), disable_env_checker=True, **kwargs)
    return SpearVectorEnv(make_env, num_envs, workers=workers, autoreset_mode=autoreset_mode)


def read_autoreset_mode(mode: AutoresetMode | str) -> AutoresetMode:
    """The mode of this value (``"NextStep"``) or name (``"next_step"``).

    Raises:
        SpearError: there is none.
    """
    if isinstance(mode, AutoresetMode):
        return mode
    for member in AutoresetMode:
        if mode in (member.value, member.name, member.name.lower()):
            return member
    valid = ", ".join(repr(member.name.lower()) for member in AutoresetMode)
    raise SpearError(f"autoreset_mode={mode!r} is not valid: choose one of {valid}.")


def read_indices(indices: Iterable[int], actions: Sequence[str], num_envs: int) -> list[int]:
    """The environments that ``step_subset`` steps, one for each of ``actions``.

    Raises:
        SpearError: not as many as actions, one twice, or one outside [0, N).
    """
    chosen = [int(i) for i in indices]
    if len(chosen) != len(actions):
        raise SpearError(f"step_subset() got {len(chosen)} indices and {len(actions)} responses: give as many of each.")
    if len(set(chosen)) < len(chosen) or not all(0 <= i < num_envs for i in chosen):
        raise SpearError(f"Indices {chosen} are not valid: give different ones from 0 to {num_envs - 1}.")
    return chosen


def read_seeds(seed: int | Sequence[int | None] | None, num_envs: int) -> list[int | None]:
    """Seeds of all environments: ``seed + i``, or the sequence itself.

    Raises:
        SpearError: a sequence of another length.
    """
    if seed is None:
        return [None] * num_envs
    if isinstance(seed, (int, np.integer)):
        return [int(seed) + i for i in range(num_envs)]
    if len(seed) != num_envs:
        raise SpearError(
            f"reset() got {len(seed)} seeds for {num_envs} environments: give one each, or a single number."
        )
    return list(seed)


def read_reset_mask(mask: Any, num_envs: int) -> np.ndarray:
    """A mask of environments to reset, bool [N]; all of them for None.

    Raises:
        SpearError: not a boolean array of N, or nothing in it is True.
    """
    if mask is None:
        return np.ones(num_envs, dtype=np.bool_)
    mask = np.asarray(mask)
    if mask.shape != (num_envs,) or mask.dtype != np.bool_ or not mask.any():
        raise SpearError(
            f"options['reset_mask'] is not valid: give a boolean array of shape ({num_envs},) with at least one True."
        )
    return mask

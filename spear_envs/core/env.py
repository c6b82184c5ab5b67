"""The base of all environments: it counts turns, reads responses, pays rewards and keeps the contract."""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded

from spear_envs.core.criteria import Criterion
from spear_envs.core.episode import Episode
from spear_envs.core.errors import SpearError, choose_member, refuse_unknown, require_whole
from spear_envs.core.faults import EnvFault
from spear_envs.core.parsing import ParsedResponse, ResponseFormat, ResponseParser, make_parser
from spear_envs.core.prompts import CompactTemplate, DefaultTemplate, PromptTemplate
from spear_envs.core.rewards import FORMAT_BONUS, Schedule, compose_reward, make_schedule, tool_call_reward
from spear_envs.core.spaces import ACTION_LENGTH, PermissiveText
from spear_envs.core.tasks import Task, TaskSet, canonical_json
from spear_envs.core.tools import ACT, Tool

ObsType = TypeVar("ObsType")
Made = TypeVar("Made", bound="SpearEnv[Any]")
STATE_KEYS = frozenset({"task_id", "episode", "result", "np_random", "world"})
NOTHING: Mapping[str, Any] = MappingProxyType({})


class RewardMode(str, Enum):
    """What ``step`` pays."""

    SPEAR = "spear"
    """outcome + mu * tool_call + format, when the episode ends, and 0 before (``eq:rewardtotal``)."""
    NATIVE = "native"
    """The benchmark's own reward, each turn."""


class OnMalformed(str, Enum):
    """What happens on a response that is not well formed."""

    EXPLAIN = "explain"
    """Nothing is played and the observation says what was wrong."""
    PEER = "peer"
    """What verl-agent would play is played, for comparison with published numbers."""


class ToolReward(str, Enum):
    """Which tool calls the tool-call term counts."""

    PAPER = "paper"
    """All of them (``eq:actionreward``)."""
    DISTINCT = "distinct"
    """Those of turns that led to something the episode had not met: a loop earns nothing after its first round."""


class ActionResult(NamedTuple):
    """What one action did. A tuple and no dataclass since one is made for every step."""

    ok: bool
    """The action did something (``info["action_ok"]``)."""
    native_reward: float = 0.0
    """The benchmark's own reward for this turn."""
    won: bool = False
    """The task is solved now; ends the episode."""
    done: bool = False
    """The episode is over, won or lost."""
    message: str = ""
    """What the environment has to say, to be shown with the next observation."""
    tool_calls: int = 0
    """Tool calls made in this turn."""
    details: Mapping[str, Any] = NOTHING
    """Keys of the environment's own for ``info``; the same ones at every step."""
    terms: Mapping[str, float] = NOTHING
    """Further reward terms for ``info["reward_terms"]``; they stay until they are given anew."""
    outcome: float | None = None
    """Outcome term where it is not simply +1 when won and -1 otherwise."""
    action: str | None = None
    """Canonical form of what was played, where it differs from what was written."""


def text_of(observation: Any) -> str:
    """The text of an observation: the string itself, or its ``"text"``; empty for a picture alone."""
    return observation if isinstance(observation, str) else observation.get("text", "")


def image_of(observation: Any) -> np.ndarray | None:
    """The picture of an observation, uint8 [height, width, 3], or None if it has none."""
    return None if isinstance(observation, str) else observation.get("image")


class SpearEnv(gym.Env[ObsType, str], ABC):
    """Base class of environments whose action is one response of a model.

    A subclass supplies its tasks and the hooks below that start with an underscore; see ``CONTRIBUTING.md``. All
    randomness must come from ``self.np_random``.

    Args:
        tasks: the task set that ``reset`` draws from.
        max_turns: responses after which the episode is truncated.
        observation_space: by default any text.
        parser: grammar of the responses, instead of the stock one of ``response_format``.
        response_format: ``"tags"`` or ``"plain"``, see :class:`ResponseFormat`.
        reward: ``"spear"`` or ``"native"``, see :class:`RewardMode`.
        on_malformed: ``"explain"`` or ``"peer"``, see :class:`OnMalformed`.
        mu: weight of the tool-call term over the training steps, see ``make_schedule``; by default none, since a weight
            that nothing takes away pays for calls that do not help. A training weighs the terms itself.
        tool_reward: which tool calls that term counts, ``"paper"`` or ``"distinct"``, see :class:`ToolReward`.
        render_mode: one of ``metadata["render_modes"]``, or None.

    Raises:
        SpearError: a keyword has no valid value; the message lists the valid ones.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # type: ignore[misc]
    draws: ClassVar[bool] = False
    """Whether ``rgb_array`` shows a picture of the world, and not one of the observation's text."""
    templates: ClassVar[Mapping[str, PromptTemplate]] = MappingProxyType(
        {"default": DefaultTemplate(), "compact": CompactTemplate()}
    )
    splits: ClassVar[tuple[str, ...]] = ("train", "valid", "test")
    """Values that the keyword ``split`` may have: to train on, to validate on and to test on, in this order."""

    restores: bool = True
    """Whether :meth:`set_state` alone goes back: nothing outside of the process is asked once more."""

    tools: ClassVar[tuple[Tool, ...]] = (ACT,)
    """The actions as functions, for models that act by calling tools; a template named ``tools`` may explain them."""

    _made_with: tuple[tuple[Any, ...], dict[str, Any]]
    """Arguments of the constructor, for copies."""

    def __new__(cls: type[Made], *values: Any, **keywords: Any) -> Made:
        """Refuse keywords that the class does not have before anything is built."""
        refuse_unknown(cls, keywords)
        env = super().__new__(cls)
        env._made_with = values, keywords
        return env

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies are made anew with the same keywords and set to the same state: an engine need not be picklable."""
        state = None if self._task is None else self.get_state()
        return _make_copy, (type(self), *self._made_with, self.spec, self.training_step, state)

    def __init__(
        self,
        tasks: TaskSet,
        *,
        max_turns: int,
        observation_space: gym.Space[Any] | None = None,
        parser: ResponseParser | None = None,
        response_format: str = "tags",
        reward: str = "spear",
        on_malformed: str = "explain",
        mu: str | float | Schedule = "none",
        tool_reward: str = "paper",
        render_mode: str | None = None,
    ) -> None:
        self.max_turns = require_whole("max_turns", max_turns, 1)
        modes = self.metadata["render_modes"]
        if render_mode is not None and render_mode not in modes:
            raise SpearError(f"render_mode={render_mode!r} is not valid: choose one of {modes} or None.")
        try:
            self.mu = make_schedule(mu)
        except ValueError as error:
            raise SpearError(f"mu: {error}") from None
        self.tasks = tasks
        self.response_format = choose_member(ResponseFormat, response_format, "response_format")
        self.reward_mode = choose_member(RewardMode, reward, "reward")
        self.on_malformed = choose_member(OnMalformed, on_malformed, "on_malformed")
        self.tool_reward = choose_member(ToolReward, tool_reward, "tool_reward")
        self.parser = parser or make_parser(self.response_format)
        self.render_mode = render_mode
        self.action_space = PermissiveText(ACTION_LENGTH)
        self.observation_space = observation_space or PermissiveText()  # type: ignore[assignment]
        self.training_step = 1
        self.parsed = ParsedResponse(None, True)  # the response being played, for hooks that need more than the action
        self.response = ""  # and its whole text
        self.episode = Episode()
        self._task: Task | None = None
        self._result = ActionResult(True)
        self._spear = self.reward_mode is RewardMode.SPEAR
        self._peer = self.on_malformed is OnMalformed.PEER
        self._distinct = self.tool_reward is ToolReward.DISTINCT

    # ---------------------------------------------------------------- hooks

    @abstractmethod
    def _start(self, task: Task) -> None:
        """Set up the world of ``task``."""

    @abstractmethod
    def _act(self, action: str) -> ActionResult:
        """Play an action in its plain form. Unknown actions do nothing and say so; they never raise.

        ``self.turn`` already counts this response; ``self.parsed`` and ``self.response`` hold the whole of it.
        """

    @abstractmethod
    def _observe(self, message: str) -> ObsType:
        """What the policy is shown now, with ``message`` (often empty) in its text. New objects at every call."""

    @abstractmethod
    def _world(self) -> Any:
        """All of the world that changes within an episode, as plain values that can be pickled."""

    @abstractmethod
    def _restore_world(self, state: Any) -> None:
        """Put back what :meth:`_world` gave, in a world of the same task."""

    @abstractmethod
    def expert_plan(self) -> list[str]:
        """Actions in plain form that win from the present state.

        Where later actions depend on what will be seen, the next one; it is asked again then. Empty if all is lost.
        """

    def expert_thought(self, plan: Sequence[str]) -> str:
        """What an expert could think before it plays the first action of ``plan``; empty where there are no words.

        A policy is to learn it, so it tells nothing that the policy has not seen.
        """
        return ""

    def scripted_action(self) -> str | None:
        """The next action in plain form of a fixed script that reads only what is shown, and understands none of it.

        What it wins shows how much of a benchmark its wording gives away. None where there is no such script.
        """
        return None

    def _malformed(self, problem: str) -> ActionResult:
        """Answer a malformed response: the turn counts and nothing is played."""
        return ActionResult(False, message=f"Your response could not be read: {problem}. {self.parser.hint}")

    def _anchor(self) -> Hashable:
        """Key of the state, the same in every process; the default digests the task id and :meth:`_world`."""
        assert self._task is not None
        return hashlib.sha256(canonical_json([self._task.id, self._world()]).encode()).hexdigest()[:32]

    def _novelty(self) -> Hashable:
        """What the last turn led to: a tool call is distinct if the episode has not met it; by default the anchor."""
        return self._anchor()

    def _admissible(self) -> list[str] | None:
        """Actions that would be accepted now, in a new list, or None where they cannot be listed."""
        return None

    def lexicon(self) -> Iterable[str]:
        """Texts with words that prompts and responses of any split may hold, for the tokenizer of a tiny model.

        It is made from these and from training episodes; what those may miss (names of the other splits' things, say)
        belongs here. The default is nothing.
        """
        return ()

    def criteria(self) -> list[Criterion]:
        """What the task asks for, point by point, and what of it is met now; by default nothing.

        It may hold the answer, so it is for records and for people, and no part of ``info``.
        """
        return []

    def _score(self) -> float:
        """The benchmark's own score of the episode so far, in [0, 1]."""
        return 1.0 if self.episode.won else 0.0

    def _details(self) -> Mapping[str, Any]:
        """The environment's own keys of ``info`` right after ``reset``; the same that its ``ActionResult`` give."""
        return NOTHING

    def peer_action(self, text: str) -> str:
        """What verl-agent would play for a malformed response (``on_malformed="peer"``)."""
        raise SpearError(f"{type(self).__name__} has no on_malformed='peer': use 'explain'.")

    # ---------------------------------------------------------------- the episode

    @property
    def task(self) -> Task:
        """The task being played.

        Raises:
            ResetNeeded: before the first ``reset``.
        """
        if self._task is None:
            raise ResetNeeded("No task yet: call reset() first.")
        return self._task

    @property
    def turn(self) -> int:
        """Responses taken in this episode."""
        return self.episode.turn

    @property
    def done(self) -> bool:
        """Whether the episode has ended, or none has begun."""
        return self.episode.done

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObsType, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: seeds ``self.np_random``; without ``options`` it also draws the task.
            options: ``{"task": "<task id>"}`` starts that very task.

        Raises:
            UnknownTaskError: no such task in this split.
            SpearError: an option that does not exist.
            EnvFault: a service that the task needs is down.
        """
        super().reset(seed=seed)
        task_id = self._read_options(options)
        task = self.tasks.draw(self.np_random) if task_id is None else self.tasks.get(task_id)
        self.episode, self._task = Episode(), task
        try:
            self._start(task)
        except BaseException:
            self._task = None
            raise
        self._result = ActionResult(True, details=self._details())
        self.episode.done = False
        if self._distinct:
            self.episode.met[self._novelty()] = None
        return self._observe(""), self._info()

    def step(self, action: str) -> tuple[ObsType, float, bool, bool, dict[str, Any]]:
        """Take one response; nothing that a model may write raises.

        Returns:
            Observation, reward, terminated (success or failure of the task), truncated (turn limit or fault), info
            with the keys of ``StepInfo``.

        Raises:
            ResetNeeded: the episode is over.
            TypeError: the action is not a string.
        """
        episode = self.episode
        if episode.done:
            state = "has ended" if self._task is not None else "has not begun"
            raise ResetNeeded(f"The episode {state}: call reset() before step().")
        if not isinstance(action, str):
            raise TypeError(f"step() takes the text of a response (str), not {type(action).__name__}.")
        episode.turn += 1
        self.response = action
        self.parsed = parsed = self.parser.parse(action)
        episode.format_ok = parsed.format_ok
        episode.well_formed = episode.well_formed and parsed.format_ok
        try:
            played = parsed.action
            if played is None and self._peer:
                played = self.peer_action(action)
            result = self._malformed(parsed.problem) if played is None else self._act(played)
            episode.action = (played or "") if result.action is None else result.action
        except EnvFault as fault:
            return self._stop_on_fault(fault)
        self._result = result
        episode.tool_calls += result.tool_calls
        episode.native_return += result.native_reward
        episode.won = result.won
        if result.outcome is not None:
            episode.outcome = result.outcome
        if result.terms:
            episode.extra_terms.update(result.terms)
        if self._distinct and result.tool_calls and (found := self._novelty()) not in episode.met:
            episode.met[found] = None
            episode.distinct_calls += result.tool_calls
        terminated = result.won or result.done
        truncated = not terminated and episode.turn >= self.max_turns
        episode.done = terminated or truncated
        info = self._info()
        if not self._spear:
            reward = float(result.native_reward)
        elif episode.done:
            reward = compose_reward(info["reward_terms"], self.mu(self.training_step))
        else:
            reward = 0.0
        return self._observe(result.message), reward, terminated, truncated, info

    def set_training_step(self, step: int) -> None:
        """Tell the schedule of mu the global training step, which starts at 1.

        Raises:
            SpearError: not a whole number of at least 0.
        """
        self.training_step = require_whole("set_training_step: step", step, 0)

    def set_text_measure(self, measure: Callable[[str], int] | None) -> None:
        """Tell how long a text is for the policy that plays, in its tokens; None if that is not known.

        An environment that cuts what it shows overrides this; the default does nothing. Members of a group must be told
        the same.
        """

    def render(self) -> Any:
        """The present observation as text (``"ansi"``) or as a picture of it (``"rgb_array"``); None without a mode."""
        if self.render_mode is None:
            gym.logger.warn("render() without a render mode: pass render_mode='ansi' to gym.make().")
            return None
        self.task  # noqa: B018 - raises ResetNeeded before the first episode
        text = text_of(self._observe(self._result.message))
        if self.render_mode == "ansi":
            return text
        from spear_envs.core.drawing import draw_text  # late: Pillow's fonts are for those who record

        return draw_text(f"{self.task.id}   turn {self.turn} of {self.max_turns}", text)

    def get_state(self) -> dict[str, Any]:
        """Everything that the rest of the episode depends on, as plain values that can be pickled.

        Later steps do not change it. It may be given to ``set_state`` of any environment with the same keywords.
        """
        result = self._result
        return copy.deepcopy(
            {
                "task_id": self.task.id,
                "episode": self.episode.save(),
                "result": {"ok": result.ok, "message": result.message, "details": dict(result.details)},
                "np_random": self.np_random.bit_generator.state,
                "world": self._world(),
            }
        )

    def set_state(self, state: Mapping[str, Any]) -> tuple[ObsType, dict[str, Any]]:
        """Go back, or over, to a state from :meth:`get_state`.

        Returns:
            The observation and info of that moment.

        Raises:
            UnknownTaskError: the state is of a task that this environment does not have.
            SpearError: the state is damaged, or another environment's; the episode stays as it was.
        """
        if not isinstance(state, Mapping) or not state.keys() >= STATE_KEYS:
            raise SpearError(f"set_state() takes what get_state() gave, with the keys {', '.join(sorted(STATE_KEYS))}.")
        state = copy.deepcopy(dict(state))
        task = self.tasks.get(state["task_id"])
        episode = Episode.load(state["episode"])
        generator = self.np_random.bit_generator.state
        before = None if self._task is None else (self._task, self.episode, self._result, self._world())
        try:
            self.np_random.bit_generator.state = state["np_random"]
            result = ActionResult(**state["result"])
            self._enter(task, episode, state["world"])
            self._result = result
            return self._observe(result.message), self._info()
        except Exception as error:
            self.np_random.bit_generator.state = generator
            if before is None:
                self._task, self.episode = None, Episode()
            else:
                former, played, self._result, world = before
                self._enter(former, played, world)
            if isinstance(error, (SpearError, EnvFault)):
                raise
            problem = f"{type(error).__name__}: {error}"
            raise SpearError(f"the state is damaged ({problem}): give set_state() what get_state() gave.") from error

    # ---------------------------------------------------------------- inside

    def _enter(self, task: Task, episode: Episode, world: Any) -> None:
        """Go to a moment of an episode of ``task``."""
        if self._task is not task:
            self._task, self.episode = task, Episode()
            self._start(task)
        self._restore_world(world)
        self.episode = episode

    def _read_options(self, options: Mapping[str, Any] | None) -> str | None:
        if not options:
            return None
        for key in options:
            if key != "task":
                raise SpearError(f"reset() knows no option {key!r}: the only one is 'task', a task id.")
        return options["task"]

    def _reward_terms(self) -> dict[str, float]:
        episode = self.episode
        outcome = episode.outcome
        if outcome is None:
            outcome = 1.0 if episode.won else -1.0
        return {
            "outcome": outcome,
            "tool_call": tool_call_reward(episode.distinct_calls if self._distinct else episode.tool_calls),
            "format": FORMAT_BONUS if episode.well_formed and episode.turn else 0.0,
            "native_return": episode.native_return,
            **episode.extra_terms,
        }

    def _info(self) -> dict[str, Any]:
        task, episode, result = self._task, self.episode, self._result
        assert task is not None
        return {
            "task_id": task.id,
            "task_fingerprint": self.tasks.fingerprint,
            "subtask": task.subtask,
            "instruction": task.instruction,
            "turn": episode.turn,
            "admissible_actions": self._admissible(),
            "anchor": self._anchor(),
            "action": episode.action,
            "format_ok": episode.format_ok,
            "action_ok": result.ok,
            "tool_calls": episode.tool_calls,
            "won": episode.won,
            "score": self._score(),
            "reward_terms": self._reward_terms(),
            "fault": episode.fault,
            **result.details,
        }

    def _stop_on_fault(self, fault: EnvFault) -> tuple[ObsType, float, bool, bool, dict[str, Any]]:
        episode = self.episode
        episode.fault, episode.done, episode.action = fault.kind, True, self.parsed.action or ""
        self._result = ActionResult(False, message=f"The environment failed ({fault}).", details=self._result.details)
        return self._observe(self._result.message), 0.0, False, True, self._info()


def _make_copy(
    cls: type[SpearEnv[Any]], values: Any, keywords: Any, spec: Any, step: int, state: Mapping[str, Any] | None
) -> SpearEnv[Any]:
    env = cls(*values, **keywords)
    env.spec = spec
    env.training_step = step
    if state is not None:
        env.set_state(state)
    return env


def set_training_step(env: Any, step: int) -> None:
    """Tell an environment the global training step, through wrappers and through vector environments.

    Raises:
        SpearError: neither a SPEAR environment nor a vector environment of them.
    """
    base = env.unwrapped
    if isinstance(base, gym.vector.VectorEnv) and hasattr(base, "call"):
        base.call("set_training_step", step)
    elif hasattr(base, "set_training_step"):
        base.set_training_step(step)
    else:
        raise SpearError(f"{env} has no training step: it is not an environment of spear_envs.")

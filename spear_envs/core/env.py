"""The base class of all environments: turns, responses, rewards and the contract."""

from __future__ import annotations

import copy
import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, TypedDict, TypeVar

import gymnasium as gym
import numpy as np
from gymnasium.error import ResetNeeded

from spear_envs.core.episode import Episode, find_time_limit
from spear_envs.core.errors import EnvFault, SpearError, choose_member, refuse_unknown, require_whole
from spear_envs.core.parsing import ParsedResponse, ResponseFormat, ResponseParser, make_parser
from spear_envs.core.prompts import CompactTemplate, DefaultTemplate, PromptTemplate
from spear_envs.core.rewards import FORMAT_BONUS, Criterion, Schedule, compose_reward, make_schedule, tool_call_reward
from spear_envs.core.spaces import ACTION_LENGTH, PermissiveText
from spear_envs.core.tasks import Task, TaskSet, canonical_json
from spear_envs.core.tools import ACT, Tool

ObsType = TypeVar("ObsType")
Made = TypeVar("Made", bound="SpearEnv[Any]")
COPIED = (
    *("spec", "training_step", "text_measure", "_max_turns", "made_limit", "_time_limit"),
    *("action_space", "observation_space", "_np_random", "_np_random_seed"),
)
"""Attributes that a copy takes over: neither the constructor nor :meth:`SpearEnv.get_state` has them."""
STATE_KEYS = frozenset({"task_id", "episode", "result", "np_random", "world"})
NOTHING: Mapping[str, Any] = MappingProxyType({})


class RewardMode(str, Enum):
    """What ``step`` pays."""

    SPEAR = "spear"
    """outcome + mu * tool_call + format at the end of the episode, 0 before (``eq:rewardtotal``)."""
    NATIVE = "native"
    """The benchmark's own reward, each turn."""


class OnMalformed(str, Enum):
    """How malformed responses are handled."""

    EXPLAIN = "explain"
    """Play nothing and explain the fault in the observation."""
    PEER = "peer"
    """Read and play responses between tags as verl-agent does, for comparison with published numbers."""


class Anchor(str, Enum):
    """When two states count as equal (GiGPO)."""

    STATE = "state"
    """Everything that decides what can happen next."""
    OBSERVATION = "observation"
    """The text of the observation without the task, as in verl-agent: states that look alike are then the same."""


class ToolReward(str, Enum):
    """Which tool calls the tool-call term counts."""

    PAPER = "paper"
    """All tool calls (``eq:actionreward``)."""
    DISTINCT = "distinct"
    """Tool calls of turns with a new result in the episode: a loop earns nothing after its first round."""


class ActionResult(NamedTuple):
    """What one action did. A tuple, since one is made in every step."""

    ok: bool
    """The action did something (``info["action_ok"]``)."""
    native_reward: float = 0.0
    """The benchmark's own reward for this turn."""
    won: bool = False
    """The task is solved now; ends the episode."""
    done: bool = False
    """The episode is over, won or lost."""
    message: str = ""
    """Message for the next observation."""
    tool_calls: int = 0
    """Tool calls made in this turn."""
    details: Mapping[str, Any] = NOTHING
    """The environment's own keys of ``info``, the same in every step."""
    terms: Mapping[str, float] = NOTHING
    """Further reward terms for ``info["reward_terms"]``; each is kept until it is replaced."""
    outcome: float | None = None
    """Outcome term, if it is not +1 when won and -1 otherwise."""
    action: str | None = None
    """Canonical form of what was played, if it differs from what was written."""


def text_of(observation: Any) -> str:
    """Return the text of an observation: the string itself, or its ``"text"``; empty for a picture alone."""
    return observation if isinstance(observation, str) else observation.get("text", "")


def image_of(observation: Any) -> np.ndarray | None:
    """Return the picture of an observation, uint8 [height, width, 3], or None if it has none."""
    return None if isinstance(observation, str) else observation.get("image")


class CommonKeywords(TypedDict, total=False):
    """Keywords that every environment takes and passes on to :class:`SpearEnv`."""

    response_format: str
    """``"tags"`` (default) or ``"plain"``, see :class:`ResponseFormat`."""
    reward: str
    """``"spear"`` (default) or ``"native"``, see :class:`RewardMode`."""
    on_malformed: str
    """``"explain"`` (default) or ``"peer"``, see :class:`OnMalformed`."""
    mu: str | float | Schedule
    """Weight of the tool-call term over the training steps, see ``make_schedule``; none by default, since a constant
    weight pays for useless calls. A training weighs the terms itself."""
    tool_reward: str
    """Which tool calls this term counts, ``"paper"`` (default) or ``"distinct"``, see :class:`ToolReward`."""
    render_mode: str | None
    """One of ``metadata["render_modes"]``, or None."""


class SpearEnv(gym.Env[ObsType, str], ABC):
    """Base class of environments whose action is one response of a model.

    A subclass supplies tasks and the hooks below that start with an underscore; see ``CONTRIBUTING.md``. All randomness
    must come from ``self.np_random``.

    Args:
        tasks: the task set that ``reset`` draws from.
        max_turns: responses after which the episode is truncated.
        observation_space: by default any text.
        parser: makes the grammar of the responses for a response format; with ``on_malformed="peer"``
            :attr:`peer_parser` reads responses between tags.
        response_format, reward, on_malformed, mu, tool_reward, render_mode: see :class:`CommonKeywords`.

    Raises:
        SpearError: a keyword has an invalid value; the message lists the valid ones.
    """

    metadata: ClassVar[dict[str, Any]] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}  # type: ignore[misc]
    draws: ClassVar[bool] = False
    """Whether ``rgb_array`` shows the world instead of the observation's text."""
    templates: ClassVar[Mapping[str, PromptTemplate]] = MappingProxyType(
        {"default": DefaultTemplate(), "compact": CompactTemplate()}
    )
    reaching: ClassVar[frozenset[str]] = frozenset()
    """Keywords that can start a command or reach a service even by a plain word: files of others may not set them."""
    splits: ClassVar[tuple[str, ...]] = ("train", "valid", "test")
    """Values of the keyword ``split``: for training, validation and test, in this order."""

    restores: bool = True
    """Whether :meth:`set_state` goes back without asking anything outside the process again."""

    peer_parser: ClassVar[ResponseParser | None] = None
    """Reads responses between tags with ``on_malformed="peer"``; None if there is no peer to compare with."""

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
        """Copy by making a new environment and setting its state, since engines need not be picklable."""
        state = None if self._task is None else self.get_state()
        return _make_copy, (type(self), *self._made_with, {name: getattr(self, name) for name in COPIED}, state)

    def __init__(
        self,
        tasks: TaskSet,
        *,
        max_turns: int,
        observation_space: gym.Space[Any] | None = None,
        parser: Callable[[ResponseFormat], ResponseParser] = make_parser,
        response_format: str = "tags",
        reward: str = "spear",
        on_malformed: str = "explain",
        mu: str | float | Schedule = "none",
        tool_reward: str = "paper",
        render_mode: str | None = None,
    ) -> None:
        self._max_turns = require_whole("max_turns", max_turns, 1)
        modes = self.metadata["render_modes"]
        if render_mode is not None and render_mode not in modes:
            raise SpearError(f"render_mode={render_mode!r} is not valid: choose one of {modes} or None.")
        try:
            self.mu = make_schedule(mu)
        except ValueError as error:
            raise SpearError(f"mu: {error}") from None
        if not isinstance(tasks, TaskSet):
            raise SpearError(f"{type(self).__name__} has a {type(tasks).__name__} for tasks: make it a ListTaskSet.")
        self.tasks = tasks
        self.response_format = choose_member(ResponseFormat, response_format, "response_format")
        self.reward_mode = choose_member(RewardMode, reward, "reward")
        self.on_malformed = choose_member(OnMalformed, on_malformed, "on_malformed")
        self.tool_reward = choose_member(ToolReward, tool_reward, "tool_reward")
        self._peer = self.on_malformed is OnMalformed.PEER
        if self._peer and self.peer_parser is None:
            raise SpearError(f"{type(self).__name__} has no on_malformed='peer': choose 'explain'.")
        reads_as_peer = self._peer and self.response_format is ResponseFormat.TAGS
        self.parser = self.peer_parser if reads_as_peer and self.peer_parser else parser(self.response_format)
        self.render_mode = render_mode
        self.action_space = PermissiveText(ACTION_LENGTH)
        self.observation_space = observation_space or PermissiveText()  # type: ignore[assignment]
        self.training_step = 1
        self.text_measure: Callable[[str], int] | None = None
        self.made_limit: float = math.inf  # turns that gymnasium's wrapper allows, which the commands leave out
        self._time_limit: float = math.inf
        self.parsed = ParsedResponse(None, True)  # the current response, for hooks that need more than the action
        self.response = ""  # and its text
        self.episode = Episode()
        self._task: Task | None = None
        self._result = ActionResult(True)
        self._spear = self.reward_mode is RewardMode.SPEAR
        self._distinct = self.tool_reward is ToolReward.DISTINCT

    # ---------------------------------------------------------------- hooks

    @abstractmethod
    def _start(self, task: Task) -> None:
        """Set up the world of ``task``."""

    @abstractmethod
    def _act(self, action: str) -> ActionResult:
        """Play an action in its plain form. Unknown actions do nothing and say so; they never raise.

        ``self.turn`` already counts this response; ``self.parsed`` and ``self.response`` hold it.
        """

    @abstractmethod
    def _observe(self, message: str) -> ObsType:
        """Return what the policy sees now, with ``message`` (often empty) in its text. New objects at every call."""

    @abstractmethod
    def _world(self) -> Any:
        """Return everything of the world that changes within an episode, as plain values that can be pickled."""

    @abstractmethod
    def _restore_world(self, state: Any) -> None:
        """Restore what :meth:`_world` returned, in a world of the same task."""

    @abstractmethod
    def expert_plan(self) -> list[str]:
        """Return actions in plain form that win from the present state.

        If later actions depend on what will be seen, only the next one. Empty if the task cannot be won.
        """

    def expert_thought(self, plan: Sequence[str]) -> str:
        """Return what an expert could think before the first action of ``plan``; may be empty.

        Policies learn it, so it must only tell what the policy has seen.
        """
        return ""

    def scripted_action(self) -> str | None:
        """Return the next action of a fixed script that copies from observations without understanding them.

        Its success shows how much a benchmark's wording gives away. None if there is no script.
        """
        return None

    def _malformed(self, problem: str) -> ActionResult:
        """Answer a malformed response: the turn counts and nothing is played."""
        message = f"Your response could not be read: {problem}. {self.parser.hint}"
        return ActionResult(False, message=message, details=self._details())

    def _anchor(self) -> Hashable:
        """Return the key of the state, equal in every process; by default a digest of task id and :meth:`_world`."""
        assert self._task is not None
        return hashlib.sha256(canonical_json([self._task.id, self._world()]).encode()).hexdigest()[:32]

    def _novelty(self) -> Hashable:
        """Return the result of the last turn, by default the anchor; a tool call is distinct if its result is new."""
        return self._anchor()

    def _admissible(self) -> list[str] | None:
        """Return actions that would be accepted now, in a new list; None if they cannot be listed."""
        return None

    def lexicon(self) -> Iterable[str]:
        """Return texts with the words of prompts and responses of any split, for the tokenizer of a tiny model.

        It is made from these and from training episodes; add what those may miss, such as names in other splits.
        """
        return ()

    def criteria(self) -> list[Criterion]:
        """Return requirements of the task, and which are met now; by default empty.

        It may contain the answer, so it is for records and people, and not in ``info``.
        """
        return []

    def _score(self) -> float:
        """Return the benchmark's own score of the episode so far, in [0, 1]."""
        return 1.0 if self.episode.won else 0.0

    def _details(self) -> Mapping[str, Any]:
        """Return the environment's own keys of ``info`` right after ``reset``, the same as in ``ActionResult``."""
        return NOTHING

    # ---------------------------------------------------------------- the episode

    @property
    def task(self) -> Task:
        """Return the task being played.

        Raises:
            ResetNeeded: before the first ``reset``.
        """
        if self._task is None:
            raise ResetNeeded("No task yet: call reset() first.")
        return self._task

    @property
    def max_turns(self) -> int:
        """Return the responses after which an episode is truncated: its own, or fewer under a limit of gymnasium."""
        return int(min(self._max_turns, self.made_limit, self._time_limit))

    @max_turns.setter
    def max_turns(self, turns: int) -> None:
        self._max_turns = turns

    @property
    def turn(self) -> int:
        """Return the number of responses taken in this episode."""
        return self.episode.turn

    @property
    def done(self) -> bool:
        """Return whether the episode has ended, or none has begun."""
        return self.episode.done

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[ObsType, dict[str, Any]]:
        """Begin an episode.

        Args:
            seed: seeds ``self.np_random``; without ``options`` it also draws the task.
            options: ``{"task": "<task id>"}`` starts that task.

        Raises:
            UnknownTaskError: this split has no task of this id.
            SpearError: an option is unknown, or the options are not a dictionary.
            EnvFault: a service that the task needs is down.
        """
        super().reset(seed=seed)
        self._time_limit = find_time_limit(self)
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
        return self._show(""), self._info()

    def step(self, action: str) -> tuple[ObsType, float, bool, bool, dict[str, Any]]:
        """Take one response; no text raises.

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
        episode.native_thought = parsed.native is not None
        episode.well_formed = episode.well_formed and parsed.format_ok
        try:
            played = parsed.action
            result = self._malformed(parsed.problem) if played is None else self._play(played)
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
        return self._show(result.message), reward, terminated, truncated, info

    def _play(self, action: str) -> ActionResult:
        result = self._act(action)
        if not isinstance(result, ActionResult):
            raise SpearError(f"{type(self).__name__}._act returned a {type(result).__name__}, not an ActionResult.")
        return result

    def _show(self, message: str) -> ObsType:
        observation = self._observe(message)
        if not isinstance(observation, (str, dict)):
            raise SpearError(
                f"{type(self).__name__}._observe returned a {type(observation).__name__}, not text or a dict."
            )
        return observation

    def set_training_step(self, step: int) -> None:
        """Set the global training step, from 1, for the schedule of mu.

        Raises:
            SpearError: it is not a whole number of at least 0.
        """
        self.training_step = require_whole("set_training_step: step", step, 0)

    def set_text_measure(self, measure: Callable[[str], int] | None) -> None:
        """Set the measure of a text in tokens of the policy, for environments that cut texts; None if it is unknown.

        Members of a group must get the same. An environment can be pickled only if its measure can.
        """
        self.text_measure = measure

    def render(self) -> Any:
        """Render the present observation as text (``"ansi"``) or picture (``"rgb_array"``); None without a mode."""
        if self.render_mode is None:
            gym.logger.warn("render() without a render mode: pass render_mode='ansi' to gym.make().")
            return None
        self.task  # noqa: B018 - raises ResetNeeded before the first episode
        text = text_of(self._observe(self._result.message))
        if self.render_mode == "ansi":
            return text
        from spear_envs.core.spaces import draw_text  # late: Pillow's fonts are for those who record

        return draw_text(f"{self.task.id}   turn {self.turn} of {self.max_turns}", text)

    def get_state(self) -> dict[str, Any]:
        """Return everything that the rest of the episode depends on, as plain values that can be pickled.

        Later steps do not change it. ``set_state`` of any environment with the same keywords accepts it.
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
        """Set a state from :meth:`get_state`.

        Returns:
            The observation and info of that moment.

        Raises:
            UnknownTaskError: this environment lacks the task of the state.
            SpearError: the state is damaged, or of another environment; the episode is not changed.
        """
        if not isinstance(state, Mapping) or not state.keys() >= STATE_KEYS:
            raise SpearError(f"set_state() takes what get_state() gave, with the keys {', '.join(sorted(STATE_KEYS))}.")
        state = copy.deepcopy(dict(state))
        task = self.tasks.get(state["task_id"])
        episode = Episode.load(state["episode"])
        generator = self.np_random.bit_generator.state
        before = None if self._task is None else (self._task, self.episode, self._result, self._world())
        try:
            result = ActionResult(**state["result"])
            self._enter(task, episode, state["world"])
            self._result = result
            self.np_random.bit_generator.state = state["np_random"]
            shown = self._observe(result.message), self._info()
            self.np_random.bit_generator.state = state["np_random"]  # all of these may draw, as _start in _enter
            return shown
        except Exception as error:
            if before is None:
                self._task, self.episode = None, Episode()
            else:
                former, played, self._result, world = before
                self._enter(former, played, world)
            self.np_random.bit_generator.state = generator
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
        if not isinstance(options, (Mapping, type(None))):
            raise SpearError(f"options={options!r:.80} is not valid: give a dictionary with a 'task' id, or None.")
        for key in options or ():
            if key != "task":
                raise SpearError(f"reset() does not take the option {key!r}: the only one is 'task', a task id.")
        return options["task"] if options else None

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
            "native_thought": episode.native_thought,
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
    cls: type[SpearEnv[Any]], values: Any, keywords: Any, copied: Mapping[str, Any], state: Mapping[str, Any] | None
) -> SpearEnv[Any]:
    env = cls(*values, **keywords)
    for name, value in copied.items():
        setattr(env, name, value)
    if state is not None:
        env.set_state(state)
    return env

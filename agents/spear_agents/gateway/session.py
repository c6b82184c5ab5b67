"""One episode at an address: the program's model calls and steps, recorded."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spear_agents.engines.base import (
    AgentFaultKind,
    ContextExceededError,
    Engine,
    EngineFault,
    Finish,
    Generation,
    Sampling,
)
from spear_agents.play.chat import Message
from spear_agents.play.episode import World, draw_response
from spear_agents.play.prompting import PromptBuilder, disarm_context
from spear_agents.play.trajectory import Layout, StopReason, Trajectory, Turn
from spear_agents.play.transcript import Asked, ToolCall, Transcript
from spear_envs.adapters.conversation import find_tools_template
from spear_envs.core.env import image_of, text_of
from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import ResponseFormat
from spear_envs.core.prompts import IMAGE, PromptContext, PromptTemplate, RunningTemplate
from spear_envs.core.tools import CallError, write_call
from spear_sandbox.web.listening import work_aside

NO_STEP = "(no step)"
"""Recorded action of a call without a step in the environment."""
BROKEN = "broken"
"""Fault of an episode with a broken engine or environment."""
MODEL_NAME = "policy"
"""Name of the model at every address."""


class EndedError(SpearError):
    """The episode is over, or the program has used up its calls."""


class BusyError(SpearError):
    """The program requests too many responses at once."""


@dataclass(frozen=True)
class Limits:
    """Most calls of the model (None for 8 times the environment's turns), calls at the same time, and seconds."""

    calls: int | None = None
    parallel: int = 16
    seconds: float = 3600.0

    def __post_init__(self) -> None:
        if (self.calls is not None and self.calls < 1) or self.parallel < 1 or not self.seconds > 0:
            raise SpearError("a program needs at least 1 call, 1 call at a time and more than 0 seconds")


def pass_over_error(ended: asyncio.Future[Any]) -> None:
    """Mark the error of a future as seen, which asyncio else logs where its awaiter was cancelled."""
    if not ended.cancelled():
        ended.exception()


@dataclass(frozen=True)
class Completion:
    """The answer to call ``number`` (from 1): text without its calls of tools, and these.

    ``prompt_tokens`` are of the full prompt. ``stop_string`` is the text at which it ended; None if by itself or at its
    limit.
    """

    number: int
    text: str
    calls: Sequence[ToolCall]
    generation: Generation
    prompt_tokens: int
    stop_string: str | None


@dataclass
class _Call:
    """An answered call and the program's steps until the next one."""

    asked: Asked
    generation: Generation
    response: str
    observation: str
    anchor: str
    actions: list[str] = field(default_factory=list)
    format_ok: bool = True
    native_thought: bool = False
    action_ok: bool = False
    reward: float = 0.0


class Session:
    """An episode of one program, which has begun in ``world``. Not thread-safe.

    The length limits of ``prompts`` hold for the program's prompts too. It can only ask for shorter responses or more
    stop strings than those of ``sampling``. Raises SpearError for an environment whose prompt shows a picture.
    """

    def __init__(
        self, world: World, engine: Engine, prompts: PromptBuilder, sampling: Sampling, limits: Limits
    ) -> None:
        self.world = world
        self.key = secrets.token_hex(8)
        self.token = secrets.token_hex(16)
        self.stop: StopReason | None = None
        self.closed = False
        self.touched = time.monotonic()
        """Time of the last request."""
        self.broken: SpearError | None = None
        """Error that ends the run: a broken engine or environment."""
        self._engine = engine
        self._prompts = prompts
        self._sampling = sampling
        self._limits = limits
        self._most = limits.calls or 8 * int(world.core.max_turns)
        self._transcript = Transcript(prompts.chat, prompts.max_prompt_tokens, prompts.max_row_tokens)
        self._calls: list[_Call] = []
        self._steps: list[tuple[int, str]] = []
        self._begun = 0
        self._calling = 0
        """Calls whose prompts are being built."""
        self._running = 0
        """Calls under way, these included."""
        self._fault: str | None = None
        self._detail = ""
        self._too_long = False
        self._stepping = asyncio.Lock()
        is_pictured = image_of(world.observation) is not None
        if is_pictured and (not text_of(world.observation) or IMAGE in self.write_prompt()):
            raise SpearError(f"{world.env_id} shows pictures, and a program reads text: set modality=text")

    # ---------------------------------------------------------------- the model

    async def complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        goes_on: bool = False,
    ) -> Completion:
        """Return the model's response to ``messages``, of at most ``max_tokens``; see :meth:`Transcript.ask`.

        It ends at a text of ``stop``, which stays part of it. Raises EndedError if the episode is over or had too many
        calls, BusyError for too many at once, ContextExceededError, EngineFault without a response, and SpearError if
        the chat template refuses the messages.
        """
        self._check_open()
        if self._begun + self._calling >= self._most:
            raise EndedError(f"this episode has used up its {self._most} calls of the model")
        if self._running >= self._limits.parallel:
            raise BusyError(f"this episode has {self._running} calls under way, and no more are allowed")
        with self._busy():
            return await self._complete(messages, self._prompts.chat.disarm_all(list(tools)), max_tokens, stop, goes_on)

    @contextlib.contextmanager
    def _busy(self) -> Iterator[None]:
        """Return a request is under way, so the episode is not idle."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self.touched = time.monotonic()

    def is_idle(self, seconds: float) -> bool:
        """Return whether no request has been under way for so long."""
        return self._running == 0 and not self._stepping.locked() and time.monotonic() - self.touched > seconds

    async def _ask(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], goes_on: bool) -> Asked:
        """Build the prompt; what is long is rendered and tokenised beside the event loop."""
        transcript, chat = self._transcript, self._prompts.chat
        characters = _count(messages) + _count(tools)
        self._calling += 1
        try:
            transcript.check_length(characters)

            text = await work_aside(characters, lambda: transcript.render(messages, tools, goes_on))
            follows, rest = transcript.begin(text)
            try:
                ids = await work_aside(len(rest), lambda: chat.encode(rest))
            except BaseException:
                transcript.release(follows)
                raise
            return transcript.finish(text, follows, ids)
        except ContextExceededError:
            self._too_long = True
            raise
        finally:
            self._calling -= 1

    async def _complete(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int | None,
        stop: Sequence[str],
        goes_on: bool,
    ) -> Completion:
        asked = await self._ask(messages, tools, goes_on)
        if self.closed or self.stop is not None:
            self._transcript.leave(asked)
            self._check_open()
        self._begun += 1
        number, shown = self._begun, self.world.info["anchor"]
        call_at = text_of(self.world.observation)
        most = min(limit for limit in (self._sampling.max_tokens, max_tokens, asked.room) if limit is not None)
        sampling = replace(self._sampling, max_tokens=most, stop_strings=tuple(stop))
        generation: Generation | None = None
        try:
            generation = await draw_response(
                self._engine, asked.ids, sampling, self.world.task_id, self.world.seed, number
            )
        except ContextExceededError:
            self._too_long = True
            raise
        except EngineFault as fault:
            self._fault, self._detail = fault.kind.value, fault.message
            raise
        except SpearError as error:
            self._break(error)
            raise
        finally:
            if generation is None or self.closed:
                self._transcript.leave(asked)
        self._check_open()
        self._fault, self._detail, self._too_long = None, "", False
        response = self._transcript.add(asked, generation.token_ids, generation.finish)
        anchor = shown if isinstance(shown, str) else repr(shown)
        self._calls.append(_Call(asked, generation, response, call_at, anchor))
        text, calls = self._transcript.read(asked, response, tools) if tools else (response, [])
        reached = next((string for string in stop if string in response), None)
        stop_string = reached if generation.finish is Finish.STRING else None
        return Completion(number, text, calls, generation, len(asked.ids), stop_string)

    def spell(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token."""
        return [self._prompts.tokenizer.decode([token]) for token in token_ids]

    def _check_open(self) -> None:
        if self.closed or self.stop is not None:
            raise EndedError("this episode has ended")

    # ---------------------------------------------------------------- the environment

    @property
    def template(self) -> PromptTemplate:
        """The prompt template: the one for tools if the environment takes bare actions."""
        is_plain = getattr(self.world.core, "response_format", None) is ResponseFormat.PLAIN
        return find_tools_template(self.world.core) if is_plain else self._prompts.template

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts at which responses end, if the template's conversation continues within one message."""
        template = self.template
        return template.stop_strings if isinstance(template, RunningTemplate) else ()

    def write_prompt(self) -> str:
        """Return the task, rules and first observation, for the program's first message."""
        return self.template.render(self._context())

    def write_observation(self) -> str:
        """Return the present observation, for the program's next message."""
        if self.stop is not None:
            return text_of(self.world.observation)
        return self.template.follow_up(self._context())

    def _context(self) -> PromptContext:
        info = self.world.info
        return disarm_context(
            PromptContext(
                instruction=info["instruction"],
                observation=text_of(self.world.observation),
                admissible_actions=info["admissible_actions"],
                history=(),
                turn=info["turn"] + 1,
                max_turns=self.world.core.max_turns,
            )
        )

    async def step(self, response: str) -> str:
        """Play a response in the environment's own form; return the observation. Raises EndedError, or SpearError."""
        step = asyncio.ensure_future(self._step(response))
        step.add_done_callback(pass_over_error)
        # A program that stops waiting must not free the lock while the environment still works in its thread.
        return await asyncio.shield(step)

    async def _step(self, response: str) -> str:
        async with self._stepping:
            self._check_open()
            before = self.world.info["reward_terms"]["native_return"]
            place = len(self._calls) - 1  # others may be answered while the environment works
            self._steps.append((place, response))
            try:
                self.stop = await self.world.step(response)
            except SpearError as error:
                self._break(error)
                raise
            finally:
                self.touched = time.monotonic()
            info = self.world.info
            if place >= 0:
                call = self._calls[place]
                call.actions.append(info["action"])
                call.format_ok = call.format_ok and bool(info["format_ok"])
                call.native_thought = call.native_thought or bool(info["native_thought"])
                call.action_ok = call.action_ok or bool(info["action_ok"])
                call.reward += float(info["reward_terms"]["native_return"] - before)
            return self.write_observation()

    async def call_tool(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Play a call of a tool; return its result or error. Raises as :meth:`step`, or if actions are not bare."""
        core = self.world.core
        if core.response_format is not ResponseFormat.PLAIN:
            raise SpearError("tools act in bare actions: make the environment with response_format=plain")
        try:
            action = write_call(core.tools, name, arguments)
        except CallError as error:
            return str(error)
        return await self.step(action)

    # ---------------------------------------------------------------- the end

    def close(self) -> None:
        """Refuse further requests."""
        self.closed = True

    async def settle(self) -> None:
        """Close, and wait for a running step, so that the environment can be reused."""
        self.close()
        async with self._stepping:
            pass

    def _break(self, error: SpearError) -> None:
        self.broken, self._fault, self._detail = error, BROKEN, str(error)

    def record(self, fault: AgentFaultKind | None = None) -> Trajectory:
        """Return the record of the episode; ``fault`` is the program's, and ignored if the environment had ended."""
        stop, given = self.stop, None
        if stop is None and self._too_long:
            stop = StopReason.CONTEXT_LIMIT  # programs may treat that as an error
        elif stop is None and (self._fault or fault):
            stop, given = StopReason.FAULT, self._fault or (fault.value if fault else None)
        elif stop is None:
            stop = StopReason.QUIT
        turns = [_make_turn(call) for call in self._calls]
        fields: dict[str, Any] = {"layout": Layout.CONVERSATION, "steps": tuple(self._steps)} | (
            {"fault": given, "detail": self._detail} if given else {}
        )
        return self.world.close(stop, turns, self._prompts, **fields)


def _make_turn(call: _Call) -> Turn:
    return Turn(
        prompt_ids=call.asked.new_ids,
        response_ids=call.generation.token_ids,
        log_probs=call.generation.log_probs,
        response=call.response,
        action="; ".join(call.actions) if call.actions else NO_STEP,
        observation=call.observation,
        format_ok=call.format_ok,
        action_ok=call.action_ok,
        anchor=call.anchor,
        reward=round(call.reward, 9),
        finish=call.generation.finish,
        served=call.generation.served,
        cached_tokens=call.generation.cached_tokens,
        version=call.generation.version,
        seconds=call.generation.seconds,
        follows=call.asked.follows,
        native_thought=call.native_thought,
    )


def _count(value: Any) -> int:
    """Return the characters of all texts of messages or schemas, and one for each part."""
    if isinstance(value, str):
        return len(value) + 1
    if isinstance(value, Mapping):
        return 1 + sum(_count(key) + _count(part) for key, part in value.items())
    if isinstance(value, (list, tuple)):
        return 1 + sum(map(_count, value))
    return 1

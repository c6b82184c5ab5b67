"""Agent programs: functions of the user that play episodes with any framework."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym

from spear_agents.engines.base import AgentFaultKind, Engine, Sampling
from spear_agents.gateway.session import MODEL_NAME, EndedError, Limits, Session, pass_over_error
from spear_agents.play.episode import World
from spear_agents.play.prompting import PromptBuilder
from spear_agents.play.trajectory import Trajectory
from spear_envs.core.errors import SpearError
from spear_envs.core.machine import import_file, import_module
from spear_envs.core.tools import Tool

if TYPE_CHECKING:
    from spear_agents.gateway.server import Gateway


Program = Callable[[Any], Any]
MOST_TOLD = 10
"""Maximum different failures in warnings; the records have all."""
_FOREIGN = (asyncio.TimeoutError, CancelledError, StopIteration)
"""Errors of a program that the player would take for its own time-out or its own end, or that no future carries."""
_log = logging.getLogger(__name__)


class AgentTask:
    """Argument of an agent program: the task, the address of a model server, and the environment.

    In an ``async def`` program :meth:`step`, :meth:`call` and :attr:`functions` are awaited, in a plain one they block.

    Attributes:
        id: of the task.
        instruction: the task in words.
        prompt: a first message for the model: task, rules and observation.
        system: a system message, if the environment's prompt has one.
        base_url: for OpenAI's clients; those of Anthropic take it without ``/v1``.
        api_key: valid for this address only.
        model: name of the model there.
        stop_strings: texts at which a response ends, if the environment's prompt needs that; the observation follows
            directly.
        max_turns: steps after which the environment ends the episode.
    """

    def __init__(self, session: Session, address: str, loop: asyncio.AbstractEventLoop, *, blocking: bool) -> None:
        self._session = session
        self._loop = loop
        self._blocking = blocking
        world = session.world
        self.id: str = world.task_id
        self.instruction: str = world.info["instruction"]
        self.prompt = session.write_prompt()
        self.system = session.template.system()
        self.stop_strings = session.stop_strings
        self.base_url = f"{address}/v1"
        self.api_key = session.token
        self.model = MODEL_NAME
        self.max_turns = int(world.core.max_turns)

    @property
    def done(self) -> bool:
        """Whether the environment has ended the episode."""
        return self._session.stop is not None

    @property
    def tools(self) -> list[Mapping[str, Any]]:
        """The environment's tools as JSON schemas in OpenAI's form."""
        return [tool.schema() for tool in self._session.world.core.tools]

    @property
    def functions(self) -> list[Callable[..., Any]]:
        """The environment's tools as functions with signature and docstring, for agent frameworks."""
        return [_make_function(self, tool, self._blocking) for tool in self._session.world.core.tools]

    def step(self, response: str) -> Any:
        """Play a response in the environment's own form; return the observation for the model's next message."""
        return self._ask(self._session.step(response))

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Play a call of one of the environment's tools; return its result, or the error of the call."""
        return self._ask(self._session.call_tool(name, arguments))

    def _ask(self, question: Coroutine[Any, Any, str]) -> Any:
        try:
            answer = asyncio.run_coroutine_threadsafe(question, self._loop)
        except RuntimeError:  # the player of the episodes is gone
            question.close()
            raise EndedError("this episode has ended") from None
        return answer.result() if self._blocking else asyncio.wrap_future(answer)


def _make_function(task: AgentTask, tool: Tool, blocking: bool) -> Callable[..., Any]:
    def bind(*values: Any, **keywords: Any) -> dict[str, Any]:
        # Missing and unknown arguments are reported to the model.
        return {**inspect.signature(tool.function).bind_partial(*values).arguments, **keywords}

    def call(*values: Any, **keywords: Any) -> Any:
        return task.call(tool.name, bind(*values, **keywords))

    async def call_async(*values: Any, **keywords: Any) -> Any:
        return await task.call(tool.name, bind(*values, **keywords))

    return tool.dress(call if blocking else call_async)


def load_program(name: str) -> Program:
    """Load the function of ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``. Raises SpearError if there is none."""
    place, _, attribute = name.rpartition(":")
    if not place or not attribute:
        raise SpearError(f"an agent is named FILE.py:FUNCTION or MODULE:FUNCTION, not {name!r}")
    try:
        module = (
            import_file(Path(place), f"agent_{Path(place).stem}") if place.endswith(".py") else import_module(place)
        )
    except Exception as error:  # a user's module may raise anything
        raise SpearError(f"agent {name}: {place} cannot be imported ({type(error).__name__}: {error})") from error
    program: Program | None = getattr(module, attribute, None)
    if not callable(program):
        raise SpearError(f"agent {name}: {place} has no function {attribute!r}")
    return program


def resolve_program(name: str) -> str:
    """Return the name with the absolute path of a file. Raises SpearError like :func:`load_program`."""
    load_program(name)
    place, _, attribute = name.rpartition(":")
    return f"{Path(place).resolve()}:{attribute}" if place.endswith(".py") else name


@contextlib.asynccontextmanager
async def open_program(name: str, seconds: float) -> AsyncIterator[ProgramPlayer]:
    """Open a player of the program ``name`` (:func:`load_program`), with its own gateway in this event loop.

    ``seconds`` bounds an episode. Raises SpearError if the program does not exist, or FastAPI is not installed.
    """
    program = load_program(name)
    try:
        from spear_agents.gateway.server import Gateway
    except ModuleNotFoundError as error:
        raise SpearError(f"an agent needs {error.name}: pip install 'spear-agents[gateway]'") from error
    gateway = Gateway()
    await gateway.start()
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(_pass_over_closed_loops)
    try:
        yield ProgramPlayer(program, gateway, Limits(seconds=seconds))
    finally:
        loop.set_exception_handler(before)
        await gateway.aclose()


def _pass_over_closed_loops(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Ignore errors of clients left open by a program, which fail when another event loop closes them."""
    error = context.get("exception")
    if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
        loop.default_exception_handler(context)


class ProgramPlayer:
    """Plays episodes with a program: a :class:`~spear_agents.play.rollout.Play`.

    Each episode has its own thread, so a program may be async or plain, and one that hangs does not delay others.
    Errors of the program are faults of its episode, with their own kinds in the records.
    """

    def __init__(self, program: Program, gateway: Gateway, limits: Limits | None = None) -> None:
        self._program = program
        self._gateway = gateway
        self._limits = limits or Limits()
        self._reported: set[str] = set()

    async def __call__(
        self,
        env: gym.Env[Any, Any],
        engine: Engine,
        prompts: PromptBuilder,
        *,
        task_id: str,
        sampling: Sampling,
        seed: int,
        env_id: str,
    ) -> Trajectory:
        """Play one episode. Raises SpearError if the engine or the environment is broken."""
        world = World(env, task_id, seed, env_id)
        stop = await world.begin(prompts.measure)
        if stop is not None:
            return world.close(stop, (), prompts)
        session = Session(world, engine, prompts, sampling, self._limits)
        address = self._gateway.add(session)
        fault: AgentFaultKind | None = None
        try:
            await asyncio.wait_for(self._run(session, address), self._limits.seconds)
        except asyncio.TimeoutError:
            fault = AgentFaultKind.TIMEOUT
            self._describe(f"the agent did not end within {self._limits.seconds:g} s")
        except Exception as error:
            fault = AgentFaultKind.FAILED
            if session.stop is None:
                self._describe(f"the agent failed: {type(error).__name__}: {error}")
        finally:
            self._gateway.remove(session)
            await session.settle()
        if session.broken is not None:
            raise session.broken
        return session.record(fault)

    async def _run(self, session: Session, address: str) -> None:
        loop = asyncio.get_running_loop()
        done: Future[None] = Future()
        is_async = inspect.iscoroutinefunction(self._program) or inspect.iscoroutinefunction(
            getattr(self._program, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        task = AgentTask(session, address, loop, blocking=not is_async)
        inner: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []

        async def play() -> None:
            current, own = asyncio.current_task(), asyncio.get_running_loop()
            assert current is not None
            own.set_exception_handler(_pass_over_closed_loops)
            inner.append((own, current))
            await self._program(task)

        def run() -> None:
            try:
                if is_async:
                    asyncio.run(play())
                else:
                    self._program(task)
            except BaseException as error:  # SystemExit too: the program ends, not the run
                is_plain = isinstance(error, Exception) and not isinstance(error, _FOREIGN)
                done.set_exception(error if is_plain else RuntimeError(repr(error)))
            else:
                done.set_result(None)

        threading.Thread(target=run, name=f"agent-{session.key}", daemon=True).start()
        ended = asyncio.wrap_future(done)
        ended.add_done_callback(pass_over_error)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            # A waiting program is woken and ends; one that computes continues until its next request.
            for running, current in inner:
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    running.call_soon_threadsafe(current.cancel)
            raise

    def _describe(self, text: str) -> None:
        """Warn, once for each kind of failure."""
        if text not in self._reported and len(self._reported) < MOST_TOLD:
            self._reported.add(text)
            _log.warning("%s", text)


async def play(task: AgentTask) -> None:
    """Play an episode as one conversation; ``spear eval --agent spear_agents.gateway.programs:play``."""
    import httpx

    messages = [{"role": "system", "content": task.system}] if task.system else []
    messages.append({"role": "user", "content": task.prompt})
    headers = {"Authorization": f"Bearer {task.api_key}"}
    # The address is plain HTTP: reading the system's certificates would take longer than a call.
    async with httpx.AsyncClient(base_url=task.base_url, headers=headers, timeout=None, verify=False) as client:
        while not task.done:
            goes_on = messages[-1]["role"] == "assistant"
            body = {"model": task.model, "messages": messages, "continue_final_message": goes_on}
            reply = await client.post("/chat/completions", json=body | {"stop": list(task.stop_strings)})
            if reply.status_code == 400 and reply.json()["error"]["code"] == "context_length_exceeded":
                return
            reply.raise_for_status()
            (choice,) = reply.json()["choices"]
            response = choice["message"]["content"]
            shown = await task.step(response)
            text = messages.pop()["content"] + response if goes_on else response
            runs_on = task.stop_strings and (choice["stop_reason"] is not None or choice["finish_reason"] == "length")
            if not runs_on:
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": shown}]
            else:
                messages += [{"role": "assistant", "content": text + shown}]

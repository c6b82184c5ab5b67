"""The service of ``spear serve``: an environment by OpenEnv's protocol, with a session for each WebSocket.

OpenEnv's own server package cannot be installed beside ours: it needs fastmcp 3, which needs an ``mcp`` before 2.0. Its
messages are therefore read and written here, strictly.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar

import numpy as np
import uvicorn

# FastAPI looks annotations up in the module's names, so a late import would turn every POST into a 422.
from fastapi import FastAPI, HTTPException, Request, Response, WebSocket, WebSocketDisconnect

from spear_envs import __version__
from spear_envs.adapters.conversation import Conversation, Message, ServiceSettings
from spear_envs.core.errors import SpearError
from spear_sandbox.web.answering import BodyRoom, check_sender, refuse
from spear_sandbox.web.listening import work_aside
from spear_sandbox.web.serving import make_server, stop_on_signals

logger = logging.getLogger(__name__)
Result = TypeVar("Result")

TOKEN_VARIABLE = "SPEAR_ENV_TOKEN"
"""Environment variable with the bearer token that clients must send."""
IN_OBSERVATION = frozenset({"instruction", "admissible_actions"})
"""Keys of ``info`` that go into the observation; the others are metadata."""


class ErrorCode(str, Enum):
    """OpenEnv's error codes."""

    INVALID_JSON = "INVALID_JSON"
    """The message is not a JSON object."""
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    """The message is of an unknown type."""
    VALIDATION_ERROR = "VALIDATION_ERROR"
    """The message is incomplete or malformed."""
    EXECUTION_ERROR = "EXECUTION_ERROR"
    """The environment refused or failed; the session continues."""
    CAPACITY_REACHED = "CAPACITY_REACHED"
    """All sessions are taken; the connection ends."""
    FACTORY_ERROR = "FACTORY_ERROR"
    """The environment could not be made."""
    SESSION_ERROR = "SESSION_ERROR"
    """The session ended: it was idle for too long."""


_SHOWN = 1000
"""Characters of an error, which may repeat what the client sent."""


class WireError(Exception):
    """A message that is answered with an error."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message[:_SHOWN])
        self.code = code


@dataclass(frozen=True)
class Reset:
    """Begin an episode."""

    seed: int | None = None
    episode_id: str | None = None
    """The client's name for the episode."""
    task: str | None = None
    """Task id; without it and ``index`` the seed draws the task."""
    split: str | None = None
    """A split other than the server's."""
    index: int | None = None
    """Position of the task in its split."""


_RESET_ARGUMENTS: Mapping[str, type] = {"seed": int, "episode_id": str, "task": str, "split": str, "index": int}


def read_message(text: str) -> tuple[str, Reset | str]:
    """Read a WebSocket message.

    Returns:
        ``"reset"`` and its arguments, ``"step"`` and the response to play, or ``"state"`` or ``"close"`` and nothing.

    Raises:
        WireError: it does not follow the protocol.
    """
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(ErrorCode.INVALID_JSON, f"the message is not JSON ({error}).") from None
    if not isinstance(message, dict):
        raise WireError(ErrorCode.INVALID_JSON, "the message is not a JSON object.")
    kind, data = message.get("type", ""), message.get("data", {})
    if not isinstance(data, dict):
        raise WireError(ErrorCode.VALIDATION_ERROR, f"'data' of a message is an object, not {_name(data)}.")
    if kind == "reset":
        return kind, read_reset(data)
    if kind == "step":
        return kind, _read_response(data)
    if kind in ("state", "close"):
        return kind, ""
    raise WireError(ErrorCode.UNKNOWN_TYPE, f"unknown message {kind!r}: send reset, step, state or close.")


def read_reset(data: Mapping[str, Any]) -> Reset:
    """Read the arguments of a reset; those that only other environments take are refused.

    Raises:
        WireError: an unknown argument, or one of the wrong kind.
    """
    values: dict[str, Any] = {}
    for name, value in data.items():
        if name not in _RESET_ARGUMENTS:
            known = ", ".join(_RESET_ARGUMENTS)
            raise WireError(ErrorCode.VALIDATION_ERROR, f"unknown argument {name!r} of reset: it takes {known}.")
        wanted = _RESET_ARGUMENTS[name]
        if value is not None and (not isinstance(value, wanted) or isinstance(value, bool)):
            raise WireError(ErrorCode.VALIDATION_ERROR, f"{name!r} is {wanted.__name__}, not {_name(value)}.")
        if isinstance(value, int) and not 0 <= value < 2**63:
            raise WireError(ErrorCode.VALIDATION_ERROR, f"{name!r} is a number from 0 to 2^63 - 1.")
        values[name] = value
    reset = Reset(**values)
    if reset.task is not None and reset.index is not None:
        raise WireError(ErrorCode.VALIDATION_ERROR, "reset takes a 'task' or an 'index', not both.")
    return reset


def _read_response(data: Mapping[str, Any]) -> str:
    unknown = sorted(set(data) - {"response", "metadata"})
    response = data.get("response")
    if unknown or not isinstance(response, str):
        what = f"has {unknown[0]!r}" if unknown else f"has {_name(response)} as its response"
        form = '{"response": "what the model wrote"}'
        raise WireError(ErrorCode.VALIDATION_ERROR, f"an action is {form}; this one {what}.")
    return response


def _name(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def write_observation(message: Message) -> dict[str, Any]:
    """Write what an environment says in OpenEnv's form: observation, reward, done, metadata."""
    info = message.info
    return {
        "observation": {
            "prompt": message.text,
            "text": message.observation,
            "image": message.encode_image(),
            "instruction": info["instruction"],
            "admissible_actions": info["admissible_actions"],
        },
        "reward": message.reward if info["turn"] else None,
        "done": message.done,
        "metadata": {
            "terminated": message.terminated,
            "truncated": message.truncated,
            **{key: value for key, value in info.items() if key not in IN_OBSERVATION},
        },
    }


def write_error(code: ErrorCode, message: str, **more: Any) -> str:
    """Write the WebSocket message of an error."""
    return write_json({"type": "error", "data": {"message": message, "code": code.value, **more}})


def write_json(value: Any) -> str:
    """Write plain JSON; NumPy values become lists and numbers."""
    return json.dumps(value, default=_make_plain, separators=(",", ":"))


def _make_plain(value: Any) -> Any:
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def _describe(kind: str, text: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": text, **more}


def _or_null(kind: str, text: str, **more: Any) -> dict[str, Any]:
    return {"anyOf": [{"type": kind, **more}, {"type": "null"}], "description": text}


ACTION_SCHEMA: dict[str, Any] = {
    "title": "SpearAction",
    "type": "object",
    "additionalProperties": False,
    "required": ["response"],
    "properties": {
        "response": _describe("string", "One whole response of the model, in the form that the prompt asks for."),
        "metadata": _describe("object", "Not read."),
    },
}
OBSERVATION_SCHEMA: dict[str, Any] = {
    "title": "SpearObservation",
    "type": "object",
    "required": ["prompt", "text", "image", "instruction", "admissible_actions"],
    "properties": {
        "prompt": _describe("string", "The next message for the model."),
        "text": _describe("string", "What the environment shows, without the words around it."),
        "image": _or_null("string", "Its picture: a PNG file.", contentEncoding="base64", contentMediaType="image/png"),
        "instruction": _describe("string", "What is to be done."),
        "admissible_actions": _or_null(
            "array", "Actions that would do something now; null where they cannot be listed.", items={"type": "string"}
        ),
    },
}
STATE_SCHEMA: dict[str, Any] = {
    "title": "SpearState",
    "type": "object",
    "properties": {
        "episode_id": _or_null("string", "What the client called the episode."),
        "step_count": _describe("integer", "Responses so far."),
        "task_id": _or_null("string", "The task being played."),
        "done": _describe("boolean", "Whether the episode has ended, or none has begun."),
    },
}


MakeConversation = Callable[[str | None], Conversation]
"""Makes an environment for a split; None for the server's own."""


class SessionPool:
    """Admits sessions and gives them environments; from any thread.

    Args:
        max_sessions: at a time; each holds at most one environment.
    """

    def __init__(self, make: MakeConversation, max_sessions: int) -> None:
        self.max_sessions = max_sessions
        self.active = 0
        self._make = make
        self._lock = threading.Lock()
        self._idle: dict[str | None, list[Conversation]] = {}
        """By splits that exist: a client can name any others."""

    def open(self) -> Session:
        """Open a session.

        Raises:
            WireError: all sessions are taken.
        """
        with self._lock:
            if self.active >= self.max_sessions:
                raise WireError(
                    ErrorCode.CAPACITY_REACHED,
                    f"all {self.max_sessions} sessions are taken: close one, or raise --max-sessions of the server.",
                )
            self.active += 1
        return Session(self)

    def leave(self) -> None:
        """Note that a session has ended."""
        with self._lock:
            self.active -= 1

    def acquire(self, split: str | None) -> Conversation:
        """Take an environment of a split, reused from an ended session or new.

        Raises:
            WireError: it cannot be made.
        """
        with self._lock:
            if self._idle.get(split):
                return self._idle[split].pop()
        try:
            return self._make(split)
        except Exception as error:
            if not isinstance(error, SpearError):
                logger.exception("an environment could not be made")
            raise WireError(ErrorCode.FACTORY_ERROR, str(error) or type(error).__name__) from error

    def take_back(self, split: str | None, conversation: Conversation) -> None:
        """Keep an environment for the next session, unless enough are kept."""
        with self._lock:
            if sum(map(len, self._idle.values())) < self.max_sessions:
                self._idle.setdefault(split, []).append(conversation)
                return
        conversation.env.close()

    def close(self) -> None:
        """Close the idle environments."""
        for idle in self._idle.values():
            while idle:
                idle.pop().env.close()


class Session:
    """One client's episode. Its methods block and are called one after the other."""

    def __init__(self, pool: SessionPool) -> None:
        self.episode_id: str | None = None
        self._pool = pool
        self._split: str | None = None
        self._conversation: Conversation | None = None
        self._last: Message | None = None

    def reset(self, request: Reset) -> Message:
        """Begin an episode.

        Raises:
            WireError: the split or task is unknown, or a service of the environment is down.
        """
        self._last, self.episode_id = None, request.episode_id
        if self._conversation is None or request.split != self._split:
            self._give_back()
            self._conversation = self._pool.acquire(request.split)
            self._split = request.split
        conversation = self._conversation
        task = request.task
        if (index := request.index) is not None:
            tasks = conversation.env.tasks
            if index >= len(tasks):
                raise WireError(ErrorCode.EXECUTION_ERROR, f"there is no task {index}: the split has {len(tasks)}.")
            task = self._run(lambda: tasks[index].id)
        self._last = self._run(lambda: conversation.reset(task=task, seed=request.seed))
        return self._last

    def step(self, response: str) -> Message:
        """Play a response.

        Raises:
            WireError: no episode is under way.
        """
        conversation = self._conversation
        if conversation is None or self._last is None or self._last.done:
            state = "has begun" if self._last is None else "is under way any more"
            raise WireError(ErrorCode.EXECUTION_ERROR, f"no episode {state}: send reset first.")
        self._last = self._run(lambda: conversation.respond(response))
        return self._last

    def describe(self) -> dict[str, Any]:
        """Return the state of the episode for OpenEnv's clients."""
        info = self._last.info if self._last else {}
        return {
            "episode_id": self.episode_id,
            "step_count": info.get("turn", 0),
            "task_id": info.get("task_id"),
            "done": self._last is None or self._last.done,
        }

    def close(self) -> None:
        """Give the environment and the place back."""
        self._give_back()
        self._pool.leave()

    def _run(self, play: Callable[[], Result]) -> Result:
        try:
            return play()
        except SpearError as error:
            raise WireError(ErrorCode.EXECUTION_ERROR, str(error)) from None
        except Exception as error:
            logger.exception("an environment failed")
            if self._conversation is not None:  # its state is unknown
                with contextlib.suppress(Exception):
                    self._conversation.env.close()
            self._conversation = self._last = None
            raise WireError(ErrorCode.EXECUTION_ERROR, f"the environment failed: {type(error).__name__}.") from error

    def _give_back(self) -> None:
        if self._conversation is not None:
            self._pool.take_back(self._split, self._conversation)
            self._conversation = None


NO_SESSION = "a request over HTTP has no session: open the WebSocket /ws, as OpenEnv's clients do."
POLICY_VIOLATION = 1008


class EnvService:
    """Serves an environment by OpenEnv's protocol. Belongs to one event loop.

    Args:
        make: makes the environment of a split, or the server's own for None.
    """

    def __init__(self, name: str, description: str, make: MakeConversation, settings: ServiceSettings) -> None:
        self.name = name
        self.description = description
        self.settings = settings
        self._bodies = BodyRoom()
        self.pool = SessionPool(make, settings.max_sessions)
        # One thread for each session, so that a slow environment does not hold up others.
        self._threads = ThreadPoolExecutor(settings.max_sessions + 1, thread_name_prefix="session")

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run blocking work on a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def check(self, request: Request) -> None:
        """See :func:`~spear_sandbox.web.answering.check_sender`."""
        check_sender(request, token=self.settings.token, local=self.settings.local)

    async def read_object(self, request: Request) -> dict[str, Any]:
        """Read the JSON object in a request; an empty body is an empty one.

        Raises:
            HTTPException: the request is refused, or its body is too large or not an object (422).
        """
        self.check(request)
        body = await self._bodies.read(request, self.settings.body_bytes, "ask for less at a time")
        try:
            value = await work_aside(len(body), partial(json.loads, body or b"{}"))
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise HTTPException(422, "the body is not a JSON object.")
        return value

    async def hold_session(self, socket: WebSocket) -> None:
        """Answer the messages of one client until it disconnects, closes the session, or is idle for too long."""
        refused = refuse(socket.headers, token=self.settings.token, local=self.settings.local)
        if refused is not None:
            await socket.send_denial_response(_write(refused[0], {"detail": refused[1]}))
            return
        await socket.accept()
        try:
            session = self.pool.open()
        except WireError as error:
            sessions = {"active_sessions": self.pool.active, "max_sessions": self.pool.max_sessions}
            await socket.send_text(write_error(error.code, str(error), **sessions))
            await socket.close(POLICY_VIOLATION)
            return
        try:
            with contextlib.suppress(WebSocketDisconnect):
                while (answer := await self._answer_next(socket, session)) is not None:
                    await socket.send_text(answer)
                await socket.close()
        finally:
            # Shielded: a cancelled connection must not keep its place.
            await asyncio.shield(self.run(session.close))

    async def _answer_next(self, socket: WebSocket, session: Session) -> str | None:
        """Answer the next message; None ends the session."""
        try:
            text = await asyncio.wait_for(socket.receive_text(), self.settings.idle_s)
        except asyncio.TimeoutError:
            said = f"no message came within {self.settings.idle_s:g} s, so the session has ended."
            await socket.send_text(write_error(ErrorCode.SESSION_ERROR, said))
            return None
        except KeyError:  # a message of bytes
            return write_error(ErrorCode.INVALID_JSON, "messages are text: send JSON as text.")
        try:
            kind, asked = read_message(text)
            if kind == "close":
                return None
            if kind == "state":
                return write_json({"type": "state", "data": session.describe()})
            message = await self.run(lambda: session.reset(asked) if isinstance(asked, Reset) else session.step(asked))
        except WireError as error:
            return write_error(error.code, str(error))
        return write_json({"type": "observation", "data": write_observation(message)})

    async def show_first(self, reset: Reset) -> dict[str, Any]:
        """Show the first observation of an episode that is then dropped."""
        session = self.pool.open()
        try:
            return write_observation(await self.run(lambda: session.reset(reset)))
        finally:
            await asyncio.shield(self.run(session.close))

    def close(self) -> None:
        """Wait for the threads and close the environments."""
        self._threads.shutdown()
        self.pool.close()


def make_app(service: EnvService) -> FastAPI:
    """Make the ASGI application of a service."""
    app = FastAPI(title=service.name, version=__version__, openapi_url=None)

    @app.websocket("/ws")
    async def talk(socket: WebSocket) -> None:
        await service.hold_session(socket)

    @app.get("/health")
    async def health() -> Response:
        return _write(200, {"status": "healthy"})

    @app.get("/metadata")
    async def metadata(request: Request) -> Response:
        service.check(request)
        return _write(200, {"name": service.name, "description": service.description, "version": __version__})

    @app.get("/schema")
    async def schema(request: Request) -> Response:
        service.check(request)
        return _write(200, {"action": ACTION_SCHEMA, "observation": OBSERVATION_SCHEMA, "state": STATE_SCHEMA})

    # Instead of FastAPI's own route, which asks for no token. OpenEnv's validator reads it.
    @app.get("/openapi.json")
    async def openapi(request: Request) -> Response:
        service.check(request)
        return _write(200, app.openapi())

    @app.get("/state")
    async def state(request: Request) -> Response:
        service.check(request)
        return _write(200, {"episode_id": None, "step_count": 0, "task_id": None, "done": True})

    @app.post("/reset")
    async def reset(request: Request) -> Response:
        try:
            return _write(200, await service.show_first(read_reset(await service.read_object(request))))
        except WireError as error:
            raise HTTPException(503 if error.code is ErrorCode.CAPACITY_REACHED else 422, str(error)) from None

    @app.post("/step")
    async def step(request: Request) -> Response:
        service.check(request)
        raise HTTPException(409, NO_SESSION)

    @app.post("/mcp")
    async def mcp(request: Request) -> Response:
        asked = await service.read_object(request)
        error = {"code": -32601, "message": "play over the WebSocket /ws; MCP is `spear serve --mcp`."}
        return _write(200, {"jsonrpc": "2.0", "id": asked.get("id"), "error": error})

    return app


def _write(status: int, content: Any) -> Response:
    return Response(write_json(content), status, media_type="application/json")


DRAIN_S = 10
"""Seconds that messages under way may take after a signal to stop."""


def make_service_server(service: EnvService) -> uvicorn.Server:
    """Make the server of a service.

    Raises:
        ModuleNotFoundError: the extra ``env-server`` is not installed.
    """
    return make_server(
        make_app(service),
        drain_s=DRAIN_S,
        lifespan="off",
        ws="websockets-sansio",
        ws_max_size=service.settings.message_bytes,
    )


def serve_service(server: uvicorn.Server, service: EnvService, listener: socket.socket) -> None:
    """Answer until SIGINT or SIGTERM.

    Args:
        server: made by :func:`make_service_server`.
        service, listener: closed at the end.
    """
    with listener, stop_on_signals(server):
        try:
            server.run(sockets=[listener])
        finally:
            service.close()

"""The service: sessions over ``/ws``; environment, schemas and tasks over HTTP; and running it until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import uvicorn

# FastAPI looks annotations up in the module's names, so a late import would turn every POST into a 422.
from fastapi import FastAPI, HTTPException, Request, Response, WebSocket, WebSocketDisconnect

from spear_envs import __version__
from spear_envs.adapters.openenv.sessions import MakeConversation, Session, SessionPool, describe_task
from spear_envs.adapters.openenv.wire import (
    ACTION_SCHEMA,
    OBSERVATION_SCHEMA,
    STATE_SCHEMA,
    ErrorCode,
    Reset,
    WireError,
    read_message,
    read_reset,
    write_error,
    write_json,
    write_observation,
)
from spear_sandbox.web.answering import BodyRoom, check_sender, refuse
from spear_sandbox.web.listening import work_aside
from spear_sandbox.web.serving import make_server, stop_on_signals

Result = TypeVar("Result")
NO_SESSION = "a request over HTTP has no session: open the WebSocket /ws, as OpenEnv's clients do."
POLICY_VIOLATION = 1008


@dataclass(frozen=True)
class ServiceSettings:
    """Everything but the environment."""

    max_sessions: int = 64
    idle_s: float = 900.0
    """Seconds without a message after which a session ends."""
    message_bytes: int = 4 << 20
    """Of one message from a client."""
    body_bytes: int = 64 << 10
    """Of a request over HTTP."""
    tasks_listed: int = 1000
    """Tasks in one answer, at most."""
    token: str | None = field(default=None, repr=False)
    """Bearer token that clients must send; None for no token."""
    local: bool = True
    """Listens on the loopback interface: requests under the name of another host are refused."""


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

    def check_name(self, name: str) -> None:
        """Refuse (404) requests for an environment of another name."""
        if name.lower() != self.name.lower():
            raise HTTPException(404, f"unknown environment {name!r}: this service has {self.name}.")

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

    async def read_split(self, request: Request, name: str) -> dict[str, Any]:
        """Read a request about tasks: ``split``, and optionally ``index``, ``start`` and ``stop``.

        Raises:
            HTTPException: as :meth:`read_object`; for another environment (404); for a malformed value (422).
        """
        data = await self.read_object(request)
        self.check_name(name)
        splits = await self.run(self.pool.list_splits)
        if data.get("split") not in splits:
            raise HTTPException(422, f"'split' is one of {', '.join(splits)}.")
        for key in ("index", "start", "stop"):
            if not (data.get(key) is None or (isinstance(data[key], int) and not isinstance(data[key], bool))):
                raise HTTPException(422, f"{key!r} is a whole number.")
        return data

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
        """First observation of an episode that is then dropped."""
        session = self.pool.open()
        try:
            return write_observation(await self.run(lambda: session.reset(reset)))
        finally:
            await asyncio.shield(self.run(session.close))

    async def read_tasks(self, data: dict[str, Any], start: int, stop: int | None) -> list[dict[str, Any]]:
        """List tasks of a split, never more than one answer may hold."""
        most = self.settings.tasks_listed

        def pick(tasks: Any) -> list[dict[str, Any]]:
            return [describe_task(tasks[place], place) for place in range(len(tasks))[start:stop][:most]]

        return await self.run(lambda: self.pool.read_tasks(data["split"], pick))

    def close(self) -> None:
        """Wait for the threads and close the environments."""
        self._threads.shutdown()
        self.pool.close()


def make_app(service: EnvService) -> FastAPI:
    """Make the ASGI application of a service."""
    app = FastAPI(title=service.name, version=__version__, openapi_url=None)
    _add_play(app, service)
    _add_tasks(app, service)
    return app


def _add_play(app: FastAPI, service: EnvService) -> None:
    """Add what players need: the session, and facts about the environment."""

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


def _add_tasks(app: FastAPI, service: EnvService) -> None:
    """Add the lists of tasks."""

    @app.get("/list_environments")
    async def list_environments(request: Request) -> Response:
        service.check(request)
        return _write(200, [service.name])

    @app.get("/{env_name}/splits")
    async def splits(request: Request, env_name: str) -> Response:
        service.check(request)
        service.check_name(env_name)
        names = await service.run(service.pool.list_splits)
        types = ("train", "test")  # OpenEnv's third type is "validation"
        return _write(200, [{"name": name, "type": name if name in types else "validation"} for name in names])

    @app.post("/{env_name}/num_tasks")
    async def num_tasks(request: Request, env_name: str) -> Response:
        data = await service.read_split(request, env_name)
        return _write(200, {"num_tasks": await service.run(lambda: service.pool.read_tasks(data["split"], len))})

    @app.post("/{env_name}/tasks")
    async def tasks(request: Request, env_name: str) -> Response:
        data = await service.read_split(request, env_name)
        return _write(200, {"tasks": await service.read_tasks(data, 0, None), "env_name": service.name})

    @app.post("/{env_name}/task_range")
    async def task_range(request: Request, env_name: str) -> Response:
        data = await service.read_split(request, env_name)
        return _write(200, {"tasks": await service.read_tasks(data, data.get("start") or 0, data.get("stop"))})

    @app.post("/{env_name}/task")
    async def task(request: Request, env_name: str) -> Response:
        data = await service.read_split(request, env_name)
        index = data.get("index")
        found = await service.read_tasks(data, index, index + 1) if isinstance(index, int) and index >= 0 else []
        if not found:
            raise HTTPException(400, "the split has no task of this index.")
        return _write(200, {"task": found[0]})


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

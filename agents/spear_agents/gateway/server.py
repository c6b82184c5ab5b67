"""HTTP server for running episodes, in the event loop of this process."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import gymnasium as gym
from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from spear_agents.engines.base import AgentFaultKind, ContextExceededError, EngineFault, Sampling
from spear_agents.evaluation.records import Key
from spear_agents.evaluation.settings import OpenPolicy
from spear_agents.gateway import anthropic_wire, openai_wire, responses_wire
from spear_agents.gateway.openai_wire import write_error
from spear_agents.gateway.session import MODEL_NAME, BusyError, EndedError, Limits, Session, pass_over_error
from spear_agents.play.episode import World
from spear_agents.play.trajectory import StopReason, Trajectory
from spear_envs.core.errors import SpearError, explain_invalid
from spear_sandbox.web.answering import BodyRoom, refuse, work_for, write_json
from spear_sandbox.web.listening import bind_socket, is_loopback, work_aside, write_url
from spear_sandbox.web.serving import make_server

LARGEST_BODY = 4 << 20
"""Bytes of a request: a million tokens have fewer."""
MOST_MESSAGES = 10_000
MOST_SHOWN = 2_000
"""Characters of an error, which may repeat what the program sent."""
DRAIN_S = 2
_JSON = TypeAdapter(dict[str, Any])
_Body = TypeVar("_Body", bound=BaseModel)
_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[Response]])


@dataclass(eq=False)
class Refusal(Exception):
    """A refused request: status, OpenAI's type and code, and a sentence."""

    status: int
    kind: str
    code: str | None
    message: str
    headers: Mapping[str, str] | None = None


class StepRequest(BaseModel):
    """A step in the environment: a response in its own form, or a tool call."""

    model_config = ConfigDict(extra="forbid")

    response: str | None = None
    tool: str | None = None
    arguments: dict[str, Any] = {}


def answering(write: Callable[[str, str, str | None], dict[str, Any]]) -> Callable[[_Handler], _Handler]:
    """Turn errors of a handler into those of its interface."""

    def decorate(handler: Callable[..., Awaitable[Response]]) -> Any:
        @functools.wraps(handler)
        async def answer(*args: Any, **keywords: Any) -> Response:
            try:
                return await handler(*args, **keywords)
            except Exception as error:
                refusal = _explain(error)
                shown = refusal.message[:MOST_SHOWN]
                return write_json(refusal.status, write(shown, refusal.kind, refusal.code), refusal.headers)

        return answer

    return decorate


class Gateway:
    """Serves sessions, each with its own address and key."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host = host
        self._port = port
        self._sessions: dict[str, Session] = {}
        self._room = BodyRoom()
        self._serving: asyncio.Task[None] | None = None
        self._server: Any = None
        self.app = self._make_app()
        self.url = ""
        """Address up to the port, once :meth:`start` has been called."""

    async def start(self) -> None:
        """Listen in the running event loop. Does nothing the second time."""
        if self._serving is not None:
            return
        listener = bind_socket(self._host, self._port)
        self.url = write_url(self._host, listener.getsockname()[1])
        self._server = make_server(self.app, drain_s=DRAIN_S, lifespan="off")
        self._server.capture_signals = contextlib.nullcontext  # Ctrl-C belongs to whoever runs the loop
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))

    async def aclose(self) -> None:
        """End all connections."""
        for session in list(self._sessions.values()):
            self.remove(session)
        if self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving
            self._serving = None

    def add(self, session: Session) -> str:
        """Give a session an address; return it without ``/v1``."""
        self._sessions[session.key] = session
        return f"{self.url}/episodes/{session.key}"

    def remove(self, session: Session) -> None:
        """Close a session; its address then replies that the episode has ended."""
        session.close()
        self._sessions.pop(session.key, None)

    # ---------------------------------------------------------------- HTTP

    def _make_app(self) -> FastAPI:
        app = FastAPI(openapi_url=None)
        path = "/episodes/{key}"
        app.post(f"{path}/v1/chat/completions")(self._chat)
        app.post(f"{path}/v1/responses")(self._responses)
        app.post(f"{path}/v1/messages")(self._messages)
        app.get(f"{path}/v1/models")(self._models)
        app.post(f"{path}/step")(self._step)
        app.get(path)(self._describe)

        async def explain_path(request: Request, _: Exception) -> Response:
            text = f"{request.method} {request.url.path} is not served here"
            return write_json(404, openai_wire.write_error(text, "invalid_request_error", "unknown_url"))

        app.add_exception_handler(404, explain_path)
        app.add_exception_handler(405, explain_path)
        return app

    @answering(openai_wire.write_error)
    async def _chat(self, request: Request, key: str) -> Response:
        session, body = await self._open(request, key, openai_wire.ChatRequest)
        messages = [message.to_message() for message in body.messages]
        answer = await work_for(
            request,
            session.complete(
                messages=messages,
                tools=body.offered,
                max_tokens=body.limit,
                stop=body.read_stops(),
                goes_on=body.continue_final_message,
            ),
        )
        answer = openai_wire.limit_calls(answer, body.parallel_tool_calls)
        if body.stream:
            return _stream(openai_wire.write_stream(answer, body, key, session.spell))
        return write_json(200, openai_wire.write_completion(answer, body, key, session.spell))

    @answering(openai_wire.write_error)
    async def _responses(self, request: Request, key: str) -> Response:
        session, body = await self._open(request, key, responses_wire.ResponsesRequest)
        calling = session.complete(body.to_messages(), body.offered, max_tokens=body.max_output_tokens)
        answer = openai_wire.limit_calls(await work_for(request, calling), body.parallel_tool_calls)
        if body.stream:
            return _stream(responses_wire.write_events(answer, body, key))
        return write_json(200, responses_wire.write_response(answer, body, key))

    @answering(lambda message, kind, code: anthropic_wire.write_error(message, kind))
    async def _messages(self, request: Request, key: str) -> Response:
        session, body = await self._open(request, key, anthropic_wire.MessagesRequest)
        answer = await work_for(
            request,
            session.complete(
                messages=body.to_messages(),
                tools=body.offered,
                max_tokens=body.max_tokens,
                stop=body.stop_sequences,
                goes_on=body.goes_on,
            ),
        )
        answer = openai_wire.limit_calls(answer, body.takes_several)
        if body.stream:
            return _stream(anthropic_wire.write_events(answer, body, key))
        return write_json(200, anthropic_wire.write_message(answer, body, key))

    @answering(openai_wire.write_error)
    async def _models(self, request: Request, key: str) -> Response:
        self.find(request, key)
        model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "spear"}
        return write_json(200, {"object": "list", "data": [model]})

    @answering(openai_wire.write_error)
    async def _describe(self, request: Request, key: str) -> Response:
        return write_json(200, describe_session(self.find(request, key)))

    @answering(openai_wire.write_error)
    async def _step(self, request: Request, key: str) -> Response:
        session = self.find(request, key)
        body = await self.read_body(request, StepRequest)
        if (body.response is None) == (body.tool is None):
            raise ValueError("give either a response or a tool with its arguments")
        if body.tool is not None:
            shown = await session.call_tool(body.tool, body.arguments)
        else:
            shown = await session.step(body.response or "")
        return write_json(200, {"observation": shown, "done": session.stop is not None})

    async def _open(self, request: Request, key: str, kind: type[_Body]) -> tuple[Session, _Body]:
        session = self.find(request, key)
        body = await self.read_body(request, kind)
        named = getattr(body, "model", MODEL_NAME)
        if named != MODEL_NAME:
            text = f"the model at this address is called {MODEL_NAME!r}, not {named!r}"
            raise Refusal(404, "invalid_request_error", "model_not_found", text)
        return session, body

    def find(self, request: Request, key: str) -> Session:
        """Find the session at an address. Raises Refusal or EndedError if it is not available to the client."""
        self.admit(request)
        session = self._sessions.get(key)
        if session is None:
            raise EndedError("the episode at this address has ended, or never existed")
        self.admit(request, session.token)
        session.touched = time.monotonic()
        return session

    def admit(self, request: Request, token: str | None = None) -> None:
        """Raise Refusal for a page of another site, or without the token in either interface's header."""
        headers = dict(request.headers)
        if not headers.get("authorization", "").lower().startswith("bearer ") and "x-api-key" in headers:
            headers["authorization"] = f"Bearer {headers['x-api-key']}"
        refused = refuse(headers, token=token, local=is_loopback(self._host))
        if refused is not None:
            status, reason = refused
            kinds = {401: ("authentication_error", "invalid_api_key"), 403: ("permission_error", "stranger")}
            raise Refusal(status, *kinds[status], reason)

    async def read_body(self, request: Request, kind: type[_Body]) -> _Body:
        """Read the body of a request. Raises HTTPException or ValidationError if it is not valid."""
        data = await self._room.read(request, LARGEST_BODY, "send less of the history")
        content = await work_aside(len(data), lambda: _JSON.validate_json(data))
        for name in ("messages", "input", "tools"):
            if isinstance(content.get(name), list) and len(content[name]) > MOST_MESSAGES:
                raise ValueError(f"{name} has {len(content[name])} entries, at most {MOST_MESSAGES} are read")
        return await work_aside(len(data), lambda: kind.model_validate(openai_wire.drop_neutral(content)))


def describe_session(session: Session) -> dict[str, Any]:
    """Return the state of an episode for its program."""
    world = session.world
    return {
        "environment": world.env_id,
        "task": world.task_id,
        "instruction": world.info["instruction"],
        "system": session.template.system(),
        "prompt": session.write_prompt() if world.info["turn"] == 0 else None,
        "stop_strings": session.stop_strings,
        "observation": session.write_observation(),
        "tools": [dict(tool.schema()) for tool in world.core.tools],
        "turn": world.info["turn"],
        "max_turns": world.core.max_turns,
        "done": session.stop is not None,
    }


def _stream(events: Iterator[str]) -> Response:
    return StreamingResponse(iter(list(events)), media_type="text/event-stream")


def _explain(error: Exception) -> Refusal:
    invalid = "invalid_request_error"
    if isinstance(error, Refusal):
        return error
    if isinstance(error, HTTPException):
        return Refusal(error.status_code, invalid, None, str(error.detail), error.headers)
    if isinstance(error, ValidationError):
        return Refusal(400, invalid, None, explain_invalid(error))
    if isinstance(error, EndedError):
        return Refusal(410, invalid, "episode_ended", str(error))
    if isinstance(error, BusyError):
        return Refusal(429, "rate_limit_error", "too_many_calls", str(error))
    if isinstance(error, ContextExceededError):
        return Refusal(400, invalid, "context_length_exceeded", str(error))
    if isinstance(error, EngineFault):
        return Refusal(503, "server_error", error.kind.value, str(error))
    if isinstance(error, SpearError | ValueError):
        return Refusal(400, invalid, None, str(error))
    return Refusal(500, "server_error", None, f"the gateway failed on this request: {type(error).__name__}")


Env = gym.Env[Any, Any]
LOOK_S = 1.0


class BeginRequest(BaseModel):
    """Task (None: the next one of the split) and seed (None: a new one) of an episode."""

    model_config = ConfigDict(extra="forbid")

    task: str | None = None
    seed: int | None = Field(default=None, ge=0)


@dataclass(eq=False)
class Host:
    """Begins and ends episodes on a gateway, not started yet, by requests.

    ``POST /episodes`` begins one and returns its address; ``DELETE /episodes/{id}`` ends it and returns its result. At
    most ``most`` are open; those without a request for ``limits.seconds`` end as a fault. A request without a seed gets
    a job that is neither open nor ``played``.
    """

    gateway: Gateway
    policy: OpenPolicy
    make_env: Callable[[], Env]
    tasks: list[str]
    env_id: str
    _: KW_ONLY
    token: str | None
    limits: Limits
    most: int
    on_end: Callable[[Trajectory], None]
    played: set[Key] = field(default_factory=set)
    first_seed: int = 0
    """Least seed of the episodes that are begun without one."""

    def __post_init__(self) -> None:
        self._next = 0
        """Least number of an episode that may be free; task and seed follow from it."""
        self._closed = False
        self._failure: SpearError | None = None
        self._beginning: set[Key] = set()
        self._free: list[Env] = []
        self._open: dict[str, tuple[Session, Env]] = {}
        self._ending: set[asyncio.Task[Trajectory]] = set()
        self.gateway.app.add_api_route("/episodes", self._begin, methods=["POST"])
        self.gateway.app.add_api_route("/episodes/{key}", self._end, methods=["DELETE"])

    async def watch(self) -> None:
        """Close idle episodes until cancelled. Raises SpearError if a record cannot be kept."""
        while self._failure is None:
            await asyncio.sleep(LOOK_S)
            for session, _ in list(self._open.values()):
                if session.key in self._open and session.is_idle(self.limits.seconds):
                    await self._finish(session, AgentFaultKind.TIMEOUT)
        raise self._failure

    async def aclose(self) -> None:
        """End all episodes, as faults, and close the environments."""
        self._closed = True
        while self._beginning:
            await asyncio.sleep(0.01)
        for session, _ in list(self._open.values()):
            if session.key in self._open:
                with contextlib.suppress(SpearError):  # a record that cannot be kept; the others may
                    await self._finish(session, AgentFaultKind.STOPPED)
        await asyncio.gather(*self._ending, return_exceptions=True)
        while self._free:
            self._free.pop().close()

    @answering(write_error)
    async def _begin(self, request: Request) -> Response:
        self.gateway.admit(request, self.token)
        body = await self.gateway.read_body(request, BeginRequest)
        session = await self._start(body)
        if isinstance(session, StopReason):
            raise Refusal(503, "server_error", "environment", "the environment's service is down: try again later")
        address = self.gateway.add(session)
        opened = {"id": session.key, "base_url": f"{address}/v1", "api_key": session.token, "model": MODEL_NAME}
        return write_json(200, opened | describe_session(session))

    def _take(self, body: BeginRequest) -> tuple[Key, int]:
        """Reserve a place and a job before anything is awaited, so no other gets the same; also the job's number."""
        if self._closed:
            raise EndedError("the gateway is stopping")
        taken = {(each.world.task_id, each.world.seed) for each, _ in self._open.values()} | self._beginning
        if len(taken) >= self.most:
            raise Refusal(429, "rate_limit_error", "too_many_episodes", f"{self.most} episodes are under way")
        for number in itertools.count(self._next):
            task = body.task if body.task is not None else self.tasks[number % len(self.tasks)]
            job = task, self.first_seed + number if body.seed is None else body.seed
            if body.seed is not None or (job not in taken and job not in self.played):
                break
        if job in taken:
            text = f"task {task} is being played with seed {job[1]}: take another seed"
            raise Refusal(409, "invalid_request_error", "episode_exists", text)
        self._next = number + 1
        self._beginning.add(job)
        return job, number

    async def _start(self, body: BeginRequest) -> Session | StopReason:
        """Begin an episode."""
        job, number = self._take(body)
        env: Env | None = None
        begun = False
        try:
            env = self._free.pop() if self._free else self.make_env()
            world = World(env, *job, self.env_id)
            stop = await world.begin(self.policy.prompts.measure)
            if stop is not None:
                return stop
            if self._closed:
                raise EndedError("the gateway is stopping")
            sampling: Sampling = self.policy.settings.sampling()
            session = Session(world, self.policy.engine_for(env), self.policy.prompts, sampling, self.limits)
            begun = True
        finally:
            self._beginning.discard(job)
            if not begun:
                self._next = min(self._next, number)
                if env is not None:
                    self._give_back(env)
        self._open[session.key] = (session, env)
        return session

    def _give_back(self, env: Env) -> None:
        if self._closed:
            env.close()
        else:
            self._free.append(env)

    @answering(write_error)
    async def _end(self, request: Request, key: str) -> Response:
        session = self.gateway.find(request, key)
        if key not in self._open:
            raise EndedError("this episode has ended")
        record = await self._finish(session)
        about = {name: getattr(record, name) for name in ("task_id", "won", "score", "reward", "fault")}
        return write_json(200, about | {"stop": record.stop.value, "calls": len(record.turns)})

    async def _finish(self, session: Session, fault: AgentFaultKind | None = None) -> Trajectory:
        _, env = self._open.pop(session.key)
        ending = asyncio.create_task(self._keep(session, env, fault))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        ending.add_done_callback(pass_over_error)
        # Who waits may be cancelled at the gateway's end; the record must still be kept.
        return await asyncio.shield(ending)

    async def _keep(self, session: Session, env: Env, fault: AgentFaultKind | None) -> Trajectory:
        self.played.add((session.world.task_id, session.world.seed))
        self.gateway.remove(session)
        await session.settle()
        record = session.record(fault)
        if session.broken is None:
            self._give_back(env)
        else:
            env.close()
        try:
            self.on_end(record)
        except SpearError as error:
            self._failure = error
            raise
        return record

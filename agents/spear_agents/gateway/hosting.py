"""Episodes for programs of other processes, begun and ended by requests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import gymnasium as gym
from fastapi import Request, Response
from pydantic import BaseModel, ConfigDict, Field

from spear_agents.engines.base import AgentFaultKind, Sampling
from spear_agents.episode import World
from spear_agents.gateway.openai_wire import write_error
from spear_agents.gateway.server import Gateway, Refusal, answering, describe_session
from spear_agents.gateway.session import MODEL_NAME, EndedError, Limits, Session
from spear_agents.policies import OpenPolicy
from spear_agents.records import Key
from spear_agents.trajectory import StopReason, Trajectory
from spear_envs.core.errors import SpearError
from spear_sandbox.web.answering import write_json

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

    def __post_init__(self) -> None:
        self._next = 0
        """Least number of an episode that may be free; task and seed follow from it."""
        self._closed = False
        self._failure: SpearError | None = None
        self._beginning: set[Key] = set()
        self._free: list[Env] = []
        self._open: dict[str, tuple[Session, Env]] = {}
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
            job = task, number if body.seed is None else body.seed
            if body.seed is not None or (job not in taken and job not in self.played):
                break
        if job in taken:
            told = f"task {task} is being played with seed {job[1]}: take another seed"
            raise Refusal(409, "invalid_request_error", "episode_exists", told)
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
            begun = True
        finally:
            self._beginning.discard(job)
            if not begun:
                self._next = min(self._next, number)
                if env is not None:
                    self._give_back(env)
        sampling: Sampling = self.policy.settings.sampling()
        session = Session(world, self.policy.engine_for(env), self.policy.prompts, sampling, self.limits)
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

"""Episodes for programs of other processes, begun and ended by requests."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
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
from spear_agents.trajectory import StopReason, Trajectory
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
    most ``most`` are open; those without a request for ``limits.seconds`` end as a fault.
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

    def __post_init__(self) -> None:
        self._numbers = itertools.count()
        self._given_back: list[int] = []
        """Numbers of episodes that could not begin, the least first."""
        self._beginning: set[tuple[str, int]] = set()
        self._free: list[Env] = []
        self._open: dict[str, tuple[Session, Env]] = {}
        self.gateway.app.add_api_route("/episodes", self._begin, methods=["POST"])
        self.gateway.app.add_api_route("/episodes/{key}", self._end, methods=["DELETE"])

    async def watch(self) -> None:
        """Close idle episodes until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for session, _ in list(self._open.values()):
                if session.key in self._open and session.is_idle(self.limits.seconds):
                    await self._finish(session, AgentFaultKind.TIMEOUT)

    async def aclose(self) -> None:
        """End all episodes and close the environments."""
        for session, _ in list(self._open.values()):
            await self._finish(session)
        for env in self._free:
            env.close()

    @answering(write_error)
    async def _begin(self, request: Request) -> Response:
        self.gateway.admit(request, self.token)
        body = await self.gateway.read_body(request, BeginRequest)
        if len(self._open) + len(self._beginning) >= self.most:
            raise Refusal(429, "rate_limit_error", "too_many_episodes", f"{self.most} episodes are under way")
        session = await self._start(body)
        if isinstance(session, StopReason):
            raise Refusal(503, "server_error", "environment", "the environment's service is down: try again later")
        address = self.gateway.add(session)
        opened = {"id": session.key, "base_url": f"{address}/v1", "api_key": session.token, "model": MODEL_NAME}
        return write_json(200, opened | describe_session(session))

    async def _start(self, body: BeginRequest) -> Session | StopReason:
        """Begin an episode. Its task and seed are taken before anything is awaited, so no other gets the same."""
        number = heapq.heappop(self._given_back) if self._given_back else next(self._numbers)
        task = body.task if body.task is not None else self.tasks[number % len(self.tasks)]
        seed = body.seed if body.seed is not None else number
        taken = {(each.world.task_id, each.world.seed) for each, _ in self._open.values()} | self._beginning
        if (task, seed) in taken:
            heapq.heappush(self._given_back, number)
            told = f"task {task} is being played with seed {seed}: take another seed"
            raise Refusal(409, "invalid_request_error", "episode_exists", told)
        self._beginning.add((task, seed))
        env: Env | None = None
        begun = False
        try:
            env = self._free.pop() if self._free else self.make_env()
            world = World(env, task, seed, self.env_id)
            stop = await world.begin(self.policy.prompts.measure)
            if stop is not None:
                return stop
            begun = True
        finally:
            self._beginning.discard((task, seed))
            if not begun:
                heapq.heappush(self._given_back, number)
                if env is not None:
                    self._free.append(env)
        sampling: Sampling = self.policy.settings.sampling()
        session = Session(world, self.policy.engine_for(env), self.policy.prompts, sampling, self.limits)
        self._open[session.key] = (session, env)
        return session

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
        self.gateway.remove(session)
        await session.settle()
        record = session.record(fault)
        if session.broken is None:
            self._free.append(env)
        else:
            env.close()
        self.on_end(record)
        return record

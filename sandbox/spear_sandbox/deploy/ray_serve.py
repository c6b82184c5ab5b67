"""Replicas of the service under Ray Serve, each with its own pool; they share nothing.

``serve run spear_sandbox.deploy.ray_serve:build replicas=4 max_running=8``, or :func:`build` and ``ray.serve.run`` in
Python. Needs Ray Serve and the service: ``pip install 'spear-sandbox[serve]'``. The bearer token is the variable
``SPEAR_SANDBOX_TOKEN`` of the replicas' environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ray import serve

from spear_sandbox.pool.admission import ServiceSettings
from spear_sandbox.pool.cgroups import choose_places, find_memory_limit
from spear_sandbox.pool.local import LocalExecutor
from spear_sandbox.protocol import Limits
from spear_sandbox.service.server import RunService, make_app
from spear_sandbox.service.wire import TOKEN_VARIABLE
from spear_sandbox.web.listening import read_token

QUEUE_LENGTH = 4096
NUMBERS = {"replicas": 1, "max_running": 0, "memory_mb": 1024, "max_run_s": 300, "queue_wait_s": 30, "cpus": 0}
"""Arguments of :func:`build`, all whole numbers, and their defaults; with ``max_running=0`` as many programs run as the
cores and memory allow."""


class _Place:
    """Where the routes find the service of their replica's process."""

    service: RunService | None = None

    @classmethod
    def find(cls) -> RunService:
        assert cls.service is not None, "Ray Serve sends no request before the replica is made"
        return cls.service


@serve.deployment(name="sandbox", health_check_period_s=10)
@serve.ingress(make_app(_Place.find))
class Replica:
    """One pool with its service; fails to start where no strong isolation holds."""

    # Ray Serve awaits it.
    async def __init__(self, numbers: Mapping[str, int]) -> None:  # type: ignore[misc]
        limits = Limits(wall_s=float(numbers["max_run_s"]), memory_mb=numbers["memory_mb"])
        self._executor = LocalExecutor(limits=limits, max_running=numbers["max_running"] or None)
        await self._executor.start()
        settings = ServiceSettings(
            max_running=self._executor.max_running,
            queue_length=QUEUE_LENGTH,
            queue_wait_s=float(numbers["queue_wait_s"]),
            max_run_s=limits.wall_s,
            limits=limits,
            token=read_token(TOKEN_VARIABLE),
        )
        _Place.service = RunService(self._executor, settings)

    async def check_health(self) -> None:
        """Have Ray Serve replace a replica that can start no run."""
        if not self._executor.health().ok:
            raise RuntimeError("the sandbox can start no run")

    async def __del__(self) -> None:
        await self._executor.close()


def build(arguments: Mapping[str, Any]) -> serve.Application:
    """Return the application for ``serve run``; raises ValueError unless the arguments are numbers of ``NUMBERS``."""
    unknown = set(arguments) - set(NUMBERS)
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: unknown; give some of {', '.join(NUMBERS)}.")
    try:
        numbers = {**NUMBERS, **{name: int(value) for name, value in arguments.items()}}
    except (TypeError, ValueError):
        raise ValueError(f"{dict(arguments)}: give whole numbers, for instance replicas=4.") from None
    limits = Limits(memory_mb=numbers["memory_mb"])
    places = numbers["max_running"] or choose_places(len(os.sched_getaffinity(0)), limits, find_memory_limit())
    # More than run and wait, so that the service's own queue decides whom to turn away.
    options: dict[str, Any] = {"num_replicas": numbers["replicas"], "max_ongoing_requests": places + QUEUE_LENGTH}
    options["ray_actor_options"] = {"num_cpus": numbers["cpus"]}
    deployment: Any = Replica
    return deployment.options(**options).bind(numbers)

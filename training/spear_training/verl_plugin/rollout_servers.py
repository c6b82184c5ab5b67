"""What our own rollout backends share.

verl's asynchronous rollout has three parts: a replica, which starts the server; a server actor; and an adapter inside
the training worker, which pushes the weights.
"""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import ray
import torch
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from spear_agents.engines.base import Finish, Generation, Sampling
from spear_agents.engines.memory import trim_heap

CLOSE_SECONDS = 60.0
"""How long the servers may take to end what they have started."""


def name_server(backend: str, replica_rank: int) -> str:
    """The Ray actor name of a replica's server."""
    return f"{backend}_server_{replica_rank}"


def register_backend(backend: str, replica: type[OwnReplica], sender: type[WeightSender]) -> None:
    """Make ``actor_rollout_ref.rollout.name=<backend>`` known to verl."""
    # verl 0.9.1 has no public register function for the adapter; a test checks that the name still exists.
    rollout_base._ROLLOUT_REGISTRY[(backend, "async")] = f"{sender.__module__}.{sender.__qualname__}"
    RolloutReplicaRegistry.register(backend, lambda: replica)


def read_sampling(parameters: dict[str, Any], response_length: int) -> Sampling:
    """verl's sampling parameters, which are vLLM's, as ours; without a limit a response has ``response_length``."""
    return Sampling(
        temperature=float(parameters.get("temperature", 1.0)),
        top_p=float(parameters.get("top_p", 1.0)),
        top_k=max(0, int(parameters.get("top_k", 0))),
        max_tokens=int(parameters.get("max_tokens") or parameters.get("max_new_tokens") or response_length),
        stop_token_ids=tuple(parameters.get("stop_token_ids") or ()),
        stop_strings=tuple(parameters.get("stop") or ()),
        seed=parameters.get("seed"),
    )


def make_output(answer: Generation) -> TokenOutput:
    """A response in verl's own form; ``global_steps`` is what verl calls the version of the weights."""
    counts = {} if answer.cached_tokens is None else {"cached_tokens": answer.cached_tokens}
    return TokenOutput(
        token_ids=list(answer.token_ids),
        log_probs=list(answer.log_probs),
        stop_reason="length" if answer.finish is Finish.LENGTH else "completed",
        num_preempted=0,
        extra_fields={"global_steps": answer.version, **counts},
    )


class OwnServer:
    """What every rollout server is asked for besides responses; ours have nothing to do for most of it."""

    version: int | None = None
    """Of the weights: the training step that they come from."""

    async def start(self) -> None:
        """Be ready to answer."""

    async def close(self) -> None:
        """End what was started outside of this process."""

    async def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Stand in for what only an engine with a managed cache has to do."""

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = _do_nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = _do_nothing


class OwnReplica(RolloutReplica):
    """Starts one server."""

    backend: str

    @abstractmethod
    def make_server(self, **options: Any) -> Any:
        """Make the server's Ray actor, with Ray's ``options``, and return its handle."""

    async def find_place(self) -> dict[str, Any]:
        """Ray's options that put the server where it belongs; on a CPU that is anywhere."""
        return {}

    async def launch_servers(self) -> None:
        """Start the server and publish its handle."""
        self._server_address = name_server(self.backend, self.replica_rank)
        place = await self.find_place()
        self._server_handle = self.make_server(name=self._server_address, max_concurrency=self.max_concurrency, **place)
        await self._server_handle.start.remote()
        self.servers = [self._server_handle]


class OneServerClient(LLMServerClient):
    """verl's client where one ``server`` answers everything, without a load balancer, which is a process that imports
    verl.
    """

    def __init__(self, config: Any, name: str, server: Any) -> None:
        super().__init__(config)
        self._server = (name, server)

    async def _acquire_server(self, request_id: str, **_: Any) -> tuple[str, Any]:
        return self._server

    def _release_server(self, server_id: str, request_id: str | None = None) -> None:
        pass


def close_servers(replicas: Iterable[RolloutReplica]) -> None:
    """Have our servers end in order; one that has died already is passed over."""
    for replica in replicas:
        for server in replica.servers if isinstance(replica, OwnReplica) else ():
            try:
                ray.get(server.close.remote(), timeout=CLOSE_SECONDS)
            except ray.exceptions.RayError:
                continue


class WeightSender(BaseRollout):
    """Lives in the training worker. Every rank drains the weights (gathering is collective), one a replica sends."""

    backend: str

    def __init__(self, config, model_config, device_mesh, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        ranks_per_replica = config.tensor_model_parallel_size * config.data_parallel_size
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        own_replica, self._rank_in_replica = divmod(int(os.environ["RANK"]), ranks_per_replica)
        self._replica_rank = own_replica if replica_rank < 0 else replica_rank

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the server takes its memory back by itself."""

    async def release(self) -> None:
        """Do nothing: the server takes its memory back by itself."""

    async def update_weights(self, weights, global_steps: int | None = None, **_: Any) -> None:
        """Send the full state dict, in the type that the server computes in, to this replica's server."""
        state: dict[str, torch.Tensor] = {name: tensor.detach().to("cpu", self._dtype) for name, tensor in weights}
        if self._rank_in_replica == 0:
            await self.send(state, global_steps)
        del state
        trim_heap()  # an update has just ended

    async def send(self, state: dict[str, torch.Tensor], version: int | None) -> None:
        """Send ``state`` of training step ``version``."""
        await self.get_server().update_weights.remote(state, version)

    def get_server(self) -> Any:
        """The Ray actor of this replica."""
        return ray.get_actor(name_server(self.backend, self._replica_rank))

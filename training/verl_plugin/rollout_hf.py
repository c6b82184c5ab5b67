"""The rollout backend ``spear_hf``: transformers on a CPU, one Ray actor a replica, batches of token ids in and out.

verl's asynchronous rollout has three parts: a replica (starts the server), a server actor (generates, takes weights,
and answers a few calls that only a GPU engine has work for) and an adapter inside the training worker (pushes the
weights).
"""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from agents.engines.base import Finish, Generation, Request, Sampling
from agents.engines.hf import HFModel

NAME = "spear_hf"


def name_server(replica_rank: int) -> str:
    """Return the Ray actor name of a replica's server."""
    return f"{NAME}_server_{replica_rank}"


@ray.remote(num_cpus=0)
class HFServer:
    """Holds one copy of the policy and answers batches of requests, one batch at a time."""

    def __init__(self, model_path: str, response_length: int) -> None:
        threads = int(os.environ.get("OMP_NUM_THREADS", 1))
        self._model = HFModel(model_path, threads=threads, dtype=torch.float32)
        self._response_length = response_length
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spear_hf")

    async def generate_batch(self, requests: list[Request]) -> list[Generation]:
        """Answer ``requests`` in one decoding pass; the answers keep their order."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._model.generate_batch, requests)

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """Answer one request in verl's own form, so that verl's stock agent loops run on this backend too."""
        limit = sampling_params.get("max_tokens") or sampling_params.get("max_new_tokens") or self._response_length
        sampling = Sampling(
            temperature=float(sampling_params.get("temperature", 1.0)),
            top_p=float(sampling_params.get("top_p", 1.0)),
            top_k=max(0, int(sampling_params.get("top_k", 0))),
            max_tokens=int(limit),
            seed=sampling_params.get("seed"),
        )
        (answer,) = await self.generate_batch([Request(tuple(prompt_ids), sampling, request_id)])
        return TokenOutput(
            token_ids=list(answer.token_ids),
            log_probs=list(answer.log_probs),
            stop_reason="completed" if answer.finish is Finish.STOP else "length",
            num_preempted=0,
            extra_fields={"global_steps": None},
        )

    async def update_weights(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the weights; runs behind whatever batch is being decoded."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._model.load_state, state)

    async def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        """Stand in for what only an engine with a managed cache has to do."""

    wake_up = sleep = abort_all_requests = resume_generation = clear_kv_cache = _do_nothing
    release_kv_cache = resume_kv_cache = start_profile = stop_profile = set_global_steps = _do_nothing


class HFReplica(RolloutReplica):
    """Starts one :class:`HFServer`."""

    async def launch_servers(self) -> None:
        """Start the server actor and publish its handle."""
        self._server_address = name_server(self.replica_rank)
        server_class: Any = HFServer
        self._server_handle = server_class.options(
            name=self._server_address, max_concurrency=self.max_concurrency
        ).remote(self.model_config.path, self.config.response_length)
        await self._server_handle.set_global_steps.remote(0)
        self.servers = [self._server_handle]


class HFWeightSender(BaseRollout):
    """Lives in the training worker. Every rank drains the weights (gathering is collective), one a replica sends."""

    def __init__(self, config, model_config, device_mesh, replica_rank: int = -1) -> None:
        super().__init__(config, model_config, device_mesh)
        ranks_per_replica = config.tensor_model_parallel_size * config.data_parallel_size
        own_replica, self._rank_in_replica = divmod(int(os.environ["RANK"]), ranks_per_replica)
        self._replica_rank = own_replica if replica_rank < 0 else replica_rank

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: a CPU server never gives its memory away."""

    async def release(self) -> None:
        """Do nothing: a CPU server never gives its memory away."""

    async def update_weights(self, weights, global_steps: int | None = None, **_: Any) -> None:
        """Send the full state dict, float32, to this replica's server."""
        state = {name: tensor.detach().cpu().float() for name, tensor in weights}
        if self._rank_in_replica == 0:
            await ray.get_actor(name_server(self._replica_rank)).update_weights.remote(state)


# verl 0.9.1 has no public register function for the adapter; a test checks that the name still exists.
rollout_base._ROLLOUT_REGISTRY[(NAME, "async")] = f"{__name__}.HFWeightSender"
RolloutReplicaRegistry.register(NAME, lambda: HFReplica)

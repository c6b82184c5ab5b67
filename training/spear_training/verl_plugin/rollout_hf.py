"""The rollout backend ``spear_hf``: transformers on a CPU, one Ray actor a replica, batches of token ids in and out."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from verl.workers.rollout.replica import TokenOutput

from spear_agents.engines.base import Generation, Request
from spear_agents.engines.hf import HFModel
from spear_training.rollouts import HF
from spear_training.verl_plugin.rollout_servers import (
    CpuReplica,
    CpuServer,
    WeightSender,
    make_output,
    read_sampling,
    register_backend,
)
from spear_training.verl_plugin.scoring import make_exact


@ray.remote(num_cpus=0)
class HFServer(CpuServer):
    """Holds one copy of the policy and answers batches of requests, one batch at a time."""

    def __init__(self, model_path: str, response_length: int, dtype: str) -> None:
        threads = int(os.environ.get("OMP_NUM_THREADS", 1))
        self._model = HFModel(model_path, threads=threads, dtype=getattr(torch, dtype))
        make_exact(self._model.model.get_output_embeddings())
        self._response_length = response_length
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spear_hf")

    async def generate_batch(self, requests: list[Request]) -> list[Generation]:
        """Answer ``requests`` in one decoding pass; the answers keep their order."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._model.generate_batch, requests)

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """Answer one request in verl's own form, so that verl's stock agent loops run on this backend too."""
        sampling = read_sampling(sampling_params, self._response_length)
        (answer,) = await self.generate_batch([Request(tuple(prompt_ids), sampling, request_id)])
        return make_output(answer, self.global_steps)

    async def update_weights(self, state: dict[str, torch.Tensor]) -> None:
        """Replace the weights; runs behind whatever batch is being decoded."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._model.load_state, state)


class HFReplica(CpuReplica):
    """Starts one :class:`HFServer`."""

    backend = HF

    def make_server(self, **options: Any) -> Any:
        """See :class:`CpuReplica`."""
        server: Any = HFServer
        return server.options(**options).remote(self.model_config.path, self.config.response_length, self.config.dtype)


class HFWeightSender(WeightSender):
    """Sends to :class:`HFServer`."""

    backend = HF


register_backend(HF, HFReplica, HFWeightSender)

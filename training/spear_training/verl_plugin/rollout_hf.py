"""The rollout backend ``spear_hf``: transformers, one Ray actor a replica, batches of token ids in and out.

On a GPU the server shares the first device of its replica with the trainer, and moves the model out of its memory while
the trainer computes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name, get_torch_device
from verl.workers.rollout.replica import TokenOutput

from spear_agents.engines.base import Generation, Request
from spear_agents.engines.hf import HFModel
from spear_training.rollouts import HF
from spear_training.verl_plugin.rollout_servers import (
    OwnReplica,
    OwnServer,
    WeightSender,
    make_output,
    read_sampling,
    register_backend,
)
from spear_training.verl_plugin.scoring import make_exact


@ray.remote(num_cpus=0)
class HFServer(OwnServer):
    """Holds one copy of the policy and answers batches of requests, one batch at a time."""

    def __init__(self, model_path: str, response_length: int, dtype: str, device: str = "cpu") -> None:
        threads = int(os.environ.get("OMP_NUM_THREADS", 1))
        self._device = torch.device(device)
        self._model = HFModel(model_path, threads=threads, dtype=getattr(torch, dtype))
        make_exact(self._model.model.get_output_embeddings())
        self._response_length = response_length
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spear_hf")

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run after the batch being decoded."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)

    def _answer(self, requests: list[Request]) -> list[Generation]:
        self._model.model.to(self._device)
        return [replace(answer, version=self.version) for answer in self._model.generate_batch(requests)]

    def _take_weights(self, state: dict[str, torch.Tensor], version: int | None) -> None:
        self._model.load_state(state)
        self.version = version

    def _leave_device(self) -> None:
        if self._device.type != "cpu":
            self._model.model.to("cpu")
            get_torch_device().empty_cache()

    async def generate_batch(self, requests: list[Request]) -> list[Generation]:
        """Answer ``requests`` in one decoding pass; the answers keep their order."""
        return await self._run(self._answer, requests)

    async def sleep(self, *_: Any, **__: Any) -> None:
        """Give the device's memory to the trainer; the next batch takes it again."""
        await self._run(self._leave_device)

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """Answer one request in verl's own form, so that verl's stock agent loops run on this backend too."""
        sampling = read_sampling(sampling_params, self._response_length)
        (answer,) = await self.generate_batch([Request(tuple(prompt_ids), sampling, request_id)])
        return make_output(answer)

    async def update_weights(self, state: dict[str, torch.Tensor], version: int | None) -> None:
        """Replace the weights after the batch being decoded, so each response is of one version."""
        await self._run(self._take_weights, state, version)


class HFReplica(OwnReplica):
    """Starts one :class:`HFServer`."""

    backend = HF

    def make_server(self, **options: Any) -> Any:
        """See :class:`OwnReplica`."""
        server: Any = HFServer
        return server.options(**options).remote(
            self.model_config.path, self.config.response_length, self.config.dtype, get_device_name()
        )

    async def find_place(self) -> dict[str, Any]:
        """On a GPU: the node and the device of the replica's first training worker, which Ray does not count twice."""
        if get_device_name() == "cpu":
            return {}
        node, devices = await self.workers[0].__ray_call__.remote(
            lambda _: (
                ray.get_runtime_context().get_node_id(),
                ray.get_runtime_context().get_accelerator_ids()[get_platform().ray_resource_name()],
            )
        )
        # Set before the process begins: CUDA looks once, when verl is imported.
        variables = dict.fromkeys(get_platform().ray_noset_envvars(), "1")
        variables[get_platform().visible_devices_envvar()] = devices[0]
        return {
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            "runtime_env": {"env_vars": variables},
        }


class HFWeightSender(WeightSender):
    """Sends to :class:`HFServer`."""

    backend = HF


register_backend(HF, HFReplica, HFWeightSender)

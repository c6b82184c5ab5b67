"""The rollout backend ``vllm_cpu``: vLLM on a CPU, one Ray actor a replica, token ids in and out, request by request.

verl's own ``vllm`` backend asks for the distribution of that name, which no CPU build has.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.workers.rollout.replica import TokenOutput

from spear_agents.engines.base import EngineFault
from spear_agents.engines.vllm import VLLMEngine
from spear_agents.engines.vllm_options import VLLMOptions, size_cpu_cache
from spear_agents.engines.weights import select_weights, share_weights
from spear_training.rollouts import VLLM_CPU
from spear_training.verl_plugin.deaths import stop_if_dead
from spear_training.verl_plugin.rollout_servers import (
    OwnReplica,
    OwnServer,
    WeightSender,
    make_output,
    read_sampling,
    register_backend,
)

_CACHE_SHARE = 0.25
"""Of the free memory for keys and values: the trainer takes its own later."""


class Gate:
    """Holds new responses back while the weights change, and the change until no response is under way.

    So each response is of one version: vLLM would continue with keys and values of other weights.
    """

    def __init__(self) -> None:
        self._door, self._idle = asyncio.Lock(), asyncio.Event()
        self._idle.set()
        self._inside = 0

    @asynccontextmanager
    async def answer(self) -> AsyncIterator[None]:
        """Be inside while a response is written."""
        async with self._door:
            self._inside += 1
            self._idle.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if not self._inside:
                self._idle.set()

    @asynccontextmanager
    async def change(self) -> AsyncIterator[None]:
        """Wait for exclusive use."""
        async with self._door:
            await self._idle.wait()
            yield


@ray.remote(num_cpus=0)
class VLLMServer(OwnServer):
    """Holds one vLLM engine, which batches the requests and computes in processes of its own."""

    def __init__(self, model_path: str, options: VLLMOptions, max_batch: int, response_length: int) -> None:
        self._model_path = model_path
        self._options = options
        self._max_batch = max_batch
        self._response_length = response_length
        self._engine: VLLMEngine | None = None
        self._gate = Gate()

    async def start(self) -> None:
        """Start vLLM, which takes the better part of a minute. Raises SpearError if it did not start."""
        options = self._options
        if options.kv_cache_gib is None:
            gib = size_cpu_cache(Path(self._model_path), options, self._max_batch, _CACHE_SHARE)
            options = replace(options, kv_cache_gib=gib)
        self._engine = await asyncio.to_thread(VLLMEngine, self._model_path, options, max_batch=self._max_batch)

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """Answer one request. Raises EngineFault if vLLM failed, ContextExceededError if the prompt leaves no room."""
        sampling = read_sampling(sampling_params, self._response_length)
        async with self._gate.answer():
            answer = await self._get_engine().generate(prompt_ids, sampling, request_id=request_id)
            return make_output(replace(answer, version=self.version))

    async def get_cache_tokens(self) -> int | None:
        """Say how many tokens the key-value cache holds."""
        return self._get_engine().cache_tokens

    async def update_weights(self, path: str, version: int | None) -> None:
        """Replace the weights by those at ``path`` when the responses under way have ended; forget the prefix cache.

        Raises SpearError if vLLM did not take them, or has died.
        """
        await self._change(self._get_engine().load_file, path)
        self.version = version

    async def sleep(self, *_: Any, **__: Any) -> None:
        """Leave the cache's memory to the trainer until the next responses. Raises SpearError if vLLM has died."""
        await self._change(self._get_engine().release_memory)

    async def _change(self, function: Callable[..., None], *arguments: Any) -> None:
        async with self._gate.change():
            try:
                await asyncio.to_thread(function, *arguments)
            except EngineFault as fault:
                stop_if_dead(fault)
                raise

    async def close(self) -> None:
        """End vLLM's processes."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.close)

    def _get_engine(self) -> VLLMEngine:
        if self._engine is None:
            raise RuntimeError("the server has not been started")
        return self._engine


class VLLMReplica(OwnReplica):
    """Starts one :class:`VLLMServer`."""

    backend = VLLM_CPU

    def make_server(self, **options: Any) -> Any:
        """See :class:`OwnReplica`."""
        config = self.config
        server: Any = VLLMServer
        own: Any = (config.engine_kwargs or {}).get(VLLM_CPU) or {}
        chosen = VLLMOptions(
            tensor_parallel=config.tensor_model_parallel_size,
            dtype=config.dtype,
            max_model_len=config.prompt_length + config.response_length,
            **own,
        )
        return server.options(**options).remote(
            self.model_config.path, chosen, config.max_num_seqs, config.response_length
        )

    async def find_place(self) -> dict[str, Any]:
        """The node of the replica's first training worker, whose memory the server reads weights from."""
        node = await self.workers[0].__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id())
        return {"scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False)}


class VLLMWeightSender(WeightSender):
    """Sends to :class:`VLLMServer`, past Ray's object store, which would keep the memory of the weights."""

    backend = VLLM_CPU

    async def send(self, state: dict[str, torch.Tensor], version: int | None) -> None:
        """See :class:`WeightSender`. Raises SpearError if they are of another model."""
        with share_weights(select_weights(Path(self.model_config.local_path), state)) as path:
            await self.get_server().update_weights.remote(path, version)


register_backend(VLLM_CPU, VLLMReplica, VLLMWeightSender)

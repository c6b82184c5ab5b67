"""Base of our own rollout backends.

verl's asynchronous rollout has three parts: a replica, which starts the server; a server actor; and an adapter inside
the training worker, which pushes the weights.
"""

from __future__ import annotations

import asyncio
import os
import re
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.device import get_device_name, get_torch_device
from verl.workers.rollout import base as rollout_base
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from spear_agents.engines.base import EngineFault, EngineFaultKind, Finish, Generation, Request, Sampling
from spear_agents.engines.hf import HFModel
from spear_agents.engines.tensors import select_weights, share_weights
from spear_agents.engines.vllm import VLLMEngine
from spear_agents.engines.vllm_options import VLLMOptions, size_cpu_cache
from spear_envs.core.errors import SpearError
from spear_envs.core.machine import trim_heap
from spear_training.run.to_verl import HF, VLLM_CPU
from spear_training.verl_plugin.scoring import make_exact

_RESUMES = "The run stopped; the same command resumes it from its last checkpoint"
_LOST_PEER = re.compile(r"(Connection (closed|reset) by peer|Connection refused|Broken pipe|recv.* timed out)", re.I)


def explain_death(error: BaseException) -> str | None:
    """Return one line about the process that died, or None if ``error`` is about something else.

    A rank that dies takes the others down with it: they lose their peer in the middle of a collective operation, and
    which of the errors arrives first is chance.
    """
    found = _find_death(error)
    if found is None:
        return None
    return f"{found} died in the middle of a step (killed, or out of memory: see `dmesg`). {_RESUMES}"


def stop_if_dead(fault: EngineFault) -> None:
    """Raise SpearError if a rollout engine has died: as a fault it would end this episode, and then all others."""
    if fault.kind in (EngineFaultKind.DEAD, EngineFaultKind.OUT_OF_MEMORY):
        raise SpearError(f"{fault.message}. {_RESUMES}") from fault


def _find_death(error: BaseException | None) -> str | None:
    if error is None:
        return None
    if isinstance(error, (ray.exceptions.RayActorError, ray.exceptions.WorkerCrashedError)):
        name = re.search(r"class_name: (?:.*[.])?(\w+)", str(error))
        return f"the worker process {name[1]}" if name else "a worker process"
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "a worker process that used too much memory"
    if isinstance(error, RuntimeError) and _LOST_PEER.search(str(error)):
        return "a process of the trainer"
    return _find_death(getattr(error, "cause", None) or error.__cause__)


CLOSE_SECONDS = 60.0
"""How long the servers may take to end what they have started."""


def name_server(backend: str, replica_rank: int) -> str:
    """Return the Ray actor name of a replica's server."""
    return f"{backend}_server_{replica_rank}"


def register_backend(backend: str, replica: type[OwnReplica], sender: type[WeightSender]) -> None:
    """Make the name ``backend`` of a rollout engine known to verl."""
    # verl 0.9.1 has no public register function for the adapter; a test checks that the name still exists.
    rollout_base._ROLLOUT_REGISTRY[(backend, "async")] = f"{sender.__module__}.{sender.__qualname__}"
    RolloutReplicaRegistry.register(backend, lambda: replica)


def read_sampling(parameters: dict[str, Any], response_length: int) -> Sampling:
    """Return verl's sampling parameters, which are vLLM's, as ours; the default limit is ``response_length``."""
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
    """Return a response in verl's own form; ``global_steps`` is what verl calls the version of the weights."""
    counts = {} if answer.cached_tokens is None else {"num_cached_tokens": answer.cached_tokens}
    return TokenOutput(
        token_ids=list(answer.token_ids),
        log_probs=list(answer.log_probs),
        stop_reason="length" if answer.finish is Finish.LENGTH else "completed",
        num_preempted=0,
        extra_fields={"global_steps": answer.version, **counts},
    )


class OwnServer:
    """Calls that verl makes to every rollout server besides responses; for most, ours have nothing to do."""

    version: int | None = None
    """Training step that the weights come from."""

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
        """Return Ray's options that place the server; on a CPU that is anywhere."""
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
    """Sender in the training worker. Every rank drains the weights (gathering is collective), one a replica sends."""

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
        """Return the Ray actor of this replica."""
        return ray.get_actor(name_server(self.backend, self._replica_rank))


def open_exact(model_path: str, dtype: str) -> HFModel:
    """Open the policy in ``model_path`` with the head that the trainer uses, too."""
    model = HFModel(model_path, threads=int(os.environ.get("OMP_NUM_THREADS", 1)), dtype=getattr(torch, dtype))
    make_exact(model.model.get_output_embeddings())
    return model


@ray.remote(num_cpus=0)
class HFServer(OwnServer):
    """Holds one copy of the policy and answers batches of requests, one batch at a time.

    ``open_model`` is called in the server's own process.
    """

    def __init__(self, open_model: Callable[[], HFModel], response_length: int, device: str = "cpu") -> None:
        self._device = torch.device(device)
        self._model = open_model()
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
            partial(open_exact, self.model_config.path, self.config.dtype),
            self.config.response_length,
            get_device_name(),
        )

    async def find_place(self) -> dict[str, Any]:
        """Return, on a GPU, the node and the device of the replica's first training worker, which Ray does not count
        twice.
        """
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


_CACHE_SHARE = 0.25
"""Share of the free memory for keys and values: the trainer takes its own later."""


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

    def __init__(
        self,
        model_path: str,
        options: VLLMOptions,
        max_batch: int,
        response_length: int,
        open_engine: Callable[..., VLLMEngine] = VLLMEngine,
    ) -> None:
        self._open_engine = open_engine
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
        self._engine = await asyncio.to_thread(self._open_engine, self._model_path, options, max_batch=self._max_batch)

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
        """Leave the cache's memory to the trainer until the next responses. Raises SpearError if vLLM has
        died.
        """
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
        """Return the node of the replica's first training worker, whose memory the server reads weights from."""
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

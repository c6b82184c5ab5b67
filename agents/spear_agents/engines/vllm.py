"""vLLM as an engine: continuous batching in its own processes, on a CPU or GPUs."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import active_children
from pathlib import Path
from threading import Lock, Thread
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from spear_agents.engines.base import ContextExceededError, EngineFault, EngineFaultKind, Finish, Generation, Sampling
from spear_agents.engines.vision import MODEL_TYPE, ImageReader, enlarge, fold_places
from spear_agents.engines.vllm_options import (
    SEED,
    EngineLog,
    VLLMOptions,
    find_semaphores,
    find_shared_memory,
    read_dtype,
    read_lora_rank,
    require_vllm,
    size_cpu_cache,
)
from spear_agents.models import require_model_file
from spear_envs.core.errors import SpearError, one_line
from spear_envs.core.machine import trim_heap

if TYPE_CHECKING:
    import torch
    from vllm.v1.engine.async_llm import AsyncLLM

_GIB = 2**30
_CPU_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"
_CPU_BLOCK = 32
"""Tokens of a block of the key-value cache; vLLM's CPU kernels need multiples of 32."""
_LEAST_TEMPERATURE = 0.01
"""vLLM replaces lower temperatures by this one."""
_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    # Results go to the standard output, so vLLM's log must not.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    # By default each engine is pinned to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # A killed process leaks its shared memory: give it time to end, also on a busy machine.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "20",
}
_SHUTDOWN_S = 60.0
_NEWS_S = 10.0
"""Seconds to wait for the news of a worker's death."""
_log = logging.getLogger(__name__)
_WORKER = "spear_agents.engines.vllm_worker.WorkerExtension"


@dataclass
class Counts:
    """Counts from vLLM's own statistics."""

    generated_tokens: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    running: int = 0
    """Requests in the present step."""


class VLLMEngine:
    """An :class:`~spear_agents.engines.base.Engine` over vLLM's ``AsyncLLM``.

    vLLM computes in its own processes, driven by one thread, so the engine serves any number of event loops; requests
    beyond ``max_batch`` wait. A cancelled call aborts its request. With a seed (``seed`` is for requests without one) a
    response depends on the prompt, the weights and the seed; its batch can change the last bits of a log-probability,
    and so a token in the rare case of a near tie.

    vLLM's own output goes to the file :attr:`log`, which is removed if nothing went wrong; with ``VLLM_LOGGING_LEVEL``
    set it goes to the standard error output. Raises SpearError if vLLM is not installed or does not start, or ``path``
    is not the folder of a model.
    """

    def __init__(
        self, path: str | Path, options: VLLMOptions | None = None, *, max_batch: int = 128, seed: int = 0
    ) -> None:
        require_vllm()
        from spear_agents.engines.hf import read_end_ids

        self.path = require_model_file(path, "config.json").parent
        self.stop_token_ids = read_end_ids(self.path)
        """Ids that end a response by themselves (:func:`~spear_agents.engines.base.find_end_ids`)."""
        self.options = options or VLLMOptions()
        self.counts = Counts()
        self._seeds = np.random.Generator(np.random.Philox(seed))
        self._lora_rank = None if self.options.lora is None else read_lora_rank(self.options.lora)
        self.log = EngineLog(is_wanted="VLLM_LOGGING_LEVEL" not in os.environ)
        self._closing = Lock()
        self._is_death_reported = False
        self._llm, self._loop = self._start(max_batch)
        atexit.register(self.close)
        config = self._llm.vllm_config.model_config
        generation = config.try_get_generation_config()
        self.max_new_tokens: int | None = generation.get("max_new_tokens")
        """The folder's own limit of a response, or None."""
        self.context_length: int = config.max_model_len
        """Maximum tokens of prompt and response together."""
        self.cache_tokens: int | None = getattr(self._llm.vllm_config.cache_config, "kv_cache_size_tokens", None)
        """Size of the key-value cache in tokens."""
        self.takes_images: bool = config.is_multimodal_model
        is_known = config.hf_config.model_type == MODEL_TYPE
        self.reader: ImageReader | None = ImageReader(self.path) if is_known else None
        """Of Qwen2.5-VL, whose prompts hold all image tokens, so that limits count them; others have one a picture."""
        self._draws = all(self.call_workers("replace_sampling"))
        self.call_workers("fuse_norms")
        core = int(self._llm.engine_core.resources.engine_manager.processes[0].pid)
        workers = self.call_workers("end_with", os.getpid(), core)
        self._processes = (core, *workers)
        self._shared_memory = find_shared_memory(self._processes)

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, images: Sequence[np.ndarray] = ()
    ) -> Generation:
        """See :class:`~spear_agents.engines.base.Engine`.

        A response ends with the context, so ``max_tokens`` may exceed it. ``images`` go in the places of the model's
        image tokens, see :attr:`reader`. Raises SpearError for images of a text model, an empty prompt, a request that
        vLLM refuses, and a closed engine.
        """
        if self._closing.locked():
            raise SpearError("this vLLM engine is closed: make a new one")
        if len(images) and not self.takes_images:
            raise SpearError(f"{request_id}: {self.path} is a text model: make the environment with modality=text")
        room = self.context_length - len(prompt_ids)
        if room < 1:
            raise ContextExceededError(f"{len(prompt_ids)} prompt tokens fill the context of {self.context_length}")
        answer = self._answer(tuple(prompt_ids), sampling, room, request_id, tuple(images))
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(answer, self._loop))

    def call_workers(self, method: str, *args: Any) -> list[Any]:
        """Call a method of :class:`~spear_agents.engines.vllm_worker.WorkerExtension` in all of vLLM's workers."""
        call = self._llm.collective_rpc(method, args=args)
        return list(asyncio.run_coroutine_threadsafe(call, self._loop).result())

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the weights by ``state``, named and shaped as in the folder; raises as :meth:`load_file`. Linux."""
        from spear_agents.engines.tensors import select_weights, share_weights

        with share_weights(select_weights(self.path, state)) as path:
            self.load_file(path)

    def load_file(self, path: str) -> None:
        """Replace the weights by those that :func:`~spear_agents.engines.tensors.share_weights` has put at ``path``.

        The prefix cache is cleared, since it belongs to the old weights. Raises SpearError if answers are pending, the
        engine has an adapter or is closed, or vLLM refuses the weights, and EngineFault if vLLM has died.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        if self._closing.locked():
            raise SpearError("this vLLM engine is closed: make a new one")
        if self.options.lora is not None:
            raise SpearError("weights of a vLLM engine with an adapter cannot be replaced: merge the adapter first")
        if self._llm.get_num_unfinished_requests():
            raise SpearError("answers are under way: wait for them before the weights are replaced")
        try:
            self.call_workers("load_weights", path)
            self._forget_prefixes()
        except Exception as error:
            if isinstance(error, EngineDeadError) or self._is_ending():
                raise self._explain_death() from error
            raise SpearError(f"vLLM did not take the new weights: {one_line(error)}{self.log.keep()}") from error

    def release_memory(self) -> None:
        """Give the memory of the key-value cache back to the system until requests fill it again; on a CPU only.

        Raises EngineFault if vLLM has died, RuntimeError if answers are pending.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            self._forget_prefixes()
            self.call_workers("release_memory")
        except EngineDeadError as error:
            raise self._explain_death() from error
        trim_heap()

    def _forget_prefixes(self) -> None:
        reset = asyncio.run_coroutine_threadsafe(self._llm.reset_prefix_cache(), self._loop)
        if not reset.result():
            raise RuntimeError("its prefix cache is in use")

    def close(self) -> None:
        """Abort running requests and end vLLM's processes; may be called more than once."""
        if not self._closing.acquire(blocking=False):
            return
        atexit.unregister(self.close)
        asyncio.run_coroutine_threadsafe(_end(self._llm), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        for file in (*self._shared_memory, *find_semaphores(self._processes)):  # of killed processes
            file.unlink(missing_ok=True)
        self.log.close()

    def _start(self, max_batch: int) -> tuple[AsyncLLM, asyncio.AbstractEventLoop]:
        """Start vLLM in a thread with its own event loop.

        Its processes inherit that thread's signal mask, so that Ctrl-C only reaches this process, which ends them.
        """
        ready: Future[tuple[AsyncLLM, asyncio.AbstractEventLoop]] = Future()

        def serve() -> None:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            loop = asyncio.new_event_loop()
            try:
                with self.log.take_output():
                    llm = _make_llm(self.path, self.options, self._lora_rank, max_batch, self.counts)
            except BaseException as error:
                ready.set_exception(error)
            else:
                ready.set_result((llm, loop))
                loop.run_forever()
            finally:
                loop.close()

        before = set(active_children())
        self._thread = Thread(target=serve, name="vllm-engine", daemon=True)
        self._thread.start()
        try:
            return ready.result()
        except Exception as error:
            self._thread.join()
            cause = self.log.find_cause() or " ".join(str(error).split()) or type(error).__name__
            raise SpearError(f"vLLM did not start with {self.path}: {cause}{self.log.keep()}") from error
        except BaseException:
            while self._thread.is_alive():
                for child in set(active_children()) - before:
                    child.terminate()
                self._thread.join(0.1)
            if not ready.exception():
                ready.result()[0].shutdown(timeout=_SHUTDOWN_S)
            self.log.close()
            raise

    async def _answer(
        self,
        prompt_ids: tuple[int, ...],
        sampling: Sampling,
        room: int,
        request_id: str,
        images: tuple[np.ndarray, ...],
    ) -> Generation:
        from vllm import TokensPrompt
        from vllm.exceptions import VLLMValidationError
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        given = prompt_ids if self.reader is None else fold_places(prompt_ids, self.reader.image_token_id)
        prompt = TokensPrompt(prompt_token_ids=list(given))
        if images:
            prompt["multi_modal_data"] = {"image": [Image.fromarray(enlarge(image)) for image in images]}
        lora = None if self.options.lora is None else LoRARequest("lora", 1, self.options.lora)
        params = self._make_params(sampling, room)
        last = None
        try:
            async for state in self._llm.generate(prompt, params, request_id, lora_request=lora):
                last = state
        except EngineDeadError as error:
            raise self._explain_death() from error
        except EngineGenerateError as error:
            cause = error.__cause__ or error
            raise EngineFault(EngineFaultKind.SERVER_ERROR, f"vLLM failed: {cause!r}") from error
        except (VLLMValidationError, ValueError) as error:
            if "longer than the maximum model length" in str(error):
                raise ContextExceededError(str(error).split(". ")[0]) from error
            raise SpearError(f"{request_id}: vLLM refuses the request: {error}") from error
        output = None if last is None else last.outputs[0]
        if last is None or output is None or output.finish_reason not in ("stop", "length"):
            reason = None if output is None else output.finish_reason
            raise EngineFault(EngineFaultKind.SERVER_ERROR, f"vLLM ended the response early ({reason})")
        finish = Finish.LENGTH
        if output.finish_reason == "stop":
            finish = Finish.STRING if isinstance(output.stop_reason, str) else Finish.STOP
        token_ids = tuple(output.token_ids)
        log_probs = tuple(output.logprobs.logprobs)
        if len(log_probs) != len(token_ids):
            raise SpearError(f"vLLM gave {len(log_probs)} log-probabilities to {len(token_ids)} tokens")
        return Generation(token_ids, log_probs, finish, cached_tokens=last.num_cached_tokens)

    def _make_params(self, sampling: Sampling, room: int) -> Any:
        """Convert a sampling to vLLM's form. Raises SpearError if vLLM would silently change it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if 0 < sampling.temperature < _LEAST_TEMPERATURE:
            raise SpearError(f"vLLM samples at temperature 0 or from {_LEAST_TEMPERATURE}, got {sampling.temperature}")
        if not self._draws and (sampling.top_k or sampling.top_p < 1) and sampling.temperature:
            raise SpearError("this version of vLLM cannot give log-probabilities with --top-k and --top-p")
        seed = int(self._seeds.integers(2**63)) if sampling.seed is None else sampling.seed
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=min(sampling.max_tokens, room),
            seed=None if self._draws else seed % 2**63,
            logit_bias=None if self.reader is None else {self.reader.image_token_id: -100.0},
            extra_args={SEED: seed % 2**64},
            # vLLM reads only some of the files with end tokens.
            ignore_eos=True,
            stop_token_ids=list(dict.fromkeys((*self.stop_token_ids, *sampling.stop_token_ids))),
            stop=list(sampling.stop_strings) or None,
            include_stop_str_in_output=True,
            detokenize=bool(sampling.stop_strings),
            skip_special_tokens=False,
            spaces_between_special_tokens=False,
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _is_ending(self) -> bool:
        """Return whether vLLM has died: a dead worker fails its calls before vLLM notices."""
        end = time.monotonic() + _NEWS_S
        while not self._llm.errored and time.monotonic() < end:
            time.sleep(0.1)
        return bool(self._llm.errored)

    def _explain_death(self) -> EngineFault:
        if self._closing.locked():
            return EngineFault(EngineFaultKind.SERVER_ERROR, "the vLLM engine was closed")
        cause = self.log.find_cause()
        kind = EngineFaultKind.OUT_OF_MEMORY if self.log.is_out_of_memory() else EngineFaultKind.DEAD
        fault = EngineFault(kind, f"vLLM's process has ended: {cause or 'killed from outside'}{self.log.keep()}")
        if not self._is_death_reported:  # records keep only the kind
            self._is_death_reported = True
            _log.error("%s", fault)
        return fault


def _make_llm(path: Path, options: VLLMOptions, lora_rank: int | None, max_batch: int, counts: Counts) -> AsyncLLM:
    """Start vLLM, which takes minutes for a large model."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    wanted: dict[str, Any] = {
        "model": str(path),
        "dtype": options.dtype or read_dtype(path),
        "tensor_parallel_size": options.tensor_parallel,
        "max_model_len": options.max_model_len,
        "max_num_seqs": max_batch,
        "enable_prefix_caching": True,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": _WORKER,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if options.gpu_memory_utilization is not None:
        wanted["gpu_memory_utilization"] = options.gpu_memory_utilization
    if lora_rank is not None:
        wanted |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": lora_rank}
    cache_gib = options.kv_cache_gib
    changes: dict[str, str | None] = {}
    if current_platform.is_cpu():
        # Compiling costs more than it saves on a CPU: half a minute at the first request for the sampler.
        wanted["enforce_eager"] = True
        changes["TORCH_COMPILE_DISABLE"] = "1"
        # Prefixes are cached in full blocks: with vLLM's 128 tokens most turns would read half a block again.
        wanted["block_size"] = _CPU_BLOCK
        # A seeded request with a prompt in chunks crashes vLLM: CPU generators cannot be reset.
        wanted["enable_chunked_prefill"] = False
        if cache_gib is not None:
            changes[_CPU_CACHE_VARIABLE] = None
        elif not os.environ.get(_CPU_CACHE_VARIABLE):
            cache_gib = size_cpu_cache(path, options, max_batch)
    if cache_gib is not None:
        wanted["kv_cache_memory_bytes"] = int(cache_gib * _GIB)
    with _set_environment(changes):
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**wanted), stat_loggers=[_make_counter(counts)])


def _make_counter(counts: Counts) -> Callable[..., Any]:
    """Make a logger that sums up vLLM's statistics."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class Counter(StatLoggerBase):
        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(
            self,
            scheduler_stats: Any,
            iteration_stats: Any,
            mm_cache_stats: Any = None,
            engine_idx: int = 0,
        ) -> None:
            if iteration_stats is not None:
                counts.generated_tokens += iteration_stats.num_generation_tokens
            if scheduler_stats is not None:
                counts.running = scheduler_stats.num_running_reqs
                counts.prompt_tokens += scheduler_stats.prefix_cache_stats.queries
                counts.cached_prompt_tokens += scheduler_stats.prefix_cache_stats.hits

        def log_engine_initialized(self) -> None:
            pass

    return Counter


async def _end(llm: AsyncLLM) -> None:
    """Cancel the running requests, which aborts them, and end vLLM's processes."""
    here = asyncio.current_task()
    answers = [task for task in asyncio.all_tasks() if task is not here and "_answer" in repr(task.get_coro())]
    for task in answers:
        task.cancel()
    await asyncio.gather(*answers, return_exceptions=True)
    llm.shutdown(timeout=_SHUTDOWN_S)
    # Its finaliser calls this again, perhaps during interpreter shutdown.
    llm.shutdown = lambda timeout=None: None
    rest = [task for task in asyncio.all_tasks() if task is not here]
    for task in rest:
        task.cancel()
    await asyncio.gather(*rest, return_exceptions=True)


@contextmanager
def _set_environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables, or remove them (None), for the duration of the block."""
    before = {name: os.environ.get(name) for name in changes}
    _change_environment(changes)
    try:
        yield
    finally:
        _change_environment(before)


def _change_environment(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

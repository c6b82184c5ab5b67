"""Extension of vLLM's worker processes. vLLM imports it by name; this module does not import vLLM."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from spear_agents.engines.tensors import filter_probs, invert_mass, release_pages, uniform_at
from spear_agents.engines.vllm_options import SEED
from spear_envs.core.machine import trim_heap

_LOOK_EVERY_S = 1.0


class WorkerExtension:
    """Methods that vLLM adds to its workers (``worker_extension_cls``), called by :meth:`VLLMEngine.call_workers`."""

    model_runner: Any

    def replace_sampling(self) -> bool:
        """Sample tokens as the ``hf`` engine does, and take their log-probabilities before top-k and top-p.

        vLLM draws a row of noise over the vocabulary for each seeded request; here a request's seed (``extra_args``)
        and its number of tokens give one uniform number. vLLM's log-probabilities are either before the temperature or
        after the filters; verl's rollouts use those in between. Returns whether this vLLM's sampler has the expected
        structure.
        """
        runner = self.model_runner
        sampler = getattr(runner, "sampler", None)
        filters = getattr(sampler, "topk_topp_sampler", None)
        if filters is None or getattr(sampler, "logprobs_mode", None) != "processed_logprobs":
            return False

        def forward(
            logits: torch.Tensor, generators: Any, k: torch.Tensor | None, p: torch.Tensor | None
        ) -> tuple[torch.Tensor, torch.Tensor]:
            log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
            probs = log_probs.exp()
            if k is not None or p is not None:
                count = len(probs)
                top_k = torch.zeros(count, dtype=torch.long, device=probs.device) if k is None else k.long()
                top_p = torch.ones(count, dtype=torch.float64, device=probs.device) if p is None else p.double()
                probs = filter_probs(probs, top_k, top_p)
            rows = [runner.requests[name] for name in runner.input_batch.req_ids]
            uniform = draw_uniform(rows) if len(rows) == len(probs) else np.zeros(len(probs))  # no rows: profiling
            return invert_mass(probs, torch.from_numpy(uniform).to(probs.device)), log_probs

        filters.forward = forward
        return True

    def fuse_norms(self) -> int:
        """Use vLLM's own kernel of the RMS norm on a CPU, and return for how many layers.

        There vLLM counts on ``torch.compile``, which the engine turns off: each norm then runs as ten operations of
        torch, which take a quarter of a small model's time. The kernel rounds once, at the end.
        """
        layers = self.model_runner.get_model().modules()
        norms = [layer for layer in layers if type(layer).__name__ == "RMSNorm" and _has_kernel(layer)]
        for layer in norms:
            layer._forward_method = partial(_normalize, layer, layer._forward_method)
        return len(norms)

    def load_weights(self, path: str) -> None:
        """Replace the model's weights by those that ``torch.save`` wrote to ``path``, in place.

        On a CPU vLLM packs the weights of linear layers: ``reload_weights`` packs them again, unlike
        ``model.load_weights``.
        """
        state = torch.load(path, mmap=True, weights_only=True)
        self.model_runner.reload_weights(weights_iterator=iter(state.items()))
        # vLLM 0.31 skips layers without their own weight: an output layer tied to the embedding would keep the packed
        # old weights.
        owners: dict[int, list[Any]] = {}
        for layer in self.model_runner.get_model().modules():
            for weight in layer.parameters(recurse=False):
                owners.setdefault(id(weight), []).append(layer)
        for layers in owners.values():
            for layer in layers if len(layers) > 1 else ():
                layer.quant_method.process_weights_after_loading(layer)

    def release_memory(self) -> None:
        """Give the memory of the key-value cache back to the system, on a CPU; its contents are lost."""
        layers = [cache if isinstance(cache, (list, tuple)) else [cache] for cache in self.model_runner.kv_caches]
        storages = [cache.untyped_storage() for layer in layers for cache in layer]  # several in state-space layers
        for storage in {storage.data_ptr(): storage for storage in storages}.values():
            if storage.device.type == "cpu":
                release_pages(storage)
        trim_heap()

    def end_with(self, owner: int, core: int) -> int:
        """End vLLM's first process ``core`` soon after the process ``owner``, which may be killed; return own pid."""
        threading.Thread(target=_end_after, args=(owner, core), name="end-with-owner", daemon=True).start()
        return os.getpid()


def _has_kernel(norm: Any) -> bool:
    weight, kernel = getattr(norm, "weight", None), getattr(torch.ops._C, "fused_add_rms_norm", None)
    plain = getattr(norm, "has_weight", False) and getattr(norm, "variance_size_override", 0) is None
    return plain and kernel is not None and weight is not None and weight.device.type == "cpu"


def _normalize(norm: Any, otherwise: Callable[..., Any], x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """Normalise ``x``, plus ``residual`` in place if there is one, as ``RMSNorm.forward`` of vLLM does."""
    weight, epsilon = norm.weight.data, norm.variance_epsilon
    if x.dtype != weight.dtype or not x.is_contiguous():
        return otherwise(x, residual)
    if residual is None:
        result = torch.empty_like(x)
        torch.ops._C.rms_norm(result, x, weight, epsilon)
        return result
    if residual.dtype != x.dtype or not residual.is_contiguous():
        return otherwise(x, residual)
    torch.ops._C.fused_add_rms_norm(x, residual, weight, epsilon)
    return x, residual


def draw_uniform(rows: Sequence[Any]) -> np.ndarray:
    """Return the next uniform number of each of vLLM's requests: float64 [N] in [0, 1)."""
    seeds = np.array([row.sampling_params.extra_args[SEED] for row in rows], dtype=np.uint64)
    return uniform_at(seeds, np.array([len(row.output_token_ids) for row in rows], dtype=np.uint64))


def _end_after(owner: int, core: int) -> None:
    with suppress(ProcessLookupError):
        while True:
            with suppress(PermissionError):
                os.kill(owner, 0)
            time.sleep(_LOOK_EVERY_S)
    # It ends its workers and frees their shared memory.
    os.kill(core, signal.SIGTERM)

"""A CPU platform for verl: chosen by ``VERL_PLATFORM=cpu``, gloo for communication, logical Ray "GPU" slots."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _always(value: Any) -> Callable[..., Any]:
    """Return a function that returns ``value``, whatever its arguments."""
    return lambda *args, **kwargs: value


_do_nothing, _zero = _always(None), _always(0)


def _memory_info(*args: Any, **kwargs: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _build_device_module() -> types.ModuleType:
    """Return what verl expects of ``torch.<device>`` and ``torch.cpu`` lacks: memory counters and a random state."""
    module = types.ModuleType("spear_cpu_device")
    vars(module).update(
        is_available=_always(False),  # turns verl's device-memory helpers into no-ops
        current_device=_always("cpu"),
        device_count=_always(1),
        get_device_name=_always("CPU"),
        set_device=_do_nothing,
        synchronize=_do_nothing,
        empty_cache=_do_nothing,
        ipc_collect=_do_nothing,
        reset_peak_memory_stats=_do_nothing,
        memory_allocated=_zero,
        memory_reserved=_zero,
        max_memory_allocated=_zero,
        max_memory_reserved=_zero,
        mem_get_info=_memory_info,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
        get_rng_state=lambda *a, **k: torch.get_rng_state(),  # checkpoints save and restore it
        set_rng_state=lambda state, *a, **k: torch.set_rng_state(state),
    )
    return module


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """verl's platform interface on a machine without an accelerator."""

    _module = _build_device_module()
    device_name = vendor_name = property(_always("cpu"))
    device_module = property(lambda self: self._module)
    is_available = _always(True)
    device_count = _always(1)
    get_device_capability = _always((None, None))
    communication_backend_name = _always("gloo")
    is_ipc_supported = _always(False)  # there is no device memory to share
    current_device = _always("cpu")  # for `tensor.to`, where an index would fail
    visible_devices_envvar = _always("CUDA_VISIBLE_DEVICES")  # verl clears and sets it around its workers
    ray_resource_name = _always("GPU")  # verl counts only GPU and NPU, so the launcher gives Ray logical GPUs
    ray_noset_envvars: Any = staticmethod(list)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    set_device = synchronize = set_allocator_settings = empty_cache = _do_nothing
    profiler_start = profiler_stop = cudart = _do_nothing
    nvtx_range = staticmethod(nullcontext)

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return True only if the CPU was asked for: a head node without a GPU must not turn a cluster's run to it."""
        return os.environ.get("VERL_PLATFORM") == "cpu"

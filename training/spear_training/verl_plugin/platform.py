"""A CPU platform for verl: chosen by ``VERL_PLATFORM=cpu``, gloo for communication, logical Ray "GPU" slots."""

from __future__ import annotations

import os
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for device calls that have no meaning on a CPU."""


def _zero(*args: Any, **kwargs: Any) -> int:
    return 0


def _memory_info(*args: Any, **kwargs: Any) -> tuple[int, int]:
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _build_device_module() -> types.ModuleType:
    """What verl expects of ``torch.<device>`` and ``torch.cpu`` lacks: memory counters and random state."""
    module = types.ModuleType("spear_cpu_device")
    vars(module).update(
        is_available=lambda: False,  # turns verl's device-memory helpers into no-ops
        current_device=lambda: "cpu",
        device_count=lambda: 1,
        get_device_name=lambda *a, **k: "CPU",
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
    device_name = property(lambda self: "cpu")
    vendor_name = property(lambda self: "cpu")
    device_module = property(lambda self: self._module)

    def is_available(self) -> bool:
        """Return True: a CPU is always there."""
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        """Return True only if the CPU was asked for: a head node without a GPU must not turn a cluster's run to it."""
        return os.environ.get("VERL_PLATFORM") == "cpu"

    def current_device(self) -> str:
        """Return ``"cpu"``; verl passes it to ``tensor.to``, where an index would fail."""
        return "cpu"

    def device_count(self) -> int:
        """Return 1."""
        return 1

    def set_device(self, device_index: int) -> None:
        """Do nothing."""

    def synchronize(self, device_index: int | None = None) -> None:
        """Do nothing."""

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generator."""
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        """Seed torch's generator."""
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        """Do nothing."""

    def empty_cache(self) -> None:
        """Do nothing."""

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        """Return no capability."""
        return None, None

    def communication_backend_name(self) -> str:
        """Return ``"gloo"``."""
        return "gloo"

    def visible_devices_envvar(self) -> str:
        """Return the variable verl clears and sets around its workers."""
        return "CUDA_VISIBLE_DEVICES"

    def profiler_start(self) -> None:
        """Do nothing."""

    def profiler_stop(self) -> None:
        """Do nothing."""

    def ray_resource_name(self) -> str:
        """Return ``"GPU"``: verl counts only GPU and NPU, so the launcher gives Ray logical GPUs."""
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        """Return no variables."""
        return []

    def is_ipc_supported(self) -> bool:
        """Return False: there is no device memory to share."""
        return False

    def cudart(self) -> None:
        """Return None."""

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        """Yield without marking anything."""
        yield

from __future__ import annotations

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch
from verl.plugin.platform import PlatformBase

from spear_training.verl_plugin.platform import PlatformCPU


def test_the_platform_is_whole() -> None:
    platform = PlatformCPU()  # abstract methods would refuse
    assert isinstance(platform, PlatformBase)
    assert (platform.device_name, platform.vendor_name) == ("cpu", "cpu")
    assert platform.is_available()
    assert platform.device_count() == 1
    assert platform.communication_backend_name() == "gloo"
    assert not platform.is_ipc_supported()
    assert platform.get_device_capability() == (None, None)


def test_tensors_go_where_the_platform_says() -> None:
    platform = PlatformCPU()
    assert torch.zeros(1).to(platform.current_device()).device.type == "cpu"
    assert torch.zeros(1).to(platform.device_module.current_device()).device.type == "cpu"


def test_ray_places_workers_by_logical_gpus() -> None:
    # verl counts the resource of this name, and clears the variable of the other.
    assert PlatformCPU().ray_resource_name() == "GPU"
    assert PlatformCPU().visible_devices_envvar() == "CUDA_VISIBLE_DEVICES"
    assert PlatformCPU().ray_noset_envvars() == []


def test_random_state_is_saved_and_restored() -> None:
    platform = PlatformCPU()
    before = torch.get_rng_state()
    try:
        platform.manual_seed(3)
        state = platform.device_module.get_rng_state()
        first = torch.rand(4)
        platform.device_module.set_rng_state(state)
        assert torch.equal(first, torch.rand(4))
        platform.manual_seed_all(3)
        assert torch.equal(first, torch.rand(4))
    finally:
        torch.set_rng_state(before)

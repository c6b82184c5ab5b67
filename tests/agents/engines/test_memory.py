"""Memory that a process gives back while it goes on."""

import mmap
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from spear_agents.engines.tensors import release_pages, trim_heap

ROLLUP = Path("/proc/self/smaps_rollup")
pytestmark = pytest.mark.skipif(not ROLLUP.exists(), reason="needs Linux, whose memory a process can count")
MIB = 2**20


def count_resident() -> int:
    """Bytes of this process's anonymous memory that are in RAM."""
    lines = ROLLUP.read_text("ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss_Anon:"))


def test_pages_of_a_tensor_are_given_back_and_can_be_written_again() -> None:
    cache = torch.ones(64 * MIB, dtype=torch.uint8)
    before = count_resident()
    given = release_pages(cache.untyped_storage())
    assert 64 * MIB - 2 * mmap.PAGESIZE <= given <= 64 * MIB
    assert before - count_resident() > 60 * MIB
    assert int(cache.sum()) <= 2 * mmap.PAGESIZE, "zeros, but at the two ends"
    cache.fill_(3)
    assert bool((cache == 3).all())


def test_neighbours_of_a_small_tensor_are_left_alone() -> None:
    block = torch.arange(3 * mmap.PAGESIZE, dtype=torch.uint8)
    wanted = block.clone()
    assert release_pages(torch.ones(16).untyped_storage()) == 0
    assert torch.equal(block, wanted)


def test_freed_memory_is_given_back() -> None:
    blocks = [torch.ones(16 * 1024) for _ in range(2048)]  # 64 KiB each, from the heap
    del blocks[::2]  # malloc keeps the holes
    before = count_resident()
    trim_heap()
    assert before - count_resident() > 40 * MIB
    assert all(bool((block == 1).all()) for block in blocks)

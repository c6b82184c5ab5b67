"""Memory given back to the system by a process that goes on: pages of a tensor, and what malloc keeps. Linux only."""

from __future__ import annotations

import ctypes
import mmap

import torch

_DONT_NEED = 4
"""``MADV_DONTNEED`` of Linux: pages of anonymous memory are dropped, and read as zeros afterwards."""


def release_pages(storage: torch.UntypedStorage) -> int:
    """Drop the contents of a CPU tensor's storage, which reads as zeros afterwards; returns the bytes given back.

    Bytes before the first and after the last whole page stay as they are. Raises OSError if the system refuses.
    """
    page = mmap.PAGESIZE
    start = -(-storage.data_ptr() // page) * page
    size = (storage.data_ptr() + storage.nbytes()) // page * page - start
    if size <= 0:
        return 0
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _DONT_NEED):
        raise OSError(ctypes.get_errno(), "madvise failed")
    return size


def trim_heap() -> None:
    """Give back what malloc keeps of freed memory, where it is glibc's."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))

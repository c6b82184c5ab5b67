"""Chunks of a build: the postings of some documents in one file, of which parts are read at a time.

The file is a line of JSON, padded, and the arrays one after the other. It is written under another name and renamed; a
checksum tells whether a crash of the system has left less.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.bm25.postings import Postings

MAX_DOCUMENTS = 1 << 16
"""Of a chunk: their numbers are written in two bytes."""
HEADER = 1_024
TYPES = {"term_bytes": "u1", "term_ends": "<i8", "starts": "<i8", "documents": "<u2", "counts": "<u2", "norms": "u1"}


@dataclass(frozen=True)
class Chunk:
    """A finished chunk."""

    path: Path
    sizes: dict[str, int]
    """Length of each array."""
    terms_total: int
    filled: int
    checksum: int

    @classmethod
    def open(cls, path: Path) -> Chunk:
        """Read what is in a file.

        Raises:
            OSError, ValueError, KeyError, TypeError: it is not a chunk.
        """
        with path.open("rb") as file:
            return cls(path, **json.loads(file.read(HEADER)))

    def read(self, array: str, start: int = 0, stop: int | None = None) -> npt.NDArray[Any]:
        """Part of an array."""
        before = HEADER
        for name, kind in TYPES.items():
            if name == array:
                break
            before += self.sizes[name] * np.dtype(kind).itemsize
        stop = self.sizes[array] if stop is None else stop
        dtype = np.dtype(TYPES[array])
        return np.fromfile(self.path, dtype, stop - start, offset=before + start * dtype.itemsize)

    def is_whole(self) -> bool:
        """Whether all was written: reads it all."""
        checksum = 0
        for array in TYPES:
            values = self.read(array)
            if len(values) != self.sizes[array]:
                return False
            checksum = zlib.crc32(values.data, checksum)
        return checksum == self.checksum


def write_chunk(postings: Postings, path: Path) -> None:
    """Write the postings of at most ``MAX_DOCUMENTS`` documents; the file is there either wholly or not at all."""
    arrays = [np.ascontiguousarray(getattr(postings, array), kind) for array, kind in TYPES.items()]
    checksum = 0
    for values in arrays:
        checksum = zlib.crc32(values.data, checksum)
    header = {
        "sizes": dict(zip(TYPES, map(len, arrays), strict=True)),
        "terms_total": postings.terms_total,
        "filled": postings.filled,
        "checksum": checksum,
    }
    part = path.with_suffix(f".{os.getpid()}")  # two chunks of equal texts have one name
    with part.open("wb") as file:
        file.write(json.dumps(header).encode("ascii").ljust(HEADER))
        for values in arrays:
            file.write(values.data)
    part.replace(path)

"""Chunks of a build: the postings of some documents in one file, which is read in parts.

The file is a padded line of JSON followed by the arrays. It is written under another name and renamed; a checksum
detects truncation by a crash of the system.
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
from spear_envs.data.files import put_file

MAX_DOCUMENTS = 1 << 16
"""Documents of a chunk: their numbers have two bytes."""
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
        """Read the header of a file.

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
        """Read everything and compare the checksum."""
        checksum = 0
        for array in TYPES:
            values = self.read(array)
            if len(values) != self.sizes[array]:
                return False
            checksum = zlib.crc32(values.data, checksum)
        return checksum == self.checksum


def write_chunk(postings: Postings, path: Path) -> None:
    """Write the postings of at most ``MAX_DOCUMENTS`` documents atomically."""
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
    part = path.with_suffix(f".{os.getpid()}")  # chunks of equal texts share a name
    with part.open("wb") as file:
        file.write(json.dumps(header).encode("ascii").ljust(HEADER))
        for values in arrays:
            file.write(values.data)
    put_file(part, path)

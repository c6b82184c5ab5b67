"""An index in a folder: a file of little-endian numbers for each array, and a manifest that is written last.

A folder without a manifest is not an index. Arrays are mapped read-only, so that opening costs milliseconds and all
processes share one copy in memory.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.bm25.packing import PADDING, Packed, count_words
from spear_envs.core.errors import SpearError, name_error
from spear_envs.data.files import MANIFEST, read_manifest, write_manifest

FORMAT = "spear-bm25-index"
VERSION = 3
"""Raised whenever the files, the analysis or the order of documents would differ."""
ARRAYS: Mapping[str, npt.DTypeLike] = {
    "term_bytes": "u1",
    "term_ends": "<i8",
    "frequencies": "<u4",
    "starts": "<i8",
    "peaks": "u1",
    "lasts": "<u4",
    "blocks": "<u8",
    "data": "u1",
    "norms": "u1",
    "mapped": "<u4",
    "maps": "<u8",
}
"""Fields of :class:`~.packing.Packed` that are files, and their types."""
MEND = "build it again"


def name_file(array: str) -> str:
    """Return the name of an array's file."""
    return f"{array}.bin"


class ArrayWriter:
    """Writes growing arrays, each to its file in ``folder``; leaving the block syncs them.

    Raises:
        OSError: the disk is full.
    """

    def __init__(self, folder: Path) -> None:
        self._stack = ExitStack()
        self._files = {array: self._stack.enter_context((folder / name_file(array)).open("wb")) for array in ARRAYS}

    def append(self, array: str, values: npt.NDArray[Any]) -> None:
        """Add values to the end of an array."""
        self._files[array].write(np.ascontiguousarray(values, ARRAYS[array]).data)

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with self._stack:
            if kind is None:
                # Before the manifest is written, which must not outlive what it lists.
                for file in self._files.values():
                    file.flush()
                    os.fsync(file.fileno())


def finish_index(folder: Path, terms_total: int, filled: int) -> None:
    """Turn a folder with complete arrays into an index."""
    content = {"format": FORMAT, "version": VERSION, "terms_total": terms_total, "filled": filled}
    write_manifest(folder, content, map(name_file, ARRAYS))


def map_index(folder: Path, mend: str = MEND) -> Packed:
    """Map the index in ``folder``.

    Args:
        mend: the end of an error message, what the user can do.

    Raises:
        SpearError: there is no index, it is of another version, or files are missing or have another size than was
            written. Checksums are not compared.
    """
    try:
        manifest = read_manifest(folder, "a search index", mend, format=FORMAT, version=VERSION)
        arrays = {
            array: _map_array(folder, array, manifest["files"][name_file(array)]["bytes"], mend) for array in ARRAYS
        }
        packed = Packed(terms_total=int(manifest["terms_total"]), filled=int(manifest["filled"]), **arrays)
    except FileNotFoundError:
        raise SpearError(f"{folder} does not hold a finished search index: {mend}.") from None
    except OSError as error:
        raise SpearError(f"{folder}: the search index cannot be read ({error}): {mend}.") from error
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise SpearError(f"{folder / MANIFEST} is damaged ({name_error(error)}): {mend}.") from error
    # The compiled search trusts these relations of lengths; within the arrays it checks every number that it follows.
    terms = len(packed.frequencies)
    if (
        not len(packed.starts) == len(packed.term_ends) == terms + 1
        or len(packed.peaks) != terms
        or len(packed.lasts) != len(packed.blocks)
        or len(packed.data) < PADDING
        or len(packed.maps) != len(packed.mapped) * count_words(len(packed.norms))
        or not 0 <= packed.filled <= len(packed.norms)
        or not packed.filled <= packed.terms_total < 1 << 62
    ):
        raise SpearError(f"{folder}: the files of the search index and its manifest do not belong together: {mend}.")
    return packed


def _map_array(folder: Path, array: str, size: int, mend: str) -> npt.NDArray[Any]:
    path = folder / name_file(array)
    with path.open("rb") as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise SpearError(f"{path} has {found:,} bytes and should have {size:,}: {mend}.")
        # An empty file cannot be mapped.
        data: Any = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
    return np.frombuffer(data, ARRAYS[array])

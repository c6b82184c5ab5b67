"""``items_ins_v2*.json`` as a table on disk, for builds: a dictionary of a million entries would take gigabytes."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from spear_envs.core.errors import SpearError
from spear_envs.data.files import put_file
from spear_envs.webshop.products import MAX_ASIN
from spear_envs.webshop.sources import JsonReader, iterate_object

KEY = f"S{MAX_ASIN}"
REPORT_EVERY = 4_096


def write_attribute_table(source: Path, folder: Path, on_bytes: Callable[[int], None] | None = None) -> None:
    """Write the members of a JSON object as a table into ``folder``, complete or not at all.

    Args:
        source: ``items_ins_v2*.json[.xz]``.
        folder: an existing folder; a table in it is kept.
        on_bytes: called with the bytes of the text read so far.

    Raises:
        SpearError: the file is broken, or a member is not an object.
    """
    if (folder / "attributes.npz").exists():
        return
    keys = bytearray()
    ends = array("Q", [0])
    part = folder / "attributes.part"
    with JsonReader(source) as reader, part.open("wb") as file:
        for count, (key, value, text) in enumerate(iterate_object(reader)):
            if not isinstance(value, Mapping):
                raise SpearError(f"{source}: the entry {key!r} must be an object.")
            if not key.isascii() or not 0 < len(key) <= MAX_ASIN:
                continue  # not an ASIN of a listed product
            keys += key.encode("ascii").ljust(MAX_ASIN, b"\0")
            ends.append(ends[-1] + file.write(text.encode("utf-8", "surrogatepass")))
            if on_bytes is not None and count % REPORT_EVERY == 0:
                on_bytes(reader.offset)
    put_file(part, folder / "attributes.bin")
    names = np.frombuffer(bytes(keys), KEY)
    # Of members with the same name JSON takes the last: the first of the reversed list.
    names, last = np.unique(names[::-1], return_index=True)
    places = len(ends) - 2 - last
    bounds = np.array(ends, np.uint64)
    table = {"names": names, "starts": bounds[places], "ends": bounds[places + 1]} if len(ends) > 1 else {}
    with (folder / "attributes.npz.part").open("wb") as file:
        np.savez(file, **table)  # type: ignore[arg-type]
    put_file(folder / "attributes.npz.part", folder / "attributes.npz")


class AttributeTable:
    """The entries of a table by ASIN."""

    def __init__(self, folder: Path) -> None:
        with np.load(folder / "attributes.npz") as table:
            self._names = table["names"] if "names" in table else np.zeros(0, KEY)
            self._starts = table["starts"] if "starts" in table else np.zeros(0, np.uint64)
            self._ends = table["ends"] if "ends" in table else np.zeros(0, np.uint64)
        self._file = os.open(folder / "attributes.bin", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def get(self, asin: str) -> Mapping[str, Any] | None:
        """Return the entry of a product, or None."""
        key = np.array(asin.encode("ascii"), KEY)
        place = int(np.searchsorted(self._names, key))
        if place == len(self._names) or self._names[place] != key:
            return None
        start, end = int(self._starts[place]), int(self._ends[place])
        return json.loads(os.pread(self._file, end - start, start).decode("utf-8", "surrogatepass"))

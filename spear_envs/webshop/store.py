"""The store: a catalogue of any size in one folder, mapped and shared by all processes that open it.

A store has the index in ``index/``, a file of little-endian numbers for each array of :data:`ARRAYS`, the packed
records, their dictionary, the goals written by people, and ``manifest.json``, which is written last. Opening compares
the version, the manifest's checksum and the sizes of all files; each record has its own checksum; :func:`check_store`
reads everything.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.bm25.index import SearchIndex
from spear_envs.core.errors import SpearError
from spear_envs.data.files import MANIFEST, check_manifest, read_manifest, write_manifest
from spear_envs.webshop.catalog import Catalog, GoalTable, SplitKey, Splits, TableGoals
from spear_envs.webshop.goals import GoalKind, GoalSource, ListedGoals, read_goals
from spear_envs.webshop.products import MAX_ASIN, Entry, decode_entry
from spear_envs.webshop.tasks import SplitScheme, positions_from_json

DICTIONARY_BYTES = 1 << 15
"""The longest distance that the format can refer back."""
LEVEL = 4
"""4% more bytes than level 6, in half the time."""
CHECKSUM_BYTES = 4
RAW = -15
"""No zlib header, which would cost a checksum of the dictionary for every record."""


def make_dictionary(records: Sequence[bytes]) -> bytes:
    """Make a dictionary of typical records; of too many, the last ones are used."""
    return b"".join(records)[-DICTIONARY_BYTES:]


class Packer:
    """Packs and unpacks records."""

    def __init__(self, dictionary: bytes) -> None:
        self._dictionary = dictionary
        self._fresh = zlib.compressobj(LEVEL, zlib.DEFLATED, RAW, zdict=dictionary)

    def pack(self, record: bytes) -> bytes:
        """Pack a record, preceded by its CRC-32."""
        compressor = self._fresh.copy()  # the dictionary is read once
        packed = compressor.compress(record) + compressor.flush()
        return zlib.crc32(record).to_bytes(CHECKSUM_BYTES, "little") + packed

    def unpack(self, packed: bytes) -> bytes:
        """Unpack a record.

        Raises:
            SpearError: the bytes are damaged.
        """
        try:
            record = zlib.decompressobj(RAW, zdict=self._dictionary).decompress(packed[CHECKSUM_BYTES:])
        except zlib.error as error:
            raise SpearError(f"a packed record is damaged ({error})") from None
        if zlib.crc32(record).to_bytes(CHECKSUM_BYTES, "little") != packed[:CHECKSUM_BYTES]:
            raise SpearError("a packed record is damaged (its checksum differs)")
        return record


FORMAT = "spear-webshop-store"
VERSION = 1
"""Increased whenever the files or their content change."""
RECORDS = "records.bin"
DICTIONARY = "dictionary.bin"
HUMAN = "human.jsonl"
INDEX = "index"
ARRAYS: Mapping[str, npt.DTypeLike] = {
    "asins": f"S{MAX_ASIN}",
    "offsets": "<u8",
    "lengths": "<u4",
    "prices": "<f8",
    "goal_numbers": "<u4",
    "goal_ceilings": "<f8",
    "goal_weights": "<f8",
    "goal_starts": "<u4",
    "goal_order": "<u4",
}
"""Arrays and their types: by product (in ascending order of ASINs), by request, and by goal."""
KEPT_ENTRIES = 1_024
"""Products that a process caches: up to 10 MB."""
MEND = "build it again ('spear data build webshop')"


@dataclass(frozen=True)
class Manifest:
    """The description of a store."""

    tagger: str
    price_seed: int
    draws: str
    counts: dict[str, int]
    """Products, and goals by kind."""
    fingerprint: str
    """Of the catalogue."""
    products: str
    """SHA-256 (hex) over all entries, in order."""
    goals: str
    """Fingerprint of the table of synthetic goals."""
    splits: dict[str, dict[str, dict[str, Any]]]
    """Positions by kind, scheme and split."""
    inputs: dict[str, dict[str, Any]]
    """Name, bytes and SHA-256 of each file that the store was made from."""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Bytes and SHA-256 of each file of the store except the manifest."""


def write_array(folder: Path, name: str, values: npt.ArrayLike) -> None:
    """Write one of :data:`ARRAYS`."""
    np.ascontiguousarray(values, ARRAYS[name]).tofile(folder / f"{name}.bin")


def map_array(path: Path, dtype: npt.DTypeLike) -> np.ndarray:
    """Map a file of numbers as a read-only array, shared with other processes."""
    if not path.stat().st_size:
        return np.zeros(0, dtype)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype)


def finish_store(folder: Path, manifest: Manifest) -> None:
    """Describe all files of the folder and write its manifest."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    write_manifest(folder, {"format": FORMAT, "version": VERSION, **asdict(manifest)}, names)


def read_store(folder: Path) -> Manifest:
    """Read the manifest of a store and check that its files are present.

    Raises:
        SpearError: the folder is not a store, or the store has another version or is incomplete or damaged.
    """
    try:
        content = read_manifest(folder, "a WebShop store", MEND, format=FORMAT, version=VERSION)
        manifest = Manifest(**{item.name: content[item.name] for item in fields(Manifest)})
    except FileNotFoundError:
        raise SpearError(f"{folder} is not a finished store: {MEND}.") from None
    except KeyError as error:
        raise SpearError(f"{folder / MANIFEST} lacks {error}: {MEND}.") from None
    check_manifest(folder, manifest.files, MEND, hashed_bytes=-1)
    return manifest


class StoreShelf:
    """The records of a store, each read on demand.

    Args:
        folder: of the store; its files must be complete.
        fingerprint: of all entries.
    """

    def __init__(self, folder: Path, fingerprint: str = "") -> None:
        self.fingerprint = fingerprint
        """SHA-256 (hex) over all entries, in order."""
        self._folder = folder
        self._asins = map_array(folder / "asins.bin", ARRAYS["asins"])
        self._offsets = map_array(folder / "offsets.bin", ARRAYS["offsets"])
        self._lengths = map_array(folder / "lengths.bin", ARRAYS["lengths"])
        self._packer = Packer((folder / DICTIONARY).read_bytes())
        # Read, not mapped: the kernel would map 64 KB around each record.
        self._records = os.open(folder / RECORDS, os.O_RDONLY | os.O_CLOEXEC)
        self.entry = lru_cache(maxsize=KEPT_ENTRIES)(self.read_entry)
        """As :meth:`read_entry`, cached."""

    def __del__(self) -> None:
        if hasattr(self, "_records"):
            os.close(self._records)

    def __len__(self) -> int:
        return len(self._asins)

    def read_entry(self, number: int) -> Entry:
        """Read the entry of a product.

        Raises:
            SpearError: the record is damaged.
        """
        try:
            packed = os.pread(self._records, int(self._lengths[number]), int(self._offsets[number]))
            return decode_entry(self._packer.unpack(packed))
        except (SpearError, ValueError, IndexError, OverflowError) as error:
            raise SpearError(f"record {number} of the store {self._folder} is damaged ({error}): {MEND}.") from None

    def asin(self, number: int) -> str:
        """Return the ASIN of a product."""
        return self._asins[number].decode("ascii")

    def number_of(self, asin: str) -> int | None:
        """Return the number of a product, or None."""
        if not (asin.isascii() and asin.isprintable() and 0 < len(asin) <= MAX_ASIN):
            return None
        # In the array's type, or numpy would copy the array to compare.
        key = np.array(asin.encode("ascii"), ARRAYS["asins"])
        number = int(np.searchsorted(self._asins, key))
        return number if number < len(self) and self._asins[number] == key else None


def map_goal_table(folder: Path) -> GoalTable:
    """Map the table of synthetic goals."""
    return GoalTable(
        **{
            item.name: map_array(folder / f"goal_{item.name}.bin", ARRAYS[f"goal_{item.name}"])
            for item in fields(GoalTable)
        }
    )


def open_store(folder: Path, manifest: Manifest | None = None) -> Catalog:
    """Open the catalogue of a store.

    Raises:
        SpearError: the folder is not a store, or the store has another version or is incomplete or damaged.
    """
    manifest = manifest or read_store(folder)
    shelf = StoreShelf(folder, manifest.products)

    def find_goals(kind: GoalKind) -> GoalSource:
        if not manifest.counts.get(kind.value):
            raise SpearError(f"goal_kind={kind.value!r}: the store {folder} lacks such goals; {MEND} with them.")
        if kind is GoalKind.HUMAN:
            return ListedGoals(read_goals(folder / HUMAN))
        return TableGoals(map_goal_table(folder), shelf, manifest.goals)

    splits: dict[SplitKey, Splits] = {
        (GoalKind(kind), SplitScheme(scheme)): {name: positions_from_json(value) for name, value in parts.items()}
        for kind, schemes in manifest.splits.items()
        for scheme, parts in schemes.items()
    }
    return Catalog(
        shelf,
        SearchIndex.open(folder / INDEX, MEND),
        map_array(folder / "prices.bin", ARRAYS["prices"]),
        find_goals,
        tagger=manifest.tagger,
        splits=splits,
        fingerprint=manifest.fingerprint,
    )


def check_store(folder: Path, on_bytes: Callable[[int], None] | None = None) -> Manifest:
    """Read all files of a store, compare their checksums, and return the manifest.

    Raises:
        SpearError: a file is missing or damaged; the message names it.
    """
    manifest = read_store(folder)
    check_manifest(folder, manifest.files, MEND, on_bytes=on_bytes)
    return manifest

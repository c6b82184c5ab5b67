"""The store: a catalogue of any size in one folder, mapped and shared by all processes that open it.

A store has the index in ``index/``, a file of little-endian numbers for each array of :data:`ARRAYS`, the packed
records, their dictionary, the goals written by people, and ``manifest.json``, which is written last. Opening compares
the version, the manifest's checksum and the sizes of all files; each record has its own checksum; :func:`check_store`
reads everything.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spear_envs.core.errors import SpearError
from spear_envs.data.files import MANIFEST, check_manifest, read_manifest, write_manifest
from spear_envs.webshop.products import Entry, Product
from spear_envs.webshop.stock import ASIN, GOAL_ARRAYS

DICTIONARY_BYTES = 1 << 15
"""Bytes of the dictionary: the longest distance that the format can refer back."""
LEVEL = 4
"""Level of zlib: 4% more bytes than level 6, in half the time."""
CHECKSUM_BYTES = 4
RAW = -15
"""Window bits without a zlib header, which would cost a checksum of the dictionary for every record."""


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


def encode_entry(entry: Entry) -> bytes:
    """Encode an entry as JSON in UTF-8; equal entries give equal bytes."""
    product = entry.product
    fields = [
        product.asin,
        product.title,
        product.description,
        product.bullets,
        product.prices,
        list(product.options.items()),
        product.category,
        product.query,
        product.product_category,
        product.attributes,
        entry.nouns,
        entry.instruction,
        entry.wanted,
    ]
    # surrogatepass: JSON may contain a lone surrogate, which must be kept.
    return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def decode_entry(data: bytes) -> Entry:
    """Decode an entry of :func:`encode_entry`.

    Raises:
        ValueError: the bytes are something else.
    """
    fields = json.loads(data.decode("utf-8", "surrogatepass"))
    asin, title, description, bullets, prices, options, *names, attributes, nouns, instruction, wanted = fields
    category, query, product_category = names
    product = Product(
        asin,
        title,
        description,
        tuple(bullets),
        tuple(prices),
        {name: tuple(values) for name, values in options},
        category,
        query,
        product_category,
        tuple(attributes),
    )
    return Entry(product, tuple(nouns), instruction, tuple(wanted))


def digest_entries(digests: Iterable[bytes]) -> str:
    """Return the SHA-256 (hex) of the SHA-256 of all encoded entries, in order."""
    whole = hashlib.sha256()
    for digest in digests:
        whole.update(digest)
    return whole.hexdigest()


FORMAT = "spear-webshop-store"
VERSION = 1
"""Version of the files and their content; increased whenever one changes."""
RECORDS = "records.bin"
DICTIONARY = "dictionary.bin"
HUMAN = "human.jsonl"
INDEX = "index"
ARRAYS: Mapping[str, npt.DTypeLike] = {
    "asins": ASIN,
    "offsets": "<u8",
    "lengths": "<u4",
    "prices": "<f8",
    **{f"goal_{name}": kind for name, kind in GOAL_ARRAYS.items()},
}
"""Arrays and their types: by product (in ascending order of ASINs), by request, and by goal."""
MEND = "build it again ('spear data build webshop')"


@dataclass(frozen=True)
class StoreManifest:
    """The manifest of a store: how its products, prices and goals were made."""

    tagger: str
    price_seed: int
    draws: str
    counts: dict[str, int]
    """Products, and goals by kind."""
    fingerprint: str
    """Fingerprint of the catalogue."""
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


def map_array(folder: Path, name: str) -> np.ndarray:
    """Map one of :data:`ARRAYS` as a read-only array, which other processes share."""
    path = folder / f"{name}.bin"
    if not path.stat().st_size:
        return np.zeros(0, ARRAYS[name])
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), ARRAYS[name])


def finish_store(folder: Path, manifest: StoreManifest) -> None:
    """Describe all files of the folder and write its manifest."""
    names = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    # A build that was killed after its manifest, and before the folder got its name, has left one here.
    listed = [name for name in names if name != MANIFEST]
    write_manifest(folder, {"format": FORMAT, "version": VERSION, **asdict(manifest)}, listed)


def read_store(folder: Path) -> StoreManifest:
    """Read the manifest of a store and check that its files are present.

    Raises:
        SpearError: the folder is not a store, or the store has another version or is incomplete or damaged.
    """
    try:
        content = read_manifest(folder, "a WebShop store", MEND, format=FORMAT, version=VERSION)
        manifest = StoreManifest(**{item.name: content[item.name] for item in fields(StoreManifest)})
    except FileNotFoundError:
        raise SpearError(f"{folder} is not a finished store: {MEND}.") from None
    except KeyError as error:
        raise SpearError(f"{folder / MANIFEST} lacks {error}: {MEND}.") from None
    check_manifest(folder, manifest.files, MEND, hashed_bytes=-1)
    return manifest


class Records:
    """The records of a store's products, each read from its file on demand.

    Args:
        folder: of the store; its files must be complete.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets, self._lengths = map_array(folder, "offsets"), map_array(folder, "lengths")
        self._packer = Packer((folder / DICTIONARY).read_bytes())
        # Read, not mapped: the kernel would map 64 KB around each record.
        self._records = os.open(folder / RECORDS, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "_records"):
            os.close(self._records)

    def read(self, number: int) -> Entry:
        """Read the entry of a product.

        Raises:
            SpearError: the record is damaged.
        """
        try:
            packed = os.pread(self._records, int(self._lengths[number]), int(self._offsets[number]))
            return decode_entry(self._packer.unpack(packed))
        except (SpearError, ValueError, IndexError, OverflowError) as error:
            raise SpearError(f"record {number} of the store {self._folder} is damaged ({error}): {MEND}.") from None


def check_store(folder: Path, on_bytes: Callable[[int], None] | None = None) -> StoreManifest:
    """Read all files of a store, compare their checksums, and return the manifest.

    Raises:
        SpearError: a file is missing or damaged; the message names it.
    """
    manifest = read_store(folder)
    check_manifest(folder, manifest.files, MEND, on_bytes=on_bytes)
    return manifest

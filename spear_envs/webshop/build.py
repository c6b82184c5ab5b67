"""Building a store from the official files, within bounded memory and in several processes.

The build works in ``<name>.partial`` next to the store and moves the result into place when it is complete. The first
half reads, packs and describes the records in chunks, each with files of its own; a chunk with an ``.npz`` is finished.
Run again after an interruption with the same files and settings, the build resumes after the finished chunks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spear_envs.bm25.build import build_index
from spear_envs.core.errors import SpearError, choose_member
from spear_envs.core.tasks import canonical_json
from spear_envs.data.files import digest_file, is_result, put_file, sync, write_text
from spear_envs.data.processes import explain_build, hold_folder, map_in_order, replace_folder
from spear_envs.data.progress import Show, count_bytes
from spear_envs.webshop.catalogue import digest_catalogue
from spear_envs.webshop.goals import GoalKind, GoalSource, SplitScheme, positions_to_json, split_goals, write_goals
from spear_envs.webshop.products import (
    MAX_ASIN,
    CatalogueFiles,
    Entry,
    JsonReader,
    iterate_array,
    iterate_object,
    read_members,
)
from spear_envs.webshop.reward import Tagger, TitleNouns, find_tagger, name_tagger
from spear_envs.webshop.stock import (
    ASIN,
    DrawMode,
    EntryTable,
    Offers,
    Stock,
    TableGoals,
    list_offers,
    make_draws,
    read_entries,
)
from spear_envs.webshop.store import (
    DICTIONARY,
    DICTIONARY_BYTES,
    FORMAT,
    HUMAN,
    INDEX,
    RECORDS,
    VERSION,
    Packer,
    Records,
    StoreManifest,
    digest_entries,
    encode_entry,
    finish_store,
    make_dictionary,
    write_array,
)

REPORT_EVERY = 4_096
"""Entries of the attribute file between two reports of progress."""


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
    names = np.frombuffer(bytes(keys), ASIN)
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
            self._names = table["names"] if "names" in table else np.zeros(0, ASIN)
            self._starts = table["starts"] if "starts" in table else np.zeros(0, np.uint64)
            self._ends = table["ends"] if "ends" in table else np.zeros(0, np.uint64)
        self._file = os.open(folder / "attributes.bin", os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def get(self, asin: str) -> Mapping[str, Any] | None:
        """Return the entry of a product, or None."""
        if not asin.isascii():
            return None
        key = np.array(asin.encode("ascii"), ASIN)
        place = int(np.searchsorted(self._names, key))
        if place == len(self._names) or self._names[place] != key:
            return None
        start, end = int(self._starts[place]), int(self._ends[place])
        return json.loads(os.pread(self._file, end - start, start).decode("utf-8", "surrogatepass"))


CHUNK_RECORDS = 2_048
"""Records of a chunk: a second of work, and some megabytes of text."""
ALL_READ = -1


class ChunkSettings(NamedTuple):
    """What every process needs to make chunks."""

    folder: Path
    items: Path
    title_nouns: TitleNouns
    plan: str
    """Everything that the chunks depend on; distinguishes builds in one folder."""


class Job(NamedTuple):
    """A chunk to make."""

    settings: ChunkSettings
    number: int
    """Number of the chunk."""
    first: int
    """Number of its first record."""
    texts: list[str]
    """The records in JSON."""
    end: int
    """Byte of the items file after the last record; ``ALL_READ`` if there are no more."""


@dataclass(frozen=True)
class Chunk:
    """The P listed products of a chunk, in the order of the file; an ASIN may repeat."""

    offers: Offers
    lengths: np.ndarray
    """uint32 [P]: bytes of each packed record."""
    digests: np.ndarray
    """uint8 [P, 32]: SHA-256 of each encoded entry."""
    end: int
    """Byte where the chunk ends, as in :class:`Job`."""


def write_chunks(
    settings: ChunkSettings, *, processes: int, limit: int | None, on_bytes: Callable[[int], None] | None = None
) -> list[Path]:
    """Make the missing chunks; return the files of all, in order.

    Args:
        settings: the folder has the attribute table.
        on_bytes: called with the bytes of the items file processed.

    Raises:
        SpearError: the file or a record is malformed.
    """
    finished: list[Path] = []
    end = 0
    while (number := len(finished)) * CHUNK_RECORDS < (limit or np.inf):
        chunk = _open_chunk(_path_of(settings, number))
        if chunk is None:
            break
        finished.append(_path_of(settings, number))
        end = chunk.end
    jobs = _list_jobs(settings, len(finished), end, limit)
    try:
        for path, done in map_in_order(_write_chunk, jobs, processes):
            finished.append(path)
            if on_bytes is not None and done != ALL_READ:
                on_bytes(done)
    finally:
        for remembering in (_open_table, _open_packer, _find_tagger):
            remembering.cache_clear()
    return finished


def _path_of(settings: ChunkSettings, number: int) -> Path:
    return settings.folder / f"chunk-{number:05d}.npz"


def _open_chunk(path: Path) -> Chunk | None:
    """Open the chunk of a file; None if it is missing or incomplete."""
    try:
        with np.load(path) as arrays:
            wanted = [tuple(names) for names in json.loads(arrays["wanted"].tobytes())]
            offers = Offers(arrays["asins"], arrays["prices"], arrays["choices"], wanted)
            chunk = Chunk(offers, arrays["lengths"], arrays["digests"], int(arrays["end"]))
        whole = path.with_suffix(".bin").stat().st_size == int(chunk.lengths.sum(dtype=np.int64))
    except (OSError, ValueError, RecursionError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
        return None
    return chunk if whole else None


def read_chunks(paths: list[Path]) -> Iterator[Chunk]:
    """Yield the finished chunks of :func:`write_chunks`.

    Raises:
        SpearError: a chunk is damaged.
    """
    for path in paths:
        chunk = _open_chunk(path)
        if chunk is None:
            raise SpearError(f"{path} is damaged: delete it and run the same command again.")
        yield chunk


def _list_jobs(settings: ChunkSettings, number: int, offset: int, limit: int | None) -> Iterator[Job]:
    records = number * CHUNK_RECORDS
    if offset == ALL_READ or (limit is not None and records >= limit):
        return
    with JsonReader(settings.items, offset) as reader:
        texts: list[str] = []
        for value, text in iterate_array(reader, inside=offset > 0):
            if records == 0 and not texts and not isinstance(value, Mapping):
                raise SpearError(f"{settings.items} is not an array of products: name the file items_shuffle*.json.")
            texts.append(text)
            records += 1
            last = records == limit
            if len(texts) == CHUNK_RECORDS or last:
                _write_dictionary(settings, texts)
                yield Job(settings, number, records - len(texts), texts, reader.offset)
                number, texts = number + 1, []
            if last:
                return
        if texts:
            _write_dictionary(settings, texts)
            yield Job(settings, number, records - len(texts), texts, ALL_READ)


def _write_dictionary(settings: ChunkSettings, texts: list[str]) -> None:
    """Make the dictionary from the first chunk, unless it exists."""
    path = settings.folder / DICTIONARY
    if path.exists():
        return
    records = [encode_entry(entry) for entry in _read_entries(settings, 0, texts)]
    # Enough records to fill it, spread over the chunk.
    mean = sum(map(len, records)) // max(1, len(records))
    step = max(1, len(records) * mean // (DICTIONARY_BYTES + mean + 1))
    part = path.with_suffix(".part")
    part.write_bytes(make_dictionary(records[::step]))
    put_file(part, path)


def _read_entries(settings: ChunkSettings, first: int, texts: list[str]) -> Iterator[Entry]:
    """Yield the entry, without nouns, of each listed product; ``first`` is the number of the first record."""
    return read_entries(map(json.loads, texts), _open_table(settings).get, settings.items, first)


# Opened once per process, not for each chunk.
@lru_cache(maxsize=1)
def _open_table(settings: ChunkSettings) -> AttributeTable:
    return AttributeTable(settings.folder)


@lru_cache(maxsize=1)
def _open_packer(settings: ChunkSettings) -> Packer:
    return Packer((settings.folder / DICTIONARY).read_bytes())


@lru_cache(maxsize=1)
def _find_tagger(settings: ChunkSettings) -> Tagger:
    return find_tagger(settings.title_nouns)


def _write_chunk(job: Job) -> tuple[Path, int]:
    """Make one chunk; return its file and the byte where it ends."""
    settings = job.settings
    entries = list(_read_entries(settings, job.first, job.texts))
    nouns = _find_tagger(settings).tag_all([entry.product.title for entry in entries])
    packer = _open_packer(settings)
    packed, digests = [], []
    for entry, found in zip(entries, nouns, strict=True):
        record = encode_entry(entry._replace(nouns=found))
        digests.append(hashlib.sha256(record).digest())
        packed.append(packer.pack(record))
    offers = list_offers(entries)
    path = _path_of(settings, job.number)
    path.with_suffix(".bin").write_bytes(b"".join(packed))
    with path.with_suffix(".part").open("wb") as file:
        np.savez(
            file,
            **{**offers._asdict(), "wanted": np.frombuffer(json.dumps(offers.wanted).encode(), np.uint8)},
            lengths=np.array([len(record) for record in packed], np.uint32),
            digests=np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32),
            end=np.int64(job.end),
        )
    sync(path.with_suffix(".bin"))
    put_file(path.with_suffix(".part"), path)
    return path, job.end


def build_store(
    files: CatalogueFiles,
    folder: Path,
    *,
    title_nouns: TitleNouns = "rule",
    price_seed: int = 42,
    draws: str | DrawMode = DrawMode.KEYED,
    processes: int = 2,
    limit: int | None = None,
    on_progress: Show | None = None,
) -> StoreManifest:
    """Build a store and return its manifest.

    Args:
        files: the official files, or others of the same form.
        folder: a new or empty folder, or one with a store, which stays in use until the new one is complete.
        title_nouns: tagger of titles; with several processes a function must be importable by name.
        processes: number of worker processes; 1 does everything in the calling process.
        limit: most records to read from the items file.

    Raises:
        SpearError: a file or record is malformed, the folder has other files, the disk is full, or another process is
            building there.
    """
    mode = choose_member(DrawMode, draws, "draws")
    if processes < 1:
        raise SpearError(f"processes={processes}: give at least 1.")
    if limit is not None and limit < 1:
        raise SpearError(f"limit={limit}: read at least 1 product.")
    find_tagger(title_nouns)  # fails now rather than in every process
    folder = Path(folder).absolute()
    is_free = folder.is_dir() and (is_result(folder, FORMAT, (HUMAN, INDEX)) or not any(folder.iterdir()))
    if folder.exists() and not is_free:
        raise SpearError(f"{folder} holds files that are not a store: name another folder, or empty this one.")
    report = on_progress or (lambda what, done, total: None)
    work = folder.with_name(f"{folder.name}.partial")
    with explain_build(f"the store {folder}"), hold_folder(work):
        manifest = _build(files, work, title_nouns, price_seed, mode, processes=processes, limit=limit, report=report)
        replace_folder(work / "store", folder, work)
        shutil.rmtree(work)
    return manifest


def _build(
    files: CatalogueFiles,
    work: Path,
    title_nouns: TitleNouns,
    price_seed: int,
    mode: DrawMode,
    *,
    processes: int,
    limit: int | None,
    report: Show,
) -> StoreManifest:
    tagger = name_tagger(title_nouns)
    inputs = _describe_inputs(files, report)
    plan = canonical_json({"version": VERSION, "chunks": 2, "tagger": tagger, "limit": limit, "inputs": inputs})
    _keep_only(work, plan)
    size = _text_size(files.attributes)
    write_attribute_table(files.attributes, work, lambda done: report("reading attributes", done, size))
    size = _text_size(files.items) if limit is None else None
    settings = ChunkSettings(work, files.items, title_nouns, plan)
    chunks = write_chunks(
        settings, processes=processes, limit=limit, on_bytes=lambda done: report("reading products", done, size)
    )
    store = work / "store"
    store.mkdir(exist_ok=True)
    report("making goals", 0, None)
    offers, products = _assemble(chunks, work, store)
    if not len(offers.asins):
        raise SpearError(f"{files.items} has no products.")
    stock = Stock(offers)
    records = Records(store)
    entries = EntryTable(stock.asins, records.read, products)
    prices = stock.draw_prices(make_draws(mode, price_seed))
    write_array(store, "prices", prices)
    table = stock.make_goals(GoalKind.SYNTHETIC, mode, price_seed, entries, {})
    assert isinstance(table, TableGoals)
    for name, values in table.arrays.items():
        write_array(store, f"goal_{name}", values)
    goals: dict[GoalKind, GoalSource] = {GoalKind.SYNTHETIC: table}
    (store / HUMAN).unlink(missing_ok=True)
    if files.human is not None:
        human = stock.make_goals(GoalKind.HUMAN, mode, price_seed, entries, dict(read_members(files.human)))
        write_goals((human.goal(position) for position in range(len(human))), store / HUMAN)
        goals[GoalKind.HUMAN] = human
    splits = {
        kind.value: {
            scheme.value: {name: positions_to_json(part) for name, part in split_goals(goals[kind], scheme).items()}
            for scheme in SplitScheme
        }
        for kind in goals
    }
    count = len(stock.asins)
    report("indexing", 0, count)
    build_index(
        (records.read(number).product.index_text for number in range(count)),
        store / INDEX,
        processes=processes,
        on_progress=lambda done: report("indexing", done, count),
    )
    manifest = StoreManifest(
        tagger=tagger,
        price_seed=price_seed,
        draws=mode.value,
        counts={"products": count, **{kind.value: len(goals[kind]) for kind in goals}},
        fingerprint=digest_catalogue(products, prices, tagger),
        products=products,
        goals=goals[GoalKind.SYNTHETIC].fingerprint,
        splits=splits,
        inputs=inputs,
    )
    report("writing checksums", 0, None)
    finish_store(store, manifest)
    return manifest


def _describe_inputs(files: CatalogueFiles, report: Show) -> dict[str, dict[str, Any]]:
    inputs = {}
    for kind, path in (("items", files.items), ("attributes", files.attributes), ("human", files.human)):
        if path is None:
            continue
        if not path.is_file():
            raise SpearError(f"{path} does not exist: check its name.")
        size = path.stat().st_size
        digest = digest_file(path, count_bytes(report, f"checking {path.name}", size))
        inputs[kind] = {"name": path.name, "bytes": size, "sha256": digest}
    return inputs


def _text_size(path: Path) -> int | None:
    return None if path.suffix == ".xz" else path.stat().st_size


def _keep_only(work: Path, plan: str) -> None:
    """Remove the leftovers of an interrupted build with other inputs."""
    path = work / "plan.json"
    try:
        same = path.read_text("utf-8") == plan
    except (OSError, ValueError):
        same = False
    if same:
        return
    for item in work.iterdir():
        if item.is_dir():
            shutil.rmtree(item)
        else:
            item.unlink()
    sync(work)
    write_text(path, plan)


def _assemble(chunks: list[Path], work: Path, store: Path) -> tuple[Offers, str]:
    """Write the records and where each is; return the offers of all chunks and the fingerprint of all entries."""
    parts = []
    wanted: list[tuple[str, ...]] = []
    known: dict[str, str] = {}  # one object per attribute: few are different
    for chunk in read_chunks(chunks):
        asins, prices, choices, chunk_wanted = chunk.offers
        wanted += (tuple(known.setdefault(name, name) for name in names) for names in chunk_wanted)
        parts.append((asins, prices, choices, chunk.lengths, chunk.digests))
    if not parts:
        return list_offers([]), ""
    asins, prices, choices, lengths, digests = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    del parts
    unique, firsts = np.unique(asins, return_index=True)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.uint64)[:-1]])
    write_array(store, "asins", unique)
    write_array(store, "offsets", offsets[firsts])
    write_array(store, "lengths", lengths[firsts])
    shutil.copyfile(work / DICTIONARY, store / DICTIONARY)
    with (store / RECORDS).open("wb") as target:
        for path in chunks:
            with path.with_suffix(".bin").open("rb") as part:
                shutil.copyfileobj(part, target, 1 << 20)
    fingerprint = digest_entries(digests[first].tobytes() for first in firsts)
    return Offers(asins, prices, choices, wanted), fingerprint

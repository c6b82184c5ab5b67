"""Catalogues: products, prices, search and goals, opened once per process by name or folder.

A catalogue of some thousand products is made in memory from the official files, a larger one is mapped from a store.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from spear_envs.bm25.index import SearchIndex
from spear_envs.core.errors import SpearError, choose_member
from spear_envs.core.machine import trim_heap
from spear_envs.core.tasks import canonical_json, check_split
from spear_envs.data import data_folder
from spear_envs.data.embedded import read_embedded
from spear_envs.webshop.goals import (
    ALL,
    SPLITS,
    GoalKind,
    GoalSource,
    GoalTaskSet,
    ListedGoals,
    SplitScheme,
    choose_split,
    positions_from_json,
    read_goals,
    read_prices,
    split_goals,
)
from spear_envs.webshop.products import (
    CatalogueFiles,
    Product,
    find_files,
    read_attributes,
    read_members,
    read_values,
)
from spear_envs.webshop.reward import RULE, Tagger, TitleNouns, find_tagger, name_tagger
from spear_envs.webshop.stock import (
    GOAL_ARRAYS,
    DrawMode,
    EntryTable,
    Stock,
    TableGoals,
    list_offers,
    make_draws,
    read_entries,
)
from spear_envs.webshop.store import (
    HUMAN,
    INDEX,
    MANIFEST,
    MEND,
    Records,
    StoreManifest,
    digest_entries,
    encode_entry,
    map_array,
    read_store,
)

MAX_HITS = 50
"""Most products that a search finds."""

Splits = Mapping[str, Sequence[int]]
SplitKey = tuple[GoalKind | None, SplitScheme]


class Catalogue:
    """Products, prices, search and goals; immutable.

    Args:
        index: search over their ``index_text``.
        prices: float64 [N], dollars.
        find_goals: returns the goals of a kind, or raises a SpearError that says why there are none.
        tagger: name of the tagger that found the nouns.
        splits: known splits.
        listed: goals from a file, which replace all others.
    """

    def __init__(
        self,
        entries: EntryTable,
        index: SearchIndex,
        prices: np.ndarray,
        find_goals: Callable[[GoalKind], GoalSource],
        *,
        tagger: str,
        scheme: SplitScheme = SplitScheme.ORIGINAL,
        splits: Mapping[SplitKey, Splits] | None = None,
        listed: GoalSource | None = None,
        fingerprint: str | None = None,
    ) -> None:
        self.tagger = tagger
        """Name of the tagger: ``"rule"``, ``"spacy:MODEL"`` or ``"custom:module.function"``."""
        self.scheme = scheme
        """Default rule that splits the goals."""
        self._entries = entries
        self._index = index
        self._prices = prices
        self._find_goals = find_goals
        self._listed = listed
        self._sources: dict[GoalKind, GoalSource] = {}
        self._splits: dict[SplitKey, Splits] = dict(splits or {})
        self._task_sets: dict[tuple[GoalKind | None, SplitScheme, str], GoalTaskSet] = {}
        self._fingerprint = fingerprint

    def __len__(self) -> int:
        return len(self._entries.asins)

    def product(self, number: int) -> Product:
        """Return the product of a number (by ascending ASIN)."""
        return self._entries.entry(number).product

    def nouns(self, number: int) -> tuple[str, ...]:
        """Return the nouns of the product's title in lower case, repeats kept."""
        return self._entries.entry(number).nouns

    def price(self, number: int) -> float:
        """Return the price in dollars that the reward uses."""
        return float(self._prices[number])

    def number_of(self, asin: str) -> int | None:
        """Return the number of the product with this ASIN, or None."""
        return self._entries.number_of(asin)

    def search(self, query: str) -> list[int]:
        """Return the numbers of at most 50 products that fit a query, best first."""
        return self._index.search(query, MAX_HITS)

    @property
    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of products, prices, nouns and tagger: equal ones score every purchase alike."""
        if self._fingerprint is None:
            self._fingerprint = digest_catalogue(self._entries.fingerprint, self._prices, self.tagger)
        return self._fingerprint

    def goals(self, kind: str | GoalKind = GoalKind.SYNTHETIC) -> GoalSource:
        """Return all goals of a kind in canonical order, or those of the goals file if there is one.

        Raises:
            SpearError: the kind is unknown, or the catalogue lacks goals of it.
        """
        kind = choose_member(GoalKind, kind, "goal_kind")
        if self._listed is not None:
            return self._listed
        if kind not in self._sources:
            self._sources[kind] = self._find_goals(kind)
        return self._sources[kind]

    def make_tasks(
        self,
        split: str | None = None,
        *,
        goal_kind: str | GoalKind = GoalKind.SYNTHETIC,
        split_scheme: str | SplitScheme | None = None,
    ) -> GoalTaskSet:
        """Return the tasks of a split: ``train``, ``eval``, ``test``, or ``all``, the list in canonical order.

        Args:
            split: by default ``all`` with a goals file, whose ids are then ``webshop/all/<row>``, and else ``train``.
            goal_kind: ignored with a goals file.
            split_scheme: by default that of the catalogue.

        Raises:
            SpearError: a value is not valid, or the split has no goals.
        """
        kind = choose_member(GoalKind, goal_kind, "goal_kind")
        scheme = self.scheme if split_scheme is None else choose_member(SplitScheme, split_scheme, "split_scheme")
        split = check_split((ALL if self._listed else "train") if split is None else split, (*SPLITS, ALL))
        source = self.goals(kind)
        key = (None if self._listed else kind, scheme)
        made = (*key, split)
        if made not in self._task_sets:
            if split != ALL and key not in self._splits:
                self._splits[key] = split_goals(source, scheme)
            positions = choose_split(self._splits.get(key, {}), split, scheme, len(source))
            self._task_sets[made] = GoalTaskSet(source, split, positions, self.fingerprint)
        return self._task_sets[made]

    def replace_goals(self, goals: GoalSource, prices: Mapping[str, float] | None = None) -> Catalogue:
        """Return the catalogue with other goals, and with other prices for some products.

        Raises:
            SpearError: a goal is about a product that the catalogue lacks.
        """
        for position in range(len(goals)):
            asin = goals.goal(position).asin
            if self.number_of(asin) is None:
                raise SpearError(f"row {position} of the goals asks for {asin}, which the catalogue lacks.")
        changed = self._prices
        if prices:
            changed = np.array(self._prices, np.float64)
            for asin, price in prices.items():
                number = self.number_of(asin)
                if number is not None:
                    changed[number] = price
        return Catalogue(
            self._entries, self._index, changed, self._find_goals, tagger=self.tagger, scheme=self.scheme, listed=goals
        )


def digest_catalogue(products: str, prices: np.ndarray, tagger: str) -> str:
    """Return the fingerprint of a catalogue: SHA-256 (hex) of its entries' fingerprint, its prices and its tagger."""
    digest = hashlib.sha256(np.ascontiguousarray(prices, "<f8").data).hexdigest()
    parts = {"products": products, "prices": digest, "tagger": tagger}
    return hashlib.sha256(canonical_json(parts).encode()).hexdigest()


def make_catalogue(
    items: Iterable[Any],
    attributes: Mapping[str, Mapping[str, Any]],
    human: Mapping[str, Any] | None = None,
    *,
    name: str,
    tagger: Tagger,
    price_seed: int,
    draws: str | DrawMode = DrawMode.KEYED,
    scheme: SplitScheme = SplitScheme.ORIGINAL,
) -> Catalogue:
    """Make a catalogue of some thousand products in memory.

    Args:
        items: records of ``items_shuffle*.json``.
        attributes: content of ``items_ins_v2*.json``.
        human: content of ``items_human_ins.json``.
        name: of the catalogue, for errors.

    Raises:
        SpearError: a record has the wrong form, or there are no products.
    """
    mode = choose_member(DrawMode, draws, "draws")
    entries = list(read_entries(items, attributes.get, name))
    if not entries:
        raise SpearError(f"{name} has no products.")
    stock = Stock(list_offers(entries))
    entries = [entries[first] for first in stock.firsts]
    nouns = tagger.tag_all(entry.product.title for entry in entries)
    entries = [entry._replace(nouns=found) for entry, found in zip(entries, nouns, strict=True)]
    products = digest_entries(hashlib.sha256(encode_entry(entry)).digest() for entry in entries)
    table = EntryTable(stock.asins, entries.__getitem__, products)

    def find_goals(kind: GoalKind) -> GoalSource:
        if kind is GoalKind.HUMAN and human is None:
            raise SpearError("goal_kind='human': the catalogue has no items_human_ins.json; put it next to the others.")
        goals = stock.make_goals(kind, mode, price_seed, table, human or {})
        if not len(goals):
            raise SpearError(f"goal_kind={kind.value!r}: the catalogue lacks goals of this kind; choose the other.")
        return goals

    return Catalogue(
        table,
        SearchIndex.in_memory(entry.product.index_text for entry in entries),
        stock.draw_prices(make_draws(mode, price_seed)),
        find_goals,
        tagger=tagger.name,
        scheme=scheme,
    )


KEPT_ENTRIES = 1_024
"""Products of a store that a process caches: up to 10 MB."""


def open_store(folder: Path, manifest: StoreManifest | None = None) -> Catalogue:
    """Open the catalogue of a store.

    Raises:
        SpearError: the folder is not a store, or the store has another version or is incomplete or damaged.
    """
    manifest = manifest or read_store(folder)
    read_entry = lru_cache(maxsize=KEPT_ENTRIES)(Records(folder).read)
    table = EntryTable(map_array(folder, "asins"), read_entry, manifest.products)

    def find_goals(kind: GoalKind) -> GoalSource:
        if not manifest.counts.get(kind.value):
            raise SpearError(f"goal_kind={kind.value!r}: the store {folder} lacks such goals; {MEND} with them.")
        if kind is GoalKind.HUMAN:
            return ListedGoals(read_goals(folder / HUMAN))
        arrays = {name: map_array(folder, f"goal_{name}") for name in GOAL_ARRAYS}
        return TableGoals(arrays, table, manifest.goals)

    splits: dict[SplitKey, Splits] = {
        (GoalKind(kind), SplitScheme(scheme)): {name: positions_from_json(value) for name, value in parts.items()}
        for kind, schemes in manifest.splits.items()
        for scheme, parts in schemes.items()
    }
    return Catalogue(
        table,
        SearchIndex.open(folder / INDEX, MEND),
        map_array(folder, "prices"),
        find_goals,
        tagger=manifest.tagger,
        splits=splits,
        fingerprint=manifest.fingerprint,
    )


MINI = "mini"
"""The catalogue that the package generates."""
SIZES = ("small", "full")
"""Names of the official catalogues, as in ``spear data get webshop --size``."""
MOST_IN_MEMORY = 10_000
"""Most products of a catalogue in memory; a larger one needs a store."""
PRICE_SEED = 42
"""Default seed of prices and ceilings."""


def open_catalogue(
    catalog: str | os.PathLike[str] = MINI,
    *,
    goals: str | os.PathLike[str] | None = None,
    title_nouns: TitleNouns | None = None,
    price_seed: int | None = None,
    draws: str | DrawMode | None = None,
) -> Catalogue:
    """Open a catalogue, once per process for the same arguments and unchanged files.

    The nouns, prices and ceilings of a store are fixed when it is built; asking for others is an error.

    Args:
        catalog: ``"mini"``, a name fetched by ``spear data get webshop`` (``"small"``, ``"full"``), or a folder with a
            store or with the official files.
        goals: a goals file that replaces the catalogue's goals; ``prices.json[.xz]`` next to it is read, too.
        title_nouns: ``"rule"`` (default), ``"spacy:MODEL"``, or a function from a title to its nouns.
        price_seed: seed of the draws; 42 by default.
        draws: ``"keyed"`` (default) or ``"sequential"``.

    Raises:
        SpearError: the catalogue does not exist or is too large to be used without a store, or its store is damaged or
            was built with other settings.
    """
    mode = None if draws is None else choose_member(DrawMode, draws, "draws")
    if title_nouns is not None:
        name_tagger(title_nouns)  # refuses unknown taggers
    if price_seed is not None and (isinstance(price_seed, bool) or not isinstance(price_seed, int)):
        raise SpearError(f"price_seed={price_seed!r} is not valid: give a whole number.")
    name = str(catalog)
    folder = None if name == MINI else _find_folder(name)
    files = None
    if folder is not None and not (folder / MANIFEST).is_file():
        files = find_files(folder)
    if folder is not None and files is None:
        opened = _open_store(folder, _stamp(folder / MANIFEST))
        _check_settings(folder, title_nouns, price_seed, mode)
    else:
        stamps = () if files is None else tuple(_stamp(path) for path in (files.items, files.attributes, files.human))
        seed = PRICE_SEED if price_seed is None else price_seed
        opened = _load(files, stamps, RULE if title_nouns is None else title_nouns, seed, mode or DrawMode.KEYED)
    if goals is None:
        return opened
    path = _read_path(goals)
    beside = (path, path.with_name("prices.json"), path.with_name("prices.json.xz"))
    return _replace_goals(opened, path, tuple(map(_stamp, beside)))


def _read_path(goals: object) -> Path:
    if isinstance(goals, (str, os.PathLike)) and Path(goals).name:
        return Path(os.path.expanduser(goals))
    raise SpearError(f"goals={goals!r} is not valid: name a goals file, or leave it out.")


def _find_folder(name: str) -> Path:
    """Return the folder with the manifest of a store, or with the official files."""
    if not name:
        raise SpearError(f"catalog='' is not valid: give {MINI!r}, {', '.join(map(repr, SIZES))}, or a folder.")
    # os.path does not raise for a name that is too long or of an unknown user.
    folder = data_folder() / "webshop" / name if name in SIZES else Path(os.path.expanduser(name))
    if not os.path.isdir(folder):
        if os.path.isdir(f"{folder}.partial"):
            raise SpearError(f"the store {folder} is incomplete: run the same build command again to resume it.")
        mend = (
            f"'spear data get webshop --size {name}' fetches it."
            if name in SIZES
            else f"give {MINI!r}, {', '.join(map(repr, SIZES))}, or a folder."
        )
        raise SpearError(f"the catalogue {folder} does not exist: {mend}")
    return folder / "store" if (folder / "store" / MANIFEST).is_file() else folder


def _stamp(path: Path | None) -> tuple[int, int]:
    """Return values that change with the file."""
    try:
        status = os.stat(path or "")
    except (OSError, ValueError):
        return 0, 0
    return status.st_mtime_ns, status.st_size


@lru_cache(maxsize=4)
def _read_manifest(folder: Path, stamp: tuple[int, int]) -> StoreManifest:
    return read_store(folder)


@lru_cache(maxsize=4)
def _open_store(folder: Path, stamp: tuple[int, int]) -> Catalogue:
    return open_store(folder, _read_manifest(folder, stamp))


def _check_settings(
    folder: Path, title_nouns: TitleNouns | None, price_seed: int | None, mode: DrawMode | None
) -> None:
    built = _read_manifest(folder, _stamp(folder / MANIFEST))
    for name, option, wanted, found in (
        ("title_nouns", "--nouns", None if title_nouns is None else name_tagger(title_nouns), built.tagger),
        ("price_seed", "--price-seed", price_seed, built.price_seed),
        ("draws", "--draws", None if mode is None else mode.value, built.draws),
    ):
        if wanted is not None and wanted != found:
            raise SpearError(
                f"the store {folder} was built with {name}={found!r}, not {wanted!r}: leave {name} out, or build it"
                f" again with {option}."
            )


@lru_cache(maxsize=4)
def _load(
    files: CatalogueFiles | None, stamps: object, title_nouns: TitleNouns, seed: int, mode: DrawMode
) -> Catalogue:
    tagger = find_tagger(title_nouns)
    if files is None:
        data = read_embedded("webshop")
        return make_catalogue(
            data["items"],
            data["attributes"],
            data["human"],
            name=MINI,
            tagger=tagger,
            price_seed=seed,
            draws=mode,
            scheme=SplitScheme.PRODUCT,
        )
    asins: set[str] = set()
    for count, record in enumerate(read_values(files.items)):
        if count == MOST_IN_MEMORY:
            raise SpearError(
                f"{files.items} has more than {MOST_IN_MEMORY:,} products and needs a store: {_build_command(files)}"
            )
        if isinstance(record, Mapping):
            asins.add(str(record.get("asin")))
    made = make_catalogue(
        read_values(files.items),
        read_attributes(files.attributes, asins),  # the file may have all products
        None if files.human is None else dict(read_members(files.human)),
        name=str(files.items),
        tagger=tagger,
        price_seed=seed,
        draws=mode,
    )
    trim_heap()  # of what the index was made from
    return made


def _build_command(files: CatalogueFiles) -> str:
    place = files.items.parent.parent
    if place.parent == data_folder() / "webshop" and place.name in SIZES:
        return f"spear data build webshop --size {place.name}"
    words = ["spear", "data", "build", "webshop", "--items", str(files.items), "--attributes", str(files.attributes)]
    if files.human is not None:
        words += ["--human-goals", str(files.human)]
    folder = place if files.items.parent.name == "raw" else files.items.parent
    return shlex.join([*words, "--out", str(folder / "store")])


@lru_cache(maxsize=4)
def _replace_goals(catalogue: Catalogue, path: Path, stamps: object) -> Catalogue:
    try:
        return catalogue.replace_goals(ListedGoals(read_goals(path)), read_prices(path))
    except SpearError as error:
        raise SpearError(str(error) if str(path) in str(error) else f"{path}: {error}") from None

"""Catalogues that fit into memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import numpy as np

from spear_envs.bm25.index import SearchIndex
from spear_envs.core.errors import SpearError
from spear_envs.webshop.catalog import Catalog
from spear_envs.webshop.draws import DrawMode, make_draws
from spear_envs.webshop.entries import Entry, count_choices, encode_entry, make_entry
from spear_envs.webshop.goal_table import Request, TableGoals, make_goal_table
from spear_envs.webshop.goals import GoalKind, GoalSource
from spear_envs.webshop.human import make_human_goals
from spear_envs.webshop.nouns import Tagger
from spear_envs.webshop.products import is_listed
from spear_envs.webshop.splits import SplitScheme


class MemoryShelf:
    """Entries in a list, in ascending order of their ASINs."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self._entries = sorted(entries, key=lambda entry: entry.product.asin)
        self._numbers = {entry.product.asin: number for number, entry in enumerate(self._entries)}

    def __len__(self) -> int:
        return len(self._entries)

    def entry(self, number: int) -> Entry:
        """Return the entry of a product."""
        return self._entries[number]

    def asin(self, number: int) -> str:
        """Return the ASIN of a product."""
        return self._entries[number].product.asin

    def number_of(self, asin: str) -> int | None:
        """Return the number of a product, or None."""
        return self._numbers.get(asin)

    @cached_property
    def fingerprint(self) -> str:
        """Return the SHA-256 (hex) of all entries, in order."""
        return digest_entries(hashlib.sha256(encode_entry(entry)).digest() for entry in self._entries)


def digest_entries(digests: Iterable[bytes]) -> str:
    """Return the SHA-256 (hex) of the SHA-256 of all encoded entries, in order."""
    whole = hashlib.sha256()
    for digest in digests:
        whole.update(digest)
    return whole.hexdigest()


def make_catalog(
    items: Iterable[Any],
    attributes: Mapping[str, Mapping[str, Any]],
    human: Mapping[str, Any] | None = None,
    *,
    name: str,
    tagger: Tagger,
    price_seed: int,
    draws: str | DrawMode = DrawMode.KEYED,
    scheme: SplitScheme = SplitScheme.ORIGINAL,
) -> Catalog:
    """Make a catalogue of some thousand products.

    Args:
        items: records of ``items_shuffle*.json``.
        attributes: content of ``items_ins_v2*.json``.
        human: content of ``items_human_ins.json``.
        name: of the catalogue, for errors.

    Raises:
        SpearError: a record has the wrong form, or there are no products.
    """
    entries = _read_entries(items, attributes, name)
    nouns = tagger.tag_all(entry.product.title for entry in entries.values())
    for (asin, entry), found in zip(list(entries.items()), nouns, strict=True):
        entries[asin] = entry._replace(nouns=found)
    shelf = MemoryShelf(entries.values())
    numbers = {asin: number for number, asin in enumerate(sorted(entries))}

    source = make_draws(draws, price_seed)
    by_asin = {asin: source.draw_price(asin, entry.product.prices) for asin, entry in entries.items()}
    table = make_goal_table(
        Request(
            numbers[asin],
            count_choices(entry.product),
            source.draw_ceiling(asin, 0, by_asin[asin]),
            entry.wanted,
        )
        for asin, entry in entries.items()
        if entry.instruction is not None
    )

    def find_goals(kind: GoalKind) -> GoalSource:
        if kind is GoalKind.SYNTHETIC:
            goals: GoalSource = TableGoals(table, shelf)
        elif human is None:
            raise SpearError("goal_kind='human': the catalogue has no items_human_ins.json; put it next to the others.")
        else:
            # Again, since a sequential generator gives the first human ceiling right after the last price.
            source = make_draws(draws, price_seed)
            prices = {asin: source.draw_price(asin, entry.product.prices) for asin, entry in entries.items()}
            goals = make_human_goals(
                (entry.product for asin, entry in entries.items() if asin in human),
                human,
                lambda asin, number: source.draw_ceiling(asin, number, prices[asin]),
            )
        if not len(goals):
            raise SpearError(f"goal_kind={kind.value!r}: the catalogue lacks goals of this kind; choose the other.")
        return goals

    return Catalog(
        shelf,
        SearchIndex.in_memory(shelf.entry(number).product.index_text for number in range(len(shelf))),
        np.array([by_asin[asin] for asin in sorted(by_asin)], np.float64),
        find_goals,
        tagger=tagger.name,
        scheme=scheme,
    )


def _read_entries(items: Iterable[Any], attributes: Mapping[str, Mapping[str, Any]], name: str) -> dict[str, Entry]:
    """Read the listed products by ASIN, each at its first occurrence."""
    entries: dict[str, Entry] = {}
    for number, record in enumerate(items):
        try:
            if not isinstance(record, Mapping):
                raise SpearError("a product must be an object")
            asin = record.get("asin")
            # Unlisted records may be malformed; make_entry refuses a record without an ASIN.
            if isinstance(asin, str) and (asin in entries or not is_listed(asin)):
                continue
            entry = make_entry(record, attributes.get(asin))  # type: ignore[arg-type]
        except SpearError as error:
            raise SpearError(f"{name}, record {number}: {error}. Repair the file, or fetch it again.") from None
        entries[entry.product.asin] = entry
    if not entries:
        raise SpearError(f"{name} has no products.")
    return entries

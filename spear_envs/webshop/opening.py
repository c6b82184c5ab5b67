"""Opening a catalogue by name or folder, once in a process."""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

from spear_envs.webshop.catalog import Catalog
from spear_envs.webshop.draws import DrawMode
from spear_envs.webshop.goal_files import read_goals, read_prices
from spear_envs.webshop.goals import ListedGoals
from spear_envs.webshop.memory import make_catalog
from spear_envs.webshop.nouns import RULE, TitleNouns, find_tagger
from spear_envs.webshop.sources import CatalogFiles, find_files, read_entries, read_members, read_values
from spear_envs.webshop.splits import SplitScheme

__all__ = ["MINI", "PRICE_SEED", "open_catalog"]

MINI = "mini"
"""The catalogue that the package makes itself."""
PRICE_SEED = 42
"""Seed of prices and ceilings unless another is given."""


def open_catalog(
    catalog: str | os.PathLike[str] = MINI,
    *,
    goals: str | os.PathLike[str] | None = None,
    title_nouns: TitleNouns | None = None,
    price_seed: int | None = None,
    draws: str | DrawMode | None = None,
) -> Catalog:
    """A catalogue; opened once in a process for the same arguments, as long as its files do not change.

    Args:
        catalog: ``"mini"``, a name fetched by ``spear data get webshop`` (``"small"``, ``"full"``), or a folder with a
            store or with the official files.
        goals: a goals file in the place of the goals that the catalogue makes.
        title_nouns: ``"rule"`` (default), ``"spacy:MODEL"``, or a function from a title to its nouns.
        price_seed: of the draws; 42 by default.
        draws: ``"keyed"`` (default) or ``"sequential"``.

    Raises:
        SpearError: there is no such catalogue, or it is too large to be used without a store.
    """
    opened = _open(
        str(catalog),
        title_nouns or RULE,
        PRICE_SEED if price_seed is None else price_seed,
        DrawMode(draws or "keyed"),
    )
    if goals is None:
        return opened
    path = Path(goals)
    return opened.replace_goals(ListedGoals(read_goals(path)), read_prices(path))


@lru_cache(maxsize=4)
def _open(catalog: str, title_nouns: TitleNouns, price_seed: int, draws: DrawMode) -> Catalog:
    tagger = find_tagger(title_nouns)
    if catalog == MINI:
        from spear_envs.webshop.mini import make_records

        items, attributes, human = make_records()
        return make_catalog(
            items,
            attributes,
            human,
            name=MINI,
            tagger=tagger,
            price_seed=price_seed,
            draws=draws,
            scheme=SplitScheme.PRODUCT,
        )
    files: CatalogFiles = find_files(Path(catalog))
    return make_catalog(
        read_values(files.items),
        read_entries(files.attributes),
        None if files.human is None else dict(read_members(files.human)),
        name=str(files.items),
        tagger=tagger,
        price_seed=price_seed,
        draws=draws,
    )

"""Synthetic WebShop catalogues of any size, in the form of the official files, for timing builds and stores.

    python -m benchmarks.parts.webshop_data --products 1180000 --out DIR

writes ``items_shuffle.json`` and ``items_ins_v2.json``. No word in them is real. Titles, descriptions and first
features have the term statistics of the real products (see `profile_texts.py`). What a record is made of follows the
1,000 real ones: title words, features, images, option groups and their sizes, the shares of products without price,
with a range, without description, with an instruction. Keys that a reader drops fill a record up to 4.4 KB, the mean
of the official file. Written as a stream; the same number and seed give the same files.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parts.profile_texts import TextMaker, read_profile

__all__ = ["make_products", "write_catalogue"]

CATEGORIES = ("beauty", "electronics", "fashion", "garden", "grocery")
QUERIES = 5_000
PHRASES = 20_000
SENTENCES = 20_000
MEAN_BYTES = 4_400
# Quantiles 0, 10, 25, 50, 75, 90, 99, 100 of the real products.
QUANTILES = (0, 10, 25, 50, 75, 90, 99, 100)
TITLE_WORDS = (2, 8, 12, 18, 24, 29, 35, 41)
DESCRIPTION_WORDS = (0, 0, 0, 50, 130, 220, 310, 2_400)
FEATURES = (1, 1, 4, 5, 5, 7, 8, 8)
GROUP_SIZES = (2, 2, 3, 4, 6, 10, 31, 45)
ATTRIBUTES = (0, 0, 1, 2, 4, 6, 16, 27)
GROUPS = (0.577, 0.245, 0.165, 0.013)
"""Share of products with 0, 1, 2 and 3 option groups."""
GROUP_NAMES = ("Color", "Size", "Style")
NO_PRICE, PRICE_RANGE, INSTRUCTION = 0.089, 0.093, 0.415


def make_products(number: int, seed: int = 0) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Records of ``items_shuffle.json`` and their entries in ``items_ins_v2.json``."""
    rng = np.random.default_rng(seed)
    maker = TextMaker(read_profile("webshop"))
    words = maker.words[:50_000]
    # Popular words and phrases come first.
    pick = (rng.zipf(1.3, 1 << 20) - 1) % len(words)
    sentences = [" ".join(words[i] for i in pick[j : j + 18]).capitalize() + ". " for j in range(0, SENTENCES * 18, 18)]
    phrases = [f"{words[i]} {words[j]}" for i, j in zip(pick[:PHRASES], pick[PHRASES : 2 * PHRASES], strict=True)]
    queries = [f"{words[i]} {words[j]}s" for i, j in rng.integers(0, len(words), (QUERIES, 2))]
    filler = "x" * 40
    asins = rng.permutation(number)
    for i, text in enumerate(maker.make_texts(number, seed)):
        own = text.split()
        title, description, features, attributes = (
            int(np.interp(at, QUANTILES, of))
            for at, of in zip(
                rng.uniform(0, 100, 4), (TITLE_WORDS, DESCRIPTION_WORDS, FEATURES, ATTRIBUTES), strict=True
            )
        )
        first = " ".join(own[title + description :]) or sentences[i % SENTENCES]
        others = rng.integers(0, SENTENCES, features - 1)
        price = float(np.exp(rng.normal(3.3, 0.9)))
        at = rng.random(3)
        kind = CATEGORIES[i % len(CATEGORIES)]
        query = queries[int(rng.integers(QUERIES))]
        pricing = "" if at[0] < NO_PRICE else f"${price:.2f}"
        if NO_PRICE <= at[0] < NO_PRICE + PRICE_RANGE:
            pricing += f" - ${price * 1.4:.2f}"
        record: dict[str, Any] = {
            "name": " ".join(own[:title]).title(),
            "full_description": " ".join(own[title : title + description]),
            "pricing": pricing,
            "images": [f"https://example.com/{i:07d}/{j}/{filler}.jpg" for j in range(6)],
            "product_category": f"{kind.title()} › {query.title()} › {query.split()[0].title()}",
            "average_rating": "",
            "small_description": [first, *(sentences[j] for j in others)],
            "customization_options": _make_options(rng, words) or "",
            "asin": f"B{asins[i]:09d}",
            "category": kind,
            "query": query,
            "page": i % 400,
        }
        missing = MEAN_BYTES - 500 - len(text) - 125 * features - 60 * 6
        record["product_information"] = {"details": filler * max(0, missing // 40)}
        named = [phrases[j] for j in (rng.zipf(1.5, attributes) - 1) % PHRASES]
        entry: dict[str, Any] = {"attributes": named}
        if named and at[1] < INSTRUCTION * len(ATTRIBUTES) / (len(ATTRIBUTES) - 1.5):
            wanted = named[: 2 + int(at[2] * 3)]
            entry["instruction"] = f"Find me {', '.join(wanted[:-1]) or wanted[0]} {query} with {wanted[-1]}"
            entry["instruction_attributes"] = wanted
        yield record, entry


def _make_options(rng: np.random.Generator, words: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for name in GROUP_NAMES[: int(rng.choice(len(GROUPS), p=GROUPS))]:
        size = int(np.interp(rng.uniform(0, 100), QUANTILES, GROUP_SIZES))
        options[name] = [{"value": words[j], "image": None} for j in rng.integers(0, 4_000, size)]
    return options


def write_catalogue(folder: Path, number: int, seed: int = 0) -> tuple[Path, Path]:
    """Write both files into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    items, attributes = folder / "items_shuffle.json", folder / "items_ins_v2.json"
    with items.open("w", encoding="utf-8") as products, attributes.open("w", encoding="utf-8") as entries:
        mark = ("[", "{")
        for record, entry in make_products(number, seed):
            products.write(mark[0] + json.dumps(record, ensure_ascii=False))
            entries.write(f"{mark[1]}{json.dumps(record['asin'])}: {json.dumps(entry)}")
            mark = (", ", ", ")
        products.write("]")
        entries.write("}")
    return items, attributes


def main() -> None:
    """Write a catalogue."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--products", type=int, default=1_180_000)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    settings = parser.parse_args()
    write_catalogue(settings.out, settings.products, settings.seed)


if __name__ == "__main__":
    main()

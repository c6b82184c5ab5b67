"""Recordings of the original, its 1,000-product set, and a small shop of products of our own."""

import json
import lzma
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spear_envs.bm25.analysis import STOP_WORDS
from spear_envs.bm25.index import SearchIndex
from spear_envs.webshop.goals import Goal
from spear_envs.webshop.products import Product


def golden_nouns(title: str) -> list[str]:
    """The rule that stood in for the tagger when the original was recorded."""
    return [word for word in map(str.lower, re.findall(r"[A-Za-z]{3,}", title)) if word not in STOP_WORDS]


def read_packed(path: Path) -> Any:
    """A packed JSON file, or the rows of a packed JSONL file."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file] if ".jsonl" in path.name else json.load(file)


@pytest.fixture(scope="session")
def golden(shared: Path) -> Path:
    """The folder with what was recorded of the original."""
    folder = shared / "golden" / "webshop"
    if not folder.is_dir():
        pytest.skip("no recordings of the original WebShop in 'shared'")
    return folder


@pytest.fixture(scope="session")
def official(shared: Path) -> Path:
    """The folder with the official 1,000 products."""
    folder = shared / "data" / "webshop"
    if not folder.is_dir():
        pytest.skip("no official products of WebShop in 'shared'")
    return folder


def make_product(asin: str, title: str = "Plain Thing", **fields: Any) -> Product:
    """A product with as little as there may be."""
    empty: dict[str, Any] = {
        "description": "",
        "bullets": ("",),
        "prices": (100.0,),
        "options": {},
        "category": "",
        "query": "",
        "product_category": "",
        "attributes": ("DUMMY_ATTR",),
    }
    return Product(asin, title, **{**empty, **fields})


def make_goal(product: Product, **fields: Any) -> Goal:
    """A goal of a product."""
    values: dict[str, Any] = {
        "asin": product.asin,
        "instruction": "Find me a thing",
        "attributes": ("soft touch",),
        "options": (),
        "price_upper": 1_000_000.0,
        "weight": 1.0,
        "query": product.query,
        "category": product.category,
        "product_category": product.product_category,
        "title": product.title,
    }
    return Goal(**{**values, **fields})


class SmallStock:
    """A catalogue of a few products, numbered by ASIN."""

    def __init__(self, products: Sequence[Product], nouns: Callable[[str], Sequence[str]] = golden_nouns) -> None:
        self._products = sorted(products, key=lambda product: product.asin)
        self._nouns = nouns
        self._index = SearchIndex.in_memory([product.index_text for product in self._products])

    def product(self, number: int) -> Product:
        return self._products[number]

    def price(self, number: int) -> float:
        return self._products[number].prices[0]

    def nouns(self, number: int) -> Sequence[str]:
        return self._nouns(self._products[number].title)

    def number_of(self, asin: str) -> int | None:
        return next((i for i, product in enumerate(self._products) if product.asin == asin), None)

    def search(self, query: str) -> list[int]:
        return self._index.search(query, 50)

"""Entries: a product with its nouns and instruction, and their encoding as bytes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from spear_envs.core.errors import SpearError
from spear_envs.webshop.products import Product, read_product, read_texts

MOST_CHOICES = 1 << 32


class Entry(NamedTuple):
    """A product of the catalogue."""

    product: Product
    nouns: tuple[str, ...]
    """Nouns of its title."""
    instruction: str | None
    """Text of its synthetic goals, without options and ceiling; None if it has no goals."""
    wanted: tuple[str, ...]
    """Attributes that its synthetic goals ask for."""


def make_entry(record: Mapping[str, Any], attributes: Mapping[str, Any] | None) -> Entry:
    """Make the entry, without nouns, of a record of ``items_shuffle*.json`` and its part of ``items_ins_v2*.json``.

    An instruction without attributes makes no goal: the original crashes on one.

    Raises:
        SpearError: a field has the wrong type.
    """
    product = read_product(record, attributes)
    instruction, wanted = None, None
    if attributes is not None:
        instruction, wanted = attributes.get("instruction"), attributes.get("instruction_attributes")
    if instruction is not None and not isinstance(instruction, str):
        raise SpearError(f"product {product.asin}: its instruction must be a text")
    if instruction is None or not wanted:
        instruction, wanted = None, []
    names = read_texts(wanted, f"product {product.asin}: instruction_attributes")
    return Entry(product, (), instruction, names)


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


def count_choices(product: Product) -> int:
    """Count the ways to choose one value of each group of options.

    Raises:
        SpearError: there are more ways than goals can be numbered.
    """
    count = math.prod(map(len, product.options.values()))
    if count > MOST_CHOICES:
        raise SpearError(f"product {product.asin}: its options make {count:,} goals: leave it out.")
    return count

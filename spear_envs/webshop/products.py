"""Products, read from records of ``items_shuffle*.json``, and their entries in a catalogue as bytes."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from spear_envs.core.errors import SpearError

DEFAULT_PRICE = 100.0
"""Price in dollars of a product without one."""
MAX_ASIN = 10
"""Products whose ASIN is longer are not listed."""
NO_ATTRIBUTES = ("DUMMY_ATTR",)
"""Attributes of a product that the attribute file lacks."""
_NOT_AMOUNT = re.compile(r"[^\d.]")


@dataclass(frozen=True, slots=True)
class Product:
    """One product of the shop."""

    asin: str
    """Its key, up to 10 characters."""
    title: str
    """``name`` of the record, unchanged: HTML and other scripts included."""
    description: str
    bullets: tuple[str, ...]
    """The features, in order; may be empty strings."""
    prices: tuple[float, ...]
    """One amount in dollars, or the two ends of a range."""
    options: Mapping[str, tuple[str, ...]] = field(hash=False)
    """Option groups and their values, both in lower case, in the order of the record."""
    category: str
    """One of beauty, electronics, fashion, garden, grocery in the official data."""
    query: str
    """The search that found the product when it was collected, in lower case."""
    product_category: str
    """Levels joined by ``" › "``."""
    attributes: tuple[str, ...]

    @property
    def price_tag(self) -> str:
        """Return the price as pages show it: ``$18.0``, or ``$19.99 to $27.99``."""
        return " to ".join(f"${price}" for price in self.prices)

    @property
    def index_text(self) -> str:
        """Return the indexed text: title, description, first bullet and options, in lower case."""
        options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in self.options.items())
        first = self.bullets[0] if self.bullets else ""
        return f"{self.title} {self.description} {first} {options}".lower()


def is_listed(asin: str) -> bool:
    """Return whether the shop lists a product with this ASIN (readers of files skip repeated ones)."""
    return asin != "nan" and len(asin) <= MAX_ASIN


def parse_prices(pricing: str) -> tuple[float, ...]:
    """Read amounts in dollars: one, or the first two of several, such as ``"$19.99 - $27.99"``; 100.0 if there is none.

    Raises:
        SpearError: a dollar sign is not followed by a number.
    """
    amounts = []
    for piece in pricing.split("$")[1:3]:
        try:
            amount = float(_NOT_AMOUNT.sub("", piece))
        except ValueError:
            amount = math.inf
        if not math.isfinite(amount):
            raise SpearError(f"the price {pricing!r} cannot be read: write amounts as $19.99, or leave it empty")
        amounts.append(amount)
    return tuple(amounts) or (DEFAULT_PRICE,)


def read_options(options: object) -> dict[str, tuple[str, ...]]:
    """Read the groups of a record's ``customization_options``: null groups dropped, names and values in lower case.

    A later group with the same lower-case name replaces the earlier one.

    Raises:
        SpearError: the options are neither empty nor an object of lists of ``{"value": text}``.
    """
    if not options:
        return {}
    if not isinstance(options, Mapping):
        raise SpearError(f"customization_options is {_name_type(options)}: it must be an object, or empty")
    read = {}
    for name, values in options.items():
        if values is None:
            continue
        if not isinstance(values, list):
            raise SpearError(f"the option {name!r} is {_name_type(values)}: it must be a list, or null")
        texts = []
        for value in values:
            text = value.get("value") if isinstance(value, Mapping) else None
            if not isinstance(text, str):
                raise SpearError(f"a value of the option {name!r} is not an object with a text 'value'")
            texts.append(text.strip().replace("/", " | ").lower())
        read[name.lower()] = tuple(texts)
    return read


def read_product(record: Mapping[str, Any], attributes: Mapping[str, Any] | None = None) -> Product:
    """Read the product of a record of ``items_shuffle*.json`` and its entry in ``items_ins_v2*.json``.

    Texts other than ``asin`` and ``name`` may be missing or null, which means empty.

    Args:
        record: keys ``asin, name, full_description, small_description, pricing, customization_options, category,
            query, product_category``; others are ignored.
        attributes: the entry, or None; its ``attributes`` are taken.

    Raises:
        SpearError: a field has the wrong type; the message names the product and the field.
    """
    asin = record.get("asin")
    if not isinstance(asin, str) or not asin:
        raise SpearError("a product lacks an asin: every record must have a text under 'asin'")
    if not (asin.isascii() and asin.isprintable()):
        raise SpearError(f"the asin {asin!r} must be of plain letters and digits")
    try:
        title = record.get("name")
        if not isinstance(title, str):
            raise SpearError(f"name is {_name_type(title)}: it must be a text")
        small = record.get("small_description")
        return Product(
            asin=asin,
            title=title,
            description=_read_text(record, "full_description"),
            bullets=(
                read_texts(small, "small_description")
                if isinstance(small, list)
                else (_read_text(record, "small_description"),)
            ),
            prices=parse_prices(_read_text(record, "pricing")),
            options=read_options(record.get("customization_options")),
            category=_read_text(record, "category"),
            query=_read_text(record, "query").lower().strip(),
            product_category=_read_text(record, "product_category"),
            attributes=(
                read_texts(attributes["attributes"], "attributes")
                if attributes and "attributes" in attributes
                else NO_ATTRIBUTES
            ),
        )
    except SpearError as error:
        raise SpearError(f"product {asin}: {error}") from None


def read_texts(values: object, name: str) -> tuple[str, ...]:
    """Read a list of texts.

    Raises:
        SpearError: the value is something else.
    """
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise SpearError(f"{name} must be a list of texts")
    return tuple(values)


def read_number(value: object, name: str) -> float:
    """Read a finite number of at least 0.

    Raises:
        SpearError: the value is something else.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= sys.float_info.max:
        raise SpearError(f"{name} must be a number of at least 0")
    return float(value)


def _read_text(record: Mapping[str, Any], name: str) -> str:
    value = record.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise SpearError(f"{name} is {_name_type(value)}: it must be a text")
    return value


def _name_type(value: object) -> str:
    names = {type(None): "null", dict: "an object", list: "a list", str: "a text", bool: "a truth value"}
    return names.get(type(value), "a number")


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

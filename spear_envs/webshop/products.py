"""The official files and the products in them.

The files may be larger than memory: :class:`JsonReader` reads one value after another from a sliding window of text.
ijson would be shorter, but it cannot resume at a byte or say which byte is wrong, replaces lone surrogates, and refuses
numbers of more than 64 bits and NaN; with its C back end it reads these files as fast as we do.
"""

from __future__ import annotations

import codecs
import json
import lzma
import math
import re
import sys
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

from spear_envs.core.errors import SpearError
from spear_envs.data.files import open_regular

CHUNK = 1 << 18
"""Bytes per read."""
LONGEST_VALUE = 64 << 20
"""Most characters of a value; a longer one means a broken file."""
SPACE = " \t\n\r"
"""White space between values."""
IN_NUMBERS = "0123456789+-.eE"
LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
SUFFIXES = (".json", ".json.xz")


@dataclass(frozen=True)
class CatalogueFiles:
    """The files of a catalogue."""

    items: Path
    """``items_shuffle*.json[.xz]``: an array of products."""
    attributes: Path
    """``items_ins_v2*.json[.xz]``: attributes and instructions by ASIN."""
    human: Path | None = None
    """``items_human_ins.json[.xz]``: instructions written by people, by ASIN."""


def find_files(folder: Path) -> CatalogueFiles:
    """Find the official files in a folder or its subfolder ``raw``; a ``.json`` takes precedence over its ``.json.xz``.

    Raises:
        SpearError: products or attributes are missing, or there are several files of one kind.
    """
    places = [place for place in (folder, folder / "raw") if place.is_dir()]
    for place in places:
        items, attributes = _find_one(place, "items_shuffle*"), _find_one(place, "items_ins_v2*")
        if items and attributes:
            return CatalogueFiles(items, attributes, _find_one(place, "items_human_ins"))
        if items or attributes:
            missing = "items_ins_v2*.json" if items else "items_shuffle*.json"
            raise SpearError(f"{place} lacks {missing}[.xz]: put it next to {(items or attributes).name}.")  # type: ignore[union-attr]
    raise SpearError(
        f"{folder} is not a catalogue: it has neither a store nor items_shuffle*.json[.xz] and items_ins_v2*.json[.xz]."
        " 'spear data get webshop --size small|full' fetches the official ones."
    )


def _find_one(folder: Path, pattern: str) -> Path | None:
    found: dict[str, Path] = {}
    for suffix in SUFFIXES:
        for path in sorted(folder.glob(pattern + suffix)):
            found.setdefault(path.name.removesuffix(".xz"), path)
    if len(found) > 1:
        raise SpearError(
            f"{folder} has several files {pattern}.json ({', '.join(found)}): keep one of them, or name the"
            " files with 'spear data build webshop --items FILE --attributes FILE'."
        )
    return next(iter(found.values()), None)


class JsonReader:
    """A JSON text of any size, read value by value.

    Args:
        path: a JSON file; packed with xz if its name ends in ``.xz``.
        offset: first byte to read, of the unpacked text.
    """

    def __init__(self, path: Path, offset: int = 0) -> None:
        self.path = path
        self._base = offset  # byte position of the first character of the window
        self._window = ""
        self._at = 0
        self._ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._scan = json.JSONDecoder().raw_decode
        self._file: IO[bytes]
        try:
            if path.suffix == ".xz":
                open_regular(path).close()
                self._file = lzma.open(path)  # noqa: SIM115 - closed by __exit__
                while offset > 0:
                    offset -= len(self._file.read(min(offset, CHUNK))) or offset
            else:
                self._file = open_regular(path)
                self._file.seek(offset)
        except FileNotFoundError:
            raise SpearError(f"{path} does not exist: check its name.") from None
        except OSError as error:
            raise SpearError(f"{path} cannot be read ({error.strerror}): check its permissions and its type.") from None

    def __enter__(self) -> JsonReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def offset(self) -> int:
        """Return the bytes of the unpacked text read so far."""
        return self._base + len(self._window[: self._at].encode("utf-8", "surrogatepass"))

    def peek(self) -> str:
        """Return the next character that is not a space without taking it; empty at the end."""
        while True:
            while self._at < len(self._window) and self._window[self._at] in SPACE:
                self._at += 1
            if self._at < len(self._window):
                return self._window[self._at]
            if not self._read_on():
                return ""

    def take(self, expected: str) -> str:
        """Take the next character that is not a space.

        Raises:
            SpearError: it is not one of ``expected``.
        """
        found = self.peek()
        if not found or found not in expected:
            wanted = " or ".join(expected)
            self.fail(f"{wanted} expected, {found} found" if found else f"it ends where {wanted} is expected")
        self._at += 1
        return found

    def take_value(self) -> tuple[Any, str]:
        """Take a value; return it with its text.

        Raises:
            SpearError: it is cut short, or not JSON.
        """
        self.peek()
        while True:
            try:
                value, end = self._scan(self._window, self._at)
                if self._ended or not self._may_go_on(value, end):
                    text = self._window[self._at : end]
                    self._at = end
                    return value, text
            except json.JSONDecodeError as error:
                rest = self._window[error.pos :]
                if self._ended and _is_cut_short(error.msg, rest):
                    self._at += len(self._window) - self._at
                    self.fail("it ends within a value")
                if self._ended or len(self._window) - self._at > LONGEST_VALUE:
                    self._at = error.pos
                    self.fail(error.msg)
            except ValueError:
                self.fail("a number has too many digits")
            except RecursionError:
                self.fail("it is nested too deeply")
            self._read_on()

    def take_end(self) -> None:
        """Check that only spaces are left.

        Raises:
            SpearError: there is more.
        """
        if self.peek():
            self.fail("there is more after its end")

    def _may_go_on(self, value: Any, end: int) -> bool:
        """Return whether a value that ends at ``end`` of the window may be the beginning of a longer one."""
        # A window may end within "1.5", after the "1" or after the dot; the scanner then reads "1".
        return isinstance(value, (int, float)) and not self._window[end : end + 64].lstrip(IN_NUMBERS)

    def fail(self, problem: str) -> None:
        """Raise a SpearError with the present position."""
        raise SpearError(
            f"{self.path}: broken JSON at byte {self.offset:,}: {problem}. Fetch the file again or repair it."
        ) from None

    def _read_on(self) -> bool:
        """Extend the window, at least doubling it, so that long values take linear time; return False at the end."""
        if self._ended:
            return False
        rest = self._window[self._at :]
        self._base = self.offset
        self._window, self._at = rest, 0
        try:
            data = self._file.read(max(CHUNK, len(rest)))
            self._ended = not data
            text = self._decoder.decode(data, final=self._ended)
        except UnicodeDecodeError as error:
            self._at = len(rest)
            self.fail(f"it is not UTF-8 ({error.reason})")
        except (lzma.LZMAError, EOFError) as error:
            self._at = len(rest)
            self.fail(f"the packed file is cut short or damaged ({error})")
        if self._base == 0 and not rest and text.startswith("\ufeff"):
            self._base, text = len(codecs.BOM_UTF8), text[1:]
        self._window = rest + text
        return bool(text) or self._read_on()


def _is_cut_short(problem: str, rest: str) -> bool:
    """Return whether the text is an unfinished value; ``rest`` begins at the scanner's problem."""
    if problem.startswith("Invalid \\u"):
        return len(rest) < 6
    return problem.startswith("Unterminated") or any(word.startswith(rest) for word in LITERALS)


def iterate_array(reader: JsonReader, *, inside: bool = False) -> Iterator[tuple[Any, str]]:
    """Yield the values of an array and their texts; ``inside`` if the reader has already read a value."""
    if not inside:
        reader.take("[")
        if reader.peek() != "]":
            yield reader.take_value()
    while reader.take(",]") == ",":
        yield reader.take_value()
    reader.take_end()


def iterate_object(reader: JsonReader) -> Iterator[tuple[str, Any, str]]:
    """Yield the members of an object: key, value and the value's text."""
    reader.take("{")
    mark = reader.take("}") if reader.peek() == "}" else ","
    while mark == ",":
        if reader.peek() != '"':
            reader.take('"')
        key, _ = reader.take_value()
        reader.take(":")
        yield (key, *reader.take_value())
        mark = reader.take(",}")
    reader.take_end()


def read_values(path: Path) -> Iterator[Any]:
    """Yield the values of a JSON array.

    Raises:
        SpearError: the file is missing, truncated, or not a JSON array; the message has the byte position.
    """
    with JsonReader(path) as reader:
        for value, _ in iterate_array(reader):
            yield value


def read_members(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the members of a JSON object.

    Raises:
        SpearError: the file is missing, truncated, or not a JSON object; the message has the byte position.
    """
    with JsonReader(path) as reader:
        for key, value, _ in iterate_object(reader):
            yield key, value


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        SpearError: the file is missing or broken; the message has the byte position.
    """
    with JsonReader(path) as reader:
        value, _ = reader.take_value()
        reader.take_end()
        return value


def read_attributes(path: Path, asins: Container[str]) -> dict[str, Mapping[str, Any]]:
    """Read the entries of some products from ``items_ins_v2*.json``, which may have those of all products.

    Raises:
        SpearError: the file is not an object of objects.
    """
    entries = {}
    for key, value in read_members(path):
        if not isinstance(value, Mapping):
            raise SpearError(f"{path}: the entry {key!r} must be an object.")
        if key in asins:
            entries[key] = value
    return entries


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
    """Key of the product, up to 10 characters."""
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

"""The official files: finding them, and reading JSON larger than memory one value at a time.

The standard library's scanner parses one value after another from a sliding window of text. It reports the place of an
error, and on the official records it is as fast as ijson with its C back end.
"""

from __future__ import annotations

import codecs
import json
import lzma
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from spear_envs.core.errors import SpearError

CHUNK = 1 << 18
"""Bytes per read."""
LONGEST_VALUE = 64 << 20
"""Most characters of a value; a longer one means a broken file."""
SPACE = " \t\n\r"
IN_NUMBERS = "0123456789+-.eE"
LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
SUFFIXES = (".json", ".json.xz")


@dataclass(frozen=True)
class CatalogFiles:
    """The files of a catalogue."""

    items: Path
    """``items_shuffle*.json[.xz]``: an array of products."""
    attributes: Path
    """``items_ins_v2*.json[.xz]``: attributes and instructions by ASIN."""
    human: Path | None = None
    """``items_human_ins.json[.xz]``: instructions written by people, by ASIN."""


def find_files(folder: Path) -> CatalogFiles:
    """Find the official files in a folder or its subfolder ``raw``; a ``.json`` takes precedence over its ``.json.xz``.

    Raises:
        SpearError: products or attributes are missing, or there are several files of one kind.
    """
    places = [place for place in (folder, folder / "raw") if place.is_dir()]
    for place in places:
        items, attributes = _find_one(place, "items_shuffle*"), _find_one(place, "items_ins_v2*")
        if items and attributes:
            return CatalogFiles(items, attributes, _find_one(place, "items_human_ins"))
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
                self._file = lzma.open(path)  # noqa: SIM115 - closed by __exit__
                while offset > 0:
                    offset -= len(self._file.read(min(offset, CHUNK))) or offset
            else:
                self._file = path.open("rb")
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
        if self._base == 0 and not rest:
            text = text.removeprefix("\ufeff")
        self._window = rest + text
        return bool(text) or self._read_on()


def _is_cut_short(problem: str, rest: str) -> bool:
    """Return whether the text is an unfinished value; ``rest`` begins at the scanner's problem."""
    if problem.startswith("Invalid \\u"):
        return len(rest) < 6
    return problem.startswith("Unterminated") or any(word.startswith(rest) for word in LITERALS)


def read_values(path: Path) -> Iterator[Any]:
    """Yield the values of a JSON array.

    Raises:
        SpearError: the file is missing, truncated, or not a JSON array; the message has the byte position.
    """
    with JsonReader(path) as reader:
        for value, _ in iterate_array(reader):
            yield value


def iterate_array(reader: JsonReader, *, inside: bool = False) -> Iterator[tuple[Any, str]]:
    """Yield the values of an array and their texts; ``inside`` if the reader has already read a value."""
    if not inside:
        reader.take("[")
        if reader.peek() != "]":
            yield reader.take_value()
    while reader.take(",]") == ",":
        yield reader.take_value()
    reader.take_end()


def read_members(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the members of a JSON object.

    Raises:
        SpearError: the file is missing, truncated, or not a JSON object; the message has the byte position.
    """
    with JsonReader(path) as reader:
        for key, value, _ in iterate_object(reader):
            yield key, value


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


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        SpearError: the file is missing or broken; the message has the byte position.
    """
    with JsonReader(path) as reader:
        value, _ = reader.take_value()
        reader.take_end()
        return value


def read_entries(path: Path, names: Container[str]) -> dict[str, Mapping[str, Any]]:
    """Read the members of a JSON object of objects that have one of ``names``.

    Raises:
        SpearError: the file is something else.
    """
    entries = {}
    for key, value in read_members(path):
        if not isinstance(value, Mapping):
            raise SpearError(f"{path}: the entry {key!r} must be an object.")
        if key in names:
            entries[key] = value
    return entries

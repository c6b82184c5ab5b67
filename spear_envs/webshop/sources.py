"""The official files: finding them, and reading JSON larger than memory one value at a time.

The standard library's scanner parses one value after another out of a sliding window of text. It needs no package and
knows where in the file an error stands; on the official records it is as fast as ijson with its C back end.
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
"""Bytes that are read at a time."""
LONGEST_VALUE = 64 << 20
"""Characters of a value at which reading stops: the file is broken."""
SPACE = " \t\n\r"
IN_NUMBERS = "0123456789+-.eE"
LITERALS = ("true", "false", "null", "NaN", "Infinity", "-Infinity")
SUFFIXES = (".json", ".json.xz")


@dataclass(frozen=True)
class CatalogFiles:
    """The files that a catalogue is made of."""

    items: Path
    """``items_shuffle*.json[.xz]``: an array of products."""
    attributes: Path
    """``items_ins_v2*.json[.xz]``: attributes and instructions by ASIN."""
    human: Path | None = None
    """``items_human_ins.json[.xz]``: instructions that people wrote, by ASIN."""


def find_files(folder: Path) -> CatalogFiles:
    """The official files in a folder, or in its subfolder ``raw``; a ``.json`` goes before its ``.json.xz``.

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
            raise SpearError(f"{place} lacks {missing}[.xz]: put it beside {(items or attributes).name}.")  # type: ignore[union-attr]
    raise SpearError(
        f"{folder} holds no catalogue: neither a built store nor items_shuffle*.json[.xz] and items_ins_v2*.json[.xz]."
        " 'spear data get webshop --size small|full' fetches the official ones."
    )


def _find_one(folder: Path, pattern: str) -> Path | None:
    found: dict[str, Path] = {}
    for suffix in SUFFIXES:
        for path in sorted(folder.glob(pattern + suffix)):
            found.setdefault(path.name.removesuffix(".xz"), path)
    if len(found) > 1:
        raise SpearError(
            f"{folder} holds several files {pattern}.json ({', '.join(found)}): keep one of them there, or name the"
            " files with 'spear data build webshop --items FILE --attributes FILE'."
        )
    return next(iter(found.values()), None)


class JsonReader:
    """A JSON text of any size, read value by value.

    Args:
        path: a JSON file, or one packed with xz if its name ends in ``.xz``.
        offset: byte to begin at, of the unpacked text.
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
            raise SpearError(f"{path} is not there: check its name.") from None
        except OSError as error:
            raise SpearError(f"{path} cannot be read ({error.strerror}): check what it is.") from None

    def __enter__(self) -> JsonReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def offset(self) -> int:
        """Bytes of the unpacked text up to here."""
        return self._base + len(self._window[: self._at].encode("utf-8", "surrogatepass"))

    def peek(self) -> str:
        """The next character that is not a space, not taken; empty at the end."""
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
            SpearError: it is none of ``expected``.
        """
        found = self.peek()
        if not found or found not in expected:
            wanted = " or ".join(expected)
            self.fail(f"{wanted} expected, {found} found" if found else f"it ends where {wanted} is expected")
        self._at += 1
        return found

    def take_value(self) -> tuple[Any, str]:
        """Take a value: what it means, and its text.

        Raises:
            SpearError: it is cut short, or no JSON.
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
                self.fail("it nests too deep")
            self._read_on()

    def take_end(self) -> None:
        """Make sure that nothing but space is left.

        Raises:
            SpearError: there is more.
        """
        if self.peek():
            self.fail("there is more behind its end")

    def _may_go_on(self, value: Any, end: int) -> bool:
        """Whether a value that ends at ``end`` of the window may be the beginning of a longer one."""
        # Of "1.5" at the end of a window "1" is read, and of "1.5" cut behind the dot, "1" and a dot.
        return isinstance(value, (int, float)) and not self._window[end : end + 64].lstrip(IN_NUMBERS)

    def fail(self, problem: str) -> None:
        """Raise a SpearError about the place that reading has come to."""
        raise SpearError(
            f"{self.path}: broken JSON at byte {self.offset:,}: {problem}. Fetch the file again or repair it."
        ) from None

    def _read_on(self) -> bool:
        """Move the window on, by as much as is in it at least, so that long values cost no more; False at the end."""
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
    """Whether a text would be JSON if more came; ``rest`` begins where the scanner found the problem."""
    if problem.startswith("Invalid \\u"):
        return len(rest) < 6
    return problem.startswith("Unterminated") or any(word.startswith(rest) for word in LITERALS)


def read_values(path: Path) -> Iterator[Any]:
    """The values of a JSON array, one by one.

    Raises:
        SpearError: the file is missing, truncated, or no JSON array; the message has the byte position.
    """
    with JsonReader(path) as reader:
        for value, _ in iterate_array(reader):
            yield value


def iterate_array(reader: JsonReader, *, inside: bool = False) -> Iterator[tuple[Any, str]]:
    """The values of an array and their texts; ``inside`` if the reader is already behind one of its values."""
    if not inside:
        reader.take("[")
        if reader.peek() != "]":
            yield reader.take_value()
    while reader.take(",]") == ",":
        yield reader.take_value()
    reader.take_end()


def read_members(path: Path) -> Iterator[tuple[str, Any]]:
    """The members of a JSON object, one by one.

    Raises:
        SpearError: the file is missing, truncated, or no JSON object; the message has the byte position.
    """
    with JsonReader(path) as reader:
        for key, value, _ in iterate_object(reader):
            yield key, value


def iterate_object(reader: JsonReader) -> Iterator[tuple[str, Any, str]]:
    """The members of an object, one by one: key, value and the value's text."""
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
    """All of a JSON file.

    Raises:
        SpearError: it is missing or broken; the message has the byte position.
    """
    with JsonReader(path) as reader:
        value, _ = reader.take_value()
        reader.take_end()
        return value


def read_entries(path: Path, names: Container[str]) -> dict[str, Mapping[str, Any]]:
    """The members of a JSON object that have one of ``names``; the values of all are objects.

    Raises:
        SpearError: it is something else.
    """
    entries = {}
    for key, value in read_members(path):
        if not isinstance(value, Mapping):
            raise SpearError(f"{path}: the entry {key!r} must be an object.")
        if key in names:
            entries[key] = value
    return entries

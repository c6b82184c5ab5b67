"""Transfer of one file, with resumption and retries."""

from __future__ import annotations

import contextlib
import json
import re
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import httpx

from spear_envs.core.errors import SpearError
from spear_envs.data.files import RemoteFile
from spear_envs.data.space import check_space, explain_full_disk

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_TITLE = re.compile(rb"<title[^>]*>(.*?)</title>", re.IGNORECASE | re.DOTALL)
_PAGE = re.compile(rb"\s*(<!doctype\s+html|<html)", re.IGNORECASE)
_PAGE_BYTES = 65536


class RefusedError(Exception):
    """The server refuses the file; the message is the reason in a few words."""


class _BrokenOffError(Exception):
    """The transfer failed, perhaps temporarily."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


@dataclass(frozen=True)
class Patience:
    """Patience with a server in trouble; times in seconds."""

    attempts: int = 5
    """Attempts in a row without progress before the next server is tried."""
    first_wait: float = 1.0
    """Wait before the second attempt; doubles with each further one."""
    longest_wait: float = 30.0
    connect_timeout: float = 20.0
    read_timeout: float = 60.0


Report = Callable[[int, "int | None"], None]
"""Called with the bytes of a transfer that are here, and their total (None: unknown)."""


@contextlib.contextmanager
def open_client(patience: Patience) -> Iterator[httpx.Client]:
    """Open an HTTP client that follows redirects and uses proxies of the environment."""
    timeout = httpx.Timeout(patience.read_timeout, connect=patience.connect_timeout)
    # Uncompressed: lengths, ranges and checksums are of the stored bytes.
    headers = {"Accept-Encoding": "identity", "User-Agent": "spear-envs"}
    with httpx.Client(follow_redirects=True, timeout=timeout, headers=headers, verify=_load_certificates()) as client:
        yield client


@lru_cache(maxsize=1)
def _load_certificates() -> ssl.SSLContext:
    """Shared by all clients: loading them takes 50 ms, and a data set has many files."""
    return httpx.create_ssl_context()


@dataclass
class Transfer:
    """Transfers ``file`` to ``part``, from one address after another if necessary.

    A JSON file next to ``part`` records its address and the server's ETag or date, so that a later transfer resumes. If
    the checksum is pinned, a part of any origin is continued, since a wrong mixture would be detected.
    """

    file: RemoteFile
    part: Path
    client: httpx.Client
    patience: Patience
    report: Report
    hear: Callable[[httpx.Response], None] | None = None
    resumed: bool = False
    """Whether the part comes from several responses."""

    @property
    def state_path(self) -> Path:
        """Path of the record of the part's origin."""
        return self.part.with_name(f"{self.part.name}.json")

    def run(self, url: str) -> None:
        """Transfer the file from ``url``.

        Raises:
            RefusedError: the server refuses it.
            SpearError: the disk is full.
        """
        failures, farthest = 0, self._size()
        while True:
            try:
                return self._try(url)
            except _BrokenOffError as error:
                # Compare with the farthest point, since a server that ignores ranges starts again each time.
                failures = 1 if self._size() > farthest else failures + 1
                farthest = max(farthest, self._size())
                if failures >= self.patience.attempts:
                    raise RefusedError(str(error)) from error
                wait = error.wait if error.wait is not None else self.patience.first_wait * 2 ** (failures - 1)
                time.sleep(min(wait, self.patience.longest_wait))

    def drop(self) -> None:
        """Delete the part."""
        self.part.unlink(missing_ok=True)
        self.state_path.unlink(missing_ok=True)
        self.resumed = False

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _find_resumption(self, url: str) -> tuple[int, str | None]:
        """Byte to continue from, and the validator that must still match (None: any)."""
        size = self._size()
        if size == 0:
            return 0, None
        try:
            state = json.loads(self.state_path.read_text("utf-8"))
            origin, validator = state["url"], state["validator"]
        except (OSError, ValueError, RecursionError, KeyError, TypeError):
            origin, validator = None, None
        if origin == url and validator:
            return size, str(validator)
        return (size, None) if self.file.sha256 else (0, None)

    def _try(self, url: str) -> None:
        start, validator = self._find_resumption(url)
        headers = {}
        if start:
            headers["Range"] = f"bytes={start}-"
            if validator:
                headers["If-Range"] = validator
        try:
            with self.client.stream("GET", url, headers=headers) as response:
                self._receive(response, url, start)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects) as error:
            raise RefusedError(str(error)) from error
        except httpx.TransportError as error:
            raise _BrokenOffError(str(error) or type(error).__name__) from error

    def _receive(self, response: httpx.Response, url: str, start: int) -> None:
        status = response.status_code
        if status in TRANSIENT:
            wait = response.headers.get("Retry-After", "")
            raise _BrokenOffError(_name_status(response), float(wait) if wait.isdecimal() else None)
        if status == 416 and start:
            if response.headers.get("Content-Range") == f"bytes */{start}":
                return  # the part is complete
            self.drop()
            raise _BrokenOffError("the part that is here does not fit the server's file", 0)
        if status not in (200, 206):
            raise RefusedError(_name_status(response))
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise RefusedError("it compresses the file, although asked not to")

        total: int | None = None
        if status == 206:
            found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != start:
                self.drop()
                raise _BrokenOffError("it sent another range than was asked for")
            total = int(found[2]) if found[2] != "*" else None
        else:  # the whole file: ranges are ignored, or the file has changed
            start = 0
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
        if self.hear is not None:
            self.hear(response)
        self._write(response, url, start, total)

    def _write(self, response: httpx.Response, url: str, start: int, total: int | None) -> None:
        blocks = response.iter_raw()
        first = next(blocks, b"")
        if self._is_page(response, first, start):
            raise RefusedError(f"it answers with a web page{_read_title(first, blocks)} instead of the file")
        if total is not None and self.file.size not in (None, total):
            raise RefusedError(f"it says that the file has {total:,} bytes instead of {self.file.size:,}")
        known = total if total is not None else self.file.size
        if known is not None:
            check_space(self.part.parent, known - start, self.file.name)

        self.resumed = start > 0
        position = start
        try:
            with (
                explain_full_disk(self.part.parent, self.file.name),
                self.part.open("ab" if start else "wb") as file,
            ):
                self._note_origin(response, url)
                while first:
                    position += len(first)
                    if self.file.size is not None and position > self.file.size:
                        raise RefusedError(f"it sends more than the {self.file.size:,} bytes of the file")
                    file.write(first)
                    self.report(position, known)
                    first = next(blocks, b"")
        except RefusedError:
            self.drop()
            raise
        except OSError as error:
            raise SpearError(f"{self.part} cannot be written ({error.strerror}): choose another folder.") from error
        if known is not None and position != known:
            raise _BrokenOffError(f"the connection ended after {position:,} of {known:,} bytes")

    def _is_page(self, response: httpx.Response, first: bytes, start: int) -> bool:
        if self.file.name.endswith((".html", ".htm")):
            return False
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        return kind in ("text/html", "application/xhtml+xml") or (start == 0 and _PAGE.match(first) is not None)

    def _note_origin(self, response: httpx.Response, url: str) -> None:
        etag = response.headers.get("ETag", "")
        # A weak ETag does not promise the same bytes; If-Range must not have it.
        validator = etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")
        self.state_path.write_text(json.dumps({"url": url, "validator": validator}), encoding="utf-8")


def _name_status(response: httpx.Response) -> str:
    return f"{response.status_code} {response.reason_phrase}".strip()


def _read_title(first: bytes, blocks: Iterator[bytes]) -> str:
    page = first
    with contextlib.suppress(httpx.HTTPError):
        while len(page) < _PAGE_BYTES and (block := next(blocks, b"")):
            page += block
    found = _TITLE.search(page)
    title = " ".join(found[1].decode("utf-8", errors="replace").split())[:80] if found else ""
    return f" ({title!r})" if title else ""

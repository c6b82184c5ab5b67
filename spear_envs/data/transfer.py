"""Transfer of one file over HTTP, with resumption and retries."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from spear_envs.core.errors import SpearError
from spear_envs.data.files import RemoteFile, check_space, explain_full_disk
from spear_sandbox.web.endpoints import Backoff

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-\d{1,18}/(\d{1,18}|\*)")
_PAGE = re.compile(rb"\s*(<!doctype\s+html|<html)", re.IGNORECASE)


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
    """Attempts in a row without progress."""
    first_wait: float = 1.0
    """Wait before the second attempt; doubles with each further one."""
    longest_wait: float = 30.0
    connect_timeout: float = 20.0
    read_timeout: float = 60.0


Report = Callable[[int, "int | None"], None]
"""Called with the bytes of a transfer that are here, and their total (None: unknown)."""


@dataclass
class Transfer:
    """Transfers ``file`` to ``part``.

    A JSON file next to ``part`` records its address and the server's ETag or date, so that a later transfer resumes. If
    the checksum is pinned, a part of any origin is continued, since a wrong mixture would be detected.
    """

    file: RemoteFile
    part: Path
    patience: Patience
    report: Report
    resumed: bool = False
    """Whether the part comes from several responses."""

    @property
    def state_path(self) -> Path:
        """Return the path of the record of the part's origin."""
        return self.part.with_name(f"{self.part.name}.json")

    def run(self) -> None:
        """Transfer the file.

        Raises:
            RefusedError: the server refuses it.
            SpearError: the disk is full.
        """
        timeout = httpx.Timeout(self.patience.read_timeout, connect=self.patience.connect_timeout)
        # Uncompressed: lengths, ranges and checksums are of the stored bytes.
        headers = {"Accept-Encoding": "identity", "User-Agent": "spear-envs"}
        failures, farthest = 0, self._size()
        try:
            client = httpx.Client(follow_redirects=True, timeout=timeout, headers=headers)
        except (ImportError, ValueError) as error:
            raise RefusedError(f"the proxy that the environment names cannot be used: {error}") from error
        with client:
            while True:
                try:
                    return self._try(client)
                except _BrokenOffError as error:
                    # Compare with the farthest point, since a server that ignores ranges starts again each time.
                    failures = 1 if self._size() > farthest else failures + 1
                    farthest = max(farthest, self._size())
                    if failures >= self.patience.attempts:
                        raise RefusedError(str(error)) from error
                    backoff = Backoff(self.patience.first_wait, self.patience.longest_wait, jitter=0)
                    wait = backoff.choose_wait(failures) if error.wait is None else error.wait
                    time.sleep(min(wait, self.patience.longest_wait))

    def drop(self) -> None:
        """Delete the part."""
        self.part.unlink(missing_ok=True)
        self.state_path.unlink(missing_ok=True)
        self.resumed = False

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _find_resumption(self) -> dict[str, str]:
        """Return the headers that ask for the rest of the file, if it can be continued."""
        with contextlib.suppress(OSError, ValueError, RecursionError, KeyError, TypeError):
            state = json.loads(self.state_path.read_text("utf-8"))
            if state["url"] == self.file.url and state["validator"] and self._size():
                return {"Range": f"bytes={self._size()}-", "If-Range": str(state["validator"])}
        return {"Range": f"bytes={self._size()}-"} if self._size() and self.file.sha256 else {}

    def _try(self, client: httpx.Client) -> None:
        headers = self._find_resumption()
        try:
            with client.stream("GET", self.file.url, headers=headers) as response:
                self._receive(response, self._size() if headers else 0)
        # ValueError: an address to which it redirects has no such host name.
        except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects, ValueError) as error:
            raise RefusedError(str(error)) from error
        except httpx.TransportError as error:
            raise _BrokenOffError(str(error) or type(error).__name__) from error

    def _receive(self, response: httpx.Response, start: int) -> None:
        status, name = response.status_code, f"{response.status_code} {response.reason_phrase}".strip()
        if status in TRANSIENT:
            wait = response.headers.get("Retry-After", "")
            raise _BrokenOffError(name, float(wait) if wait.isdecimal() else None)
        if status == 416 and start:
            if response.headers.get("Content-Range") == f"bytes */{start}":
                self.resumed = True
                return  # the part is complete
            self.drop()
            raise _BrokenOffError("the part that is here does not fit the server's file", 0)
        if status not in (200, 206):
            raise RefusedError(name)
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise RefusedError("it compresses the file, although asked not to")
        if status == 206:
            found = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
            if found is None or int(found[1]) != start:
                self.drop()
                raise _BrokenOffError("it sent another range than was asked for")
            length = found[2]
        else:  # the whole file: ranges are ignored, or the file has changed
            start, length = 0, response.headers.get("Content-Length", "")
        self._write(response, start, int(length) if length.isdecimal() else None)

    def _write(self, response: httpx.Response, start: int, total: int | None) -> None:
        blocks = response.iter_raw()
        block = next(blocks, b"")
        kind = response.headers.get("Content-Type", "").partition(";")[0].strip().lower()
        if kind in ("text/html", "application/xhtml+xml") or (start == 0 and _PAGE.match(block)):
            raise RefusedError("it answers with a web page instead of the file")
        if total is not None and self.file.size not in (None, total):
            raise RefusedError(f"it says that the file has {total:,} bytes instead of {self.file.size:,}")
        known = total if total is not None else self.file.size
        if known is not None:
            check_space(self.part.parent, known - start, self.file.name)

        etag = response.headers.get("ETag", "")
        # A weak ETag does not promise the same bytes; If-Range must not have it, nor what is not ASCII.
        strong = etag and etag.isascii() and not etag.startswith("W/")
        validator = etag if strong else response.headers.get("Last-Modified")
        self.resumed = start > 0
        position = start
        try:
            with explain_full_disk(self.part.parent, self.file.name), self.part.open("ab" if start else "wb") as file:
                self.state_path.write_text(json.dumps({"url": self.file.url, "validator": validator}), "utf-8")
                while block:
                    position += len(block)
                    if self.file.size is not None and position > self.file.size:
                        raise RefusedError(f"it sends more than the {self.file.size:,} bytes of the file")
                    file.write(block)
                    self.report(position, known)
                    block = next(blocks, b"")
        except RefusedError:
            self.drop()
            raise
        except OSError as error:
            raise SpearError(f"{self.part} cannot be written ({error.strerror}): choose another folder.") from error
        if known is not None and position != known:
            raise _BrokenOffError(f"the connection ended after {position:,} of {known:,} bytes")


def download(file: RemoteFile, part: Path, report: Report, find_fault: Callable[[], str]) -> None:
    """Download ``file`` to ``part``.

    Args:
        find_fault: returns what is wrong with the complete part, or an empty text.

    Raises:
        RefusedError: the server refuses the file or sends another.
    """
    transfer = Transfer(file, part, Patience(), report)
    transfer.run()
    fault = find_fault()
    if fault and transfer.resumed:  # perhaps only the older bytes are wrong
        transfer.drop()
        transfer.run()
        fault = find_fault()
    if fault:
        transfer.drop()
        raise RefusedError(f"it sends another file, {fault}. {file.changed}".rstrip(". "))
    transfer.state_path.unlink(missing_ok=True)

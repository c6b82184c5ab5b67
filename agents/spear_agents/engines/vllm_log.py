"""The log of vLLM's output, and the causes of failures in it."""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_LARGEST_READ = 2**20
_PREFIX = re.compile(r"^\x1b?\S*\((?:EngineCore|Worker)[^)]*\)\S*\s*(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]+\] ?)?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_ERROR = re.compile(r"^(?:[a-zA-Z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)\b: \S")
_NO_CAUSE = re.compile(r"root cause|EngineCore encountered an issue|EngineDeadError|cancelled")
_OUT_OF_MEMORY = re.compile(r"OutOfMemoryError|out of memory|can't allocate memory|Cannot allocate memory|MemoryError")


class EngineLog:
    """A file for the output of vLLM's processes; if it is not wanted, output stays and causes are unknown."""

    def __init__(self, is_wanted: bool) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="spear-vllm-")) / "vllm.log" if is_wanted else None
        self._file: IO[str] | None = None
        self._taken: list[tuple[logging.StreamHandler[Any], Any]] = []
        self._is_kept = False

    @contextmanager
    def take_output(self) -> Iterator[None]:
        """Redirect processes started within the block, and vLLM's logger in this process, to the file.

        Standard output and error are inherited, so this process's own go there too for the duration.
        """
        if self.path is None:
            yield
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(ValueError, AttributeError):
                stream.flush()
        saved = [(number, os.dup(number)) for number in (1, 2)]
        try:
            with self.path.open("ab") as file:
                for number, _ in saved:
                    os.dup2(file.fileno(), number)
            yield
        finally:
            for number, copy in saved:
                os.dup2(copy, number)
                os.close(copy)
            if self._file is None:  # vLLM's logger keeps the standard error stream of its setup
                self._file = self.path.open("a", encoding="utf-8")
                for handler in logging.getLogger("vllm").handlers:
                    if isinstance(handler, logging.StreamHandler):
                        self._taken.append((handler, handler.setStream(self._file)))

    def find_cause(self) -> str | None:
        """The last error with a cause, or None."""
        found = None
        for line in self._read().splitlines():
            text = _PREFIX.sub("", _COLOUR.sub("", line)).strip()
            if _ERROR.match(text) and not _NO_CAUSE.search(text):
                found = text
        return found

    def tells_out_of_memory(self) -> bool:
        """Whether the log shows that memory ran out."""
        return bool(_OUT_OF_MEMORY.search(self._read()))

    def keep(self) -> str:
        """Keep the file after the engine; return its place as the end of a sentence."""
        self._is_kept = True
        return "" if self.path is None else f" (its log: {self.path})"

    def close(self) -> None:
        """Give vLLM's logger its stream back and remove the file, unless something went wrong."""
        for handler, stream in self._taken:
            if stream is not None and handler.stream is self._file:
                handler.setStream(stream)
        self._taken.clear()
        if self._file is not None:
            self._file.close()
        if self.path is not None and not self._is_kept:
            shutil.rmtree(self.path.parent, ignore_errors=True)

    def _read(self) -> str:
        if self.path is None:
            return ""
        try:
            with self.path.open("rb") as file:
                file.seek(max(0, self.path.stat().st_size - _LARGEST_READ))
                return file.read().decode("utf-8", "replace")
        except OSError:
            return ""

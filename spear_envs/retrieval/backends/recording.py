"""Searches recorded in an SQLite file, so that a training with a search engine can be repeated, also by others.

A file belongs to one backend. Any number of processes may write to it concurrently and may be killed at any moment. A
stored answer never changes, since a search is stored only if no stored one answers it.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import unicodedata
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.asking import digest_plain
from spear_envs.retrieval.backend import Backend, DocumentBackend, Found, Load
from spear_envs.retrieval.searcher import RetrieverRefusal

FORMAT = 1
BUSY_S = 60.0
SCHEMA = """
CREATE TABLE IF NOT EXISTS about (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS searches (
    query TEXT NOT NULL, k INTEGER NOT NULL, whole INTEGER NOT NULL, hits TEXT NOT NULL, PRIMARY KEY (query, k)
) WITHOUT ROWID;
"""
# An answer for a greater k also answers a smaller one; one with fewer hits than k answers every k.
FIND = "SELECT hits FROM searches WHERE query = ? AND (k >= ? OR whole) ORDER BY k LIMIT 1"

Hits = list[tuple[bytes, float]]


def normalize_query(query: str) -> str:
    """Normalize a query for comparisons: composed characters (NFC) and single spaces."""
    return " ".join(unicodedata.normalize("NFC", query).split())


class Recording:
    """A file of searches, for any thread.

    Args:
        path: the file; made if necessary and ``backend`` is given.
        settings: of the backend, as far as they affect results; None for the file's.
        backend: to record; None for read-only.

    Raises:
        SpearError: the file is missing, is not a recording, or is of another backend, settings or format.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None, backend: Backend | None = None) -> None:
        self.path = Path(path).absolute()
        self._writes = backend is not None
        self._lock = threading.Lock()
        self._connections: dict[int, sqlite3.Connection] = {}
        if not self._writes and not self.path.is_file():
            raise SpearError(f"the recording {self.path} does not exist: make one with 'spear retriever record'.")
        try:
            if backend is not None:
                self._create(dict(settings or {}), backend)
            about: dict[str, str] = dict(self._connect().execute("SELECT name, value FROM about").fetchall())
        except sqlite3.Error as error:
            raise SpearError(f"{self.path} cannot be used as a recording ({error}): name another file.") from error
        if about.get("format") != str(FORMAT):
            raise SpearError(f"{self.path} has another format than {FORMAT}: record again, into another file.")
        self.settings: dict[str, Any] = json.loads(about["settings"])
        changed = sorted(
            key for key in {*self.settings, *(settings or {})} if self.settings.get(key) != (settings or {}).get(key)
        )
        if settings is not None and changed:
            raise SpearError(
                f"{self.path} is of other settings ({', '.join(changed)}): it has {self.settings}; name another file, "
                "or set them as they were."
            )
        if backend is not None and about["backend"] != backend.fingerprint:
            raise SpearError(
                f"{self.path} is a recording of another backend (fingerprint {about['backend'][:12]}, not "
                f"{backend.fingerprint[:12]}): name another file."
            )
        self.scale: str | None = about["scale"] or None
        self.fingerprint = digest_plain([about["backend"], about["id"]])

    def _create(self, settings: dict[str, Any], backend: Backend) -> None:
        """Make the file unless it exists; of several processes only one names it."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpearError(f"{self.path.parent} cannot be made ({error.strerror}): name another place.") from error
        connection = self._connect()
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        with connection:
            for statement in filter(str.strip, SCHEMA.split(";")):
                connection.execute(statement)
            about = {
                "format": str(FORMAT),
                "id": uuid.uuid4().hex,
                "backend": backend.fingerprint,
                "scale": backend.scale or "",
                "settings": json.dumps(settings, sort_keys=True),
            }
            if connection.execute("SELECT count(*) FROM about").fetchone() == (0,):
                connection.executemany("INSERT INTO about VALUES (?, ?)", about.items())

    def _connect(self) -> sqlite3.Connection:
        """This process's connection: forked children must not use or close their parent's."""
        connection = self._connections.get(os.getpid())
        if connection is None:
            connection = self._connect_to_write() if self._writes else self._connect_to_read()
            self._lock = threading.Lock()  # the parent's may have been held
            self._connections[os.getpid()] = connection
        return connection

    def _connect_to_write(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        # Safe against killed processes; a power cut may lose the last searches.
        connection.execute("PRAGMA synchronous = NORMAL")
        return connection

    def _connect_to_read(self) -> sqlite3.Connection:
        """Open read-only; as immutable if the folder is not writable."""
        uri = f"{self.path.as_uri()}?mode=ro"
        options: dict[str, Any] = {"uri": True, "timeout": BUSY_S, "isolation_level": None, "check_same_thread": False}
        connection = sqlite3.connect(uri, **options)
        try:
            connection.execute("SELECT 1 FROM about")
        except sqlite3.OperationalError:
            if os.access(self.path.parent, os.W_OK):
                raise
            connection.close()
            connection = sqlite3.connect(f"{uri}&immutable=1", **options)
        return connection

    def find(self, query: str, k: int) -> Hits | None:
        """Find the stored answer; None if there is none."""
        connection = self._connect()
        with self._lock:
            return _find(connection, query, k)

    def store(self, answers: Iterable[tuple[str, Hits]], k: int) -> list[Hits]:
        """Store answers; return what the file then has for each, which another process may have stored first.

        Args:
            answers: normalised queries and their hits.
        """
        connection = self._connect()
        kept = []
        with self._lock:
            connection.execute("BEGIN IMMEDIATE")
            with connection:
                for query, hits in answers:
                    if (stored := _find(connection, query, k)) is None:
                        plain = json.dumps([(raw.decode(), score) for raw, score in hits], ensure_ascii=False)
                        connection.execute("INSERT INTO searches VALUES (?, ?, ?, ?)", (query, k, len(hits) < k, plain))
                    kept.append(hits if stored is None else stored)
        return kept

    def __len__(self) -> int:
        """Number of stored searches."""
        connection = self._connect()
        with self._lock:
            return int(connection.execute("SELECT count(*) FROM searches").fetchone()[0])

    def describe(self) -> dict[str, Any]:
        """The file's name and length."""
        return {"file": self.path.name, "searches": len(self)}

    def close(self) -> None:
        """Close; the last one to do so merges everything into the file, which can then be shared."""
        with self._lock:
            if connection := self._connections.pop(os.getpid(), None):
                connection.close()


def _find(connection: sqlite3.Connection, query: str, k: int) -> Hits | None:
    row = connection.execute(FIND, (query, k)).fetchone()
    return None if row is None else [(raw.encode(), score) for raw, score in json.loads(row[0])][:k]


class ReplayBackend(DocumentBackend):
    """Answers from a recording; refuses other searches unless there is a backend.

    Args:
        recording: read only.
        inner: for what was not recorded; None to refuse.
    """

    def __init__(self, recording: Recording, inner: Backend | None = None) -> None:
        self._recording = recording
        self._inner = inner
        self.scale = recording.scale
        self.fingerprint = recording.fingerprint
        self._counts = {"replayed": 0, "recorded": 0}
        self.load = inner.load if inner else Load(calls=2, queries=16)

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return 1 for each query, or as the backend does."""
        return self._inner.lengths(queries) if self._inner else super().lengths(queries)

    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Found]]:
        """See :class:`~spear_envs.retrieval.backend.Backend`."""
        asked = [normalize_query(query) for query in queries]
        found = {query: self._recording.find(query, k) for query in dict.fromkeys(asked)}
        missing = [query for query, hits in found.items() if hits is None]
        self._counts["replayed"] += len(asked) - len(missing)
        if missing:
            found.update(zip(missing, self._ask(missing, k), strict=True))
        return [found[query] or [] for query in asked]

    def _ask(self, queries: Sequence[str], k: int) -> Sequence[Hits]:
        if self._inner is None:
            raise RetrieverRefusal(
                f"{self._recording.path.name} lacks a search for {queries[0][:200]!r} with {k} passages: record it, or "
                "set fall_through: true."
            )
        return _search_whole(self._inner, queries, k)

    def describe(self) -> dict[str, Any]:
        """Describe the recorded backend and the file."""
        about = self._inner.describe() if self._inner else self._recording.settings
        return {**about, "recording": self._recording.describe()}

    def counts(self) -> Mapping[str, float]:
        """Searches answered from the file and by the backend, and the backend's counts."""
        return {**(self._inner.counts() if self._inner else {}), **self._counts}

    def close(self) -> None:
        """Close the file, and the backend."""
        self._recording.close()
        if self._inner:
            self._inner.close()


class RecordingBackend(ReplayBackend):
    """Answers from a recording that is open for writing; asks the backend once for each other search."""

    def __init__(self, recording: Recording, inner: Backend) -> None:
        super().__init__(recording, inner)
        self.passages = inner.passages

    def _ask(self, queries: Sequence[str], k: int) -> Sequence[Hits]:
        assert self._inner is not None
        answers = _search_whole(self._inner, queries, k)
        self._counts["recorded"] += len(queries)
        return self._recording.store(zip(queries, answers, strict=True), k)


def _search_whole(backend: Backend, queries: Sequence[str], k: int) -> list[Hits]:
    """Hits with their documents."""
    return [[(backend.read(passage), score) for passage, score in hits] for hits in backend.search(queries, k)]

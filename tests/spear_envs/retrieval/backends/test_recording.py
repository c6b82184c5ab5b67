"""Searches that are kept in a file, and answered from it."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.backend import EmbeddedBackend, Found
from spear_envs.retrieval.backends.recording import Recording, RecordingBackend, ReplayBackend, normalize_query
from spear_envs.retrieval.searcher import RetrieverRefusal
from tests.commands import wait_until
from tests.spear_envs.retrieval.backends.engines import ListBackend, read_ids, write_document
from tests.spear_envs.retrieval.service import ScriptedRetriever, make_rows

SETTINGS = {"kind": "list", "results": 10}


class MovingBackend(ListBackend):
    """As the web: no two answers are alike. An answer has as many passages as its query says at most."""

    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Found]]:
        self.asked += [(query, k) for query in queries]
        number = len(self.asked)
        return [[(write_document(f"{q}/{number}/{i}"), 1 / (1 + i)) for i in range(min(k, int(q)))] for q in queries]


def record(path: Path, inner: ListBackend) -> RecordingBackend:
    return RecordingBackend(Recording(path, SETTINGS, inner), inner)


def replay(path: Path) -> ReplayBackend:
    return ReplayBackend(Recording(path, SETTINGS))


ASKED = st.lists(st.tuples(st.sampled_from(["0", "3", "7", "50"]), st.integers(1, 12)), min_size=1, max_size=25)


@given(asked=ASKED, data=st.data())
def test_what_was_answered_once_is_answered_so_for_ever(
    asked: list[tuple[str, int]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("recording") / "searches.sqlite"
    inner = MovingBackend()
    backend = record(path, inner)
    first: dict[tuple[str, int], Any] = {}
    for query, k in asked:
        before = len(inner.asked)
        (hits,) = backend.search([query], k)
        assert hits == first.setdefault((query, k), hits), "the second answer differs from the first"
        deeper = any(q == query and (depth >= k or len(found) < depth) for (q, depth), found in first.items())
        assert deeper and len(hits) == min(k, int(query))
        assert len(inner.asked) - before <= 1
    backend.close()
    replayed = replay(path)
    for query, k in data.draw(st.permutations(sorted(first))):
        assert replayed.search([query], k) == [first[query, k]]
    assert replayed.fingerprint == backend.fingerprint and replayed.counts()["recorded"] == 0


def test_a_deeper_or_a_whole_answer_is_cut_and_nothing_is_asked(tmp_path: Path) -> None:
    inner = MovingBackend()
    backend = record(tmp_path / "r.sqlite", inner)
    (deep,) = backend.search(["50"], 10)
    assert backend.search(["50"], 3) == [deep[:3]]
    (whole,) = backend.search(["4"], 10)
    assert backend.search(["4"], 100) == [whole]
    assert inner.asked == [("50", 10), ("4", 10)]
    assert backend.counts() == {"requests": 2, "replayed": 2, "recorded": 2}


def test_a_batch_asks_only_for_what_is_missing_and_once(tmp_path: Path) -> None:
    inner = MovingBackend()
    backend = record(tmp_path / "r.sqlite", inner)
    backend.search(["1"], 3)
    answers = backend.search(["2", " 1 ", "2", "3"], 3)
    assert inner.asked == [("1", 3), ("2", 3), ("3", 3)] and answers[0] == answers[2]


def test_queries_are_the_same_but_for_spaces_and_composition(tmp_path: Path) -> None:
    assert normalize_query("  Zu\u0308rich \n 1 ") == "Zürich 1"
    assert normalize_query("a") != normalize_query("A")


def test_replay_touches_no_backend_and_says_what_is_missing(tmp_path: Path) -> None:
    inner = MovingBackend()
    backend = record(tmp_path / "r.sqlite", inner)
    (hits,) = backend.search(["9"], 3)
    backend.close()
    replayed = replay(tmp_path / "r.sqlite")
    assert replayed.search(["9"], 2) == [hits[:2]]
    for query, k in (("8", 3), ("9", 4)):
        with pytest.raises(RetrieverRefusal, match=rf"r.sqlite lacks a search for '{query}' with {k} passages"):
            replayed.search([query], k)
    through = ReplayBackend(Recording(tmp_path / "r.sqlite", SETTINGS), inner)
    assert through.search(["9"], 2) == [hits[:2]] and len(through.search(["8"], 3)[0]) == 3
    assert len(Recording(tmp_path / "r.sqlite")) == 1, "a search that fell through was kept"


def test_rows_of_a_corpus_are_kept_as_documents_byte_for_byte(tmp_path: Path) -> None:
    corpus = make_rows(20)
    embedded = EmbeddedBackend(corpus, ScriptedRetriever(20))
    backend = RecordingBackend(Recording(tmp_path / "r.sqlite", {}, embedded), embedded)
    assert backend.search(["3"], 2) == [[(corpus.raw(3), 1.0), (corpus.raw(4), 0.5)]]
    assert ReplayBackend(Recording(tmp_path / "r.sqlite")).scale == "scripted"


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    record(path, MovingBackend()).close()
    other = MovingBackend()
    other.fingerprint = "another"
    with pytest.raises(SpearError, match="recording of another backend"):
        Recording(path, SETTINGS, other)
    with pytest.raises(SpearError, match=r"other settings \(results\)"):
        Recording(path, {**SETTINGS, "results": 5})
    with pytest.raises(SpearError, match="spear retriever record"):
        Recording(tmp_path / "none.sqlite")
    (tmp_path / "text.sqlite").write_text("no database, but a text of some length" * 100)
    with sqlite3.connect(tmp_path / "foreign.sqlite") as foreign:
        foreign.execute("CREATE TABLE t (x)")
    for name in ("text", "foreign"):
        with pytest.raises(SpearError, match=f"{name}.sqlite cannot be used as a recording"):
            Recording(tmp_path / f"{name}.sqlite")
    with sqlite3.connect(path) as database:
        database.execute("UPDATE about SET value = '99' WHERE name = 'format'")
    with pytest.raises(SpearError, match="another format"):
        Recording(path)


def test_two_recordings_of_one_backend_have_different_fingerprints(tmp_path: Path) -> None:
    one, other = (record(tmp_path / f"{name}.sqlite", MovingBackend()) for name in "ab")
    assert one.fingerprint != other.fingerprint
    assert record(tmp_path / "a.sqlite", MovingBackend()).fingerprint == one.fingerprint


def test_a_closed_recording_is_one_file_that_can_be_read_where_nothing_can_be_written(tmp_path: Path) -> None:
    backend = record(tmp_path / "r.sqlite", MovingBackend())
    backend.search(["5"], 3)
    backend.close()
    assert [path.name for path in tmp_path.iterdir()] == ["r.sqlite"]
    shared = tmp_path / "shared"
    shared.mkdir()
    (tmp_path / "r.sqlite").rename(shared / "r.sqlite")
    os.chmod(shared, 0o555)
    try:
        assert len(replay(shared / "r.sqlite").search(["5"], 3)[0]) == 3
    finally:
        os.chmod(shared, 0o755)


def test_threads_share_a_recording_and_agree(tmp_path: Path) -> None:
    backend = record(tmp_path / "r.sqlite", MovingBackend())
    found: list[list[str]] = []

    def ask() -> None:
        found.append([read_ids(backend.search([str(query)], 2)[0])[0] for query in range(1, 30)])

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and all(answers == found[0] for answers in found)


WRITER = """
import sys
from pathlib import Path
from tests.spear_envs.retrieval.backends.test_recording import MovingBackend, read_ids, record
backend = record(Path(sys.argv[1]), MovingBackend())
backend._inner.asked = [("", 0)] * (1000 * int(sys.argv[2]))  # answers of another process are other ones
for query in range(1, 1 + int(sys.argv[3])):
    (hits,) = backend.search([str(query)], 2)
    print(query, read_ids(hits)[0], flush=True)
"""


def start_writer(path: Path, number: int, queries: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(path), str(number), str(queries)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_share_a_recording_and_agree(tmp_path: Path) -> None:
    writers = [start_writer(tmp_path / "r.sqlite", number, 100) for number in range(2)]
    outputs = [writer.communicate(timeout=120)[0] for writer in writers]
    assert all(writer.returncode == 0 for writer in writers)
    assert len(outputs[0].splitlines()) == 100 and outputs[0] == outputs[1]


def test_what_a_killed_process_answered_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "r.sqlite"
    writer = start_writer(path, 1, 100_000)
    assert writer.stdout is not None
    said = [writer.stdout.readline() for _ in range(20)]
    writer.send_signal(signal.SIGKILL)
    said += [line for line in writer.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    wait_until(lambda: writer.poll() is not None)
    replayed = replay(path)
    for line in said:
        query, first = line.split()
        assert json.loads(replayed.search([query], 2)[0][0][0])["id"] == first  # type: ignore[arg-type]

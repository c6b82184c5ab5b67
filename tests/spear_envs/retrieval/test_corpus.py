"""Corpora: reading in place, and a clear word on every line that is not a document."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.retrieval import corpus as module
from spear_envs.retrieval.corpus import Corpus

GOOD = '{"id": "1", "contents": "\\"A\\"\\nb"}\n'


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_bytes(text.encode("utf-8") if isinstance(text, str) else text)
    return path


def test_rows_are_lines(tmp_path: Path) -> None:
    text = GOOD + '{"contents": "é漢\u2028x", "id": 2, "title": "T"}\r\n' + '{"id":"3","contents":""}'
    corpus = Corpus.open(write(tmp_path, text))
    assert len(corpus) == 3
    assert corpus.document(0) == {"id": "1", "contents": '"A"\nb'}
    assert corpus.document(1)["title"] == "T"
    assert corpus.raw(1).decode("utf-8") == text.splitlines()[1] + "\u2028" + text.splitlines()[2]
    assert list(corpus.texts()) == ['"A"\nb', "é漢\u2028x", ""]
    assert list(corpus.texts(1, 2)) == ["é漢\u2028x"]
    assert list(corpus.texts(2, 99)) == [""]
    assert corpus.fingerprint == hashlib.sha256(text.encode("utf-8")).hexdigest()
    for row in (-1, 3):
        with pytest.raises(IndexError):
            corpus.raw(row)


def test_a_byte_order_mark_is_no_part_of_the_first_document(tmp_path: Path) -> None:
    corpus = Corpus.open(write(tmp_path, "\ufeff" + GOOD + '{"id":"3","contents":""}'))
    assert corpus.raw(0) == GOOD.strip().encode() and corpus.document(0)["id"] == "1"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2, is not JSON"),
        ("\n", "line 2, is blank"),
        ("   \n", "line 2, is blank"),
        ("[1]\n", "not a JSON object but a list"),
        ('"text"\n', "not a JSON object but a str"),
        ('{"contents": "x"}\n', "lacks a text or whole number under 'id'"),
        ('{"id": null, "contents": "x"}\n', "under 'id'"),
        ('{"id": true, "contents": "x"}\n', "under 'id'"),
        ('{"id": 1.5, "contents": "x"}\n', "under 'id'"),
        ('{"id": "2"}\n', "lacks a text under 'contents'"),
        ('{"id": "2", "contents": ["x"]}\n', "lacks a text under 'contents'"),
        ('{"id": "2", "contents": "x", "score": NaN}\n', "NaN is not a JSON number"),
        ('{"id": "2", "contents": "x", "score": 1e999}\n', "1e999 is too large"),
        (b'{"id": "2", "contents": "\xff"}\n', "line 2, is not JSON"),
        ('{"id": 2, "contents": ' + "[" * 100_000 + "\n", "line 2, is not JSON"),
        ('{"id": "1", "contents": "other"}\n', "lines 1 and 2 have the id '1'"),
        ('{"id": 1, "contents": "other"}\n', "lines 1 and 2 have the id '1'"),
    ],
)
def test_what_is_no_document(line: str | bytes, words: str, tmp_path: Path) -> None:
    data = line if isinstance(line, bytes) else line.encode("utf-8")
    with pytest.raises(SpearError, match=words):
        Corpus.open(write(tmp_path, GOOD.encode("utf-8") + data))


def test_files_that_are_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match=r"the corpus .* does not exist"):
        Corpus.open(tmp_path / "none.jsonl")
    with pytest.raises(SpearError, match="cannot be read"):
        Corpus.open(tmp_path)
    with pytest.raises(SpearError, match="does not contain documents"):
        Corpus.open(write(tmp_path, ""))
    with pytest.raises(SpearError, match="gunzip -k"):
        Corpus.open(write(tmp_path, gzip.compress(GOOD.encode("utf-8"))))
    with pytest.raises(SpearError, match="line 2, is not JSON"):
        Corpus.open(write(tmp_path, GOOD + "\ufeff" + GOOD))


def test_a_line_without_end_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE", 1_000)
    with pytest.raises(SpearError, match="longer than 1,000 bytes"):
        Corpus.open(write(tmp_path, GOOD + '{"id": "2", "contents": "' + "x" * 5_000))


def test_only_equal_ids_are_refused_not_equal_hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "hash", lambda value: 7, raising=False)
    lines = [json.dumps({"id": str(n), "contents": ""}) for n in range(50)]
    assert len(Corpus.open(write(tmp_path, "\n".join(lines)))) == 50
    lines.append(lines[20])
    with pytest.raises(SpearError, match="lines 21 and 51"):
        Corpus.open(write(tmp_path, "\n".join(lines)))


def test_offsets_of_large_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_FROM", 1)
    path = write(tmp_path, GOOD + '{"id": "2", "contents": "x"}\n')
    first = Corpus.open(path)
    received: list[int] = []
    again = Corpus.open(path, on_lines=lambda lines, place: received.append(lines))
    assert received == []
    assert again.fingerprint == first.fingerprint
    assert [again.raw(row) for row in range(2)] == [first.raw(row) for row in range(2)]
    # A file that was written to is read anew, and so is one whose offsets are damaged.
    path.write_text(GOOD + '{"id": "3", "contents": "yy"}\n', "utf-8")
    assert Corpus.open(path).document(1)["id"] == "3"
    kept = path.with_name("corpus.jsonl.lines")
    for damaged in (b"", b"{}", kept.read_bytes()[:-3], b"\xff" * 600):
        kept.write_bytes(damaged)
        assert Corpus.open(path).document(1)["contents"] == "yy"
    os.utime(path, ns=(1, 1))
    path.write_text("{", "utf-8")
    with pytest.raises(SpearError, match="line 1"):
        Corpus.open(path)


def test_nothing_is_kept_where_writing_is_not_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "KEPT_FROM", 1)
    path = write(tmp_path, GOOD)

    def refuse(*arguments: object, **keywords: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "replace", refuse)
    assert len(Corpus.open(path)) == 1
    assert [item.name for item in tmp_path.iterdir()] == ["corpus.jsonl"]


TEXT = st.text(st.characters(), max_size=40)


@given(st.lists(TEXT, min_size=1, max_size=8))
def test_memory_and_file_are_alike(tmp_path_factory: pytest.TempPathFactory, contents: list[str]) -> None:
    documents = [{"id": str(row), "contents": text, "more": [row, None]} for row, text in enumerate(contents)]
    corpus = Corpus.in_memory(documents)
    assert [corpus.document(row) for row in range(len(corpus))] == documents
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    path.write_bytes(b"\n".join(corpus.raw(row) for row in range(len(corpus))) + b"\n")
    assert Corpus.open(path).fingerprint == corpus.fingerprint
    assert list(Corpus.open(path).texts()) == contents


@pytest.mark.parametrize(
    "documents", [[], [{"id": "1"}], [{"id": "1", "contents": {1}}], [{"id": "1", "contents": "", "x": float("nan")}]]
)
def test_memory_refuses_what_is_no_document(documents: list[dict[str, object]]) -> None:
    with pytest.raises(SpearError):
        Corpus.in_memory(documents)


@pytest.mark.parametrize("change", ["truncate", "rewrite"])
def test_a_file_that_is_written_to_is_noticed(tmp_path: Path, change: str) -> None:
    path = write(tmp_path, GOOD + '{"id": "2", "contents": "x"}\n')
    corpus = Corpus.open(path)
    assert corpus.document(1)["id"] == "2"
    state = path.stat()
    if change == "truncate":
        os.truncate(path, 0)
    else:
        path.write_text(path.read_text("utf-8").replace("x", "y"), "utf-8")
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    for row in range(2):
        with pytest.raises(SpearError, match="was written to while it is open: start again"):
            corpus.raw(row)


def test_a_file_that_is_replaced_stays_open(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    corpus = Corpus.open(path)
    other = tmp_path / "other"
    other.write_text("nothing", "utf-8")
    other.replace(path)
    assert corpus.document(0)["id"] == "1"

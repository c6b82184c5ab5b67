"""Builds: gone on with after a kill, with the same bytes; refused when they would not fit; taken over from others."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from spear_envs.core.errors import SpearError
from spear_envs.data.processes import hold_folder
from spear_envs.retrieval import build
from spear_envs.retrieval.build import NOTE, EncoderSource, encode_corpus
from spear_envs.retrieval.corpus import INDEX, Corpus
from spear_envs.retrieval.encoders import describe_model
from spear_envs.retrieval.indexes import open_index

faiss = pytest.importorskip("faiss", reason="the extra 'search' is not installed")

Build = Callable[..., Path]
MakeCorpus = Callable[..., Corpus]
SMALL_SHARD = 40

ENCODE = """
import sys, time
from pathlib import Path
from spear_envs.retrieval import build
from spear_envs.retrieval.corpus import INDEX, Corpus
from spear_envs.retrieval.encoders import describe_model

build.SHARD_ROWS = {shard}
model, export, corpus, folder = map(Path, sys.argv[1:])
source = build.EncoderSource(export, describe_model(model), exported=True)
build.encode_corpus(Corpus.open(corpus), folder, source, on_rows=lambda rows: time.sleep(0.1))
"""


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "SHARD_ROWS", SMALL_SHARD)


@pytest.fixture
def source(tiny_model: Path, tiny_export: Path) -> EncoderSource:
    return EncoderSource(tiny_export, describe_model(tiny_model), exported=True)


def read_shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.f16"))}


@pytest.mark.usefixtures("small_shards")
def test_killed_and_gone_on_with_gives_the_same_bytes(
    make_corpus: MakeCorpus, source: EncoderSource, tiny_model: Path, tmp_path: Path
) -> None:
    corpus = make_corpus(600)
    whole = encode_corpus(corpus, tmp_path / "whole", source)
    assert (whole.rows, whole.dimension, len(whole.paths)) == (600, 32, 15)
    assert corpus.path is not None
    folder = tmp_path / "killed"
    arguments = [str(path) for path in (tiny_model, source.folder, corpus.path, folder)]
    process = subprocess.Popen([sys.executable, "-c", ENCODE.format(shard=SMALL_SHARD), *arguments])
    deadline = time.monotonic() + 120
    while len(read_shards(folder)) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    finished = len(read_shards(folder))
    assert 3 <= finished < 15
    before = {name: os.stat(folder / name).st_mtime_ns for name in list(read_shards(folder))[:finished]}
    received: list[int] = []
    encode_corpus(corpus, folder, source, on_rows=received.append)
    assert received[0] >= finished * SMALL_SHARD and received[-1] == 600
    assert read_shards(folder) == read_shards(tmp_path / "whole")
    assert before == {name: os.stat(folder / name).st_mtime_ns for name in before}


@pytest.mark.usefixtures("small_shards")
def test_what_a_crash_leaves_is_made_anew(make_corpus: MakeCorpus, source: EncoderSource, tmp_path: Path) -> None:
    corpus = make_corpus(170)
    folder = tmp_path / "vectors"
    encode_corpus(corpus, folder, source)
    expected = read_shards(folder)
    assert [name.partition(".")[0] for name in expected] == ["000000", "000001", "000002", "000003", "000004"]
    for text in ("", "\x00", "7"):
        (folder / NOTE).write_text(text, "utf-8")
        encode_corpus(corpus, folder, source)
        assert read_shards(folder) == expected
    name = list(expected)[2]
    for damage in (b"", expected[name][:-2], b"\x01" * len(expected[name])):
        (folder / name).write_bytes(damage)
        encode_corpus(corpus, folder, source)
        assert read_shards(folder) == expected


@pytest.mark.usefixtures("small_shards")
def test_vectors_of_another_corpus_or_model_are_not_gone_on_with(
    make_corpus: MakeCorpus, source: EncoderSource, tmp_path: Path, tiny_model: Path
) -> None:
    encode_corpus(make_corpus(50), tmp_path / "vectors", source)
    with pytest.raises(SpearError, match="made with another corpus"):
        encode_corpus(make_corpus(51), tmp_path / "vectors", source)
    other = EncoderSource(source.folder, describe_model(tiny_model, passage_prefix="p "), exported=True)
    with pytest.raises(SpearError, match="made with another encoder"):
        encode_corpus(make_corpus(50), tmp_path / "vectors", other)


@pytest.mark.usefixtures("small_shards")
def test_rows_keep_their_order_and_samples_are_seeded(
    make_corpus: MakeCorpus, source: EncoderSource, tmp_path: Path
) -> None:
    corpus = make_corpus(130)
    files = encode_corpus(corpus, tmp_path / "vectors", source)
    stacked = np.concatenate(list(files.shards()))
    encoder = source.open()
    for row in (0, 39, 40, 129):
        alone = encoder.encode_passages([corpus.document(row)["contents"]])[0]
        np.testing.assert_allclose(stacked[row], alone, atol=2e-3)
    sample = files.sample(50, seed=3)
    rows = np.sort(np.random.default_rng(3).choice(130, 50, replace=False))
    np.testing.assert_array_equal(sample, stacked[rows])
    np.testing.assert_array_equal(files.sample(130, seed=0), stacked)


def test_several_processes_give_the_same_bytes(
    make_corpus: MakeCorpus, source: EncoderSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "SHARD_ROWS", 100)
    corpus = make_corpus(250)
    encode_corpus(corpus, tmp_path / "one", source)
    encode_corpus(corpus, tmp_path / "two", source, processes=2)
    assert read_shards(tmp_path / "one") == read_shards(tmp_path / "two")


def test_kept_vectors_make_another_type_without_encoding(
    make_corpus: MakeCorpus, build_index: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(100)
    build_index(corpus, "Flat", vectors=tmp_path / "vectors")
    assert not (tmp_path / "index" / "dense.partial").exists()

    def refuse(job: object) -> None:
        raise AssertionError("encoded again")

    monkeypatch.setattr(build, "write_shard", refuse)
    index = build_index(corpus, "HNSW", vectors=tmp_path / "vectors")
    assert open_index("dense", corpus, index).describe()["index"] == "HNSW32"


def test_vectors_are_kept_outside_the_index(make_corpus: MakeCorpus, build_index: Build, tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="another folder"):
        build_index(make_corpus(20), "Flat", vectors=tmp_path / "index" / "vectors")
    assert not (tmp_path / "index" / "vectors").exists()


def test_two_builds_do_not_write_the_same_vectors_at_once(
    make_corpus: MakeCorpus, source: EncoderSource, tmp_path: Path
) -> None:
    with hold_folder(tmp_path / "vectors"), pytest.raises(SpearError, match="another process"):
        encode_corpus(make_corpus(20), tmp_path / "vectors", source)
    assert encode_corpus(make_corpus(20), tmp_path / "vectors", source).rows == 20


def test_type_is_chosen_and_memory_is_asked_for_first(make_corpus: MakeCorpus, build_index: Build) -> None:
    corpus = make_corpus(60)
    index = build_index(corpus, None)
    assert open_index("dense", corpus, index).describe()["index"] == "Flat"
    received: list[str] = []
    with pytest.raises(SpearError, match=r"HNSW32 of 60 vectors of 32 dimensions needs \d+ MB of memory.*--memory"):
        build_index(corpus, "HNSW", "other", memory=10**6, on_progress=lambda what, done, total: received.append(what))
    assert received == []
    with pytest.raises(SpearError, match="fewer than lists"):
        build_index(corpus, "IVF64,Flat", "third")
    with pytest.raises(SpearError, match="cannot be cut into 5"):
        build_index(corpus, "IVF4,PQ5", "fourth")


def test_two_builders_do_not_mix_their_words_and_manifests(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    with hold_folder(tmp_path / "index" / "bm25"), pytest.raises(SpearError, match="another process is building"):
        build.build_bm25(make_corpus(5), tmp_path / "index", processes=1)
    build.build_bm25(make_corpus(5), tmp_path / "index", processes=1)


def test_strange_folders_are_left_alone(make_corpus: MakeCorpus, build_index: Build, tmp_path: Path) -> None:
    corpus = make_corpus(10)
    (tmp_path / "index").mkdir()
    (tmp_path / "index" / "thesis.tex").write_text("precious", "utf-8")
    with pytest.raises(SpearError, match=r"thesis\.tex"):
        build_index(corpus)
    (tmp_path / "file").write_text("", "utf-8")
    from spear_envs.retrieval.build import build_bm25

    with pytest.raises(SpearError, match="is a file"):
        build_bm25(corpus, tmp_path / "file", processes=1)


def test_indexes_of_others_are_taken_over(make_corpus: MakeCorpus, build_index: Build, tmp_path: Path) -> None:
    corpus = make_corpus(300)
    own = build_index(corpus, "Flat", "own")
    stored = faiss.read_index(str(own / "dense" / INDEX)).reconstruct_n(0, 300)
    foreign = tmp_path / "e5.index"
    graph = faiss.IndexHNSWFlat(32, 24, faiss.METRIC_INNER_PRODUCT)
    graph.add(stored)
    faiss.write_index(graph, str(foreign))
    index = build_index(corpus, None, "adopted", adopted=foreign)
    retriever = open_index("dense", corpus, index)
    assert retriever.describe()["index"] == "HNSW24" and retriever.describe()["efSearch"] == 128
    assert (index / "dense" / INDEX).samefile(foreign)
    content = json.loads((index / "dense" / "manifest.json").read_text("utf-8"))
    assert content["settings"]["ef_construction"] is None

    shifted = faiss.IndexFlatIP(32)
    shifted.add(np.roll(stored, 1, axis=0))
    by_distance = faiss.IndexFlatL2(32)
    by_distance.add(stored)
    short = faiss.IndexFlatIP(32)
    short.add(stored[:-1])
    for number, (wrong, words) in enumerate(
        ((shifted, "do not find themselves"), (by_distance, "cannot be imported"), (short, "299 vectors"))
    ):
        faiss.write_index(wrong, str(foreign))
        with pytest.raises(SpearError, match=words):
            build_index(corpus, None, f"wrong{number}", adopted=foreign)
        assert not (tmp_path / f"wrong{number}" / "dense").exists()
    faiss.write_index(graph, str(foreign))
    whole = foreign.read_bytes()
    for number, content in enumerate((b"part of a file", b"", whole[: len(whole) // 2])):  # one part of two, say
        foreign.write_bytes(content)
        with pytest.raises(SpearError, match="cannot be read as a faiss index"):
            build_index(corpus, None, f"broken{number}", adopted=foreign)


def test_an_index_behind_a_link_is_taken_over(make_corpus: MakeCorpus, build_index: Build, tmp_path: Path) -> None:
    corpus = make_corpus(40)
    own = build_index(corpus, "Flat", "own")
    (tmp_path / "snapshots").mkdir()  # as in the cache of Hugging Face
    linked = tmp_path / "snapshots" / "e5.index"
    linked.symlink_to(os.path.join("..", "own", "dense", INDEX))
    index = build_index(corpus, None, "adopted", adopted=linked)
    assert (index / "dense" / INDEX).samefile(own / "dense" / INDEX)


def test_an_index_on_another_file_system_is_linked_by_name(
    make_corpus: MakeCorpus, build_index: Build, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(100)
    own = build_index(corpus, "Flat", "own")
    stored = faiss.read_index(str(own / "dense" / INDEX)).reconstruct_n(0, 100)
    foreign = tmp_path / "lists.index"
    lists = faiss.index_factory(32, "IVF4,Flat", faiss.METRIC_INNER_PRODUCT)
    lists.train(stored)
    lists.add(stored)
    faiss.write_index(lists, str(foreign))

    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    index = build_index(corpus, None, "adopted", adopted=foreign)
    assert (index / "dense" / INDEX).is_symlink()
    retriever = open_index("dense", corpus, index, nprobe=4)
    assert retriever.describe()["index"] == "IVF4,Flat"
    expected = open_index("dense", corpus, own)
    for ours, theirs in zip(retriever.rank(["river"], 5), expected.rank(["river"], 5), strict=True):
        # A build rounds to float16 on its way.
        assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-3)
    foreign.unlink()
    with pytest.raises(SpearError, match="is missing"):
        open_index("dense", corpus, index)

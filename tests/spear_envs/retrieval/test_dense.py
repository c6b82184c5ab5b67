"""Dense retrieval over small real indexes of every type, and what is refused when they are opened."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spear_envs.core.errors import SpearError
from spear_envs.data.files import MANIFEST
from spear_envs.retrieval.corpus import EXPORT, INDEX, Corpus
from spear_envs.retrieval.indexes import open_index

faiss = pytest.importorskip("faiss", reason="the extra 'search' is not installed")

Build = Callable[..., Path]
MakeCorpus = Callable[..., Corpus]
QUERIES = ["river city", "number17", "king of the school", "", "war \ud800 " * 300]


def find_exactly(corpus: Corpus, tiny_model: Path, tiny_export: Path) -> np.ndarray:
    """Inner products of queries and passages, without faiss."""
    from spear_envs.retrieval.encoders import OnnxEncoder, describe_model

    encoder = OnnxEncoder(tiny_export, describe_model(tiny_model))
    return encoder.encode_queries(QUERIES) @ encoder.encode_passages(list(corpus.texts())).T


@pytest.mark.parametrize("kind", ["Flat", "HNSW", "HNSW8,SQ8", "IVF4,Flat", "IVF4,SQ8", "IVF4,PQ8"])
def test_every_type_finds_what_is_near(
    kind: str, make_corpus: MakeCorpus, build_index: Build, tiny_model: Path, tiny_export: Path
) -> None:
    corpus = make_corpus(400)
    retriever = open_index("dense", corpus, build_index(corpus, kind))
    exact = find_exactly(corpus, tiny_model, tiny_export)
    for scores, hits in zip(exact, retriever.rank(QUERIES, 10), strict=True):
        assert len(hits) == len({row for row, _ in hits}) == 10
        assert hits == sorted(hits, key=lambda hit: (-hit[1], hit[0]))
        # Random weights put all texts close together: judged by score, since ranks are a matter of the fourth digit.
        assert np.mean([scores[row] for row, _ in hits]) > np.sort(scores)[-30:].mean()
        for row, score in hits:
            assert score == pytest.approx(scores[row], abs=0.02 if "sq8" in kind else 2e-3)
    if kind == "Flat":
        best = [hits[0][0] for hits in retriever.rank(QUERIES, 1)]
        assert np.allclose(exact[range(len(QUERIES)), best], exact.max(axis=1), atol=1e-3)


@pytest.mark.parametrize("kind", ["Flat", "HNSW", "IVF2,Flat"])
def test_short_lists_have_no_minus_one(kind: str, make_corpus: MakeCorpus, build_index: Build) -> None:
    corpus = make_corpus(7)
    retriever = open_index("dense", corpus, build_index(corpus, kind))
    for k in (1, 3, 7, 8, 10**6):
        for hits in retriever.rank(QUERIES, k):
            rows = [row for row, _ in hits]
            assert len(rows) == len(set(rows)) == min(k, 7)
            assert set(rows) <= set(range(7))
    assert retriever.rank([], 3) == []
    with pytest.raises(SpearError, match="at least one"):
        retriever.rank(["x"], 0)


def test_effort_is_set_after_loading(make_corpus: MakeCorpus, build_index: Build) -> None:
    corpus = make_corpus(50)
    graph = build_index(corpus, "HNSW", "graph")
    assert faiss.read_index(str(graph / "dense" / INDEX)).hnsw.efSearch == 16
    retriever = open_index("dense", corpus, graph)
    text = retriever.describe()
    assert text["efSearch"] == 128 and text["index"] == "HNSW32" and text["backend"] == "onnxruntime"
    assert open_index("dense", corpus, graph, ef_search=64).describe()["efSearch"] == 64
    fingerprints = {open_index("dense", corpus, graph, ef_search=ef).fingerprint for ef in (None, 128, 64)}
    assert len(fingerprints) == 2
    lists = build_index(corpus, "IVF4,Flat", "lists")
    assert open_index("dense", corpus, lists).describe()["nprobe"] == 4
    assert open_index("dense", corpus, lists, nprobe=2).describe()["nprobe"] == 2
    for settings in ({"nprobe": 2}, {"ef_search": 0}):
        with pytest.raises(SpearError, match="does not go with HNSW32"):
            open_index("dense", corpus, graph, **settings)


def test_another_device_takes_the_model_in_half_precision(
    make_corpus: MakeCorpus, build_index: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(50)
    flat, graph = build_index(corpus, "Flat", "Flat"), build_index(corpus, "HNSW", "graph")
    expected = open_index("dense", corpus, flat)
    with pytest.raises(SpearError, match=r"torch has no device 'cuda' here .*: give cpu, cuda or cuda:1"):
        open_index("dense", corpus, flat, device="cuda")
    # "cpu:0" is to torch what "cpu" is, and to us what is not "cpu".
    other = open_index("dense", corpus, flat, device="cpu:0")
    assert other.describe()["backend"] == "torch cpu:0" and other.describe()["searched_on"] == "cpu"
    assert other.fingerprint != expected.fingerprint
    for ours, theirs in zip(other.rank(QUERIES, 5), expected.rank(QUERIES, 5), strict=True):
        assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=5e-3)

    # A build of faiss for GPUs, at its boundary: which index goes where.
    moved = []

    def move(resources: object, number: int, index: Any, options: Any) -> Any:
        moved.append((type(index).__name__, number, options.useFloat16))
        return index

    options = type("GpuClonerOptions", (), {"useFloat16": False})
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "GpuClonerOptions", options, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", move, raising=False)
    assert open_index("dense", corpus, flat, device="cpu:0").describe()["searched_on"] == "cpu:0"
    assert open_index("dense", corpus, graph, device="cpu:0").describe()["searched_on"] == "cpu"
    assert moved == [("IndexFlat", 0, True)] or moved == [("IndexFlatIP", 0, True)]


def change_manifest(index: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = index / "dense" / MANIFEST
    content = json.loads(path.read_text("utf-8"))
    change(content)
    path.write_text(json.dumps(content | {"checksum": None}), "utf-8")


def test_what_does_not_belong_together_is_refused(
    make_corpus: MakeCorpus, build_index: Build, tiny_model: Path, tmp_path: Path
) -> None:
    corpus = make_corpus(60)
    index = build_index(corpus, "Flat")
    for other in (make_corpus(61), make_corpus(60, seed=1)):
        with pytest.raises(SpearError, match="another corpus"):
            open_index("dense", other, index)
    assert open_index("dense", corpus, index, encoder=tiny_model).passages == 60
    other_model = tmp_path / "other-model"
    shutil.copytree(tiny_model, other_model)
    weights = other_model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x01")
    with pytest.raises(SpearError, match=r"another model than tiny-encoder.*model\.safetensors differs"):
        open_index("dense", corpus, index, encoder=other_model)

    # A faiss file of another length, of another corpus, and of another type, each with a manifest that fits.
    path = index / "dense" / INDEX
    stored = faiss.read_index(str(path))
    vectors = stored.reconstruct_n(0, 60)
    shifted, shorter = faiss.IndexFlatIP(32), faiss.IndexFlatIP(32)
    shifted.add(np.roll(vectors[np.random.default_rng(0).permutation(60)], 1, axis=0))
    shorter.add(vectors[:59])
    by_distance = faiss.IndexFlatL2(32)
    by_distance.add(vectors)
    graph = faiss.IndexHNSWFlat(32, 8, faiss.METRIC_INNER_PRODUCT)
    graph.add(vectors)
    for wrong, words in (
        (shorter, "59 vectors of 32 dimensions"),
        (by_distance, "is not an index of type Flat"),
        (graph, "is not an index of type Flat"),
        (shifted, "do not find themselves"),
    ):
        faiss.write_index(wrong, str(path))
        change_manifest(index, lambda content: content["files"].update({INDEX: describe_file(path)}))
        with pytest.raises(SpearError, match=words):
            open_index("dense", corpus, index)


def describe_file(path: Path) -> dict[str, Any]:
    from spear_envs.data.files import digest_file

    return {"bytes": path.stat().st_size, "sha256": digest_file(path)}


def test_damaged_parts_are_refused(make_corpus: MakeCorpus, build_index: Build) -> None:
    corpus = make_corpus(30)
    index = build_index(corpus, "Flat")
    manifest = index / "dense" / MANIFEST
    good = manifest.read_text("utf-8")
    for text in ("", "{", "[]", "{}", good.replace("spear-index", "other")):
        manifest.write_text(text, "utf-8")
        with pytest.raises(SpearError, match=r"build the index again"):
            open_index("dense", corpus, index)
    changes: list[Callable[[dict[str, Any]], object]] = [
        lambda content: content.update(version=99),
        lambda content: content.pop("notes"),
        lambda content: content.update(files=[]),
        lambda content: content["settings"].pop("encoder"),
        lambda content: content["settings"].update(dimension="many"),
        lambda content: content["settings"].update(type=7),
        lambda content: content["settings"]["encoder"].update(max_length=0),
        lambda content: content["settings"]["encoder"].update(files=3),
    ]
    for change in changes:
        manifest.write_text(good, "utf-8")
        change_manifest(index, change)
        with pytest.raises(SpearError, match="build the index again"):
            open_index("dense", corpus, index)
    manifest.write_text(good, "utf-8")
    assert open_index("dense", corpus, index).passages == 30
    for name in (INDEX, f"{EXPORT}/model.onnx"):
        path = index / "dense" / name
        content = path.read_bytes()
        for wrong in (content[:-1], b"\x00" * len(content)):
            path.write_bytes(wrong)
            with pytest.raises(SpearError, match="build the index again"):
                open_index("dense", corpus, index)
        path.unlink()
        with pytest.raises(SpearError, match="missing"):
            open_index("dense", corpus, index)
        path.write_bytes(content)


def test_without_an_export_the_model_serves(
    make_corpus: MakeCorpus, build_index: Build, tiny_model: Path, tmp_path: Path
) -> None:
    corpus = make_corpus(40)
    index = build_index(corpus, "Flat")
    expected = open_index("dense", corpus, index).rank(QUERIES, 5)
    shutil.rmtree(index / "dense" / EXPORT)

    def drop(content: dict[str, Any]) -> None:
        content["files"] = {INDEX: content["files"][INDEX]}

    change_manifest(index, drop)
    retriever = open_index("dense", corpus, index)
    assert retriever.describe()["backend"] == "torch cpu"
    for ours, theirs in zip(retriever.rank(QUERIES, 5), expected, strict=True):
        assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-4)
    change_manifest(index, lambda content: content["notes"].update(model_folder=str(tmp_path / "gone")))
    with pytest.raises(SpearError, match="is gone"):
        open_index("dense", corpus, index)
    assert open_index("dense", corpus, index, encoder=tiny_model).passages == 40


def test_hybrid_fuses_both(make_corpus: MakeCorpus, build_index: Build) -> None:
    from spear_envs.retrieval.build import build_bm25

    corpus = make_corpus(120)
    index = build_index(corpus, "Flat")
    hybrid = open_index("hybrid", corpus, index)
    words, dense = open_index("bm25", corpus), open_index("dense", corpus, index)
    for query in QUERIES:
        expected: dict[int, float] = {}
        for part in (words, dense):
            for rank, (row, _) in enumerate(part.rank([query], 50)[0], start=1):
                expected[row] = expected.get(row, 0) + 1 / (60 + rank)
        (found,) = hybrid.rank([query], 100)
        assert found == sorted(expected.items(), key=lambda hit: (-hit[1], hit[0]))[:100]
        assert hybrid.rank([query], 3) == [found[:3]]
    assert hybrid.describe()["parts"][0]["mapped"] is False
    build_bm25(corpus, index, processes=1)
    mapped = open_index("hybrid", corpus, index)
    assert mapped.describe()["parts"][0]["mapped"] is True
    assert mapped.fingerprint == hybrid.fingerprint
    assert mapped.lengths(["river city"]) == dense.lengths(["river city"])


@pytest.mark.parametrize("backend", ["onnxruntime", "torch cpu"])
def test_threads_may_share_a_retriever(
    backend: str, make_corpus: MakeCorpus, build_index: Build, tiny_model: Path
) -> None:
    from concurrent.futures import ThreadPoolExecutor

    corpus = make_corpus(80)
    index = build_index(corpus, "HNSW8")
    if backend != "onnxruntime":
        change_manifest(index, lambda content: content.update(files={INDEX: content["files"][INDEX]}))
    retriever = open_index("dense", corpus, index)
    assert retriever.describe()["backend"] == backend
    queries = [f"{query} {number}" for number in range(10) for query in QUERIES]
    expected = [retriever.rank([query], 3) for query in queries]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda query: (retriever.lengths([query]), retriever.rank([query], 3)), queries)
        assert [hits for _, hits in found] == expected

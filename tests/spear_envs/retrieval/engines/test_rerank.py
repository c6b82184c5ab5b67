"""The second look, with a small cross-encoder of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.engines import Reranker
from spear_envs.retrieval.indexes import BM25Index
from tests.spear_envs.retrieval.conftest import EXTRA, WORDS, make_documents
from tests.spear_envs.retrieval.engines.engines import ListRetriever, plain, read_ids


@pytest.fixture(scope="module")
def cross_encoder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """BERT with one output over the vocabulary of the tiny encoder."""
    torch = pytest.importorskip("torch", reason=EXTRA)
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    folder = tmp_path_factory.mktemp("rerank") / "tiny-cross-encoder"
    base = tiny_model.parent / "base"
    config = BertConfig.from_pretrained(base, num_labels=1)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        BertForSequenceClassification(config).save_pretrained(folder)
    BertTokenizerFast(str(base / "vocab.txt")).save_pretrained(folder)
    return folder


@pytest.fixture
def inner() -> BM25Index:
    corpus = Corpus.in_memory(make_documents(60))
    return BM25Index(corpus)


def test_the_candidates_are_ordered_by_the_model_itself(cross_encoder: Path, inner: BM25Index) -> None:
    from sentence_transformers import CrossEncoder

    backend = Reranker(inner, cross_encoder, depth=20, batch=7, device="cpu")
    queries = ["river king", WORDS[3], "no such word"]
    found = backend.search(queries, 5)
    model = CrossEncoder(str(cross_encoder), device="cpu")
    for query, hits in zip(queries[:2], found, strict=False):
        (candidates,) = inner.search([query], 20)
        pairs = [(query, json.loads(hit.raw)["contents"]) for hit in candidates]
        scores = dict(zip(read_ids(candidates), model.predict(pairs, show_progress_bar=False), strict=True))
        expected = sorted(scores, key=lambda name: -round(float(scores[name]), 4))[:5]
        assert read_ids(hits) == expected and len(hits) == 5
        assert read_ids(hits) != read_ids(candidates[:5]), "nothing was reordered"
        assert [hit.score for hit in hits] == pytest.approx([float(scores[name]) for name in expected], abs=1e-3)
    assert found[2] == []
    assert plain(backend.search(queries, 3)) == plain([hits[:3] for hits in found]), "the first hits depend on k"
    assert plain(backend.search(queries[:1], 5)) == plain(found[:1]), "a hit depends on its neighbours in the batch"


def test_a_model_takes_no_turn_on_the_loop_and_reads_any_text(cross_encoder: Path) -> None:
    inner = BM25Index(Corpus.in_memory([*make_documents(5), {"id": "cut", "contents": '"t"\nking \ud83d'}]))
    backend = Reranker(inner, cross_encoder, depth=6, batch=7, device="cpu")
    assert inner.load.on_loop and not backend.load.on_loop
    (found,) = backend.search(["king \ud83d"], 6)
    assert "cut" in read_ids(found)


def test_its_fingerprint_is_of_backend_model_and_depth(cross_encoder: Path, inner: BM25Index) -> None:
    def make(depth: int) -> Reranker:
        return Reranker(inner, cross_encoder, depth=depth, batch=8, device="cpu")

    assert make(5).fingerprint == make(5).fingerprint
    assert len({make(5).fingerprint, make(6).fingerprint, inner.fingerprint}) == 3
    assert make(5).describe() | {"rerank": None} == inner.describe() | {"rerank": None}
    assert make(5).describe()["rerank"] == {"model": "tiny-cross-encoder", "depth": 5}


def test_documents_of_any_backend_are_read(cross_encoder: Path) -> None:
    names = ListRetriever([(name, 1.0) for name in "abcd"])
    backend = Reranker(names, cross_encoder, depth=3, batch=8, device="cpu")
    (hits,) = backend.search(["a text"], 10)
    assert sorted(read_ids(hits)) == ["a", "b", "c"] and names.asked == [("a text", 3)]
    backend.close()
    assert names.closed


def test_what_is_no_cross_encoder_is_refused(cross_encoder: Path, inner: BM25Index, tmp_path: Path) -> None:
    with pytest.raises(SpearError, match=r"the folder .* does not exist"):
        Reranker(inner, tmp_path / "none", depth=5, batch=8, device="cpu")
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

    two = tmp_path / "two"
    BertForSequenceClassification(BertConfig.from_pretrained(cross_encoder, num_labels=2)).save_pretrained(two)
    BertTokenizerFast.from_pretrained(cross_encoder).save_pretrained(two)
    with pytest.raises(SpearError, match="has 2 outputs"):
        Reranker(inner, two, depth=5, batch=8, device="cpu")

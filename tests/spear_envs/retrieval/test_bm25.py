"""BM25 behind the Protocol: in memory and mapped, and with another's index."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.retrieval import indexes
from spear_envs.retrieval.build import build_bm25
from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.indexes import open_index

MakeCorpus = Callable[..., Corpus]
QUERIES = ["number7", "river city", "the", "", "\ud800", "king (song) AND -war*~"]


def test_memory_and_disk_agree(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    corpus = make_corpus(300)
    in_memory = open_index("bm25", corpus)
    build_bm25(corpus, tmp_path / "index", processes=1)
    mapped = open_index("bm25", corpus, tmp_path / "index")
    assert in_memory.passages == mapped.passages == 300
    assert in_memory.fingerprint == mapped.fingerprint
    found = mapped.rank(QUERIES, 5)
    assert found == in_memory.rank(QUERIES, 5)
    assert found[0][0][0] == 7
    assert found[2] == found[3] == found[4] == []
    assert mapped.lengths(QUERIES) == [1] * len(QUERIES)
    assert mapped.settings() == {"kind": "bm25", "k1": 0.9, "b": 0.4, "mapped": True}


def test_index_of_another_corpus_is_refused(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    build_bm25(make_corpus(50), tmp_path / "index", processes=1)
    for other in (make_corpus(51), make_corpus(50, seed=1)):
        with pytest.raises(SpearError, match="another corpus"):
            open_index("bm25", other, tmp_path / "index")
    build_bm25(make_corpus(51), tmp_path / "index", processes=1)
    assert open_index("bm25", make_corpus(51), tmp_path / "index").passages == 51


def test_a_build_cut_off_between_postings_and_manifest_is_refused(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    build_bm25(make_corpus(50), tmp_path / "index", processes=1)
    build_bm25(make_corpus(50, seed=1), tmp_path / "other", processes=1)
    postings = tmp_path / "index" / "bm25" / "postings"
    postings.rename(tmp_path / "old")
    (tmp_path / "other" / "bm25" / "postings").rename(postings)
    with pytest.raises(SpearError, match="build the index again"):
        open_index("bm25", make_corpus(50), tmp_path / "index")


def test_large_corpora_need_an_index(make_corpus: MakeCorpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "IN_MEMORY_ROWS", 10)
    with pytest.raises(SpearError, match="spear index build"):
        open_index("bm25", make_corpus(11))


def test_unknown_kinds_and_missing_indexes(make_corpus: MakeCorpus, tmp_path: Path) -> None:
    corpus = make_corpus(5)
    with pytest.raises(SpearError, match="'bm25', 'dense', 'hybrid'"):
        open_index("colbert", corpus)
    for kind in ("dense", "hybrid"):
        with pytest.raises(SpearError, match="spear index build"):
            open_index(kind, corpus)
    with pytest.raises(SpearError, match=r"none does not exist"):
        open_index("bm25", corpus, tmp_path / "none")
    with pytest.raises(SpearError, match="no finished index"):
        open_index("bm25", corpus, tmp_path)

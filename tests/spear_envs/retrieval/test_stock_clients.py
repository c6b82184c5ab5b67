"""Clients that were written for Search-R1's server, unchanged, against ours."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra 'search'")
pytest.importorskip("prometheus_client", reason="the service needs the extra 'search'")
pytest.importorskip("requests", reason="the clients use requests")


from spear_envs.retrieval.corpus import Corpus
from spear_envs.retrieval.indexes import open_index
from tests.spear_envs.retrieval.service import make_documents, make_service, run_service


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    corpus = Corpus.in_memory(make_documents())
    with run_service(make_service(open_index("bm25", corpus))) as base:
        yield f"{base}/retrieve"


def load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_verls_request_and_reading_of_the_answer(url: str, old_verl: Path) -> None:
    client = load_file(old_verl / "verl" / "tools" / "utils" / "search_r1_like_utils.py")
    text, metadata = client.perform_single_search_batch(url, ["amber fox", "zzz nothing"], topk=3)
    assert metadata["status"] == "success" and metadata["api_request_error"] is None
    assert metadata["query_count"] == 2 and metadata["total_results"] == 3
    assert json.loads(text)["result"].startswith('Doc 1 (Title: "The amber fox")\nA fox that is amber')
    _, blank = client.perform_single_search_batch(url, [" "], topk=3)
    assert blank["status"] == "success" and blank["total_results"] == 0, "a batch is not lost for a blank query"
    _, refused = client.perform_single_search_batch(url, ["x" * 9000], topk=3)
    assert refused["status"] == "api_error" and "422" in refused["api_request_error"]

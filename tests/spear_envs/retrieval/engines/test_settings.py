"""The file that names indexes: what is right, and what is wrong in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="the extra 'search' is not installed")

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.config import open_config, read_config
from spear_envs.retrieval.retriever import find_documents
from tests.spear_envs.retrieval.service import write_corpus


def write(folder: Path, text: str) -> Path:
    path = folder / "retriever.yaml"
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("indexes: {a: {kind: bm26}}", ["indexes.a", "'bm26'", "'bm25', 'dense'"]),
        ("indexes: {a: {kind: bm25, ef_serch: 3}}", ["ef_serch is not a setting", "Did you mean 'ef_search'?"]),
        ("indexes: {a: {}}", ["indexes.a", "'kind'"]),
        ("indexes: {a: {kind: bm25, threads: '2'}}", ["threads: input should be a valid integer (it is '2')"]),
        ("indexes: {a: {kind: bm25, threads: true}}", ["threads: input should be a valid integer"]),
        ("indexes: {a: {kind: bm25, threads: 0}}", ["threads: input should be greater than or equal to 1 (it is 0)"]),
        (
            "indexes: {a: {kind: bm25, rerank: {modell: x}}}",
            ["rerank.modell is not a setting", "Did you mean 'model'?"],
        ),
        ("indexes: {bm25: {kind: bm25, rerank: {}}}", ["rerank.model is missing"]),
        ("index: {}", ["index is not a setting", "Did you mean 'indexes'?"]),
        ("indexes: {}", ["indexes: dictionary should have at least 1 item"]),
        ("[1]", ["the file", "[1]"]),
        ("indexes: {a: 3}", ["indexes.a", "3"]),
        ("indexes: {a: {kind: searxng}}", ["searxng needs url"]),
        ("indexes: {a: {kind: serper, max_cost: 1.0}}", ["max_cost needs cost_per_request"]),
        ("indexes: {a: {kind: serper, results: 101}}", ["results: input should be less than or equal to 100"]),
        ("indexes: {a: {kind: bm25}}\ndefault: b", ["default is 'b', which is not an index: there are a"]),
        ("indexes: {health: {kind: bm25}}", ["'health'"]),
        ("indexes: {a/b: {kind: bm25}}", ["'a/b'"]),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_its_path(tmp_path: Path, text: str, line: list[str]) -> None:
    with pytest.raises(SpearError) as caught:
        read_config(write(tmp_path, text))
    message = str(caught.value)
    assert message.startswith("retriever.yaml: ") and "\n" not in message
    assert all(part in message for part in line), message


@pytest.mark.parametrize(
    "text",
    [
        *("a: [", "a: \x00", "- &a [*b]", "a: " + "9" * 5000, "a: 2026-99-99"),
        *("a: !!bool x", "a: !!timestamp x", "a: !!int []"),
        "indexes: {a: {kind: bm25}, a: {kind: dense}}",
    ],
    ids=lambda text: text[:30],
)
def test_what_is_not_yaml_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpearError, match=r"retriever.yaml is not YAML"):
        read_config(write(tmp_path, text))


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="check the path"):
        read_config(tmp_path / "none.yaml")
    for text, message in (
        (
            "indexes: {a: {kind: bm25, corpus: none.jsonl}}",
            r"retriever.yaml, indexes.a: the corpus .*none.jsonl does not exist",
        ),
        ("indexes: {a: {kind: dense}}", r"indexes.a: retriever='dense' needs an index"),
        ("indexes: {a: {kind: brave, results: 21}}", "brave gives at most 20"),
        ("indexes: {a: {kind: milvus, uri: x, encoder: y}}", "give http://host:19530, or a path that ends in .db"),
        ("indexes: {a: {kind: opensearch, urls: ['x'], index_name: y}}", "'x' is not an address of an OpenSearch"),
    ):
        with pytest.raises(SpearError, match=message):
            open_config(write(tmp_path, text))
    with pytest.raises(SpearError, match=r"lacks the index 'wik': it has wiki. Did you mean 'wiki'?"):
        open_config(write(tmp_path, "indexes: {wiki: {kind: bm25}}"), "wik")


def test_paths_begin_at_the_file_and_the_default_comes_first(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    text = """
default: own
indexes:
  mini: {kind: bm25}
  own: {kind: bm25, corpus: corpus.jsonl}
"""
    opened = open_config(write(tmp_path, text))
    assert list(opened) == ["own", "mini"]
    assert find_documents(opened["own"], "amber bear", 1)[0]["id"] == "d1"
    assert list(open_config(tmp_path / "retriever.yaml", "mini", only=True)) == ["mini"]

"""The file that names indexes: what is right, and what is wrong in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("yaml", reason="the extra 'search' is not installed")

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.backends.opening import ConfigSource
from spear_envs.retrieval.backends.settings import Shards, identify, read_config
from tests.spear_envs.retrieval.backends.engines import read_ids
from tests.spear_envs.retrieval.service import write_corpus


def write(folder: Path, text: str) -> Path:
    path = folder / "retriever.yaml"
    path.write_text(text, "utf-8")
    return path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("indexes: {a: {kind: bm26}}", "indexes.a.kind='bm26' is not valid. Did you mean 'bm25'?"),
        ("indexes: {a: {kind: bm25, ef_serch: 3}}", "indexes.a.ef_serch is not a setting. Did you mean 'ef_search'?"),
        ("indexes: {a: {}}", "indexes.a.kind is missing: choose one of bm25, dense, hybrid, milvus, service, "),
        (
            "indexes: {a: {kind: shards, shards: [{kind: bm25}, {kind: serper, max_request: 3}]}}",
            "indexes.a.shards.1.max_request is not a setting. Did you mean 'max_requests'?",
        ),
        ("indexes: {a: {kind: bm25, threads: '2'}}", "indexes.a.threads: input should be a valid integer (it is '2')."),
        ("indexes: {a: {kind: bm25, threads: true}}", "indexes.a.threads: input should be a valid integer"),
        ("indexes: {a: {kind: bm25, threads: 0}}", "indexes.a.threads: input should be greater than or equal to 1"),
        (
            "indexes: {a: {kind: bm25, rerank: {modell: x}}}",
            "indexes.a.rerank.modell is not a setting. Did you mean 'mod",
        ),
        ("indexes: {bm25: {kind: bm25, rerank: {}}}", "indexes.bm25.rerank.model is missing: give it."),
        ("index: {}", "index is not a setting. Did you mean 'indexes'?"),
        ("indexes: {}", "indexes: dictionary should have at least 1 item"),
        ("[1]", "the file must be a mapping of settings, not '[1]'."),
        ("indexes: {a: 3}", "indexes.a must be a mapping of settings, not '3'."),
        (
            "indexes: {a: {kind: shards, shards: [{kind: bm25}], merge: rnk}}",
            "indexes.a.merge='rnk' is not valid: choose",
        ),
        ("indexes: {a: {kind: searxng}}", "indexes.a: searxng needs url: the address of an instance"),
        ("indexes: {a: {kind: serper, max_cost: 1.0}}", "indexes.a: max_cost needs cost_per_request"),
        ("indexes: {a: {kind: serper, record: x, replay: y}}", "indexes.a: give record or replay, not both"),
        ("indexes: {a: {kind: serper, fall_through: true}}", "indexes.a: fall_through is for replay"),
        ("indexes: {a: {kind: serper, results: 101}}", "indexes.a.results: input should be less than or equal to 100"),
        ("indexes: {a: {kind: bm25}}\ndefault: b", "default is 'b', which is not an index: there are a."),
        ("indexes: {health: {kind: bm25}}", "an index cannot be called 'health'"),
        ("indexes: {a/b: {kind: bm25}}", "an index cannot be called 'a/b'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_its_path(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(SpearError) as caught:
        read_config(write(tmp_path, text))
    message = str(caught.value)
    assert message.startswith("retriever.yaml: ") and told in message and "\n" not in message


@pytest.mark.parametrize("text", ["a: [", "a: \x00", "- &a [*b]"])
def test_what_is_not_yaml_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpearError, match=r"retriever.yaml is not YAML"):
        read_config(write(tmp_path, text))


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="check the path"):
        read_config(tmp_path / "none.yaml")
    for text, told in (
        (
            "indexes: {a: {kind: bm25, corpus: none.jsonl}}",
            r"retriever.yaml, indexes.a: the corpus .*none.jsonl does not exist",
        ),
        (
            "indexes: {a: {kind: shards, shards: [{kind: dense}]}}",
            r"indexes.a: shards.0: retriever='dense' needs an index",
        ),
        ("indexes: {a: {kind: bm25, replay: r.sqlite}}", r"the recording .*r.sqlite does not exist"),
        ("indexes: {a: {kind: brave, results: 21}}", "brave gives at most 20"),
        ("indexes: {a: {kind: milvus, uri: x, encoder: y}}", "give http://host:19530, or a path that ends in .db"),
        ("indexes: {a: {kind: opensearch, urls: ['x'], index_name: y}}", "'x' is not an address of an OpenSearch"),
    ):
        with pytest.raises(SpearError, match=told):
            ConfigSource(write(tmp_path, text)).open()
    with pytest.raises(SpearError, match=r"lacks the index 'wik': it has wiki. Did you mean 'wiki'?"):
        ConfigSource(write(tmp_path, "indexes: {wiki: {kind: bm25}}"), "wik").open()


def test_paths_begin_at_the_file_and_the_default_comes_first(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    text = """
default: own
indexes:
  mini: {kind: bm25}
  own: {kind: bm25, corpus: corpus.jsonl, record: kept/searches.sqlite}
"""
    opened = ConfigSource(write(tmp_path, text)).open()
    assert list(opened) == ["own", "mini"] and (tmp_path / "kept" / "searches.sqlite").is_file()
    assert read_ids(opened["own"].search(["amber bear"], 1)[0]) == ["d1"]
    assert list(ConfigSource(tmp_path / "retriever.yaml", "mini", only=True).open()) == ["mini"]


def test_what_a_recording_is_compared_with_has_no_places_keys_and_limits(tmp_path: Path) -> None:
    text = """
indexes:
  a:
    kind: shards
    merge: rank
    shards:
      - {kind: serper, key_variable: K, max_requests: 3, options: {gl: de}, url: "http://x", tries: 2, record: r}
      - {kind: opensearch, urls: ["http://x"], index_name: wiki, username: u, password_variable: P}
      - {kind: dense, corpus: /a/b, index: /c, encoder: /d, ef_search: 7, threads: 3}
"""
    settings = read_config(write(tmp_path, text)).indexes["a"]
    assert isinstance(settings, Shards)
    assert identify(settings) == {
        "kind": "shards",
        "merge": "rank",
        "shards": [
            {"kind": "serper", "results": 10, "options": {"gl": "de"}},
            {"kind": "opensearch", "index_name": "wiki", "text_field": "contents"},
            {"kind": "dense", "ef_search": 7},
        ],
    }

"""Several indexes in one service, backends of all kinds behind it, and the commands."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra 'search' is not installed")
pytest.importorskip("yaml", reason="the extra 'search' is not installed")

import gymnasium as gym
import httpx
from click.testing import CliRunner

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.cli import retriever
from spear_envs.retrieval.client import RetrieverClient
from spear_envs.retrieval.limits import ServiceSettings
from spear_envs.retrieval.retriever import FaultKind, Load, Retriever, RetrieverFault, RetrieverRefusal, find_documents
from spear_envs.retrieval.service import RetrievalService
from tests.commands import wait_until
from tests.scripted_server import reply, serve
from tests.spear_envs.retrieval.engines.engines import ListRetriever, answer_well, open_kind
from tests.spear_envs.retrieval.service import run_command, run_service, write_corpus


def make_service(backends: Mapping[str, Retriever], **settings: Any) -> RetrievalService:
    return RetrievalService(lambda: backends, ServiceSettings(**settings))


def ask(url: str, query: str, topk: int = 2) -> Any:
    return httpx.post(f"{url}/retrieve", json={"query": query, "topk": topk}, timeout=30)


def test_each_index_has_its_path_and_the_first_is_the_default() -> None:
    web = ListRetriever([("w", 1.0)])
    web.fingerprint = "of the web"
    backends = {"wiki": ListRetriever([("a", 2.0), ("b", 1.0)]), "web": web}
    with run_service(make_service(backends)) as url:
        found = {path: ask(f"{url}{path}", "q").json()["result"][0] for path in ("", "/wiki", "/web")}
        assert [document["id"] for document in found[""]] == ["a", "b"] and found["/wiki"] == found[""]
        assert [document["id"] for document in found["/web"]] == ["w"]
        missing = ask(f"{url}/wep", "q")
        assert missing.status_code == 422 and "Did you mean 'web'?" in missing.json()["detail"]
        with pytest.raises(SpearError, match="the index 'wep' does not exist"):
            find_documents(RetrieverClient(f"{url}/wep"), "q", 1)
        health = httpx.get(f"{url}/health").json()
        assert health["fingerprint"] == "list" and list(health["indexes"]) == ["wiki", "web"]
        assert httpx.get(f"{url}/web/health").json()["fingerprint"] == "of the web"
        assert httpx.get(f"{url}/wep/health").status_code == 404
        client = RetrieverClient(f"{url}/web")
        assert find_documents(client, "other", 1)[0]["id"] == "w" and client.fingerprint == "of the web"
        lines = httpx.get(f"{url}/metrics").text.splitlines()
        assert 'spear_retriever_backend_requests_total{index="web"} 2.0' in lines
        assert 'spear_retriever_backend_requests_total{index="wiki"} 1.0' in lines  # the second was in the cache
    assert web.closed


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RetrieverFault(FaultKind.UNAVAILABLE, "the engine is down"), 503),
        (RetrieverFault(FaultKind.TIMEOUT, "the engine is slow"), 504),
        (RetrieverFault(FaultKind.BAD_REPLY, "the engine talks nonsense"), 502),
        (RetrieverRefusal("the budget is spent"), 403),
    ],
)
def test_a_backend_that_fails_is_asked_once_and_says_so(error: Exception, status: int) -> None:
    backend = ListRetriever()
    backend.error = error
    with run_service(make_service({"one": backend})) as url:
        answer = httpx.post(f"{url}/retrieve", json={"queries": ["a", "b"]}, timeout=30)
        assert answer.status_code == status and answer.json()["detail"] == getattr(error, "message", str(error))
    assert len(backend.asked) == 2, "a batch that failed as a whole was asked again"


def test_calls_run_side_by_side_as_far_as_the_backend_takes_them() -> None:
    backend = ListRetriever([("a", 1.0)], Load(calls=3, queries=1))
    backend.gate.clear()
    queries = {"queries": [f"q{number}" for number in range(5)]}
    with run_service(make_service({"one": backend})) as url:
        calling = threading.Thread(target=lambda: httpx.post(f"{url}/retrieve", json=queries, timeout=30))
        calling.start()
        wait_until(lambda: len(backend.asked) == 3)
        assert httpx.get(f"{url}/health").json()["waiting"] == 5
        backend.gate.set()
        calling.join(30)
    assert len(backend.asked) == 5


def test_a_service_behind_it_is_identified_when_it_starts() -> None:
    with (
        serve(reply(200, {"fingerprint": "abc"}), None) as server,
        run_service(make_service({"one": open_kind("service", server.url)})) as url,
    ):
        assert len(server.requests) == 1
        assert httpx.get(f"{url}/health").json()["fingerprint"] == "abc"
    dead = make_service({"one": open_kind("service", "http://127.0.0.1:9", tries=1)})
    with pytest.raises(RetrieverFault, match="cannot be reached"), run_service(dead):
        pass


CONFIG = """
indexes:
  words: {{kind: bm25, corpus: corpus.jsonl}}
  web: {{kind: searxng, url: "{url}", max_requests: 3}}
"""


def test_indexes_of_a_file_are_served(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus.jsonl")
    config = tmp_path / "retriever.yaml"
    with serve(answer_well("searxng")) as server:
        config.write_text(CONFIG.format(url=server.url), "utf-8")
        with run_command("--config", str(config)) as running:
            assert running.line.startswith("ready: words: 72 passages, bm25; web: searxng, at http://127.0.0.1:")
            assert ask(running.url, "amber bear").json()["result"][0][0]["id"] == "d1"
            for query in "abc":
                assert ask(f"{running.url}/web", query).json()["result"][0][0]["id"] == f"{query}/0"
            spent = ask(f"{running.url}/web", "d")
            assert spent.status_code == 403 and "max_requests" in spent.json()["detail"]
        assert len(server.requests) == 3


def test_wrong_commands_say_what_to_do(tmp_path: Path) -> None:
    config = tmp_path / "retriever.yaml"
    config.write_text("indexes: {words: {kind: bm25}}", "utf-8")

    def run(*arguments: str) -> str:
        result = CliRunner().invoke(retriever, list(map(str, arguments)))
        assert result.exit_code
        return result.output + str(result.exception)

    text = run("serve", "--config", str(config), "--retriever", "bm25", "--nprobe", "3")
    assert "--retriever and --nprobe belong in retriever.yaml" in text
    assert "lacks an index 'web' of kind milvus" in run(
        "fill", "--config", str(config), "--index", "web", "--corpus", str(config)
    )


def play(choice: str) -> dict[str, Any]:
    """The expert's episode on a task of three hops."""
    env = gym.make("spear_envs:spear/SearchR1-v0", split="test", response_format="plain", retriever=choice)
    _, info = env.reset(options={"task": "search/mini/test/00017"})
    done = False
    while not done:
        *_, terminated, truncated, info = env.step(env.unwrapped.expert_plan()[0])  # type: ignore[attr-defined]
        done = terminated or truncated
    return info


def test_an_environment_plays_on_a_file(tmp_path: Path) -> None:
    (tmp_path / "retriever.yaml").write_text(
        "indexes: {words: {kind: bm25}, again: {kind: bm25}}",
        "utf-8",
    )
    path = os.fspath(tmp_path / "retriever.yaml")
    infos = [play(choice) for choice in (path, f"{path}#again")]
    assert all(info["won"] and info["tool_calls"] == 3 for info in infos)
    assert infos[0]["retriever"] == infos[1]["retriever"]
    with pytest.raises(SpearError, match="lacks the index 'x'"):
        play(f"{path}#x")


def test_an_index_without_a_corpus_searches_the_passages_of_the_data_set(tmp_path: Path) -> None:
    path = tmp_path / "retriever.yaml"
    path.write_text("indexes: {words: {kind: bm25}}", "utf-8")
    keywords = {"dataset": "mini-small", "split": "test", "response_format": "plain", "topk": 1}
    env: Any = gym.make("spear_envs:spear/SearchR1-v0", retriever=os.fspath(path), **keywords).unwrapped
    env.reset(seed=0)
    *_, info = env.step(env.expert_plan()[0])
    assert info["passages"] == env.task.content["gold_passages"][:1]
    (tmp_path / "asked.jsonl").write_text('{"question": "Who?", "golden_answers": ["x"]}', "utf-8")
    with pytest.raises(SpearError, match="corpus"):
        gym.make("spear_envs:spear/SearchR1-v0", retriever=os.fspath(path), dataset=tmp_path / "asked.jsonl")


def test_a_replaced_corpus_of_a_file_is_searched(tmp_path: Path) -> None:
    path = tmp_path / "retriever.yaml"
    path.write_text("indexes: {words: {kind: bm25, corpus: corpus.jsonl}}", "utf-8")
    for text in ("an old river", "another river, which is new"):
        corpus = {"id": "1", "contents": text}
        (tmp_path / "new.jsonl").write_text(json.dumps(corpus), "utf-8")
        (tmp_path / "new.jsonl").replace(tmp_path / "corpus.jsonl")
        env: Any = gym.make("spear_envs:spear/SearchR1-v0", retriever=os.fspath(path)).unwrapped
        assert find_documents(env.retriever, "river", 1) == [corpus]

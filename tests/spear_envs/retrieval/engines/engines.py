"""Stand-ins for engines of others, written from their published protocols, and backends that ask them."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from spear_envs.retrieval.retriever import Load, Passage, Retriever
from tests.scripted_server import reply

KEYS = {"serper": "SERPER_API_KEY", "brave": "BRAVE_API_KEY", "opensearch": "TEST_ENGINE_KEY"}
SECRET = "k3y-that-nobody-may-see"
KINDS = ("serper", "brave", "searxng", "opensearch", "service")


def open_kind(kind: str, url: str, **settings: Any) -> Retriever:
    """A backend of a kind that asks a server of the test."""
    from spear_envs.retrieval.config import Config, open_settings

    own: dict[str, Any] = {
        "opensearch": {
            "urls": [url],
            "index_name": "wiki",
            "title_field": "title",
            "api_key_variable": KEYS["opensearch"],
        },
        "service": {"urls": [url]},
    }.get(kind, {"url": url})
    config = Config.model_validate({"indexes": {"one": {"kind": kind, **own, **settings}}})
    return open_settings(config.indexes["one"], Path())


def read_queries(kind: str, line: str, body: bytes) -> tuple[list[str], int]:
    """Queries and number of results of a request."""
    if kind == "serper":
        asked = json.loads(body)
        return [asked["q"]], asked["num"]
    if kind in ("brave", "searxng"):
        params = parse_qs(urlsplit(line.split()[1]).query)
        return params["q"], int(params.get("count", ["10"])[0])
    if kind == "service":
        asked = json.loads(body)
        return asked["queries"], asked["topk"]
    lines = [json.loads(part) for part in body.splitlines()]
    assert all(head == {"index": "wiki"} for head in lines[::2]) and body.endswith(b"\n")
    return [part["query"]["match"]["contents"] for part in lines[1::2]], lines[1]["size"]


def write_answer(kind: str, queries: Sequence[str], number: int) -> Any:
    """What an engine says: result i of query q has the title "q i" and the text "about q"."""
    if kind == "service":
        return {
            "result": [
                [
                    {"document": {"id": f"{q}/{i}", "contents": f'"{q} {i}"\nabout {q}'}, "score": 9.5 - i}
                    for i in range(number)
                ]
                for q in queries
            ]
        }
    if kind == "opensearch":
        answers = []
        for q in queries:
            hits = [
                {
                    "_index": "wiki",
                    "_id": f"{q}/{i}",
                    "_score": 9.5 - i,
                    "_source": {"title": f"{q} {i}", "contents": f"about {q}"},
                }
                for i in range(number)
            ]
            shards = {"total": 1, "successful": 1, "skipped": 0, "failed": 0}
            answers.append({"took": 1, "timed_out": False, "_shards": shards, "status": 200, "hits": {"hits": hits}})
        return {"took": 1, "responses": answers}
    (q,) = queries
    if kind == "serper":
        items = [
            {"title": f"{q} {i}", "link": f"{q}/{i}", "snippet": f"about {q}", "position": i + 1} for i in range(number)
        ]
        return {"searchParameters": {"q": q, "type": "search"}, "organic": items, "credits": 1}
    if kind == "brave":
        items = [
            {"title": f"{q} {i}", "url": f"{q}/{i}", "description": f"about <strong>{q}</strong>"}
            for i in range(number)
        ]
        return {"type": "search", "query": {"original": q}, "web": {"type": "search", "results": items}}
    items = [{"url": f"{q}/{i}", "title": f"{q} {i}", "content": f"about {q}", "score": 1.0} for i in range(number)]
    return {"query": q, "number_of_results": 0, "results": items, "answers": [], "unresponsive_engines": []}


def answer_well(kind: str) -> Callable[[str, Mapping[str, str], bytes], bytes]:
    """A step of a scripted server."""
    return lambda line, _, body: reply(200, write_answer(kind, *read_queries(kind, line, body)))


class ListRetriever(Retriever):
    """Finds documents by their scores, which stand in a table; counts, fails and blocks as a test wants."""

    fingerprint = "list"

    def __init__(self, hits: Sequence[tuple[str, float]] = (), load: Load | None = None) -> None:
        self.hits = sorted(hits, key=lambda hit: -hit[1])
        self.load = load or Load()
        self.asked: list[tuple[str, int]] = []
        self.error: Exception | None = None
        self.closed = False
        self.gate = threading.Event()
        self.gate.set()

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        self.asked += [(query, k) for query in queries]
        assert self.gate.wait(30)
        if self.error:
            raise self.error
        return [[Passage(write_document(name), score) for name, score in self.hits[:k]] for _ in queries]

    def describe(self) -> dict[str, Any]:
        return {"kind": "list"}

    def counts(self) -> Mapping[str, float]:
        return {"requests": len(self.asked)}

    def close(self) -> None:
        self.closed = True


def write_document(name: str) -> bytes:
    return json.dumps({"id": name, "contents": f'"{name}"\ntext of {name}'}).encode()


def read_ids(hits: Sequence[Passage]) -> list[str]:
    return [json.loads(hit.raw)["id"] for hit in hits]


def plain(rows: Sequence[Sequence[Passage]]) -> list[list[tuple[bytes, float]]]:
    return [[(hit.raw, hit.score) for hit in hits] for hits in rows]

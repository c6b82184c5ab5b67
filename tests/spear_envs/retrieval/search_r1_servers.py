"""Stand-ins for the servers in Search-R1's ``search_r1/search``: what they ask for and answer, in our own code.

Written from answers of the servers themselves (commit a14dc3a), which ran over Lucene indexes with and without stored
documents, a small cross-encoder, and stand-ins of SerpAPI and of Google's search.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from spear_sandbox.web.listening import bind_socket
from tests.commands import PATIENCE_S, wait_until

CORPUS = (
    {"id": "0", "contents": '"Oslo"\nOslo is the capital of Norway.', "source": 7},
    {"id": "1", "contents": '"Bergen"\nBergen is a city in Norway.\nIt rains.'},
    {"id": "2", "contents": '"Paris (city)"\nParis is the capital of France.'},
    {"id": "3", "contents": '"Rome"\nRome is a city in Italy.'},
)


class Asked(BaseModel):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


class AskedToRerank(BaseModel):
    queries: list[str]
    topk_retrieval: int | None = 10
    topk_rerank: int | None = 3
    return_scores: bool = False


class AskedOnline(BaseModel):
    queries: list[str]


def find(query: str, topk: int) -> list[dict[str, Any]]:
    """The documents that share a word with the query, the most first."""
    words = set(query.lower().split())
    shared = [(len(words & set(re.findall(r"\w+", doc["contents"].lower()))), doc) for doc in CORPUS]
    return [doc for count, doc in sorted(shared, key=lambda pair: -pair[0]) if count][:topk]


def show_stored(document: dict[str, Any]) -> dict[str, str]:
    """A document out of a Lucene index that stores them (``--storeRaw``)."""
    title, _, text = document["contents"].partition("\n")
    return {"title": title.strip('"'), "text": text, "contents": document["contents"]}


def make_local(show: Callable[[dict[str, Any]], dict[str, Any]]) -> FastAPI:
    """``retrieval_server.py``: BM25 and dense. Without scores it fails on any number of queries but two."""
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(asked: Asked) -> dict[str, Any]:
        rows = [[show(doc) for doc in find(query, asked.topk or 3)] for query in asked.queries]
        if not asked.return_scores:
            raise ValueError("not enough values to unpack (expected 2, got 1)")
        return {"result": [[{"document": doc, "score": 1.5} for doc in row] for row in rows]}

    return app


def make_online(boxes: int) -> FastAPI:
    """``serp_search_server.py`` and ``google_search_server.py``: neither reads ``topk``; its own is 3.

    The first puts an answer box before the results and related questions behind them.
    """
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(asked: AskedOnline) -> dict[str, Any]:
        def show(query: str) -> list[dict[str, Any]]:
            titles = ["Box"] * boxes + [f"Result {i} of {query}" for i in range(3)] + ["Question"] * 3 * boxes
            return [{"document": {"contents": f'"{title}"\nNo snippet available.'}} for title in titles]

        return {"result": [show(query) for query in asked.queries]}

    return app


def make_reranking() -> FastAPI:
    """``retrieval_rerank_server.py``: texts alone, of which the title has lost a bracket and won quotes.

    It reads no ``topk``, pairs each query with the documents of all, and leaves out queries without a pair.
    """
    app = FastAPI()

    def show(document: dict[str, Any]) -> str:
        title, _, text = document["contents"].partition("\n")
        found = re.match(r"\(Title:\s*([^)]+)\)\s*(.+)", f"(Title: {title}) {text}", re.DOTALL)
        assert found is not None
        return f'"{found[1]}"\n{found[2]}'

    @app.post("/retrieve")
    def retrieve(asked: AskedToRerank) -> dict[str, Any]:
        found = [show(doc) for query in asked.queries for doc in find(query, asked.topk_retrieval or 10)]
        row: list[Any] = found[: asked.topk_rerank]
        if asked.return_scores:
            row = [{"document": text, "score": 0.5} for text in row]
        return {"result": [row for _ in asked.queries] if found else []}

    return app


SERVERS: dict[str, Callable[[], FastAPI]] = {
    "bm25, stored": lambda: make_local(show_stored),
    "bm25 or dense, corpus": lambda: make_local(dict),
    "serp": lambda: make_online(1),
    "google": lambda: make_online(0),
    "rerank": make_reranking,
}


@contextmanager
def run_app(app: FastAPI) -> Iterator[str]:
    """Serve from a thread; yields the base address."""
    listener = bind_socket("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None))
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)

"""The client, and the environment on it, against what Search-R1's own servers answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the stand-ins need the extra 'search'")
pytest.importorskip("httpx", reason="the client needs the extra 'search'")

from fastapi import FastAPI, Response
from pydantic import BaseModel

from spear_envs.core.errors import EnvFault, SpearError
from spear_envs.retrieval.client import RetrieverClient
from spear_envs.retrieval.retriever import find_documents
from tests.spear_envs.retrieval.search_r1_servers import SERVERS, make_local, make_reranking, run_app
from tests.spear_envs.search.conftest import make_asking

RAIN = '"Bergen"\nBergen is a city in Norway.\nIt rains.'


@pytest.mark.parametrize("name", SERVERS)
def test_the_environment_plays_with_each_of_them(name: str, tmp_path: Path) -> None:
    with run_app(SERVERS[name]()) as url:
        env = make_asking(tmp_path, ["x"], shelf=url, response_format="plain", topk=2)
        seen = [env.step("<search>capital Norway</search>") for _ in range(2)]
        lost, *_ = env.step("<search>zzz</search>")
    for observation, _, _, truncated, info in seen:
        assert not truncated and info["fault"] is None and len(info["passages"]) == 2
        titles = re.findall(r"Doc \d\(Title: (.*?)\) ", observation)
        assert len(titles) == 2 and all('"' in title for title in titles)
    assert seen[0][4]["passages"] == seen[1][4]["passages"], "ids are the same each time"
    assert ("No passage was found." in lost) == (name not in ("serp", "google"))


def test_documents_keep_their_id_or_get_one_of_their_text() -> None:
    with run_app(SERVERS["bm25, stored"]()) as one, run_app(SERVERS["bm25 or dense, corpus"]()) as two:
        (stored,) = find_documents(RetrieverClient(one), "rains", 3)
        (whole,) = find_documents(RetrieverClient(two), "rains", 3)
        with_source = find_documents(RetrieverClient(two), "Oslo", 3)
    assert whole == {"id": "1", "contents": RAIN} and with_source[0]["source"] == 7
    assert stored["contents"] == RAIN and re.fullmatch(r"[0-9a-f]{32}", stored["id"])
    assert {**stored, "id": "1"} == {**whole, "title": "Bergen", "text": "Bergen is a city in Norway.\nIt rains."}


def test_reranked_texts_become_documents() -> None:
    with run_app(make_reranking()) as url:
        client = RetrieverClient(url)
        documents = find_documents(client, "capital France", 3)
        assert find_documents(client, "zzz", 3) == []
    assert [document["contents"] for document in documents] == [
        '""Paris (city"\n") Paris is the capital of France.',
        '""Oslo""\nOslo is the capital of Norway.',
    ]
    assert len({document["id"] for document in documents}) == 2


class OtherQuery(BaseModel):
    question: str


def make_other() -> FastAPI:
    """A service of another contract, of FastAPI."""
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve(asked: OtherQuery) -> dict[str, Any]:
        return {}

    return app


def make_failing() -> FastAPI:
    app = FastAPI()

    @app.post("/retrieve")
    def retrieve() -> Response:
        raise RuntimeError("search_results")

    return app


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (make_other(), ["answered 422: body.question: Field required:", "refused"]),
        (make_failing(), ["500: Internal Server Error, to the first search and to 'Paris'"]),
        (FastAPI(), ["status 404 (Not Found)", '{"result": [[{"document": {"contents": "…"}']),
    ],
)
def test_a_server_that_never_can_ends_the_run(app: FastAPI, words: list[str], tmp_path: Path) -> None:
    with run_app(app) as url:
        env = make_asking(tmp_path, ["x"], shelf=url, response_format="plain")
        with pytest.raises(SpearError) as caught:
            env.step("<search>Oslo</search>")
    message = str(caught.value)
    assert not isinstance(caught.value, EnvFault)
    assert url in message and "\n" not in message and all(word in message for word in words), message


def test_a_server_that_fails_on_one_query_does_not(tmp_path: Path) -> None:
    app = make_local(dict)

    @app.middleware("http")
    async def fail(request: Any, call_next: Any) -> Any:
        if b"poison" in await request.body():
            raise RuntimeError("poison")
        return await call_next(request)

    with run_app(app) as url:
        env = make_asking(tmp_path, ["x"], shelf=url, response_format="plain")
        *_, truncated, info = env.step("<search>poison</search>")
        assert truncated and info["fault"] == "retriever_unavailable"
        env.reset(seed=0)
        assert env.step("<search>Oslo</search>")[4]["passages"] == ["0"]

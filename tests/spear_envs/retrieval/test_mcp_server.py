"""``spear retriever mcp``, asked by the official client."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs the extra 'mcp'")

import httpx
from click.testing import CliRunner
from mcp import Client, StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.cli import retriever
from spear_envs.retrieval.mcp_server import make_mcp_server
from spear_envs.retrieval.retriever import FaultKind, Passage, Retriever, RetrieverFault, find_documents
from spear_envs.search.retrievers import open_retriever
from tests import commands

QUERY = "historian Jurol Knaklofae taught"


async def call(client: Client, **arguments: Any) -> Any:
    return await client.call_tool("search", arguments)


@cache
def open_embedded() -> Retriever:
    return open_retriever("bm25", None, None)


def expected(topk: int) -> list[tuple[str, str]]:
    return [(document["id"], document["contents"]) for document in find_documents(open_embedded(), QUERY, topk)]


def read(result: Any) -> list[tuple[str, str]]:
    passages = result.structured_content["result"]
    return [(passage["id"], f'"{passage["title"]}"\n{passage["text"]}') for passage in passages]


async def check(client: Client) -> None:
    (tool,) = (await client.list_tools()).tools
    assert tool.name == "search" and tool.input_schema["required"] == ["query"]
    assert read(await call(client, query=QUERY)) == expected(3)


async def check_all(client: Client) -> None:
    await check(client)
    assert read(await call(client, query=QUERY, topk=7)) == expected(7)
    for arguments in ({}, {"query": ""}, {"query": " "}, {"query": "a", "topk": 0}, {"query": "a", "topk": 101}):
        assert (await call(client, **arguments)).is_error
    together = await asyncio.gather(*(call(client, query=QUERY, topk=1 + n % 5) for n in range(20)))
    assert [read(result) for result in together] == [expected(1 + n % 5) for n in range(20)]


def test_answers_and_refusals() -> None:
    async def go() -> None:
        async with Client(make_mcp_server(open_embedded())) as client:
            await check_all(client)

    asyncio.run(go())


def test_a_client_that_starts_the_command() -> None:
    async def go() -> None:
        command = ["-m", "spear_envs.cli", "retriever", "mcp"]
        parameters = StdioServerParameters(command=sys.executable, args=command, env={**os.environ}, cwd=commands.ROOT)
        async with Client(stdio_client(parameters)) as client:
            await check(client)

    asyncio.run(go())


def test_over_http_with_a_token() -> None:
    async def go(url: str) -> None:
        async with (
            httpx.AsyncClient(headers={"Authorization": "Bearer s3cret"}) as http,
            Client(streamable_http_client(f"{url}/mcp", http_client=http)) as client,
        ):
            await check(client)

    with commands.run_command("retriever", "--http", verb="mcp", SPEAR_RETRIEVER_TOKEN="s3cret") as running:
        assert httpx.post(f"{running.url}/mcp", json={}).status_code == 401
        headers = {"Authorization": "Bearer s3cret"}
        assert (
            httpx.post(f"{running.url}/mcp", json={}, headers={**headers, "Origin": "http://x.org"}).status_code == 403
        )
        asyncio.run(go(running.url))


def test_half_a_character_of_a_corpus_is_replaced() -> None:
    class Halved(Retriever):
        fingerprint = "halved"

        def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            return [[Passage(rb'{"id": "\udc00", "contents": "\"Half \ud83d\"\nand \ud800."}', 1.0)]]

        def describe(self) -> dict[str, Any]:
            return {"kind": "halved"}

    async def go() -> None:
        async with Client(make_mcp_server(Halved())) as client:
            assert read(await call(client, query="a")) == [("?", '"Half ?"\nand ?.')]

    asyncio.run(go())


def test_a_fault_is_an_error_of_the_tool() -> None:
    class Broken(Retriever):
        fingerprint = "broken"

        def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
            raise RetrieverFault(FaultKind.TIMEOUT, "no answer within 30 s")

        def describe(self) -> dict[str, Any]:
            return {"kind": "broken"}

    async def go() -> None:
        async with Client(make_mcp_server(Broken())) as client:
            result = await call(client, query="a")
            assert result.is_error and "no answer within 30 s" in result.content[0].text

    asyncio.run(go())


@pytest.mark.parametrize(
    "words",
    [
        ("--config", "r.yaml", "--retriever", "dense"),
        ("--config", "r.yaml", "--retriever", "http://127.0.0.1:9"),
        ("--name", "words"),
    ],
    ids=" ".join,
)
def test_options_that_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str]) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("indexes: {words: {kind: bm25}}\n")
    result = CliRunner().invoke(retriever, ["mcp", *words])
    assert isinstance(result.exception, SpearError) and words[0] in str(result.exception)

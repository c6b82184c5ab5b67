"""The recorded HTTP cases, against the real command over the embedded knowledge base."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the service needs the extra 'search'")
pytest.importorskip("prometheus_client", reason="the service needs the extra 'search'")
pytest.importorskip("httpx", reason="needs the extra 'search'")

import httpx

from tests.commands import RunningCommand
from tests.spear_envs.retrieval.service import run_command


@pytest.fixture(scope="module")
def command() -> Iterator[RunningCommand]:
    with run_command() as running:
        yield running


ANSWERED = {"empty list", "blank query", "too many queries"}
"""Recorded as refused; Search-R1's training client sends them, and its batch would be lost."""


def check_rows(rows: list[Any], shape: dict[str, Any]) -> None:
    assert len(rows) == shape["rows"]
    for row in rows:
        assert shape["min_per_row"] <= len(row) <= shape["max_per_row"]
        for item in row:
            if shape["scores"]:
                assert set(item) == {"document", "score"} and isinstance(item["score"], float)
            document = item["document"] if shape["scores"] else item
            assert isinstance(document["id"], str) and isinstance(document["contents"], str)


def test_recorded_cases(shared: Path, command: RunningCommand) -> None:
    cases = json.loads((shared / "golden" / "search" / "http.json").read_text("utf-8"))
    assert len(cases) == 37
    faults = []
    with httpx.Client(base_url=command.url, trust_env=False) as client:
        for case in cases:
            body = (
                case["raw"].encode() if "raw" in case else json.dumps(case["body"]).encode() if "body" in case else None
            )
            response = client.request(case["method"], case["path"], content=body)
            try:
                status = 200 if case["name"] in ANSWERED else case["status"]
                assert response.status_code == status, response.text
                content = response.json()
                if "rows" in case["shape"]:
                    check_rows(content["result"], case["shape"])
                if "keys" in case["shape"]:
                    assert set(case["shape"]["keys"]) <= set(content)
                if status >= 400:
                    assert isinstance(content["detail"], str) and len(content["detail"].split()) > 3
            except (AssertionError, KeyError, ValueError) as error:
                faults.append(f"{case['name']}: {error}")
    assert not faults, "\n".join(faults)


def test_the_embedded_base_is_served_by_default(command: RunningCommand) -> None:
    from spear_envs.search.embedded import open_base

    base = open_base()
    assert f"ready: {len(base.corpus):,} passages, bm25" in command.line
    document = base.corpus[7]
    answer = httpx.post(f"{command.url}/retrieve", json={"query": document["contents"][:300], "topk": 1})
    assert answer.json()["result"] == [[document]]

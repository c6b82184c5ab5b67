"""What the tests of the search environment share."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

from spear_envs.retrieval.retriever import Passage, Retriever
from spear_envs.search.env import SearchR1Env


@pytest.fixture(scope="session")
def golden(shared: Path) -> Callable[[str], list[dict[str, Any]]]:
    """Reads recorded cases."""
    return lambda name: json.loads((shared / "golden" / "search" / f"{name}.json").read_text("utf-8"))


class Shelf(Retriever):
    """A retriever with set answers: a query brings the documents whose contents hold it."""

    fingerprint = "shelf"

    def __init__(self, *contents: str) -> None:
        self.documents = [{"id": str(i), "contents": text} for i, text in enumerate(contents)]
        self.queries: list[str] = []
        self.fault: Exception | None = None

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        (query,) = queries
        self.queries.append(query)
        if self.fault is not None:
            raise self.fault
        found = [document for document in self.documents if query in document["contents"]][:k]
        return [[Passage(json.dumps(document).encode(), 1.0) for document in found]]

    def describe(self) -> dict[str, Any]:
        return {"kind": "shelf"}


def make(**kwargs: Any) -> SearchR1Env:
    """The environment by its id."""
    env = gym.make("spear_envs:spear/SearchR1-v0", disable_env_checker=True, **kwargs).unwrapped
    assert isinstance(env, SearchR1Env)
    return env


def make_asking(
    tmp_path: Path, golds: Sequence[str], *, shelf: Shelf | str | None = None, **kwargs: Any
) -> SearchR1Env:
    """One question, "Who?", with these answers, reset; passages come from a shelf or an address."""
    path = tmp_path / "asked.jsonl"
    path.write_text(json.dumps({"id": "1", "question": "Who?", "golden_answers": list(golds)}) + "\n")
    env = make(dataset=path, retriever=shelf or Shelf(), **kwargs)
    env.reset(seed=0)
    return env

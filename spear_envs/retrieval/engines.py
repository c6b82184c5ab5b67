"""Engines of others behind the protocol: OpenSearch, web search, and a second look by a cross-encoder.

Each has its settings, as the file of indexes has them, and a retriever of some eighty lines.
"""

from __future__ import annotations

import base64
import html
import json
import math
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import mend_text
from spear_envs.retrieval.client import Asker, Budget, Call, read_json, read_key
from spear_envs.retrieval.corpus import digest_plain
from spear_envs.retrieval.encoders import describe_model, find_model
from spear_envs.retrieval.retriever import FaultKind, Load, Passage, Retriever, RetrieverFault, RetrieverRefusal
from spear_sandbox.web.endpoints import Service, read_urls

# ---------------------------------------------------------------- settings, and a second look


class Settings(BaseModel):
    """Base of all parts of the file: without unknown keys and conversions of types."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Rerank(Settings):
    """Settings of :class:`Reranker`."""

    model: str
    depth: int = Field(30, ge=1, le=1000)
    batch: int = Field(32, ge=1)
    device: str = "cpu"


class AnyIndex(Settings):
    """Settings of every kind of index."""

    rerank: Rerank | None = None

    @abstractmethod
    def open(self, folder: Path) -> Retriever:
        """Open the index, without reranking; paths begin at ``folder``.

        Raises:
            SpearError: it cannot be opened.
        """


class Remote(AnyIndex):
    """Settings of engines over HTTP."""

    deadline_s: float = Field(10.0, gt=0)
    """Seconds for all tries of a search together."""
    tries: int = Field(4, ge=1)
    concurrency: int = Field(8, ge=1, le=256)
    """Concurrent requests."""


def find_path(name: str, folder: Path) -> str:
    """Resolve a path in the file, or return another name, such as that of an installed model."""
    place = folder / os.path.expanduser(name)
    return str(place) if place.exists() or "/" in name else name


class Reranker(Retriever):
    """The first passages of another retriever, ordered by a cross-encoder's score of query and contents.

    A list has at most ``depth`` passages. Ties keep the other's order. Scores have four digits: the composition of
    batches only changes later ones.

    Args:
        inner: finds the candidates; closed with this one.
        model: folder of a sentence-transformers cross-encoder with one output.

    Raises:
        SpearError: the model is missing or cannot be read.
        ModuleNotFoundError: the extra ``search`` is not installed.
    """

    def __init__(self, inner: Retriever, model: str | Path, *, depth: int, batch: int, device: str) -> None:
        from sentence_transformers import CrossEncoder

        folder = find_model(model)
        spec = describe_model(folder)
        try:
            self._model = CrossEncoder(str(folder), device=device, local_files_only=True)
        except Exception as error:  # the library lacks a base class of its errors
            raise SpearError(f"{folder} cannot be read as a cross-encoder ({error}): check the model.") from error
        if self._model.config.num_labels != 1:
            raise SpearError(f"{folder} has {self._model.config.num_labels} outputs: give a cross-encoder with one.")
        self._inner = inner
        self._depth = depth
        self._batch = batch
        self._lock = Lock()
        self._settings = {"model": spec.model, "depth": depth}
        self._digest = spec.fingerprint
        self.passages = inner.passages
        self.load = replace(inner.load, on_loop=False)  # a cross-encoder takes long, and uses OpenMP

    @property
    def fingerprint(self) -> str:  # type: ignore[override]
        """Return a fingerprint of the other retriever, the model and the depth."""
        return digest_plain([self._inner.fingerprint, self._digest, self._depth])

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See :class:`~spear_envs.retrieval.retriever.Retriever`."""
        found = [list(hits[: self._depth]) for hits in self._inner.search(queries, self._depth)]
        pairs = [
            (mend_text(query), mend_text(json.loads(passage.raw)["contents"]))
            for query, hits in zip(queries, found, strict=True)
            for passage in hits
        ]
        if not pairs:
            return found
        with self._lock:
            scores = self._model.predict(pairs, batch_size=self._batch, show_progress_bar=False)
        left = iter([round(float(score), 4) for score in scores])
        scored = [[Passage(passage.raw, next(left)) for passage in hits] for hits in found]
        return [sorted(hits, key=lambda hit: -hit.score)[:k] for hits in scored]

    def describe(self) -> dict[str, Any]:
        """Describe the other retriever and the reranking."""
        return {**self._inner.describe(), "rerank": self._settings}

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return the lengths that the other retriever gives."""
        return self._inner.lengths(queries)

    def counts(self) -> Mapping[str, float]:
        """Return the counts of the other retriever."""
        return self._inner.counts()

    def close(self) -> None:
        """Close the other retriever."""
        self._inner.close()


# ---------------------------------------------------------------- OpenSearch and Elasticsearch


class OpenSearch(Remote):
    """An index of a cluster of OpenSearch or Elasticsearch."""

    kind: Literal["opensearch"]
    urls: list[str] = Field(min_length=1)
    index_name: str
    text_field: str = "contents"
    """Field that is searched, and the text of the passage."""
    title_field: str | None = None
    """Field put before the text, in quotes, where the text does not begin with it by itself."""
    id_field: str | None = None
    """Field of a document's id; None for ``_id``."""
    username: str | None = None
    password_variable: str | None = None
    api_key_variable: str | None = None

    def open(self, folder: Path) -> Retriever:
        """See :class:`AnyIndex`."""
        return OpenSearchRetriever(self)


class OpenSearchRetriever(Retriever):
    """BM25 of a text field, by ``_msearch``."""

    def __init__(self, settings: OpenSearch) -> None:
        urls = read_urls(settings.urls, Service("an OpenSearch", "/_msearch", 9200, "password_variable"))
        variable = settings.api_key_variable or settings.password_variable
        self.load = Load(settings.concurrency, 16)
        self._login = settings
        self._index = settings.index_name
        self._fields = {"text": settings.text_field, "title": settings.title_field, "id": settings.id_field}
        self._asker = Asker(
            urls,
            settings.deadline_s,
            settings.tries,
            headers=self._make_headers,
            key=f"the variable {variable}" if variable else "api_key_variable",
        )
        self._proved = False
        """Whether the index has answered a query."""
        self._settings = {"kind": "opensearch", "index": self._index, "fields": self._fields}
        self.fingerprint = digest_plain([self._settings, sorted(urls)])

    def _make_headers(self) -> Mapping[str, str]:
        headers = {"Content-Type": "application/x-ndjson"}
        if self._login.api_key_variable:
            headers["Authorization"] = f"ApiKey {read_key(self._login.api_key_variable)}"
        elif self._login.username and self._login.password_variable:
            pair = f"{self._login.username}:{read_key(self._login.password_variable)}".encode()
            headers["Authorization"] = f"Basic {base64.b64encode(pair).decode()}"
        return headers

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See :class:`~spear_envs.retrieval.retriever.Retriever`."""
        return self._asker.run(self._search(queries, k))

    async def _search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        fields = [field for field in self._fields.values() if field]
        lines = []
        for query in queries:
            # Ties go to the document that was indexed first, so that answers are repeatable.
            body = {"query": {"match": {self._fields["text"]: query}}, "size": k, "_source": fields}
            lines += [json.dumps({"index": self._index}), json.dumps(body)]
        response = await self._asker.require(Call("POST", "/_msearch", "".join(f"{line}\n" for line in lines).encode()))
        answers = read_json(response).get("responses")
        if not isinstance(answers, list) or len(answers) != len(queries):
            raise RetrieverFault(
                FaultKind.BAD_REPLY,
                f"{response.url.host}: the answer lacks a list 'responses' of {len(queries)} entries.",
            )
        return [self._read_answer(answer, k) for answer in answers]

    def _read_answer(self, answer: Any, k: int) -> list[Passage]:
        try:
            if (error := answer.get("error")) is not None:
                reason = error.get("reason") or error.get("type") if isinstance(error, dict) else error
                status = answer.get("status")
                said = f"{self._index}: status {status}, {str(reason)[:200]}"
                if isinstance(status, int) and 400 <= status < 500 and status != 429:
                    if self._proved:  # so it is the query that it refuses, such as one of too many words
                        raise RetrieverFault(FaultKind.BAD_REPLY, f"{said}.")
                    raise RetrieverRefusal(f"{said}; check the settings of this index.")
                raise RetrieverFault(FaultKind.UNAVAILABLE, f"{said}.")
            if answer.get("timed_out") or answer.get("_shards", {}).get("failed"):
                raise RetrieverFault(FaultKind.UNAVAILABLE, f"{self._index}: a part of the index did not answer.")
            hits = [self._read_hit(hit) for hit in answer["hits"]["hits"][:k]]
            self._proved = True
            return hits
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise RetrieverFault(
                FaultKind.BAD_REPLY, f"{self._index}: the answer lacks what a search has ({error!r})."
            ) from None

    def _read_hit(self, hit: Mapping[str, Any]) -> Passage:
        source, fields = hit["_source"], self._fields
        if not isinstance(text := source.get(fields["text"]), str):
            raise RetrieverRefusal(
                f"{self._index}: a document lacks a text under {fields['text']!r} in its _source; set text_field."
            )
        if fields["title"] and (title := source.get(fields["title"])):
            text = f'"{title}"\n{text}'
        identifier = str(source[fields["id"]] if fields["id"] else hit["_id"])
        if not math.isfinite(score := float(hit["_score"])):
            raise ValueError(f"a score is {score}")
        return Passage(json.dumps({"id": identifier, "contents": text}).encode(), score)

    def describe(self) -> dict[str, Any]:
        """Return kind and settings."""
        return {**self._settings, "servers": len(self._asker.urls)}

    def counts(self) -> Mapping[str, float]:
        """Return the number of requests."""
        return {"requests": self._asker.budget.requests}


# ---------------------------------------------------------------- web search

_TAG = re.compile(r"<[^<>]*>")


@dataclass(frozen=True)
class WebEngine:
    """Requests and answers of a search engine, as published by its makers."""

    url: str | None
    """Address of its makers; None if it is self-hosted."""
    key_header: str | None
    key_variable: str | None
    most: int
    """Most results of one request."""
    ask: Callable[[str, int, Mapping[str, str]], Call]
    """Function that makes the request for a query, a number of results, and further parameters."""
    list_path: tuple[str, ...]
    """Path of the list of results in an answer."""
    keys: tuple[str, str, str]
    """Keys of a result's title, address and snippet."""
    may_lack_list: bool = False
    """Whether an answer without results lacks the list."""


ENGINES = {
    "serper": WebEngine(
        "https://google.serper.dev",
        "X-API-KEY",
        "SERPER_API_KEY",
        100,
        lambda query, results, more: Call("POST", "/search", json.dumps({"q": query, "num": results, **more}).encode()),
        ("organic",),
        ("title", "link", "snippet"),
    ),
    "brave": WebEngine(
        "https://api.search.brave.com",
        "X-Subscription-Token",
        "BRAVE_API_KEY",
        20,
        lambda query, results, more: Call(
            "GET",
            "/res/v1/web/search",
            # Brave refuses more than 50 words or 400 characters.
            params={"q": " ".join(query.split()[:50])[:400], "count": str(results), "result_filter": "web", **more},
        ),
        ("web", "results"),
        ("title", "url", "description"),
        may_lack_list=True,
    ),
    "searxng": WebEngine(
        None,
        None,
        None,
        100,
        lambda query, results, more: Call("GET", "/search", params={"q": query, "format": "json", **more}),
        ("results",),
        ("title", "url", "content"),
    ),
}


class Web(Remote):
    """A search engine of the web."""

    kind: Literal["serper", "brave", "searxng"]
    url: str | None = None
    """Address; None for the one of the engine's makers."""
    key_variable: str | None = None
    """Environment variable of the key; None for the engine's usual one."""
    results: int = Field(10, ge=1, le=100)
    """Results requested by each search, whatever ``k``."""
    options: dict[str, str] = Field(default_factory=dict)
    """Further parameters of the request, such as ``gl`` of Serper."""
    max_requests: int | None = Field(None, ge=0)
    max_cost: float | None = Field(None, ge=0)
    cost_per_request: float = Field(0.0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Web:
        if self.kind == "searxng" and self.url is None:
            raise ValueError("searxng needs url: the address of an instance, such as http://127.0.0.1:8888")
        if self.max_cost is not None and not self.cost_per_request:
            raise ValueError("max_cost needs cost_per_request, the price of one")
        if self.results > (most := ENGINES[self.kind].most):
            raise ValueError(f"results is {self.results}: {self.kind} gives at most {most} with one request")
        return self

    def open(self, folder: Path) -> Retriever:
        """See :class:`AnyIndex`."""
        return WebRetriever(self)


class WebRetriever(Retriever):
    """A search engine. A passage is a result's title and snippet; its id is the address; scores are 1, 1/2, 1/3, ….

    Raises:
        SpearError: the address is not valid.
    """

    def __init__(self, settings: Web) -> None:
        engine = ENGINES[settings.kind]
        if settings.url is not None:
            read_urls(settings.url, Service(f"the search engine {settings.kind}", "/search", 8888, "key_variable"))
        self.load = Load(settings.concurrency, 1)
        self._engine = engine
        self._results = settings.results
        self._options = dict(settings.options)
        self._variable = settings.key_variable or engine.key_variable
        address = (settings.url or engine.url or "").rstrip("/")
        self._asker = Asker(
            (address,),
            settings.deadline_s,
            settings.tries,
            budget=Budget(settings.max_requests, settings.max_cost, settings.cost_per_request),
            headers=self._make_headers,
            key=f"the variable {self._variable}" if self._variable else "that its settings allow the format 'json'",
        )
        self._settings = {"kind": settings.kind, "results": self._results, "options": self._options}
        self.fingerprint = digest_plain([self._settings, address])

    def _make_headers(self) -> Mapping[str, str]:
        if not self._variable:
            return {}
        key = read_key(self._variable)
        return {self._engine.key_header: key} if self._engine.key_header else {"Authorization": f"Bearer {key}"}

    def search(self, queries: Sequence[str], k: int) -> list[list[Passage]]:
        """See :class:`~spear_envs.retrieval.retriever.Retriever`. At most ``results`` for each query."""
        return [hits[:k] for hits in self._asker.gather([self._search(query) for query in queries])]

    async def _search(self, query: str) -> list[Passage]:
        response = await self._asker.require(self._engine.ask(query, self._results, self._options))
        items: Any = read_json(response)
        for key in self._engine.list_path:
            items = items.get(key) if isinstance(items, dict) else None
        if items is None and self._engine.may_lack_list:
            items = []
        if not isinstance(items, list):
            path = ".".join(self._engine.list_path)
            raise RetrieverFault(FaultKind.BAD_REPLY, f"{response.url.host}: the answer lacks the list {path!r}.")
        documents = dict(filter(None, (self._read_item(item) for item in items)))
        if items and not documents:
            keys = " and ".join(self._engine.keys[:2])
            raise RetrieverFault(FaultKind.BAD_REPLY, f"{response.url.host}: no result of the answer has {keys}.")
        return [Passage(raw, 1 / rank) for rank, raw in enumerate(list(documents.values())[: self._results], start=1)]

    def _read_item(self, item: Any) -> tuple[str, bytes] | None:
        """Read the address and document of a result; return None for one without an address or a title."""
        values = [item.get(key) if isinstance(item, dict) else None for key in self._engine.keys]
        title, url, snippet = (_clean(value) if isinstance(value, str) else "" for value in values)
        if not title or not url:
            return None
        return url, json.dumps({"id": url, "contents": f'"{title}"\n{snippet}', "url": url}).encode()

    def describe(self) -> dict[str, Any]:
        """Return kind, settings and limits."""
        return {**self._settings, "budget": self._asker.budget.describe()}

    def counts(self) -> Mapping[str, float]:
        """Return requests and their price."""
        budget = self._asker.budget
        return {"requests": budget.requests, "cost": round(budget.cost, 6)}


def _clean(text: str) -> str:
    """Remove the HTML that engines put around words of the query."""
    return " ".join(html.unescape(_TAG.sub("", text)).split())

"""Web search: Serper, Brave and SearXNG. A passage is a result's title and snippet; its id is the address."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spear_envs.core.errors import SpearError
from spear_envs.retrieval.asking import Asker, Budget, Call, digest_plain, read_json, read_key
from spear_envs.retrieval.retriever import FaultKind, Load, Passage, Retriever, RetrieverFault
from spear_sandbox.web.endpoints import Service, read_urls

if TYPE_CHECKING:
    from spear_envs.retrieval.config import Web


_TAG = re.compile(r"<[^<>]*>")


@dataclass(frozen=True)
class WebEngine:
    """Requests and answers of a search engine, as published by its makers."""

    name: str
    url: str | None
    """Of its makers; None if it is self-hosted."""
    key_header: str | None
    key_variable: str | None
    most: int
    """Results of one request."""
    ask: Callable[[str, int, Mapping[str, str]], Call]
    """The request for a query, a number of results, and further parameters."""
    list_path: tuple[str, ...]
    """Path of the list of results in an answer."""
    keys: tuple[str, str, str]
    """Of a result's title, address and snippet."""
    may_lack_list: bool = False
    """Whether an answer without results lacks the list."""


def _ask_serper(query: str, results: int, options: Mapping[str, str]) -> Call:
    return Call("POST", "/search", json.dumps({"q": query, "num": results, **options}).encode())


def _ask_brave(query: str, results: int, options: Mapping[str, str]) -> Call:
    params = {"q": query, "count": str(results), "result_filter": "web", **options}
    return Call("GET", "/res/v1/web/search", params=params)


def _ask_searxng(query: str, results: int, options: Mapping[str, str]) -> Call:
    return Call("GET", "/search", params={"q": query, "format": "json", **options})


SERPER = WebEngine(
    "serper",
    "https://google.serper.dev",
    "X-API-KEY",
    "SERPER_API_KEY",
    100,
    _ask_serper,
    ("organic",),
    ("title", "link", "snippet"),
)
BRAVE = WebEngine(
    "brave",
    "https://api.search.brave.com",
    "X-Subscription-Token",
    "BRAVE_API_KEY",
    20,
    _ask_brave,
    ("web", "results"),
    ("title", "url", "description"),
    may_lack_list=True,
)
SEARXNG = WebEngine("searxng", None, None, None, 100, _ask_searxng, ("results",), ("title", "url", "content"))
ENGINES = {engine.name: engine for engine in (SERPER, BRAVE, SEARXNG)}


class WebRetriever(Retriever):
    """A search engine. Scores are 1, 1/2, 1/3, … by rank.

    Raises:
        SpearError: the engine does not give as many results with one request, or the address is not valid.
    """

    def __init__(self, settings: Web) -> None:
        engine = ENGINES[settings.kind]
        if settings.results > engine.most:
            raise SpearError(f"results={settings.results}: {engine.name} gives at most {engine.most} with one request.")
        if settings.url is not None:
            read_urls(settings.url, Service(f"the search engine {engine.name}", "/search", 8888, "key_variable"))
        self.load = Load(settings.concurrency, 1)
        self._engine = engine
        self._results = settings.results
        self._options = dict(settings.options)
        self._variable = settings.key_variable or engine.key_variable
        address = (settings.url or engine.url or "").rstrip("/")
        self._asker = Asker(
            [address],
            deadline_s=settings.deadline_s,
            tries=settings.tries,
            budget=Budget(settings.max_requests, settings.max_cost, settings.cost_per_request),
            headers=self._make_headers,
            key=f"the variable {self._variable}" if self._variable else "that its settings allow the format 'json'",
        )
        self._settings = {"kind": engine.name, "results": self._results, "options": self._options}
        self.fingerprint = digest_plain([self._settings, address])

    def _make_headers(self) -> Mapping[str, str]:
        if not self._variable:
            return {}
        header = self._engine.key_header or "Authorization"
        key = read_key(self._variable)
        return {header: key if self._engine.key_header else f"Bearer {key}"}

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
        """Address and document of a result; None for one without an address or a title."""
        values = [item.get(key) if isinstance(item, dict) else None for key in self._engine.keys]
        title, url, snippet = (_clean(value) if isinstance(value, str) else "" for value in values)
        if not title or not url:
            return None
        document = {"id": url, "contents": f'"{title}"\n{snippet}', "url": url}
        return url, json.dumps(document).encode()

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

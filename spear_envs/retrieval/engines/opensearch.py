"""OpenSearch and Elasticsearch over HTTP: BM25 of a text field, by ``_msearch``."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spear_envs.retrieval.asking import Asker, Call, digest_plain, read_json, read_key
from spear_envs.retrieval.retriever import FaultKind, Load, Passage, Retriever, RetrieverFault, RetrieverRefusal
from spear_sandbox.web.endpoints import Service, read_urls

if TYPE_CHECKING:
    from spear_envs.retrieval.config import OpenSearch


BATCH = 16
"""Queries of one ``_msearch``."""


class OpenSearchRetriever(Retriever):
    """One index of a cluster."""

    def __init__(self, settings: OpenSearch) -> None:
        urls = read_urls(settings.urls, Service("an OpenSearch", "/_msearch", 9200, "password_variable"))
        variable = settings.api_key_variable or settings.password_variable
        self.load = Load(settings.concurrency, BATCH)
        self._login = settings
        self._index = settings.index_name
        self._fields = {"text": settings.text_field, "title": settings.title_field, "id": settings.id_field}
        self._asker = Asker(
            urls,
            deadline_s=settings.deadline_s,
            tries=settings.tries,
            headers=self._make_headers,
            key=f"the variable {variable}" if variable else "whether the server wants a key, and name its variable",
        )
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
        if isinstance(answer, dict) and answer.get("error") is not None:
            self._explain(answer)
        try:
            if answer.get("timed_out") or answer.get("_shards", {}).get("failed"):
                raise RetrieverFault(FaultKind.UNAVAILABLE, f"{self._index}: a part of the index did not answer.")
            return [self._read_hit(hit) for hit in answer["hits"]["hits"][:k]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RetrieverFault(
                FaultKind.BAD_REPLY, f"{self._index}: the answer lacks what a search has ({error!r})."
            ) from None

    def _explain(self, answer: Mapping[str, Any]) -> None:
        """Raise the error of one search."""
        error, status = answer["error"], answer.get("status")
        reason = error.get("reason") or error.get("type") if isinstance(error, dict) else error
        said = f"{self._index}: status {status}, {str(reason)[:200]}"
        if isinstance(status, int) and 400 <= status < 500 and status != 429:
            raise RetrieverRefusal(f"{said}; check the settings of this index.")
        raise RetrieverFault(FaultKind.UNAVAILABLE, f"{said}.")

    def _read_hit(self, hit: Mapping[str, Any]) -> Passage:
        source, fields = hit["_source"], self._fields
        if not isinstance(text := source.get(fields["text"]), str):
            raise RetrieverRefusal(
                f"{self._index}: a document lacks a text under {fields['text']!r} in its _source; set text_field."
            )
        if fields["title"] and (title := source.get(fields["title"])):
            text = f'"{title}"\n{text}'
        identifier = str(source[fields["id"]] if fields["id"] else hit["_id"])
        return Passage(json.dumps({"id": identifier, "contents": text}).encode(), float(hit["_score"]))

    def describe(self) -> dict[str, Any]:
        """Return kind and settings."""
        return {**self._settings, "servers": len(self._asker.urls)}

    def counts(self) -> Mapping[str, float]:
        """Return the number of requests."""
        return {"requests": self._asker.budget.requests}

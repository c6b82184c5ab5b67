"""OpenSearch and Elasticsearch over HTTP: BM25 of a text field, by ``_msearch``."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spear_envs.retrieval.asking import Asker, Call, digest_plain, read_json, read_key
from spear_envs.retrieval.backend import Found, Load, read_as_is
from spear_envs.retrieval.searcher import FaultKind, RetrieverFault, RetrieverRefusal

BATCH = 16
"""Queries of one ``_msearch``."""


@dataclass(frozen=True)
class Fields:
    """Fields of an index for passages."""

    text: str = "contents"
    """Searched, and the text of the passage."""
    title: str | None = None
    """Put before the text, in quotes, where the text does not begin with it by itself."""
    id: str | None = None
    """None for ``_id``."""


@dataclass(frozen=True)
class Login:
    """Names of the environment variables for logging in."""

    username: str | None = None
    password_variable: str | None = None
    api_key_variable: str | None = None

    def make_headers(self) -> Mapping[str, str]:
        """The headers of a request."""
        if self.api_key_variable:
            return {"Authorization": f"ApiKey {read_key(self.api_key_variable)}"}
        if self.username and self.password_variable:
            pair = f"{self.username}:{read_key(self.password_variable)}".encode()
            return {"Authorization": f"Basic {base64.b64encode(pair).decode()}"}
        return {}

    @property
    def key(self) -> str:
        """What an error message says to check."""
        variable = self.api_key_variable or self.password_variable
        return f"the variable {variable}" if variable else "whether the server wants a key, and name its variable"


class OpenSearchBackend:
    """One index of a cluster.

    Args:
        urls: of its nodes.
        index: name of the index.
        fields: see :class:`Fields`.
        login: see :class:`Login`.
        calls: concurrent requests.
        deadline_s, tries: of :class:`~spear_envs.retrieval.asking.Asker`.
    """

    passages: int | None = None
    scale: str | None = "bm25"
    read = staticmethod(read_as_is)

    def __init__(
        self,
        urls: Sequence[str],
        index: str,
        fields: Fields,
        login: Login,
        *,
        calls: int,
        deadline_s: float,
        tries: int,
    ) -> None:
        self.load = Load(calls, BATCH)
        self._index = index
        self._fields = fields
        headers = lambda: {**login.make_headers(), "Content-Type": "application/x-ndjson"}  # noqa: E731
        self._asker = Asker(urls, deadline_s=deadline_s, tries=tries, headers=headers, key=login.key)
        self._settings = {"kind": "opensearch", "index": index, "fields": vars(fields)}
        self.fingerprint = digest_plain([self._settings, sorted(urls)])

    def lengths(self, queries: Sequence[str]) -> list[int]:
        """Return 1 for each query."""
        return [1] * len(queries)

    def search(self, queries: Sequence[str], k: int) -> Sequence[Sequence[Found]]:
        """See :class:`~spear_envs.retrieval.backend.Backend`."""
        return self._asker.run(self._search(queries, k))

    async def _search(self, queries: Sequence[str], k: int) -> list[list[Found]]:
        fields = [field for field in vars(self._fields).values() if field]
        lines = []
        for query in queries:
            # Ties go to the document that was indexed first, so that answers are repeatable.
            body = {"query": {"match": {self._fields.text: query}}, "size": k, "_source": fields}
            lines += [json.dumps({"index": self._index}), json.dumps(body)]
        response = await self._asker.require(Call("POST", "/_msearch", "".join(f"{line}\n" for line in lines).encode()))
        answers = read_json(response).get("responses")
        if not isinstance(answers, list) or len(answers) != len(queries):
            raise RetrieverFault(
                FaultKind.BAD_REPLY,
                f"{response.url.host}: the answer lacks a list 'responses' of {len(queries)} entries.",
            )
        return [self._read_answer(answer, k) for answer in answers]

    def _read_answer(self, answer: Any, k: int) -> list[Found]:
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

    def _read_hit(self, hit: Mapping[str, Any]) -> Found:
        source, fields = hit["_source"], self._fields
        if not isinstance(text := source.get(fields.text), str):
            raise RetrieverRefusal(
                f"{self._index}: a document lacks a text under {fields.text!r} in its _source; set text_field."
            )
        if fields.title and (title := source.get(fields.title)):
            text = f'"{title}"\n{text}'
        identifier = str(source[fields.id] if fields.id else hit["_id"])
        return json.dumps({"id": identifier, "contents": text}, ensure_ascii=True).encode(), float(hit["_score"])

    def describe(self) -> dict[str, Any]:
        """Kind and settings."""
        return {**self._settings, "servers": len(self._asker.urls)}

    def counts(self) -> Mapping[str, float]:
        """Requests."""
        return {"requests": self._asker.budget.requests}

    def close(self) -> None:
        """Do nothing: connections belong to the process."""

"""The wire format: both ends of Search-R1's ``/retrieve``, read strictly."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spear_envs.retrieval.backend import Found, Passage


TOKEN_VARIABLE = "SPEAR_RETRIEVER_TOKEN"
"""Environment variable with the bearer token, for the service and its clients."""
DEFAULT_TOPK = 3
EXPECTED_REPLY = '{"result": [[{"document": {"contents": "…"}, "score": 1.0}, …], …]}'
"""An answer, as errors show it."""
SHOWN_CHARACTERS = 40
SHOWN_OF_REPLY = 120
ID_DIGITS = 32
"""Hex digits of SHA-256 in the id of a document that came without one."""


@dataclass(frozen=True)
class RequestLimits:
    """Limits of one request."""

    queries: int = 512
    topk: int = 100
    characters: int = 8192
    """Of one query."""
    body_bytes: int = 64 << 20
    """More than 512 queries of 8,192 characters can take in any JSON encoding."""
    separators: int = 500_000
    """Commas and opening brackets in the body, those of the queries' text included. Each may make an object when JSON
    is read, which stops all other requests; 512 queries of 8,192 characters have as many if every eighth is a comma."""


class BadRequestError(Exception):
    """The body is not a valid request; the sender gets the message."""


class BadReplyError(Exception):
    """The body is not a valid answer; the message says why."""


@dataclass(frozen=True)
class Query:
    """A parsed request."""

    queries: tuple[str, ...]
    topk: int
    return_scores: bool


def read_request(body: bytes, limits: RequestLimits) -> Query:
    """Read the body of ``POST /retrieve``.

    A JSON object with either ``queries`` (strings) or ``query`` (a string), and optionally ``topk`` (an integer or
    null) and ``return_scores`` (a boolean). Other fields are ignored, as other servers of this contract do.

    Raises:
        BadRequestError: the body is something else; the message names the field, its value and the limit.
    """
    separators = sum(map(body.count, (b",", b"[", b"{")))
    if separators > limits.separators:
        raise BadRequestError(
            f"the body has {separators} commas and opening brackets; at most {limits.separators} are allowed. "
            "Send fewer queries in one request."
        )
    try:
        data = json.loads(body)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadRequestError(f"the body is not JSON: {error}.") from None
    except RecursionError:
        raise BadRequestError("the body is not JSON that can be read: it is nested too deeply.") from None
    except ValueError:
        raise BadRequestError("the body is not JSON that can be read: a number in it has too many digits.") from None
    if not isinstance(data, dict):
        raise BadRequestError(f"the body must be a JSON object, not {_name_type(data)}.")
    return Query(_read_queries(data, limits), _read_topk(data, limits), _read_return_scores(data))


def _read_queries(data: dict[str, Any], limits: RequestLimits) -> tuple[str, ...]:
    if ("queries" in data) == ("query" in data):
        found = "both" if "query" in data else "neither"
        raise BadRequestError(
            f"give exactly one of 'queries' (a list of strings) and 'query' (a string); the body has {found}."
        )
    if "query" in data:
        return (_check_query(data["query"], "'query'", limits),)
    queries = data["queries"]
    if not isinstance(queries, list):
        raise BadRequestError(f"'queries' must be a list of strings, not {_name_type(queries)}.")
    if not 1 <= len(queries) <= limits.queries:
        raise BadRequestError(f"'queries' has {len(queries)} entries; it must have 1 to {limits.queries}.")
    return tuple(_check_query(query, f"'queries'[{i}]", limits) for i, query in enumerate(queries))


def _check_query(query: object, name: str, limits: RequestLimits) -> str:
    if not isinstance(query, str):
        raise BadRequestError(f"{name} must be a string, not {_name_type(query)}.")
    if len(query) > limits.characters:
        raise BadRequestError(f"{name} has {len(query)} characters; at most {limits.characters} are allowed.")
    if not query or query.isspace():
        raise BadRequestError(f"{name} is blank; it must have 1 to {limits.characters} characters, not only spaces.")
    if not query.isascii():
        try:
            query.encode()
        except UnicodeEncodeError as error:
            raise BadRequestError(f"{name} has a lone surrogate at position {error.start}: {error.reason}.") from None
    return query


def _read_topk(data: dict[str, Any], limits: RequestLimits) -> int:
    topk = data.get("topk")
    if topk is None:
        return DEFAULT_TOPK
    if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= limits.topk:
        raise BadRequestError(f"'topk' is {_show(topk)}; it must be an integer from 1 to {limits.topk}, or null.")
    return topk


def _read_return_scores(data: dict[str, Any]) -> bool:
    return_scores = data.get("return_scores", False)
    if not isinstance(return_scores, bool):
        raise BadRequestError(f"'return_scores' is {_show(return_scores)}; it must be true or false.")
    return return_scores


def _name_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _show(value: object, most: int = SHOWN_CHARACTERS) -> str:
    """Return a JSON value, cut to fit into a sentence."""
    try:
        text = json.dumps(value)
    except RecursionError:
        return "nested too deeply"
    return text if len(text) <= most else f"{text[:most]}…"


def write_result(rows: Sequence[Sequence[Found]], raw: Callable[[Passage], bytes], return_scores: bool) -> bytes:
    """Write the body of the answer.

    Args:
        rows: hits of each query, in order.
        raw: returns the document of a passage as one JSON object, spliced in unchanged.
        return_scores: whether an item is ``{"document": …, "score": …}`` or the document alone.
    """
    if return_scores:
        lists = (b",".join(b'{"document":%b,"score":%r}' % (raw(row), score) for row, score in hits) for hits in rows)
    else:
        lists = (b",".join(raw(row) for row, _ in hits) for hits in rows)
    return b'{"result":[%b]}' % b",".join(b"[%b]" % items for items in lists)


def write_request(queries: Sequence[str], topk: int) -> bytes:
    """Write the body of a request.

    Ask for scores, since Search-R1's own server answers single queries only with them.
    """
    return json.dumps({"queries": list(queries), "topk": topk, "return_scores": True}).encode()


def read_result(body: bytes, queries: int, topk: int) -> list[list[tuple[dict[str, Any], float | None]]]:
    """Read the documents of each query with their scores, in any form that Search-R1's servers write.

    An item is a document, or ``{"document": …}`` with or without a score; a document is an object with ``contents``, or
    the text alone. A document without an ``id`` gets the digest of its text. Rows longer than ``topk`` are cut.

    Returns:
        For each query at most ``topk`` pairs of an object with ``id`` (a string or an integer) and ``contents`` (a
        string), and its score, None where the server gave none.

    Raises:
        BadReplyError: the body does not answer the request.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadReplyError(f"the answer is not JSON: {error}") from None
    if not isinstance(data, dict) or "result" not in data:
        raise BadReplyError(f"the answer has no 'result' but is {_show(data, SHOWN_OF_REPLY)}")
    rows = data["result"]
    if rows == [] and queries == 1:  # a query without a hit, from the server that reranks
        rows = [[]]
    if not isinstance(rows, list) or len(rows) != queries:
        raise BadReplyError(
            f"'result' is not a list with a row for each of {queries} queries but {_show(rows, SHOWN_OF_REPLY)}"
        )
    return [_read_row(row, topk) for row in rows]


def _read_row(row: object, topk: int) -> list[tuple[dict[str, Any], float | None]]:
    if not isinstance(row, list):
        raise BadReplyError(f"a row of 'result' is not a list of documents but {_show(row, SHOWN_OF_REPLY)}")
    return [(_read_document(item), _read_score(item)) for item in row[:topk]]


def _read_score(item: object) -> float | None:
    score = item.get("score") if isinstance(item, dict) and "document" in item else None
    return float(score) if isinstance(score, int | float) else None


def _read_document(item: object) -> dict[str, Any]:
    document = item.get("document", item) if isinstance(item, dict) else item
    if isinstance(document, str):
        document = {"contents": document}
    if not isinstance(document, dict) or not isinstance(document.get("contents"), str):
        raise BadReplyError(f"a document has no text under 'contents' but is {_show(document, SHOWN_OF_REPLY)}")
    if not isinstance(document.get("id"), str | int):
        text = document["contents"].encode("utf-8", "surrogatepass")
        document = {**document, "id": hashlib.sha256(text).hexdigest()[:ID_DIGITS]}
    return document

"""The wire format: both ends of Search-R1's ``/retrieve``, read strictly."""

from __future__ import annotations

import hashlib
import json
import re
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

    topk: int = 100
    hits: int = 250_000
    """Queries times ``topk``, which is what an answer may hold."""
    characters: int = 8192
    """Of one query."""
    body_bytes: int = 64 << 20
    separators: int = 500_000
    """Commas and opening brackets in the body, outside strings. Each makes an object when JSON is read, which stops all
    other requests."""


class BadRequestError(Exception):
    """The body is not a valid request; the sender gets the message.

    Args:
        queries: number of queries in the body, as far as it can be read.
    """

    def __init__(self, message: str, queries: int = 0) -> None:
        super().__init__(message)
        self.queries = queries


class BadReplyError(Exception):
    """The body is not a valid answer; the message says why."""


@dataclass(frozen=True)
class Query:
    """A parsed request."""

    queries: tuple[str, ...]
    """Empty for a blank one and for one that is refused: it has no hits."""
    topk: int
    return_scores: bool
    problem: str = ""
    """Why the first refused query is refused; empty if none is."""


def read_request(body: bytes, limits: RequestLimits) -> Query:
    """Read the body of ``POST /retrieve``.

    A JSON object with either ``queries`` (strings) or ``query`` (a string), and optionally ``topk`` (an integer or
    null) and ``return_scores`` (a boolean). Other fields are ignored, as other servers of this contract do. A query
    that is too long or no text is refused alone, since trainers send those of a whole batch together.

    Raises:
        BadRequestError: the body is something else; the message names the field, its value and the limit.
    """
    separators = _count_separators(body)
    if separators > limits.separators:  # most often within the queries, where they cost nothing
        separators = _count_separators(_STRING.sub(b"", body))
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
    given = _read_queries(data)
    problems = [_find_problem(query, name, limits) for query, name in given]
    queries = tuple(
        "" if problem or query.isspace() else query for (query, _), problem in zip(given, problems, strict=True)
    )
    try:
        topk = _read_topk(data, limits)
        if len(queries) * topk > limits.hits:
            raise BadRequestError(
                f"{len(queries)} queries with 'topk' {topk} may have {len(queries) * topk} hits; at most {limits.hits} "
                "are allowed. Send fewer queries in one request."
            )
        return Query(queries, topk, _read_return_scores(data), next(filter(None, problems), ""))
    except BadRequestError as error:
        raise BadRequestError(str(error), len(queries)) from None


_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def _count_separators(body: bytes) -> int:
    return sum(map(body.count, (b",", b"[", b"{")))


def _read_queries(data: dict[str, Any]) -> list[tuple[Any, str]]:
    """The queries, each with its name in an error."""
    if ("queries" in data) == ("query" in data):
        found = "both" if "query" in data else "neither"
        raise BadRequestError(
            f"give exactly one of 'queries' (a list of strings) and 'query' (a string); the body has {found}."
        )
    if "query" in data:
        return [(data["query"], "'query'")]
    queries = data["queries"]
    if not isinstance(queries, list):
        raise BadRequestError(f"'queries' must be a list of strings, not {_name_type(queries)}.")
    return [(query, f"'queries'[{i}]") for i, query in enumerate(queries)]


def _find_problem(query: object, name: str, limits: RequestLimits) -> str:
    """Why a query is refused; empty if it is not."""
    if not isinstance(query, str):
        return f"{name} must be a string, not {_name_type(query)}."
    if len(query) > limits.characters:
        return f"{name} has {len(query)} characters; at most {limits.characters} are allowed."
    if not query.isascii():
        try:
            query.encode()
        except UnicodeEncodeError as error:
            return f"{name} has a lone surrogate at position {error.start}: {error.reason}."
    return ""


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

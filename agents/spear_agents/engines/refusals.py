"""What a server of chat completions says instead of an answer, and whether to ask again, otherwise, or not at all.

Servers agree on neither status, form nor words: an error is judged by all texts in its body.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spear_envs.core.errors import SpearError

_SHOWN = 300
_ECHOES = frozenset({"input", "ctx", "url", "documentation_url"})
"""Keys of an error under which a server repeats the request."""
_DEPTH = 8
_PASSING = frozenset({408, 409, 425, 429})
_NOT_OF_THE_REQUEST = frozenset({*_PASSING, 401, 402, 403, 404, 503, 504})
_NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached")
_TOO_LONG = re.compile(
    r"context[ _-]?(length|size|window|limit|the overflow)|max\w* (context|prompt|input|model)\w* (len|tok)"
    r"|max_(model_len|input_tokens)|too many (\w+ )?tokens|string_above_max_length"
    r"|\b(prompt|inputs?|messages?|conversation|text|string|sequence|request)\b[^.]{0,80}?\btoo (long|large)"
    r"|\btokens?\b[^.]{0,80}?(exceed|longer than|must be <|less than|larger than|greater than|too (long|large))"
    r"|exceed\w*[^.]{0,60}?\b(tokens?|length|context)\b|longer than[^.]{0,60}?\b(length|tokens?|context)\b"
    r"|reduce (the |your )?(length|prompt|message|input|conversation|context|number of tokens)"
    r"|(less|fewer) than [\d,]+ tokens|range of input length|length\b[^.]{0,40}?\b(exceed|limit)",
    re.IGNORECASE,
)
_RESPONSE = re.compile(
    r"max_?(completion_?|new_?|output_?)?tokens|max(imum)? (\w+ )?tokens (you|value|to)"
    r"|\b(completion|output) tokens|in the (completion|output)|for the completion",
    re.IGNORECASE,
)
_EXCESS = re.compile(
    r"too (large|high|big|long|many)|exceed|at most|(less|lower|fewer|greater|more|larger) than"
    r"|maximum|must be <|range|above|cannot be|[<>]|up to|limit",
    re.IGNORECASE,
)
_ALONE = re.compile(
    r"(?<!\+ )(?<!\+ [`'])max_?\w*tokens\W*( or \W*max\w+\W*)?( value)?( is|:| must be)? *"
    r"(invalid|too (large|high|big)|less than|at most|<)"
    r"|max_?\w*tokens value|range of max_tokens|at most [\d,]+ (completion|output)|maximum tokens you requested",
    re.IGNORECASE,
)
"""The response's limit is too large by itself, whatever the prompt."""
_NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]{0,17}(?![\w,-]|\.\d)")
_WITHHELD = re.compile(
    r"content[ _]?(management policy|filter|policy)|responsibleai|data_?inspection|content exists risk|moderation"
    r"|safety (system|filter|polic)|inappropriate content|sensitive content",
    re.IGNORECASE,
)
_STREAM = re.compile(r"stream\w*\b[^.]{0,40}?\b(required|true|only|must)|only[^.]{0,30}?\bstream", re.IGNORECASE)
_UNSUPPORTED = re.compile(
    r"support|unknown|unrecogni[sz]ed|unexpected|extra|not (permitted|allowed|available|implemented|accepted)"
    r"|cannot find|deprecated|(only|must)\b[^.]{0,40}?\b(default|1|one)\b|(cannot|can't|not) both|mutually exclusive"
    r"|invalid (parameter|argument|field|property|key)|accept|forbidden|additional properties|use only one|instead",
    re.IGNORECASE,
)
_RANGE = re.compile(
    r"\bbetween\b|\brange\b|(less|greater|more|lower|larger) than|at (most|least)|[<>]=? *-?\d", re.IGNORECASE
)
_OPTIONAL = (
    *("stream_options", "logprobs", "return_token_ids", "include_stop_str_in_output", "repetition_penalty", "min_p"),
    *("seed", "stop", "top_k", "top_p", "temperature"),
)
"""Fields that a request can do without, in the order in which one of two is given up."""
LIMITS = ("max_tokens", "max_completion_tokens")
_BROKEN = ("error", "abort", "aborted", "cancelled", "canceled", "network_error", "insufficient_system_resource")
"""Reasons of an end that is a failure."""


@dataclass(frozen=True)
class Room:
    """Most ``tokens`` of a response, 0 or less if the prompt alone is too long; whether the number asked for
    ``never_fits``, however short the prompt.
    """

    tokens: int
    never_fits: bool


@dataclass(frozen=True)
class Refusal:
    """A failure of a server.

    ``text`` joins every text of the body, ``message`` is the sentence to show, ``code`` the server's word, and
    ``fields`` the request's fields that the body names as wrong.
    """

    status: int
    text: str
    message: str
    code: str = ""
    fields: tuple[str, ...] = ()

    @property
    def will_pass(self) -> bool:
        """Whether another try may succeed."""
        if self.status == 429 and self.code in _NO_CREDIT:
            return False
        return self.status in _PASSING or self.status >= 500

    @property
    def is_too_long(self) -> bool:
        """Whether the prompt does not fit the model."""
        if self.status in _NOT_OF_THE_REQUEST:
            return False
        return self.status == 413 or self.code == "context_length_exceeded" or bool(_TOO_LONG.search(self.text))

    @property
    def is_withheld(self) -> bool:
        """Whether a filter refused the prompt."""
        return self.status in (400, 403, 422) and bool(_WITHHELD.search(f"{self.code} {self.text}"))

    def find_room(self, asked: int) -> Room | None:
        """The room for a response, if ``asked`` tokens are too many; None if the refusal is about something else."""
        if self.status in _NOT_OF_THE_REQUEST or not (_RESPONSE.search(self.text) and _EXCESS.search(self.text)):
            return None
        numbers = [int(found.replace(",", "")) for found in _NUMBER.findall(self.text)]
        room = _compute_room(numbers, asked)
        if asked not in numbers and _ALONE.search(self.text):  # the server counts otherwise
            most = max(numbers, default=asked)
            return Room(most if most < asked else asked // 2, True)
        if "at least" in self.text:  # the prompt was not counted to its end
            return Room(min(room.tokens, asked // 2), room.never_fits)
        return room

    def explain(self, url: str, model: str, key_variable: str) -> SpearError:
        """The error for an answer that another try would not change."""
        if self.status in (401, 403):
            return SpearError(
                f"{url} refused the key ({self.status}): set the variable {key_variable} to a key of this server. "
                f"It said: {self.message}"
            )
        if self.status == 404:
            versioned = "" if "/v1/" in url else "; most servers' address ends in /v1"
            return SpearError(
                f"{url} does not exist or does not serve {model!r}: check --base-url and --model "
                f"({self.message}){versioned}"
            )
        if self.status in (402, 429):
            return SpearError(f"{url}: no credit is left ({self.message})")
        if 300 <= self.status < 400:
            return SpearError(
                f"{url} leads elsewhere ({self.status}): give the final address, perhaps https://, as --base-url"
            )
        return SpearError(f"{url} refused the request ({self.status}): {self.message}")


def _compute_room(numbers: list[int], asked: int) -> Room:
    """The room by the numbers of a refusal: its limit, and perhaps the tokens of the prompt, or of prompt and response.

    Without a limit it is half of what was asked for.
    """
    others = set(numbers) - {asked}
    totals = {n for n in others if n - asked in others or n == 2 * asked}
    prompts = {n - asked for n in totals}
    limits = others - totals - prompts or {n for n in prompts if numbers.count(n) > 1}  # a prompt as long as the limit
    limits = limits or ({asked} if asked in numbers else set())
    if not limits or not others:
        return Room(asked // 2, False)
    low, high = min(limits), max(limits)
    if prompts:
        limit, left = high, high - max(prompts)
    elif low == high > asked and numbers.count(high) > 1:  # the prompt has as many tokens as the limit
        return Room(0, False)
    elif low == high:  # a limit, or the sum
        limit, left = (high, high) if high < asked else (asked, asked - (high - asked))
    elif low + asked > high:
        limit, left = high, high - low
    else:
        limit, left = low, low - (high - asked)
    return Room(left, limit <= asked)


class Dialect:
    """How a server wants requests written, learnt from its refusals.

    The ``dropped`` fields are left out. A limit of the response that is dropped goes under its other name.
    """

    def __init__(self) -> None:
        self.dropped: list[str] = []
        self._streams = False

    def write(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The request in the form that the server takes."""
        written = dict(request)
        if self._streams:
            written |= {"stream": True, "stream_options": {"include_usage": True}}
        for name in self.dropped:
            value = written.pop(name, None)
            if name in LIMITS and value is not None:
                written[next(other for other in LIMITS if other != name)] = value
        return written

    def learn(self, refusal: Refusal, sent: Mapping[str, Any]) -> str:
        """The field that is left out, or renamed, from now on; empty if none. ``sent`` is the refused request."""
        if refusal.will_pass or refusal.status in _NOT_OF_THE_REQUEST:
            return ""
        if _RANGE.search(refusal.text) or not (refusal.fields or _UNSUPPORTED.search(refusal.text)):
            return ""  # a value out of range is the user's to change
        named = {*refusal.fields, *([] if refusal.fields else re.findall(r"\w+", refusal.text))}
        for name in (*LIMITS, *_OPTIONAL):
            if name not in named or name not in sent:
                continue
            if name not in self.dropped:  # else this request was written before it was learnt
                if name in LIMITS and set(self.dropped) & set(LIMITS):
                    continue
                self.dropped.append(name)
            return name
        return ""

    def stream(self, refusal: Refusal, sent: Mapping[str, Any]) -> bool:
        """Ask for streams from now on, if that is what the server demands; whether it is."""
        demanded = not (refusal.will_pass or sent.get("stream")) and bool(_STREAM.search(refusal.text))
        self._streams = self._streams or demanded
        return demanded


def read_refusal(status: int, content: bytes) -> Refusal:
    """The failure in an answer with another status than 200."""
    try:
        return _make_refusal(status, json.loads(content), content)
    except (ValueError, RecursionError):
        return _make_refusal(status, None, content)


def find_inner(data: dict[str, Any]) -> Refusal | None:
    """A failure inside an answer with status 200: of the answer, or of its choice; None if it holds none."""
    if data.get("error"):
        return _make_refusal(_read_status(data["error"]), data["error"], b"")
    choices = data.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    if choice.get("error"):
        return _make_refusal(_read_status(choice["error"]), choice["error"], b"")
    reason = str(choice.get("finish_reason") or "").lower()
    if reason in _BROKEN:
        message = f"the server ended the response ({reason})"
        return Refusal(500, message, message)
    return None


def _read_status(error: Any) -> int:
    code = str(error.get("code")) if isinstance(error, dict) else ""
    number = int(code) if code.isdigit() else 0
    return number if 400 <= number < 600 else 500


def _make_refusal(status: int, data: Any, content: bytes) -> Refusal:
    texts = list(_list_texts(data))
    error = data[0] if isinstance(data, list) and data else data
    error = error.get("error", error) if isinstance(error, dict) else error
    code, fields = "", []
    if isinstance(error, dict):
        code = str(error.get("code") or error.get("type") or "")
        if isinstance(error.get("param"), str) and error["param"]:
            fields.append(error["param"])
    fields += [place[-1] for place in _list_places(data)]
    text = " | ".join(texts) or content.decode("utf-8", "replace")
    message = max(texts, key=_rank, default="") if texts else repr(text[:_SHOWN])
    return Refusal(status, text, message[:_SHOWN], code, tuple(fields))


def _rank(text: str) -> tuple[bool, int]:
    """Sentences before words, and of those the longest that can be shown."""
    return " " in text, len(text) if len(text) <= 2 * _SHOWN else 0


def _list_texts(data: Any, depth: int = 0) -> Iterator[str]:
    """Every text of an error's body, also of JSON within a text, without what repeats the request."""
    if isinstance(data, str):
        if data.lstrip()[:1] in ("{", "[") and depth < _DEPTH:
            try:
                yield from _list_texts(json.loads(data), depth + 1)
                return
            except (ValueError, RecursionError):
                pass
        if data and not data.isdigit():
            yield data
    elif isinstance(data, Mapping) and depth < _DEPTH:
        for key, value in data.items():
            if key not in _ECHOES:
                yield from _list_texts(value, depth + 1)
    elif isinstance(data, list) and depth < _DEPTH:
        for value in data:
            yield from _list_texts(value, depth + 1)


def _list_places(data: Any, depth: int = 0) -> Iterator[list[str]]:
    """The paths that a validator (pydantic's ``loc``) calls wrong."""
    if isinstance(data, Mapping) and depth < _DEPTH:
        place = data.get("loc")
        if isinstance(place, list) and place:
            yield [str(part) for part in place]
        for value in data.values():
            yield from _list_places(value, depth + 1)
    elif isinstance(data, list) and depth < _DEPTH:
        for value in data:
            yield from _list_places(value, depth + 1)

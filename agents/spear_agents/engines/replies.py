"""Answers of a server of chat completions, checked: texts, tokens, counts."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spear_agents.engines.base import Ending, Served
from spear_envs.core.errors import SpearError
from spear_sandbox.errors import show_text

_MOST_SHOWN = 300
_MOST_SEARCHED = 1 << 13
"""Characters at either end of a failure's text that are searched: the patterns take quadratic time in its words."""
_ECHOES = frozenset({"input", "ctx", "url", "documentation_url"})
"""Keys of an error under which a server repeats the request."""
_DEPTH = 8
_PASSING = frozenset({408, 409, 425, 429})
_NOT_OF_THE_REQUEST = frozenset({*_PASSING, 401, 402, 403, 404, 503, 504})
_NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached")
_TOO_LONG = re.compile(
    r"context[ _-]?(length|size|window|limit|the overflow)|max\w{0,20} (context|prompt|input|model)\w{0,20} (len|tok)"
    r"|max_(model_len|input_tokens)|too many (\w+ )?tokens|string_above_max_length"
    r"|\b(prompt|inputs?|messages?|conversation|text|string|sequence|request)\b[^.]{0,80}?\btoo (long|large)"
    r"|\btokens?\b[^.]{0,80}?(exceed|longer than|must be <|less than|larger than|greater than|too (long|large))"
    r"|exceed\w{0,20}[^.]{0,60}?\b(tokens?|length|context)\b|longer than[^.]{0,60}?\b(length|tokens?|context)\b"
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
    r"(?<!\+ )(?<!\+ [`'])max\w{0,20}tokens\W*( or \W*max\w+\W*)?( value)?( is|:| must be)? *"
    r"(invalid|too (large|high|big)|less than|at most|<)"
    r"|max\w{0,20}tokens value|range of max_tokens|at most [\d,]+ (completion|output)|maximum tokens you requested",
    re.IGNORECASE,
)
"""The response's limit is too large by itself, whatever the prompt."""
_NUMBER = re.compile(r"(?<![\w.,-])\d[\d,]{0,17}(?![\w,-]|\.\d)")
_WITHHELD_WORDS = re.compile(
    r"content[ _]?(management policy|filter|policy)|responsibleai|data_?inspection|content exists risk|moderation"
    r"|safety (system|filter|polic)|inappropriate content|sensitive content",
    re.IGNORECASE,
)
_STREAM = re.compile(r"stream\w{0,20}\b[^.]{0,40}?\b(required|true|only|must)|only[^.]{0,30}?\bstream", re.IGNORECASE)
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
    *("parallel_tool_calls", "seed", "stop", "top_k", "top_p", "temperature"),
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
        return self.status in (400, 403, 422) and bool(_WITHHELD_WORDS.search(f"{self.code} {self.text}"))

    def find_room(self, asked: int) -> Room | None:
        """Return the room for a response if ``asked`` tokens are too many, None for a refusal of something else."""
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
        """Return the error for an answer that another try would not change."""
        if self.status in (401, 403):
            return SpearError(f"{url} refused the key ({self.status}): set {key_variable}. It said: {self.message}")
        if self.status == 404:
            versioned = "" if "/v1/" in url else "; most servers' address ends in /v1"
            return SpearError(
                f"{url} does not exist or does not serve {model!r}: check --base-url and --model "
                f"({self.message}){versioned}"
            )
        if self.status in (402, 429):
            return SpearError(f"{url}: no credit is left ({self.message})")
        if 300 <= self.status < 400:
            return SpearError(f"{url} leads elsewhere ({self.status}): give the final address as --base-url")
        return SpearError(f"{url} refused the request ({self.status}): {self.message}")


def _compute_room(numbers: list[int], asked: int) -> Room:
    """Compute the room from the numbers of a refusal: its limit, and perhaps the tokens of the prompt or of both.

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
        """Return the request in the form that the server takes."""
        written = dict(request)
        if self._streams:
            written |= {"stream": True, "stream_options": {"include_usage": True}}
        for name in self.dropped:
            value = written.pop(name, None)
            if name in LIMITS and value is not None:
                written[next(other for other in LIMITS if other != name)] = value
        return written

    def learn(self, refusal: Refusal, sent: Mapping[str, Any]) -> str:
        """Return the field to leave out or rename from now on, empty for none. ``sent`` is the refused request."""
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
    """Return the failure in an answer with another status than 200."""
    try:
        return _make_refusal(status, json.loads(content), content)
    except (ValueError, RecursionError):
        return _make_refusal(status, None, content)


def find_inner(data: dict[str, Any]) -> Refusal | None:
    """Return a failure inside an answer with status 200: of the answer, or of its choice; None if it holds none."""
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
    number = int(code) if code.isdecimal() and len(code) == 3 else 0
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
    if len(text) > 2 * _MOST_SEARCHED:
        text = f"{text[:_MOST_SEARCHED]} … {text[-_MOST_SEARCHED:]}"
    message = max(texts, key=_rank, default="") if texts else repr(text[:_MOST_SHOWN])
    # The message goes into records, and servers repeat the key that they refuse.
    return Refusal(status, text, show_text(message)[:_MOST_SHOWN], code, tuple(fields))


def _rank(text: str) -> tuple[bool, int]:
    """Return the sentences before words, and of those the longest that can be shown."""
    return " " in text, len(text) if len(text) <= 2 * _MOST_SHOWN else 0


def _list_texts(data: Any, depth: int = 0) -> Iterator[str]:
    """Return every text of an error's body, also of JSON within a text, without what repeats the request."""
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
    """Return the paths that a validator (pydantic's ``loc``) calls wrong."""
    if isinstance(data, Mapping) and depth < _DEPTH:
        place = data.get("loc")
        if isinstance(place, list) and place:
            yield [str(part) for part in place]
        for value in data.values():
            yield from _list_places(value, depth + 1)
    elif isinstance(data, list) and depth < _DEPTH:
        for value in data:
            yield from _list_places(value, depth + 1)


_SHOWN = 200


class RefusedError(Exception):
    """The server failed."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class BadReplyError(ValueError):
    """An answer that does not follow the interface."""


@dataclass(frozen=True)
class Prices:
    """Prices of a million tokens, in any currency.

    ``cached`` is the price of prompt tokens in the server's cache; None for the price of the others.
    """

    prompt: float
    completion: float
    cached: float | None = None

    def __post_init__(self) -> None:
        for price in (self.prompt, self.completion, self.cached or 0.0):
            if not (price >= 0 and math.isfinite(price)):
                raise SpearError(f"a price is a number from 0, got {price}: give --price IN,OUT for a million tokens")

    def compute_cost(self, prompt: int, completion: int, cached: int) -> float:
        """Return the cost of one response."""
        price = self.prompt if self.cached is None else self.cached
        return ((prompt - cached) * self.prompt + cached * price + completion * self.completion) / 1e6


@dataclass(frozen=True)
class Reply:
    """One response of a server."""

    text: str
    cut_short: bool
    served: Served
    """Its data, without tries and cost."""
    calls: tuple[tuple[str, str], ...] = ()
    """Name and arguments, as the server wrote them, of each call of a tool."""
    opening: int = 0
    """Characters of the text that are thoughts which came by themselves, with their tags: no stop string ends these."""

    def to_served(self, tries: int, prices: Prices | None) -> Served:
        """Return the record of it."""
        served, cost = self.served, None
        if prices is not None and served.prompt_tokens is not None and served.completion_tokens is not None:
            cached = min(served.cached_tokens or 0, served.prompt_tokens)
            cost = prices.compute_cost(served.prompt_tokens, served.completion_tokens, cached)
        return replace(served, tries=tries, cost=cost)


_CUT = ("length", "max_tokens", "max_output_tokens", "model_length")
_WITHHELD = ("content_filter", "safety", "sensitive", "recitation", "prohibited", "blocklist", "spii", "refusal")
_MOST_TOKENS = 2**53
_MOST_NATS = 1e300
_THOUGHTS = ("thinking", "reasoning", "reasoning_content", "summary")
_EVENT = re.compile(rb"\s*(?:data|event|id|retry)?:")
"""Begin of a stream of events: a field, or a comment such as a sign of life."""


def read_reply(content: bytes) -> Reply:
    """Read an answer with status 200.

    Raises BadReplyError if it is not JSON or a stream, or not a completion, and RefusedError if it holds a failure.

    Separate thoughts (``reasoning_content``, ``reasoning``, parts of a content) are put in front of the text, between
    ``<think>`` tags. A refusal is a response like any other.
    """
    data = _join_stream(content) if _EVENT.match(content) else _read_object(content)
    if data is None:
        raise BadReplyError(f"the answer is not a JSON object: {_shorten(content)}")
    if (refusal := find_inner(data)) is not None:
        raise RefusedError(refusal)
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadReplyError(f"the answer has no choices: {_shorten(content)}")
    choice = choices[0]
    message = choice.get("message")
    if not isinstance(message, dict):
        raise BadReplyError("the answer's choice has no message")
    thoughts, text = _split_parts(message.get("content"))
    if message.get("content") is None:
        text = str(message.get("refusal") or "")
    thoughts = thoughts or _split_parts(message.get("reasoning_content") or message.get("reasoning") or "")[1]
    opening = ""
    if thoughts.strip():
        # As chat templates set a native thought, so that it is none of those that a prompt asks for.
        form = "<think>\n{}\n</think>\n\n" if "<think>" in text else "<think>{}</think>"
        opening = form.format(thoughts.strip().replace("</think>", "< /think>"))
        text = opening + text.lstrip()
    reason = str(choice.get("finish_reason") or "").lower()
    counts = data.get("usage")
    usage: dict[str, Any] = counts if isinstance(counts, dict) else {}
    details = usage.get("prompt_tokens_details")
    served = Served(
        model=data["model"] if isinstance(data.get("model"), str) else "",
        prompt_tokens=_read_count(usage, "prompt_tokens"),
        completion_tokens=_read_count(usage, "completion_tokens"),
        cached_tokens=_read_count(details, "cached_tokens") if isinstance(details, dict) else None,
        prompt_ids=_read_ids(data.get("prompt_token_ids")),
        token_ids=_read_ids(choice.get("token_ids")),
        log_probs=_read_log_probs(choice.get("logprobs")),
        **_explain_ending(reason, choice, message, text),
    )
    return Reply(text, reason in _CUT, served, _read_tool_calls(message.get("tool_calls")), len(opening))


def _read_tool_calls(calls: Any) -> tuple[tuple[str, str], ...]:
    """Return the calls of functions in a message; what has another form is left out."""
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    found = []
    for function in functions:
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            arguments = function.get("arguments")
            written = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
            found.append((function["name"], written))
    return tuple(found)


def _explain_ending(reason: str, choice: dict[str, Any], message: dict[str, Any], text: str) -> dict[str, Any]:
    """Return the ending and note of a response that a filter withheld, or that is a tool call."""
    if any(word in reason for word in _WITHHELD):
        line = message.get("refusal") or choice.get("content_filter_results") or choice.get("stop_reason")
        return {"ending": Ending.FILTER, "note": f"{reason}: {line}"[:_SHOWN] if line else reason}
    calls = message.get("tool_calls") or message.get("function_call")
    if calls and not text:
        return {"ending": Ending.TOOL_CALL, "note": f"a tool call instead of text: {json.dumps(calls)}"[:_SHOWN]}
    return {}


def _split_parts(content: Any) -> tuple[str, str]:
    """Return the thoughts and text of a content: a text, or a list of parts. Raises BadReplyError for other parts."""
    if isinstance(content, str) or content is None:
        return "", content or ""
    if not isinstance(content, list):
        raise BadReplyError("the answer's content is not text")
    thoughts = text = ""
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        value = part if isinstance(part, str) else part.get(kind) or part.get("text") if isinstance(part, dict) else 0
        if kind in _THOUGHTS:
            thoughts += "".join(_split_parts(value))
        elif kind in ("text", "output_text", "refusal") and isinstance(value, str):
            text += value
        elif kind != "redacted_thinking" and kind != "reference":
            raise BadReplyError(f"the answer's content has a part of type {kind!r}")
    return thoughts, text


def _join_stream(content: bytes) -> dict[str, Any] | None:
    """Return a streamed answer as one that came in one piece; None if it has a part that is not JSON.

    Raises BadReplyError if the stream broke off.
    """
    whole: dict[str, Any] = {"choices": []}
    choice: dict[str, Any] = {"message": {}}
    for part in _read_events(content):
        if part is None:
            return None
        whole |= {key: value for key, value in part.items() if key != "choices" and value is not None}
        for piece in (part.get("choices") or [])[:1]:
            whole["choices"] = [choice]
            choice |= {key: value for key, value in piece.items() if key in ("finish_reason", "error") and value}
            _append(choice["message"], piece.get("delta") or {})
            for key in ("logprobs", "token_ids"):
                if piece.get(key):
                    _append(choice, {key: piece[key]})
    if whole["choices"] and not choice.get("finish_reason") and not whole.get("error"):
        raise BadReplyError("the stream ended before the response")
    return whole


def _read_events(content: bytes) -> Iterator[dict[str, Any] | None]:
    for line in content.splitlines():
        written = line.removeprefix(b"data:").strip()
        if line.startswith(b"data:") and written != b"[DONE]":
            yield _read_object(written)


def _append(whole: dict[str, Any], piece: Mapping[str, Any]) -> None:
    """Append the texts and lists of a piece to those that came before, and those of a call to the same call."""
    for key, value in piece.items():
        old = whole.get(key)
        if key == "tool_calls" and isinstance(value, list):
            calls = whole.setdefault(key, [])
            numbers = [call.get("index") for call in calls]
            for part in value:
                place = part.get("index")
                if place is not None and place in numbers:
                    _append(calls[numbers.index(place)], part)
                else:
                    calls.append(part)
                    numbers.append(place)
        elif isinstance(value, dict):
            _append(whole.setdefault(key, {}), value)
        elif isinstance(value, str) and isinstance(old, str) and key != "role":
            whole[key] = old + value
        elif isinstance(value, list) and isinstance(old, list):
            old += value
        elif value is not None:
            whole[key] = value


def _read_object(content: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _shorten(content: bytes) -> str:
    return repr(show_text(content[: 2 * _SHOWN].decode("utf-8", "replace"))[:_SHOWN])


def _read_count(usage: Mapping[str, Any], key: str) -> int | None:
    value = usage.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS else None


def _read_ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(type(item) is int and 0 <= item <= _MOST_TOKENS for item in value):
        return None
    return tuple(value)


def _read_log_probs(value: Any) -> tuple[float, ...] | None:
    entries = value.get("content") if isinstance(value, dict) else None
    if not isinstance(entries, list):
        return None
    found = [entry.get("logprob") if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in found):
        return None
    # NaN is a fault of its own.
    if any(item is not None and abs(item) > _MOST_NATS for item in found):
        raise BadReplyError("a log-probability of the answer is infinite")
    return tuple(float(item) for item in found if item is not None)

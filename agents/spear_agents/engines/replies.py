"""Answers of a server of chat completions, checked: texts, tokens, counts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from spear_agents.engines.base import Ending, Served
from spear_agents.engines.refusals import Refusal, find_inner
from spear_envs.core.errors import SpearError

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
        """The cost of one response."""
        price = self.prompt if self.cached is None else self.cached
        return ((prompt - cached) * self.prompt + cached * price + completion * self.completion) / 1e6


@dataclass(frozen=True)
class Reply:
    """One response of a server."""

    text: str
    cut_short: bool
    served: Served
    """Its data, without tries and cost."""

    def to_served(self, tries: int, prices: Prices | None) -> Served:
        """The record of it."""
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


def read_reply(content: bytes) -> Reply:
    """Read an answer with status 200.

    Raises BadReplyError if it is not JSON or a stream, or not a completion, and RefusedError if it holds a failure.

    Separate thoughts (``reasoning_content``, ``reasoning``, parts of a content) are put in front of the text, between
    ``<think>`` tags. A refusal is a response like any other.
    """
    data = _join_stream(content) if content.lstrip()[:6] in (b"data: ", b"data:{", b"event:") else _read_object(content)
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
    if thoughts.strip():
        # As chat templates set a native thought, so that it is none of those that a prompt asks for.
        form = "<think>\n{}\n</think>\n\n{}" if "<think>" in text else "<think>{}</think>{}"
        text = form.format(thoughts.strip().replace("</think>", "< /think>"), text.lstrip())
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
    return Reply(text, reason in _CUT, served)


def _explain_ending(reason: str, choice: dict[str, Any], message: dict[str, Any], text: str) -> dict[str, Any]:
    """Ending and note of a response that a filter withheld, or that is a tool call."""
    if any(word in reason for word in _WITHHELD):
        told = message.get("refusal") or choice.get("content_filter_results") or choice.get("stop_reason")
        return {"ending": Ending.FILTER, "note": f"{reason}: {told}"[:_SHOWN] if told else reason}
    calls = message.get("tool_calls") or message.get("function_call")
    if calls and not text:
        return {"ending": Ending.TOOL_CALL, "note": f"a tool call instead of text: {json.dumps(calls)}"[:_SHOWN]}
    return {}


def _split_parts(content: Any) -> tuple[str, str]:
    """Thoughts and text of a content: a text, or a list of parts. Raises BadReplyError for other parts."""
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
    """A streamed answer as one that came in one piece; None if it has a part that is not JSON.

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
    """Append the texts and lists of a piece to those that came before."""
    for key, value in piece.items():
        old = whole.get(key)
        if isinstance(value, dict):
            _append(whole.setdefault(key, {}), value)
        elif isinstance(value, str) and isinstance(old, str) and key != "role":
            whole[key] = old + value
        elif isinstance(value, list) and isinstance(old, list):
            whole[key] = [*old, *value]
        elif value is not None:
            whole[key] = value


def _read_object(content: bytes) -> dict[str, Any] | None:
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def _shorten(content: bytes) -> str:
    return repr(content[:_SHOWN].decode("utf-8", "replace"))


def _read_count(usage: Mapping[str, Any], key: str) -> int | None:
    value = usage.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_TOKENS else None


def _read_ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(isinstance(item, int) and 0 <= item <= _MOST_TOKENS for item in value):
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

"""Answers of a server of chat completions, checked: texts, tokens, counts, refusals."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from spear_agents.engines.base import ContextExceededError, Served
from spear_envs.core.errors import SpearError

PASSING = frozenset({408, 409, 425, 429})
_TOO_LONG = re.compile(
    r"context[ _](length|size|window)|maximum context|prompt is too long|too many (input )?tokens", re.IGNORECASE
)
_ONLY_OPENAI = re.compile(r"max_completion_tokens|top_p")
_NO_CREDIT = ("insufficient_quota", "billing_hard_limit_reached")
_SHOWN = 200


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


def read_reply(content: bytes) -> Reply:
    """Read an answer with status 200. Raises BadReplyError if it is not JSON, or not a completion.

    Separate thoughts (``reasoning_content``, ``reasoning``) are put in front of the text, between ``<think>`` tags. A
    refusal is a response like any other.
    """
    data = _read_object(content)
    if data is None:
        raise BadReplyError(f"the answer is not a JSON object: {_shorten(content)}")
    choices = data.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadReplyError(f"the answer has no choices: {_shorten(content)}")
    choice = choices[0]
    message = choice.get("message")
    if not isinstance(message, dict):
        raise BadReplyError("the answer's choice has no message")
    text = message.get("content")
    if text is None:
        text = message.get("refusal") or ""
    if not isinstance(text, str):
        raise BadReplyError("the answer's content is not text")
    thoughts = message.get("reasoning_content") or message.get("reasoning")
    if isinstance(thoughts, str) and thoughts:
        # As chat templates set a native thought, so that it is none of those that a prompt asks for.
        form = "<think>\n{}\n</think>\n\n{}" if "<think>" in text else "<think>{}</think>{}"
        text = form.format(thoughts.strip(), text.lstrip())
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
    )
    return Reply(text, choice.get("finish_reason") == "length", served)


def will_pass(status: int, content: bytes) -> bool:
    """Whether another try may succeed after this status."""
    if status == 429 and _find_error(content)[1] in _NO_CREDIT:
        return False
    return status in PASSING or status >= 500


def explain_refusal(status: int, content: bytes, url: str, model: str, key_variable: str) -> SpearError:
    """The error for an answer that another try would not change."""
    message, code = _find_error(content)
    if status in (400, 413, 422) and (code == "context_length_exceeded" or _TOO_LONG.search(message)):
        return ContextExceededError(f"the prompt is too long for {model}: {message}")
    if status in (401, 403):
        return SpearError(
            f"{url} refused the key ({status}): set the variable {key_variable} to a key of this server. "
            f"It said: {message}"
        )
    if status == 404:
        versioned = "" if "/v1/" in url else "; most servers' address ends in /v1"
        return SpearError(
            f"{url} does not exist or does not serve {model!r}: check --base-url and --model ({message}){versioned}"
        )
    if status == 429:
        return SpearError(f"{url}: no credit is left ({message})")
    if 300 <= status < 400:
        return SpearError(f"{url} leads elsewhere ({status}): give the final address, perhaps https://, as --base-url")
    mend = "Change the option it names."
    if _ONLY_OPENAI.search(message):
        mend = "--server openai sends max_completion_tokens, and leaves out a temperature and a top_p of 1."
    return SpearError(f"{url} refused the request ({status}): {message.rstrip('.')}. {mend}")


def _find_error(content: bytes) -> tuple[str, str]:
    """Message and code of an error's body."""
    data = _read_object(content) or {}
    error = data.get("error", data)
    if isinstance(error, dict):
        message = error.get("message") or error.get("detail") or ""
        code = error.get("code") or error.get("type") or ""
        return (str(message)[:_SHOWN] or _shorten(content)), str(code)
    return str(error)[:_SHOWN], ""


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
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _read_ids(value: Any) -> tuple[int, ...] | None:
    if not isinstance(value, list) or not all(isinstance(item, int) and item >= 0 for item in value):
        return None
    return tuple(value)


def _read_log_probs(value: Any) -> tuple[float, ...] | None:
    entries = value.get("content") if isinstance(value, dict) else None
    if not isinstance(entries, list):
        return None
    found = [entry.get("logprob") if isinstance(entry, dict) else None for entry in entries]
    if not all(isinstance(item, (int, float)) and not isinstance(item, bool) for item in found):
        return None
    return tuple(float(item) for item in found if item is not None)

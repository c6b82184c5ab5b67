"""What a response of the search environment means, and how passages are shown. Everything is linear in the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from spear_envs.core.parsing import ParsedResponse, ResponseFormat

__all__ = [
    "NO_PASSAGE",
    "RESERVED_TAGS",
    "Parsed",
    "ResponseKind",
    "SearchParser",
    "find_peer_action",
    "neutralize_tags",
    "parse_response",
    "read_action",
    "render_information",
    "write_action",
]

RESERVED_TAGS = ("think", "search", "answer", "information")
"""Names of the tags that mean something: in lower case, without attributes."""
NO_PASSAGE = "No passage was found."
"""What stands between the information tags where a search has no hit."""

_TAG = re.compile(rf"<(/?)({'|'.join(RESERVED_TAGS)})>")
_OPEN, _CLOSE = "<information>", "</information>"
_SLACK = 60
"""Units that a cut may leave unused in order to end at a word."""


class ResponseKind(str, Enum):
    """What a response asks for."""

    SEARCH = "search"
    """Passages for a query."""
    ANSWER = "answer"
    """The end of the episode, with this answer."""
    INVALID = "invalid"
    """Nothing that could be read."""


class Parsed(NamedTuple):
    """What was found in a response."""

    kind: ResponseKind
    content: str
    """Query or answer, stripped; empty if invalid."""
    format_ok: bool
    """A valid action, one thought in front of it, and nothing else but white space."""
    error: str
    """One sentence that says what is wrong; empty unless invalid."""
    think: str = ""
    """The first thought, stripped."""


class _Tag(NamedTuple):
    """A reserved tag of a text."""

    closing: bool
    name: str
    start: int
    end: int


def parse_response(text: str, *, needs_thought: bool = True) -> Parsed:
    """Read a response; never raises, and takes time linear in its length.

    Thoughts are taken out first: each ``<think>…</think>``, also all before a ``</think>`` that is the first think tag
    (some chat templates open the thought for the model), and all behind a ``<think>`` that is never closed. Then what
    the model wrote between information tags is taken out. The first ``<search>`` or ``<answer>`` opened in what remains
    is the action; it reaches to its first closing tag and must hold no reserved tag.

    Args:
        text: the whole response.
        needs_thought: whether ``format_ok`` asks for a thought.
    """
    tags = [_Tag(bool(m[1]), m[2], m.start(), m.end()) for m in _TAG.finditer(text)]
    thoughts = _find_spans(tags, "think", len(text), preopened=True)
    tags = _drop_within(tags, thoughts)
    invented = _find_spans(tags, "information", len(text), preopened=False)
    tags = _drop_within(tags, invented)
    removed = sorted([*thoughts, *invented])
    think = _strip_tags(text, thoughts[0]) if thoughts else ""

    def refuse(error: str) -> Parsed:
        return Parsed(ResponseKind.INVALID, "", False, error, think)

    opening = next((i for i, tag in enumerate(tags) if not tag.closing and tag.name in ("search", "answer")), None)
    if opening is None:
        return refuse(_explain_lack(text, thoughts))
    begin = tags[opening]
    end = next((tag for tag in tags[opening + 1 :] if tag.closing and tag.name == begin.name), None)
    if end is None:
        return refuse(f"The <{begin.name}> is never closed by </{begin.name}>.")
    if tags[opening + 1] is not end:
        return refuse(f"Another tag stands between <{begin.name}> and </{begin.name}>.")
    content = "".join(_cut_out(text, begin.end, end.start, removed)).strip()
    if not content:
        return refuse(f"There is nothing between <{begin.name}> and </{begin.name}>.")
    in_front = len(thoughts) == 1 and thoughts[0][1] <= begin.start
    format_ok = (
        (in_front or (not thoughts and not needs_thought))
        and not invented
        and not any(part.strip() for part in _cut_out(text, 0, begin.start, removed))
        and not text[end.end :].strip()
    )
    return Parsed(ResponseKind(begin.name), content, format_ok, "", think)


def _find_spans(tags: Sequence[_Tag], name: str, length: int, *, preopened: bool) -> list[tuple[int, int]]:
    """Where the elements of a name begin and end, their tags included; one that is never closed reaches to the end.

    Args:
        preopened: a closing tag that comes first closes an element that began with the text.
    """
    found: list[tuple[int, int]] = []
    begun: int | None = 0 if preopened else None
    named = [tag for tag in tags if tag.name == name]
    if named and not named[0].closing:
        begun = None
    for tag in named:
        if tag.closing and begun is not None:
            found.append((begun, tag.end))
            begun = None
        elif not tag.closing and begun is None:
            begun = tag.start
    return [*found, (begun, length)] if named and begun is not None else found


def _drop_within(tags: Sequence[_Tag], spans: Sequence[tuple[int, int]]) -> list[_Tag]:
    """The tags outside of some spans, which are in order and do not overlap."""
    kept: list[_Tag] = []
    position = 0
    for tag in tags:
        while position < len(spans) and spans[position][1] <= tag.start:
            position += 1
        if position == len(spans) or tag.start < spans[position][0]:
            kept.append(tag)
    return kept


def _cut_out(text: str, start: int, end: int, removed: Sequence[tuple[int, int]]) -> Iterator[str]:
    """The parts of ``text[start:end]`` outside of the spans in ``removed``, which may nest."""
    for first, last in removed:
        if last <= start:
            continue
        if first >= end:
            break
        if first > start:
            yield text[start:first]
        start = max(start, last)
    if start < end:
        yield text[start:end]


def _strip_tags(text: str, span: tuple[int, int]) -> str:
    return text[slice(*span)].removeprefix("<think>").removesuffix("</think>").strip()


def _explain_lack(text: str, thoughts: Sequence[tuple[int, int]]) -> str:
    """Why there is no action, the most helpful reason first."""
    if not text.strip():
        return "The response is empty."
    if thoughts and thoughts[-1][1] == len(text) and not text.endswith("</think>"):
        return "The <think> is never closed by </think>."
    if thoughts and _holds_action(text[thoughts[0][0] : thoughts[-1][1]]):
        return "The search or answer stands within the thoughts, where it does not count."
    if "<search" not in text and "<answer" not in text and _holds_action(text.lower()):
        return "Tags are written in lower case."
    return "There is neither a search nor an answer between its tags."


def _holds_action(text: str) -> bool:
    return "<search>" in text or "<answer>" in text


def write_action(kind: ResponseKind, content: str) -> str:
    """An action in plain form: the content between its tags."""
    return f"<{kind.value}>{content}</{kind.value}>"


def read_action(action: str) -> tuple[ResponseKind, str]:
    """Kind and content of an action in plain form; what is none is of the kind ``invalid``."""
    for kind in (ResponseKind.SEARCH, ResponseKind.ANSWER):
        begin, end = f"<{kind.value}>", f"</{kind.value}>"
        if action.startswith(begin) and action.endswith(end):
            return kind, action[len(begin) : -len(end)]
    return ResponseKind.INVALID, ""


def find_peer_action(text: str) -> str:
    """What verl-agent plays for a response, in plain form: its first search, else its first answer, else nothing.

    Tags in capitals count, thoughts are not taken out, and all behind the first closing tag in lower case is cut off.
    """
    for name in ("search", "answer"):
        head, closed, _ = text.partition(f"</{name}>")
        if closed:
            text = head + closed
            break
    folded = text.translate(_LOWER)
    for kind in (ResponseKind.SEARCH, ResponseKind.ANSWER):
        begin = folded.find(f"<{kind.value}>")
        end = folded.find(f"</{kind.value}>", begin) if begin >= 0 else -1
        if end >= 0:
            return write_action(kind, text[begin + len(kind.value) + 2 : end].strip())
    return ""


# str.lower() may change the length of a text, and then positions are not the same.
_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


@dataclass(frozen=True)
class SearchParser:
    """The grammar of the search environment as a :class:`~spear_envs.core.parsing.ResponseParser`.

    The action of a response is its search or its answer between its tags, in either format.

    Args:
        response_format: with ``plain`` no thought is asked for.
    """

    response_format: ResponseFormat = ResponseFormat.TAGS

    @property
    def hint(self) -> str:
        """The two forms of a response."""
        think = "<think>your reasoning</think>" if self.response_format is ResponseFormat.TAGS else ""
        return (
            f"Write {think}<search>your query</search> to search, or {think}<answer>your answer</answer> to answer,"
            " and nothing else."
        )

    def parse(self, response: str) -> ParsedResponse:
        """Read a response of any length; never raises."""
        parsed = parse_response(response, needs_thought=self.response_format is ResponseFormat.TAGS)
        if parsed.kind is ResponseKind.INVALID:
            return ParsedResponse(None, False, parsed.error, parsed.think, parsed.kind.value)
        action = write_action(parsed.kind, parsed.content)
        return ParsedResponse(action, parsed.format_ok, "", parsed.think, parsed.kind.value)

    def respond(self, action: str, think: str = "") -> str:
        """The action, behind the thoughts between their tags where thoughts are asked for."""
        return f"<think>{think}</think>{action}" if self.response_format is ResponseFormat.TAGS else action


def neutralize_tags(text: str) -> str:
    """The text with its reserved tags in square brackets, so that they mean nothing; as long as before."""
    return _TAG.sub(lambda tag: f"[{tag[0][1:-1]}]", text) if "<" in text else text


def render_information(documents: Sequence[Mapping[str, Any]], limit: int, measure: Callable[[str], int] = len) -> str:
    """Passages as a policy reads them, between information tags, within a budget.

    Each document stands as ``Doc {i}(Title: {title}) {text}``, one after the other in lines; the title is the first
    line of its ``contents``. What does not fit is cut off at the end, at a word if that leaves no more than 60 units
    unused. Both tags always stand there, and no other reserved tag does.

    Args:
        documents: each with ``contents``, the best first; none gives a sentence that says so.
        limit: most units of the result, tags included. The tags stand there even if they alone are more.
        measure: units of a text: its length, or the number of its tokens.
    """
    lines = []
    for number, document in enumerate(documents, 1):
        title, _, text = str(document["contents"]).partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    body = neutralize_tags("".join(lines)).strip() or NO_PASSAGE
    return f"{_OPEN}{_cut(body, limit, measure)}{_CLOSE}"


def _cut(body: str, limit: int, measure: Callable[[str], int]) -> str:
    """The longest beginning of ``body`` that stays within ``limit`` between its tags."""

    def count(length: int) -> int:
        return measure(f"{_OPEN}{body[:length]}{_CLOSE}")

    high = max(limit, 1)  # units are no shorter than characters as a rule, so begin there and double
    while high < len(body) and count(high) <= limit:
        high *= 2
    if high >= len(body):
        high = len(body)
        if count(high) <= limit:
            return body
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        if count(middle) <= limit:
            low = middle
        else:
            high = middle
    # Tokens depend on what follows, so a shorter text may have more of them: the search is right only nearly.
    while low and count(low) > limit:
        low -= 1
    if not body[low : low + 1].isspace():
        blank = max(body.rfind(" ", 0, low), body.rfind("\n", 0, low))
        if blank > 0 and count(len(body[:blank].rstrip())) >= limit - _SLACK:
            low = blank
    return body[:low].rstrip()

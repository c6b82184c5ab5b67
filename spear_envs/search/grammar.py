"""Parsing the responses of the search environment and rendering passages, in time linear in the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from spear_envs.core.parsing import ParsedResponse, ResponseFormat, cut_native_thought, mend_text, split_elements

RESERVED_TAGS = ("think", "search", "answer", "information")
"""Names of the tags with a meaning: in lower case, without attributes."""
NO_PASSAGE = "No passage was found."
"""Default content of the information tags for a search without a hit."""

_TAG = re.compile(rf"<(/?)({'|'.join(RESERVED_TAGS)})>")
_OPEN, _CLOSE = "<information>", "</information>"
_THOUGHT = "<think>"
_SLACK = 60
"""Units that a cut may leave unused in order to end at a word."""


class ResponseKind(str, Enum):
    """The kind of a response."""

    SEARCH = "search"
    """Passages for a query."""
    ANSWER = "answer"
    """An answer, which ends the episode."""
    INVALID = "invalid"
    """Neither a search nor an answer."""


_ACTIONS = (ResponseKind.SEARCH, ResponseKind.ANSWER)


class Parsed(NamedTuple):
    """A parsed response."""

    kind: ResponseKind
    content: str
    """Query or answer, stripped; empty if invalid."""
    format_ok: bool
    """Whether there is a valid action, one thought in front of it, and otherwise only white space."""
    error: str
    """One sentence that says what is wrong; empty unless invalid."""
    think: str = ""
    """The first thought that is not native, else the native one, stripped."""
    native: str | None = None
    """Native thought, as in :class:`~spear_envs.core.parsing.ParsedResponse`."""


def parse_response(text: str, *, needs_thought: bool = True) -> Parsed:
    """Parse a response in time linear in its length; never raise.

    Thoughts are taken out first: a native one (:func:`~spear_envs.core.parsing.cut_native_thought`), each
    ``<think>…</think>``, and all text after a ``<think>`` that is never closed. Then
    text that the model wrote between information tags is taken out. The first ``<search>`` or ``<answer>`` in the rest
    opens the action, which extends to its first closing tag and must not contain a reserved tag.

    Args:
        text: the whole response.
        needs_thought: whether ``format_ok`` requires a thought.
    """
    native, rest = cut_native_thought(text, "think" if needs_thought else "")
    rest, thoughts = take_out(rest, "think")
    rest, invented = take_out(rest, "information")
    think = thoughts[0].strip() if thoughts else native or ""

    def refuse(error: str) -> Parsed:
        return Parsed(ResponseKind.INVALID, "", False, error, think, native)

    starts = [(at, kind) for kind in _ACTIONS if (at := rest.find(f"<{kind.value}>")) >= 0]
    if not starts:
        return refuse(_explain_lack(text, [native or "", *thoughts]))
    start, kind = min(starts)
    begin, end = f"<{kind.value}>", f"</{kind.value}>"
    written, closed, behind = rest[start + len(begin) :].partition(end)
    if not closed:
        return refuse(f"The {begin} is never closed by {end}.")
    content = read_content(written)
    if content is None:
        return refuse(f"Another tag stands between {begin} and {end}.")
    if not content:
        return refuse(f"There is nothing between {begin} and {end}.")
    front = rest[:start].strip()
    needs_thought = needs_thought and native is None
    thought_ok = (front == _THOUGHT and len(thoughts) == 1) or not (needs_thought or front or thoughts)
    return Parsed(kind, content, thought_ok and not invented and not behind.strip(), "", think, native)


def read_content(written: str) -> str | None:
    """Return a query or an answer without marks of thoughts; None if a tag of the grammar is left in it."""
    content = written.replace(_THOUGHT, "").replace(_OPEN, "").strip()
    return None if _TAG.search(content) else content


def take_out(text: str, name: str) -> tuple[str, list[str]]:
    """Replace each element of :func:`~spear_envs.core.parsing.split_elements` by its opening tag.

    No other opening tag of this name is left.

    Returns:
        The text and the contents of the elements.
    """
    kept, held, _ = split_elements(text, name)
    return f"<{name}>".join(kept), held


def _explain_lack(text: str, thoughts: Sequence[str]) -> str:
    """Explain why there is no action, by the most helpful reason."""
    if not text.strip():
        return "The response is empty."
    if text.rfind(_THOUGHT) > text.rfind("</think>"):
        return "The <think> is never closed by </think>."
    if any(map(_holds_action, thoughts)):
        return "The search or answer stands within the thoughts, where it does not count."
    if not _holds_action(text) and _holds_action(text.lower()):
        return "Tags are written in lower case."
    return "There is neither a search nor an answer between its tags."


def _holds_action(text: str) -> bool:
    return "<search>" in text or "<answer>" in text


def write_action(kind: ResponseKind, content: str) -> str:
    """Write an action in plain form: the content between its tags."""
    return f"<{kind.value}>{content}</{kind.value}>"


def read_action(action: str) -> tuple[ResponseKind, str]:
    """Read kind and content of an action in plain form; anything else has the kind ``invalid``."""
    for kind in _ACTIONS:
        begin, end = f"<{kind.value}>", f"</{kind.value}>"
        if action.startswith(begin) and action.endswith(end):
            return kind, action[len(begin) : -len(end)]
    return ResponseKind.INVALID, ""


# str.lower() may change the length of a text and so the positions.
_LOWER = {upper: upper + 32 for upper in range(ord("A"), ord("Z") + 1)}


@dataclass(frozen=True)
class SearchParser:
    """The grammar of the search environment as a :class:`~spear_envs.core.parsing.ResponseParser`.

    The action of a response is its search or its answer between its tags, in either format.

    Args:
        response_format: ``plain`` requires no thought.
    """

    response_format: ResponseFormat = ResponseFormat.TAGS

    @property
    def hint(self) -> str:
        """Describe the two forms of a response."""
        think = "<think>your reasoning</think>" if self.response_format is ResponseFormat.TAGS else ""
        return (
            f"Write {think}<search>your query</search> to search, or {think}<answer>your answer</answer> to answer,"
            " and nothing else."
        )

    def parse(self, response: str) -> ParsedResponse:
        """Parse a response of any length; never raise."""
        parsed = parse_response(response, needs_thought=self.response_format is ResponseFormat.TAGS)
        if parsed.kind is ResponseKind.INVALID:
            return ParsedResponse(None, False, parsed.error, parsed.think, parsed.kind.value, parsed.native)
        action = write_action(parsed.kind, parsed.content)
        return ParsedResponse(action, parsed.format_ok, "", parsed.think, parsed.kind.value, parsed.native)

    def respond(self, action: str, think: str = "") -> str:
        """Return the action, after the thoughts in their tags if the format has thoughts."""
        return f"<think>{think}</think>{action}" if self.response_format is ResponseFormat.TAGS else action


@dataclass(frozen=True)
class PeerSearchParser(SearchParser):
    """Reads a response as verl-agent's projection does.

    The action is the first search, else the first answer, else empty: tags in capitals count, thoughts are not taken
    out, and text after the first lower-case closing tag is cut off. The form is right if there is an action and the
    whole response opens just one search or one answer.
    """

    def parse(self, response: str) -> ParsedResponse:
        """Read a response in time linear in its length; there is always an action, which may be empty."""
        opened = [response.translate(_LOWER).count(f"<{kind.value}>") for kind in _ACTIONS]
        text = response
        for name in ("search", "answer"):
            head, closed, _ = text.partition(f"</{name}>")
            if closed:
                text = head + closed
                break
        folded = text.translate(_LOWER)
        for kind in _ACTIONS:
            begin = folded.find(f"<{kind.value}>")
            end = folded.find(f"</{kind.value}>", begin) if begin >= 0 else -1
            if end >= 0:
                action = write_action(kind, text[begin + len(kind.value) + 2 : end].strip())
                problem = "" if sum(opened) == 1 else f"It opens {opened[0]} searches and {opened[1]} answers, not one."
                return ParsedResponse(action, not problem, problem, kind=kind.value)
        problem = "There is neither a search nor an answer between its tags."
        return ParsedResponse("", False, problem, kind=ResponseKind.INVALID.value)


def neutralize_tags(text: str) -> str:
    """Put the reserved tags of a text in square brackets, so that they lose their meaning; the length stays."""
    return _TAG.sub(lambda tag: f"[{tag[0][1:-1]}]", text) if "<" in text else text


def render_information(
    documents: Sequence[Mapping[str, Any]],
    limit: int,
    measure: Callable[[str], int] = len,
    *,
    nothing: str = NO_PASSAGE,
) -> str:
    """Render passages between information tags, within a budget.

    Each document is a line ``Doc {i}(Title: {title}) {text}``; the title is the first line of its ``contents``. Text
    that does not fit is cut off, at a word if that leaves at most 60 units unused. Both tags are always kept, and other
    reserved tags are neutralized.

    Args:
        documents: each with ``contents``, the best first.
        limit: most units of the result, tags included; the tags are kept even if they alone are longer.
        measure: units of a text: its length, or the number of its tokens.
        nothing: content of the tags if there are no documents.
    """
    lines = []
    for number, document in enumerate(documents, 1):
        title, _, text = str(document["contents"]).partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    body = neutralize_tags(mend_text("".join(lines))).strip() or nothing
    return f"{_OPEN}{_cut(body, limit, measure)}{_CLOSE}"


def _cut(body: str, limit: int, measure: Callable[[str], int]) -> str:
    """Return the longest beginning of ``body`` that with the tags stays within ``limit``."""

    def count(text: str) -> int:
        return measure(f"{_OPEN}{text}{_CLOSE}")

    high = max(limit, 1)  # a unit is usually at least one character, so begin there and double
    while high < len(body) and count(body[:high]) <= limit:
        high *= 2
    if high >= len(body):
        high = len(body)
        if count(body) <= limit:
            return body
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        if count(body[:middle]) <= limit:
            low = middle
        else:
            high = middle
    longest = body[:low]
    shorter = [longest.rstrip()]
    if not body[low : low + 1].isspace():
        blank = max(longest.rfind(" "), longest.rfind("\n"))
        shorter.insert(0, longest[: max(blank, 0)].rstrip())
    # Tokens depend on what follows, so a shorter text may have more of them.
    return next((text for text in shorter if text and limit - _SLACK <= count(text) <= limit), longest)

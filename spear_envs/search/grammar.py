"""What a response of the search environment means, and how passages are shown. Everything is linear in the text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from spear_envs.core.parsing import ParsedResponse, ResponseFormat

RESERVED_TAGS = ("think", "search", "answer", "information")
"""Names of the tags that mean something: in lower case, without attributes."""
NO_PASSAGE = "No passage was found."
"""What stands between the information tags where a search has no hit, unless told otherwise."""

_TAG = re.compile(rf"<(/?)({'|'.join(RESERVED_TAGS)})>")
_OPEN, _CLOSE = "<information>", "</information>"
_THOUGHT = "<think>"
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


_ACTIONS = (ResponseKind.SEARCH, ResponseKind.ANSWER)


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
    rest, thoughts = take_out(text, "think", preopened=True)
    rest, invented = take_out(rest, "information", preopened=False)
    think = thoughts[0].strip() if thoughts else ""

    def refuse(error: str) -> Parsed:
        return Parsed(ResponseKind.INVALID, "", False, error, think)

    starts = [(at, kind) for kind in _ACTIONS if (at := rest.find(f"<{kind.value}>")) >= 0]
    if not starts:
        return refuse(_explain_lack(text, thoughts))
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
    thought_ok = (front == _THOUGHT and len(thoughts) == 1) or not (needs_thought or front or thoughts)
    return Parsed(kind, content, thought_ok and not invented and not behind.strip(), "", think)


def read_content(written: str) -> str | None:
    """The content of an action, of a text that :func:`take_out` went over; None if it holds a reserved tag."""
    content = written.replace(_THOUGHT, "").replace(_OPEN, "").strip()
    return None if _TAG.search(content) else content


def take_out(text: str, name: str, *, preopened: bool) -> tuple[str, list[str]]:
    """The text with its opening tag instead of each element of a name, and what the elements held.

    No other opening tag of this name is left. One that is never closed reaches to the end.

    Args:
        preopened: a closing tag that comes first closes an element that began with the text.
    """
    begin, end = f"<{name}>", f"</{name}>"
    kept: list[str] = []
    held: list[str] = []
    position = 0
    if preopened and (closing := text.find(end)) >= 0 and not 0 <= text.find(begin) < closing:
        kept.append("")
        held.append(text[:closing])
        position = closing + len(end)
    while (opening := text.find(begin, position)) >= 0:
        kept.append(text[position:opening])
        closing = text.find(end, opening)
        if closing < 0:
            held.append(text[opening + len(begin) :])
            return begin.join([*kept, ""]), held
        held.append(text[opening + len(begin) : closing])
        position = closing + len(end)
    return begin.join([*kept, text[position:]]), held


def _explain_lack(text: str, thoughts: Sequence[str]) -> str:
    """Why there is no action, the most helpful reason first."""
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
    """An action in plain form: the content between its tags."""
    return f"<{kind.value}>{content}</{kind.value}>"


def read_action(action: str) -> tuple[ResponseKind, str]:
    """Kind and content of an action in plain form; anything else is of the kind ``invalid``."""
    for kind in _ACTIONS:
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
    for kind in _ACTIONS:
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


def mend_text(text: str) -> str:
    """The text with ``?`` for each half of a surrogate pair: JSON may escape one alone, and tokenizers refuse it."""
    return text.encode("utf-8", "replace").decode("utf-8")


def neutralize_tags(text: str) -> str:
    """The text with its reserved tags in square brackets, so that they mean nothing; as long as before."""
    return _TAG.sub(lambda tag: f"[{tag[0][1:-1]}]", text) if "<" in text else text


def render_information(
    documents: Sequence[Mapping[str, Any]],
    limit: int,
    measure: Callable[[str], int] = len,
    *,
    nothing: str = NO_PASSAGE,
) -> str:
    """Passages as a policy reads them, between information tags, within a budget.

    Each document stands as ``Doc {i}(Title: {title}) {text}``, one after the other in lines; the title is the first
    line of its ``contents``. What does not fit is cut off at the end, at a word if that leaves no more than 60 units
    unused. Both tags always stand there, and no other reserved tag does.

    Args:
        documents: each with ``contents``, the best first.
        limit: most units of the result, tags included. The tags stand there even if they alone are more.
        measure: units of a text: its length, or the number of its tokens.
        nothing: what stands between the tags where there is no document.
    """
    lines = []
    for number, document in enumerate(documents, 1):
        title, _, text = str(document["contents"]).partition("\n")
        lines.append(f"Doc {number}(Title: {title}) {text}\n")
    body = neutralize_tags(mend_text("".join(lines))).strip() or nothing
    return f"{_OPEN}{_cut(body, limit, measure)}{_CLOSE}"


def _cut(body: str, limit: int, measure: Callable[[str], int]) -> str:
    """The longest beginning of ``body`` that stays within ``limit`` between its tags."""

    def count(text: str) -> int:
        return measure(f"{_OPEN}{text}{_CLOSE}")

    high = max(limit, 1)  # units are no shorter than characters as a rule, so begin there and double
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

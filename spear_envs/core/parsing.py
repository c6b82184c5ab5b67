"""From the text of a response to an action, in linear time and without raising."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, runtime_checkable

from spear_envs.core.errors import choose_member

_CJK = re.compile("[\u4e00-\u9fff]")
MAX_RESPONSE_LENGTH = 100_000
"""Longest response that is read, in characters; a longer one is malformed."""


class ResponseFormat(str, Enum):
    """How an action is written."""

    TAGS = "tags"
    """Thoughts and action, each between its tags: what a policy is trained to write."""
    PLAIN = "plain"
    """The bare action, for a person or a script."""


class ParsedResponse(NamedTuple):
    """What was found in a response. A tuple, since one is made in every step."""

    action: str | None
    """Text of the action, or None if nothing is to be played."""
    format_ok: bool
    """Whether the response earns the format reward."""
    problem: str = ""
    """The fault of the response, as a short clause for the policy; empty if there is none."""
    think: str = ""
    """The thoughts, if there were any."""
    kind: str = "action"
    """Kind of action, if a grammar has several (such as ``search`` and ``answer``)."""
    native: str | None = None
    """The model's native thought, see :func:`cut_native_thought`; None if there is none."""


@runtime_checkable
class ResponseParser(Protocol):
    """Turns responses into actions. An environment with its own grammar passes one to ``SpearEnv``."""

    @property
    def hint(self) -> str:
        """Return one sentence that shows the expected form."""

    def parse(self, response: str) -> ParsedResponse:
        """Read a response; never raises, whatever the text."""

    def respond(self, action: str, think: str = "") -> str:
        """Write a well-formed response with this action, so that ``parse(respond(a)).action == a``."""


def _find_unreadable(response: str) -> str:
    """Return why a response is not read at all; empty if it is."""
    if len(response) > MAX_RESPONSE_LENGTH:
        return f"it has {len(response):,} characters and only {MAX_RESPONSE_LENGTH:,} are read"
    if "\0" in response:
        return "it holds a NUL character"
    return ""


@dataclass(frozen=True)
class PlainParser:
    """The stripped text is the action."""

    hint: str = "Give the bare action, nothing else."

    def parse(self, response: str) -> ParsedResponse:
        """Strip the response; only one that is empty, too long or contains NUL is malformed."""
        problem = _find_unreadable(response)
        if problem:
            return ParsedResponse(None, False, problem)
        native, rest = cut_native_thought(response, "")
        action = rest.strip()
        think = native or ""
        if not action:
            return ParsedResponse(None, False, "it is empty", think, native=native)
        return ParsedResponse(action, True, "", think, native=native)

    def respond(self, action: str, think: str = "") -> str:
        """Return the action itself, without thoughts."""
        return action


@dataclass(frozen=True)
class TagParser:
    """Strictly ``<think>…</think><action>…</action>``: one of each, in this order, with only white space around.

    A native thought (:func:`cut_native_thought`) may come before this form, or stand for its thoughts.
    """

    action_tag: str = "action"
    think_tag: str = "think"
    _tags: tuple[str, str, str, str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Built once: parse() runs at every step.
        tags = (f"<{self.think_tag}>", f"</{self.think_tag}>", f"<{self.action_tag}>", f"</{self.action_tag}>")
        object.__setattr__(self, "_tags", tags)

    @property
    def hint(self) -> str:
        """Return one sentence that shows the expected form."""
        think, end_think, act, end_act = self._tags
        return f"Write {think}your reasoning{end_think}{act}your action{end_act}, each once, and nothing else."

    def parse(self, response: str) -> ParsedResponse:
        """Read a response in time linear in its length; anything but the strict form is malformed, with a reason."""
        problem = _find_unreadable(response)
        if problem:
            return ParsedResponse(None, False, problem)
        text = response.strip()
        found, native = self._match(text), None
        if found is None:
            native, rest = cut_native_thought(text, self.think_tag)
            if native is not None:
                text = rest.strip()
                if self._tags[0] not in text:  # the native thought stands for those asked for
                    text = f"{self._tags[0]}{self._tags[1]}{text}"
                found = self._match(text)
        if found is None:
            return ParsedResponse(None, False, self._explain(text), native or "", native=native)
        return ParsedResponse(found[1], True, "", found[0] or native or "", native=native)

    def _match(self, text: str) -> tuple[str, str] | None:
        """Return thoughts and action of a stripped text in the strict form; None if it has another."""
        think, end_think, act, end_act = self._tags
        if text.startswith(think) and text.endswith(end_act):
            thoughts, closed, rest = text[len(think) : -len(end_act)].partition(end_think)
            rest = rest.lstrip()
            if closed and rest.startswith(act):
                action = rest[len(act) :].strip()
                if action and not self._holds_tag(thoughts) and not self._holds_tag(action):
                    return thoughts.strip(), action
        return None

    def respond(self, action: str, think: str = "") -> str:
        """Return thoughts and action between their tags."""
        begin_think, end_think, act, end_act = self._tags
        return f"{begin_think}{think}{end_think}{act}{action}{end_act}"

    def _holds_tag(self, text: str) -> bool:
        return "<" in text and any(tag in text for tag in self._tags)

    def _explain(self, text: str) -> str:
        """Return why ``text`` does not have the strict form, the most helpful reason first."""
        think, end_think, act, end_act = self._tags
        if not text:
            return "it is empty"
        for begin, end, name in ((act, end_act, "action"), (think, end_think, "reasoning")):
            opened, ended = text.count(begin), text.count(end)
            if not opened and not ended:
                written = " (tags are written in lower case)" if begin in text.lower() else ""
                return f"there is no {begin}…{end} with the {name} in it{written}"
            if not ended:
                return f"{begin} is never closed by {end}"
            if not opened:
                return f"{end} was never opened by {begin}"
            if opened > 1 or ended > 1:
                return f"{begin}…{end} stands there {max(opened, ended)} times and only one is allowed"
        first, second, third, fourth = (text.index(tag) for tag in self._tags)
        if second < first:
            return f"{end_think} comes before {think}"
        if fourth < third:
            return f"{end_act} comes before {act}"
        if first < third < second or third < first < fourth:
            return f"{think}…{end_think} and {act}…{end_act} overlap; one must end before the other begins"
        if third < first:
            return f"{act} comes before {think}; the reasoning comes first"
        if not text[third + len(act) : fourth].strip():
            return f"the action between {act} and {end_act} is empty"
        return "there is text outside the tags"


def cut_native_thought(response: str, asked: str = "think") -> tuple[str | None, str]:
    """Split off the thought that a reasoning model writes by itself, besides what a prompt asks for.

    It ends with the first ``</think>``. Its ``<think>`` was written by the chat template, so that the response lacks
    it, or begins the response.

    Args:
        asked: tag of the thoughts that the prompt asks for. With ``"think"`` a complete element that begins the
            response is native only if another follows it, and if it is set as chat templates set thoughts: its text
            begins a line, or a blank line follows. Two thoughts in one line are a policy's fault.

    Returns:
        The thought, None if there is none, and the rest.
    """
    head, closed, rest = response.partition("</think>")
    if not closed:
        return None, response
    head = head.strip()
    if head.startswith("<think>"):
        head = head.removeprefix("<think>")
        is_set_apart = head.lstrip(" ").startswith("\n") or rest.lstrip(" ").startswith("\n\n")
        if asked == "think" and not (is_set_apart and rest.lstrip().startswith("<think>")):
            return None, response
    return (None, response) if "<think>" in head else (head.strip(), rest)


def mend_text(text: str) -> str:
    """Replace each lone surrogate by ``?``: JSON can escape one, but neither UTF-8 nor tokenizers take it."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def split_elements(text: str, name: str) -> tuple[list[str], list[str], bool]:
    """Split a text at the elements of a name, in linear time.

    Returns:
        The texts around the elements, the contents of the elements, and whether each is closed: one that is not extends
        to the end.
    """
    begin, end = f"<{name}>", f"</{name}>"
    kept: list[str] = []
    held: list[str] = []
    position = 0
    while (opening := text.find(begin, position)) >= 0:
        kept.append(text[position:opening])
        closing = text.find(end, opening)
        if closing < 0:
            held.append(text[opening + len(begin) :])
            return [*kept, ""], held, False
        held.append(text[opening + len(begin) : closing])
        position = closing + len(end)
    return [*kept, text[position:]], held, True


@dataclass(frozen=True)
class PeerParser:
    """Reads a response as verl-agent's projections do: something is always played.

    The action is the stripped text between the first ``<action>`` and the first ``</action>``, in lower case. The form
    is right if both action tags occur in any case, both think tags in lower case, and no Chinese character, wherever
    they stand.

    Args:
        tail: characters at the end that are played of a response without action tags.
        words: if there are any, the action is the first of them that occurs between the tags, else empty and of a wrong
            form; Chinese characters are then allowed.
    """

    tail: int = 0
    words: tuple[str, ...] = ()
    hint: str = TagParser().hint

    def parse(self, response: str) -> ParsedResponse:
        """Read a response; there is always an action, which may be empty."""
        lowered = response.lower()
        begin, end = lowered.find("<action>"), lowered.find("</action>")
        if begin < 0 or end < 0:
            action = lowered[-self.tail :] if self.tail else ""
            return ParsedResponse(action, False, "there is no <action>…</action> in it")
        action, problem = lowered[begin + len("<action>") : end].strip(), ""
        if self.words:
            action = next((word for word in self.words if word in action), "")
        if self.words and not action:
            problem = f"its action holds none of {', '.join(self.words)}"
        elif "<think>" not in response or "</think>" not in response:
            problem = "there is no <think>…</think> in it"
        elif not self.words and _CJK.search(response):
            problem = "it holds Chinese characters"
        return ParsedResponse(action, not problem, problem)

    def respond(self, action: str, think: str = "") -> str:
        """Return thoughts and action between their tags."""
        return TagParser().respond(action, think)


def make_parser(response_format: ResponseFormat | str) -> ResponseParser:
    """Make the stock parser of a format.

    Raises:
        SpearError: the format is unknown.
    """
    chosen = choose_member(ResponseFormat, response_format, "response_format")
    return PlainParser() if chosen is ResponseFormat.PLAIN else TagParser()

"""Prompt templates of the search environment, as data: ``default``, ``search_r1``, and ``compact`` for tiny models."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from spear_envs.core.parsing import ResponseParser
from spear_envs.core.prompts import DefaultTemplate, PromptContext, PromptTemplate
from spear_envs.core.tools import CallParser, Tool
from spear_envs.search.grammar import SearchParser, read_action, write_action

__all__ = [
    "LAST_TURN",
    "TEXTS",
    "CompactSearchTemplate",
    "PromptText",
    "SearchTemplate",
    "compress_observation",
    "make_templates",
]

LAST_TURN = "This is your last turn: only an answer counts now."
"""Stands before the last response of an episode."""


@dataclass(frozen=True)
class PromptText:
    """The words of a template."""

    opening: str
    """The first user message, with the slots ``{question}``, ``{max_turns}`` and ``{topk}``."""
    question_mark: bool = False
    """Whether a question without a question mark gets one."""


TEXTS: Mapping[str, PromptText] = MappingProxyType(
    {
        "default": PromptText(
            """\
Answer the question below. You have a search engine and at most {max_turns} turns; each response is one turn.

Reason first, between <think> and </think>. Then do one of two things:
- To search, write <search>your query</search>. The {topk} best passages come back between <information> and \
</information>. Never write these tags yourself. A question may need several searches: search for one fact at a time, \
with the names that you have found.
- To answer, write <answer>your answer</answer>. It ends the task, so answer as soon as you are sure. Give the name, \
date or phrase alone, without an explanation.

For example: <think>I need the birthplace of the author.</think><search>Jane Austen born in</search>
And in the end: <think>The passages say so.</think><answer>Steventon</answer>

Question: {question}"""
        ),
        # What the published template of Search-R1 asks for, for policies that were trained with it.
        "search_r1": PromptText(
            """\
Answer the question that follows. Every time you get new information you must first reason about it inside <think> \
and </think>. If your reasoning shows that some knowledge is missing, call a search engine with <search> query \
</search>; it returns the top results between <information> and </information>. Search as many times as you want. As \
soon as no further knowledge is needed, give the answer inside <answer> and </answer> without a detailed explanation, \
for example <answer> Beijing </answer>. Question: {question}
""",
            question_mark=True,
        ),
    }
)
"""Texts by the name of their template."""


@dataclass(frozen=True)
class SearchTemplate:
    """The question and how to work on it in one user message; then passages follow upon queries in one running text.

    A ``conversation`` goes on within the assistant's message: a response ends at its closing tag, which stays part of
    it, and what the environment says stands right behind it, with blank lines around it. A ``per_turn`` prompt is the
    opening followed by the turns of the history as they would stand there.

    Args:
        name: key of :data:`TEXTS`.
        topk: passages that a search brings.
        parser: writes responses in the form that the environment reads.
    """

    name: str = "default"
    topk: int = 3
    parser: ResponseParser = field(default_factory=SearchParser)
    token_pattern: str | None = None
    stop_strings: tuple[str, ...] = ("</search>", "</answer>")

    def system(self) -> str | None:
        """None: all stands in the user message, so that templates of models without a system role work too."""
        return None

    def render(self, context: PromptContext) -> str:
        """The opening, then the turns of the history."""
        text = TEXTS[self.name]
        question = context.instruction.strip()
        if text.question_mark and not question.endswith("?"):
            question += "?"
        parts = [text.opening.format(question=question, max_turns=context.max_turns, topk=self.topk)]
        if context.turn == 1:
            return "\n\n".join([*parts, LAST_TURN]) if context.max_turns == 1 else parts[0]
        first = context.turn - len(context.history)
        if first > 1:
            parts.append(f"({first - 1} earlier turns are not shown.)")
        for turn, (seen, action) in enumerate(context.history, first):
            parts += [action] if turn == 1 else [seen, action]
        return "\n\n".join([*parts, context.observation])

    def follow_up(self, context: PromptContext) -> str:
        """What the environment says, with blank lines around it."""
        return f"\n\n{context.observation}\n\n"

    def respond(self, action: str, think: str = "") -> str:
        """Thoughts and action in the form that the environment reads."""
        return self.parser.respond(action, think)


# A piece is a word with the blank before it, so that no blank is a token.
_PIECES = (
    r"<think></think><(?:search|answer)>",
    r"</(?:search|answer)>",
    r" ?\w+",
    r"\n[>!#]?",
    r" ?[^\s\w]",
    r"\s",
)
_HEAD = re.compile(r'Doc \d+\(Title: "?(.*?)"?\) ')
_INFORMATION = re.compile(r"<information>(.*)</information>", re.DOTALL)


@dataclass(frozen=True)
class CompactSearchTemplate:
    """The question, then bare passages: short sequences for tiny models with a word-level tokenizer.

    A passage is a line that begins with ``>``, with its title in front unless it begins with that anyway; a response
    that could not be read is answered by a line ``!``; ``#`` ends each prompt. Thoughts are empty, and a blank stands
    in front of each query and answer, so that a name is the same tokens there as in a passage. Responses end with the
    model's own end token.

    Args:
        parser: writes responses in the form that the environment reads.
    """

    parser: ResponseParser = field(default_factory=SearchParser)
    name: str = "compact"
    token_pattern: str | None = "|".join(_PIECES)

    def system(self) -> str | None:
        """None."""
        return None

    def render(self, context: PromptContext) -> str:
        """The question, then the turns of the history."""
        parts = [f" {context.instruction.strip()}"]
        if context.turn > 1:
            first = context.turn - len(context.history)
            for turn, (seen, action) in enumerate(context.history, first):
                parts += ["" if turn == 1 else compress_observation(seen), f"\n#{self.respond(action)}"]
            parts.append(compress_observation(context.observation))
        return "".join([*parts, "\n#"])

    def follow_up(self, context: PromptContext) -> str:
        """The passages."""
        return f"{compress_observation(context.observation)}\n#"

    def respond(self, action: str, think: str = "") -> str:
        """The action in the form that the environment reads, with empty thoughts and a blank before its content."""
        kind, content = read_action(action)
        return self.parser.respond(write_action(kind, f" {content}")) if content else self.parser.respond(action)


def compress_observation(observation: str) -> str:
    """Passages as lines of the compact form; what else the environment says is a line ``!``."""
    found = _INFORMATION.match(observation)
    if found is None:
        return "\n!"
    passages = _HEAD.split(found[1])[1:]
    lines = zip(passages[::2], passages[1::2], strict=True)
    return "".join(f"\n> {_join_title(title, ' '.join(text.split()))}" for title, text in lines) or "\n>"


def _join_title(title: str, text: str) -> str:
    return text if text.removeprefix("The ").startswith(title.removeprefix("The ")) else f"{title}: {text}"


TOOLS = (
    Tool("search", "Returns the best passages for a query.", "query", "The query.", "<search>", "</search>"),
    Tool("answer", "Answers; this ends the task.", "answer", "The answer alone.", "<answer>", "</answer>"),
)
"""The two kinds of actions as functions."""

_TOOL_RULES = """\
Answer a question with the help of a search engine, which brings the {topk} best passages. A question may need several \
searches: search for one fact at a time, with the names that you have found. Answer as soon as you are sure, with the \
name, date or phrase alone."""


def make_templates(parser: ResponseParser, topk: int) -> Mapping[str, PromptTemplate]:
    """All templates by name, for an environment with these settings."""
    templates: dict[str, PromptTemplate] = {name: SearchTemplate(name, topk, parser) for name in TEXTS}
    tools = DefaultTemplate(_TOOL_RULES.format(topk=topk), CallParser(TOOLS, parser), name="tools")
    return MappingProxyType({**templates, "compact": CompactSearchTemplate(parser), "tools": tools})

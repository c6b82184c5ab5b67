"""Prompt templates of WebShop: ``default`` and ``verl_agent`` for language models, ``compact`` for tiny ones."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import ParsedResponse, PlainParser, ResponseParser, TagParser
from spear_envs.core.prompts import PromptContext, StockTemplate, VerlAgentTemplate
from spear_envs.core.tools import make_tool
from spear_envs.webshop.shop import PAGE_SIZE, SEARCH_ACTION, SEPARATOR, ObservationMode


class VerbatimParser(PlainParser):
    """The whole text is the action, blanks included: the shop ignores ``" click[x]"``."""

    def parse(self, response: str) -> ParsedResponse:
        """Take the response unchanged; only one that is too long or contains NUL is malformed."""
        parsed = super().parse(response)
        refused = parsed.action is None and response.strip()
        return parsed if refused or parsed.native is not None else ParsedResponse(response, True)


LONGEST_WITH_HISTORY = 13_000
"""Most characters of a prompt with history; a longer one is written without it, as in verl-agent."""

_GAME = """\
You are shopping in an online store. Find a product that fits your task, choose the options it asks for, and buy it. \
Your score, from 0 to 1, is the share of the wanted attributes, options and price limit that your purchase fulfils; \
a product of another kind scores much less.
- {search} finds up to 50 products, ten on a page. It can be used on every page.
- {click} clicks on something that the page offers. A product's code opens the product; the value of an option \
chooses it, and another value of the same option replaces it; 'next >' and '< prev' turn pages; 'description' and \
'features' tell more about a product.
- {buy} buys the open product with the options chosen so far. It ends the task, so compare before you buy."""
RULES = _GAME.format(search="search[words]", click="click[name]", buy="click[buy now]")
TOOL_RULES = _GAME.format(search="search(query)", click="click(target)", buy='click(target="buy now")')
"""The same rules for actions as tool calls."""


def strip_instruction(observation: str, instruction: str) -> str:
    """Remove the instruction from an observation; prompts show it already.

    In the mode ``text`` return the fields after the instruction, each in single quotes, as in verl-agent. Return an
    observation without the instruction (the last page) unchanged.
    """
    shown = instruction.strip()
    fields = observation.split(SEPARATOR)
    if len(fields) > 1 and shown in fields:
        return SEPARATOR.join(f"'{text}'" for text in fields[fields.index(shown) + 1 :])
    for head in (f"WebShop\nInstruction: \n{instruction}\n", f"Instruction:\n{instruction}\n"):
        if head in observation:
            return observation.replace(head, "", 1).strip("\n")
    return observation


@dataclass(frozen=True)
class ShopTemplate(StockTemplate):
    """Rules of the shop, task, step count, history, observation, admissible actions and the form of the response.

    Args:
        rules: description of the shop and its actions.
    """

    parser: ResponseParser = field(default_factory=TagParser)
    name: str = "default"
    token_pattern: str | None = None
    rules: str = RULES

    def render(self, context: PromptContext) -> str:
        """Render the prompt, without history if it would exceed 13,000 characters."""
        head = f"{self.rules}\n\nYour task: {context.instruction}"
        tail = self.follow_up(context)
        if context.history:
            taken, first = context.turn - 1, context.turn - len(context.history)
            pairs = [(strip_instruction(seen, context.instruction), did) for seen, did in context.history]
            lines = [f"[Observation {i}: {seen}, Action {i}: '{did}']" for i, (seen, did) in enumerate(pairs, first)]
            past = f"You have taken {taken} of at most {context.max_turns} steps. The latest:\n" + "\n".join(lines)
            prompt = f"{head}\n\n{past}\n\n{tail}"
            if len(prompt) <= LONGEST_WITH_HISTORY:
                return prompt
        return f"{head}\n\n{tail}"

    def follow_up(self, context: PromptContext) -> str:
        """Render observation, actions and the form of the response."""
        seen = strip_instruction(context.observation, context.instruction)
        parts = [f"This is step {context.turn} of at most {context.max_turns}. You see:\n{seen}"]
        if context.admissible_actions is not None:
            parts.append("You may:\n" + "\n".join(f"'{action}'," for action in context.admissible_actions))
        parts.append(f"Think about which action brings you closer to the right purchase. {self.parser.hint}")
        return "\n\n".join(parts)


# The texts of VerlAgentShopTemplate are verl-agent's to the letter: https://github.com/langfengQ/verl-agent,
# agent_system/environments/prompts/webshop.py. Licensed under the Apache License, Version 2.0;
# Copyright 2025 Nanyang Technological University (NTU), Singapore and the verl-agent (GiGPO) team.
@dataclass(frozen=True)
class VerlAgentShopTemplate(VerlAgentTemplate):
    """verl-agent's prompt: pages without the instruction, actions in lines, no history beyond 13,000 characters."""

    texts = (
        """\

You are an expert autonomous agent operating in the WebShop e\u2011commerce environment.\x20
Your task is to: {task_description}.
Your current observation is: {current_observation}.
Your admissible actions of the current situation are:\x20
[
{available_actions}
].

Now it's your turn to take one action for the current step.
You should first reason step-by-step about the current situation, then think carefully which admissible action best \
advances the shopping goal. This reasoning process MUST be enclosed within <think> </think> tags.\x20
Once you've finished your reasoning, you should choose an admissible action for current step and present it within \
<action> </action> tags.
""",
        """\

You are an expert autonomous agent operating in the WebShop e\u2011commerce environment.
Your task is to: {task_description}.
Prior to this step, you have already taken {step_count} step(s). Below are the most recent {history_length} \
observations and the corresponding actions you took: {action_history}
You are now at step {current_step} and your current observation is: {current_observation}.
Your admissible actions of the current situation are:\x20
[
{available_actions}
].

Now it's your turn to take one action for the current step.
You should first reason step-by-step about the current situation, then think carefully which admissible action best \
advances the shopping goal. This reasoning process MUST be enclosed within <think> </think> tags.\x20
Once you've finished your reasoning, you should choose an admissible action for current step and present it within \
<action> </action> tags.
""",
    )

    def render(self, context: PromptContext) -> str:
        """Write the prompt of a turn, with history if there is any and it fits."""
        prompt = super().render(context)
        return prompt if len(prompt) <= LONGEST_WITH_HISTORY else super().render(replace(context, history=()))

    def _show(self, context: PromptContext) -> PromptContext:
        context = super()._show(context)
        task = context.instruction
        return replace(
            context,
            instruction=task.strip(),
            observation=strip_instruction(context.observation, task),
            history=[(strip_instruction(seen, task), action) for seen, action in context.history],
        )

    def _list(self, actions: Sequence[str]) -> dict[str, str]:
        listed = list(actions)
        if SEARCH_ACTION in listed:  # a click on the search button does nothing, and verl-agent lists it
            listed.insert(listed.index(SEARCH_ACTION) + 1, "click[search]")
        return {"available_actions": "\n".join([f"'{action}'," for action in listed])}


TITLE_WORDS = 12
"""Most words of a title in the compact prompt."""
TEXT_WORDS = 60
"""Most words of a description or of features in it."""

# A piece is a word with the blank before it, so that a blank alone is not a token. An ASIN of the mini catalogue is
# three pieces and a number has its last digit apart, so that a model can write and compare values unseen in training.
_PIECES = (
    r"<think></think><action>(?:search|click)\[",
    r"\]</action>",
    "buy now|back to search|next >|< prev",
    r"z0(?=[a-z]{8}(?!\w))|(?<=z0)[a-z]{4}|(?<=z0[a-z]{4})[a-z]{4}",
    r" ?\d+(?=\d(?![\w.]))| ?\d(?![\w.])",
    r" ?\w+(?:[-'.]\w+)*",
    r"\n| ?[^\w\s]|\s",
)

_PRODUCT = re.compile(
    r"\n\n\[(clicked )?button\] (\S+) \[(?:clicked )?button_\]\n"
    r"(?:(.*?)\n)??(\$[\d.]+(?: to \$[\d.]+)?)(?=\n(?:\n\[|\Z))",
    re.DOTALL,
)
_OPTION = re.compile(r"  \[(clicked )?button\] (.*) \[(?:clicked )?button_\]")
_RESULTS = re.compile(r"Page (\d+) \(Total results: (\d+)\)\n")
_HEAD = re.compile(
    r"Instruction:.*?\n\[button\] Back to Search \[button_\]\n(?:\[button\] < Prev \[button_\]\n)?", re.DOTALL
)
_BUTTONS = "Rating: N.A.\n[button] Description [button_]\n"
_MALFORMED = "\nYour response could not be read: "
_AMOUNT = re.compile(r"\$([\d.]+)")
_CEILING = re.compile(r"(?<!\d)(\d+)\.00 dollars")
_NO_WORD = re.compile(r"[^\w\s'.&%+-]+")


@dataclass(frozen=True)
class CompactShopTemplate(StockTemplate):
    """A page in few lower-case words, for tiny models with a word-level tokenizer.

    The task comes first. A page of results has a line for each product with its title, its price and last its ASIN, so
    that a model reading from left to right knows the product by then; ``~`` instead of ``>`` marks an opened one. A
    product has a line for each group of options, with ``*`` before a chosen value and ``|`` before the others. Prices
    are rounded up to whole dollars, which does not change comparisons with a task's limit. Titles are cut to 12 words
    and descriptions to 60. There is no history, since the page shows everything needed.

    Args:
        mode: of the observations; only ``text_rich`` shows the chosen options.
    """

    parser: ResponseParser = field(default_factory=TagParser)
    mode: ObservationMode = ObservationMode.TEXT_RICH
    name: str = "compact"
    token_pattern: str | None = "|".join(_PIECES)

    def render(self, context: PromptContext) -> str:
        """Render task and page.

        Raises:
            SpearError: the observations have the mode ``text``, which does not show the chosen options.
        """
        return f"{compress_task(context.instruction)}\n{self.follow_up(context)}"

    def follow_up(self, context: PromptContext) -> str:
        """Render the page; raise as :meth:`render`."""
        if self.mode is ObservationMode.TEXT:
            raise SpearError(
                "the compact template shows which options are chosen, and observation_mode='text' does not: "
                "use observation_mode='text_rich'"
            )
        return compress_page(context.observation)

    def respond(self, action: str, think: str = "") -> str:
        """Write the action in the form that the environment reads, with empty thoughts."""
        return self.parser.respond(action)


def compress_task(instruction: str) -> str:
    """Return the task in the compact form."""
    shown = _CEILING.sub(r"\1", instruction.strip().lower().removeprefix("find me "))
    return shown.replace(": ", ":")  # so that the first word of a value is the same token as on a product's page


def compress_page(observation: str) -> str:
    """Return an observation of the mode ``text_rich`` in the compact form, without the environment's messages."""
    return "\n".join(_compress(observation.partition(_MALFORMED)[0].rstrip("\n") + "\n")) + "\n"


def _compress(observation: str) -> Iterator[str]:
    """Yield the lines of a page."""
    head = _HEAD.search(observation)
    if head is None:
        yield "search" if observation.startswith("WebShop\n") else "done"
        return
    body = observation[head.end() :]
    results = _RESULTS.match(body)
    if results is not None:
        page, total = map(int, results.groups())
        yield f"page {page} of {math.ceil(total / PAGE_SIZE)}"
        for opened, asin, title, price in _PRODUCT.findall(body):
            yield f"{_join(_shorten(title, TITLE_WORDS), _round_up(price))}{'~' if opened else '>'}{asin.lower()}"
        return
    item, is_item, _ = body.partition(_BUTTONS)
    if is_item:
        about, _, price = f"\n{item}".rpartition("\nPrice: ")
        yield from _compress_item(about.split("\n")[1:], price)
    else:
        yield _join("text", _shorten(body, TEXT_WORDS))


def _compress_item(lines: list[str], price: str) -> Iterator[str]:
    """Yield title and price, then each group of options; in ``lines`` the title follows the values."""
    groups: list[str] = []
    pending: list[str] = []
    for line in lines:
        option = _OPTION.fullmatch(line)
        if option is None:
            pending.append(line)
            continue
        if pending or not groups:
            groups.append(" ".join(pending).lower())
            pending = []
        groups[-1] += f"{'*' if option[1] else '|'}{option[2]}"
    yield _join("item", _shorten(" ".join(pending), TITLE_WORDS), _round_up(price))
    yield from groups


def _join(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _shorten(text: str, words: int) -> str:
    return " ".join(_NO_WORD.sub(" ", text.lower()).split()[:words])


def _round_up(price: str) -> str:
    """Write ``$12.99 to $15.50`` as ``13$ to 16$``: a number follows a blank, as in the task, to be the same token."""
    return _AMOUNT.sub(lambda amount: f"{math.ceil(float(amount[1]))}$", price.strip())


@make_tool(r"search\[(?P<query>.*)\]")
def search(query: Annotated[str, "Words to look for."]) -> str:
    """Finds products and returns the first page of them."""
    return f"search[{query}]"


@make_tool(r"click\[(?P<target>.*)\]")
def click(
    target: Annotated[str, "Name of what the page offers: a product's code, the value of an option, a button."],
) -> str:
    """Clicks on something that the page offers and returns the page that follows."""
    return f"click[{target}]"


TOOLS = (search, click)
"""The two kinds of actions as functions."""

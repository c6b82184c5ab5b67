"""Prompt templates."""

from __future__ import annotations

import re

from spear_envs.core.parsing import PlainParser, TagParser
from spear_envs.core.prompts import PromptContext
from spear_envs.sokoban.levels import SYMBOLS, WORDS
from spear_envs.sokoban.prompts import CompactBoardTemplate, SokobanTemplate

BOARD = "######\n#P_O_#\n#_X__#\n#____#\n#____#\n######"


def make_context(observation: str = BOARD, history: tuple[tuple[str, str], ...] = (), turn: int = 3) -> PromptContext:
    return PromptContext("Push the box onto the target.", observation, list(WORDS), history, turn, 15)


def test_responses_are_read_back() -> None:
    text = SokobanTemplate().respond("up", "go north")
    parsed = TagParser().parse(text)
    assert (parsed.action, parsed.format_ok, parsed.think) == ("up", True, "go north")
    assert SokobanTemplate(parser=PlainParser()).respond("up", "go north") == "up"


def test_the_token_pattern_of_the_compact_prompt_gives_the_tiny_vocabulary() -> None:
    pattern = CompactBoardTemplate().token_pattern
    assert pattern is not None
    response = CompactBoardTemplate().respond("up")
    assert re.findall(pattern, response) == ["<think></think><action>", "up", "</action>"]
    prompt = CompactBoardTemplate().render(make_context())
    assert re.findall(pattern, prompt) == list(prompt)
    words = {token for word in WORDS for token in re.findall(pattern, CompactBoardTemplate().respond(word))}
    assert len(words | set(SYMBOLS)) == 13  # and three special ones: 16 of the 18 of the recipe

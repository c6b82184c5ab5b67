"""Prompt templates."""

from __future__ import annotations

import re

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import PlainParser, TagParser
from spear_envs.core.prompts import PromptContext, PromptTemplate
from spear_envs.sokoban.levels import SYMBOLS, WORDS, format_spaced
from spear_envs.sokoban.prompts import CompactBoardTemplate, Modality, SokobanTemplate
from spear_envs.sokoban.sprites import Sprites

BOARD = "######\n#P_O_#\n#_X__#\n#____#\n#____#\n######"


def make_context(observation: str = BOARD, history: tuple[tuple[str, str], ...] = (), turn: int = 3) -> PromptContext:
    return PromptContext("Push the box onto the target.", observation, list(WORDS), history, turn, 15)


@pytest.mark.parametrize("modality", list(Modality))
@pytest.mark.parametrize("sprites", list(Sprites))
def test_the_default_prompt_says_all_that_is_needed(modality: Modality, sprites: Sprites) -> None:
    template = SokobanTemplate(modality, sprites)
    text = template.render(make_context("" if modality is Modality.IMAGE else BOARD))
    assert isinstance(template, PromptTemplate)
    assert template.system() is None
    assert text.count("<image>") == (modality is not Modality.TEXT)
    assert (BOARD in text) == (modality is not Modality.IMAGE)
    for word in (*WORDS, "cannot be pulled", "Turn 3 of 15", "<action>", "Push the box onto the target."):
        assert word in text
    if modality is not Modality.TEXT:  # all seven tiles
        for name in ("wall:", "floor:", "target, empty:", "box, not", "box on a target:", "you:", "you, standing"):
            assert f"- {name}" in text
    if modality is not Modality.IMAGE:
        for symbol in SYMBOLS:
            assert re.search(rf"^{re.escape(symbol)} \w", text, re.MULTILINE)


def test_history_is_shown_with_text_only() -> None:
    history = (("old board", "left"), ("older board", ""))
    assert "Turn 1\nold board\nYou played: left\nTurn 2\nolder board\nYou played: (nothing)" in SokobanTemplate(
        Modality.TEXT
    ).render(make_context(history=history))
    assert "old board" not in SokobanTemplate(Modality.IMAGE).render(make_context("", history))


def test_follow_ups_show_the_board_and_the_form_alone() -> None:
    text = SokobanTemplate(Modality.BOTH).follow_up(make_context(BOARD + "\n\nNothing moved."))
    assert text.startswith("Turn 3 of 15. The board now:\n<image>\n######")
    assert "Nothing moved." in text
    assert "cannot be pulled" not in text
    assert "up to 4, joined by commas" in SokobanTemplate(moves_per_turn=4).follow_up(make_context())


def test_responses_are_read_back() -> None:
    text = SokobanTemplate().respond("up", "go north")
    parsed = TagParser().parse(text)
    assert (parsed.action, parsed.format_ok, parsed.think) == ("up", True, "go north")
    assert SokobanTemplate(parser=PlainParser()).respond("up", "go north") == "up"


def test_the_compact_prompt_is_the_inner_cells() -> None:
    template = CompactBoardTemplate()
    assert isinstance(template, PromptTemplate)
    assert template.system() is None
    expected = "P_O__X__________"
    for observation in (BOARD, BOARD + "\n\nNothing moved.", format_spaced(BOARD)):
        for history in ((), (("x", "up"),)):
            assert template.render(make_context(observation, history)) == expected
            assert template.follow_up(make_context(observation, history)) == expected
    assert template.respond("left", "ignored") == "<think></think><action>left</action>"
    with pytest.raises(SpearError, match="modality='text'"):
        template.render(make_context("Nothing moved."))


def test_the_token_pattern_of_the_compact_prompt_gives_the_tiny_vocabulary() -> None:
    pattern = CompactBoardTemplate().token_pattern
    assert pattern is not None
    response = CompactBoardTemplate().respond("up")
    assert re.findall(pattern, response) == ["<think></think><action>", "up", "</action>"]
    prompt = CompactBoardTemplate().render(make_context())
    assert re.findall(pattern, prompt) == list(prompt)
    words = {token for word in WORDS for token in re.findall(pattern, CompactBoardTemplate().respond(word))}
    assert len(words | set(SYMBOLS)) == 13  # and three special ones: 16 of the 18 of the recipe

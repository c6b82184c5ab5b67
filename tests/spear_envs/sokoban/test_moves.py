"""Reading actions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.parsing import ResponseParser, TagParser
from spear_envs.sokoban.moves import RememberingParser, find_peer_action, read_like_peer, read_moves


@pytest.mark.parametrize(
    ("text", "codes", "words"),
    [
        ("up", (1,), "up"),
        ("DOWN", (2,), "down"),
        ("Left.", (3,), "left"),
        (" right \n", (4,), "right"),
        ("still", (0,), "still"),
    ],
)
def test_single_words(text: str, codes: tuple[int, ...], words: str) -> None:
    assert read_moves(text) == (codes, words, "")


@pytest.mark.parametrize("text", ["", "jump", "up, down", "upp", "I go up", "up..", "u p", "上", "up\0"])
def test_anything_else_is_explained(text: str) -> None:
    moves = read_moves(text)
    assert not moves.codes
    assert not moves.words
    assert "Nothing moved" in moves.problem
    assert "up, down, left, right" in moves.problem


@pytest.mark.parametrize("text", ["up, left, up", "up left up", "Up || Left || Up", "up,left,up.", "up|| left,,up"])
def test_several_words_a_turn(text: str) -> None:
    assert read_moves(text, 3) == ((1, 3, 1), "up, left, up", "")
    assert read_moves(text, 2).problem.startswith("The action holds 3 moves")


@given(st.text(max_size=10_000), st.integers(1, 5))
def test_no_text_raises_and_no_message_is_long(text: str, limit: int) -> None:
    moves = read_moves(text, limit)
    assert bool(moves.codes) != bool(moves.problem)
    assert len(moves.codes) <= limit
    assert len(moves.problem) < 400
    assert moves.problem.isascii()
    read_like_peer(text)
    find_peer_action(text)


def test_a_megabyte_is_turned_down_at_once() -> None:
    assert "too long" in read_moves("up " * 400_000, 1).problem


@pytest.mark.parametrize(
    ("response", "word"),
    [
        ("<think>x</think><action>I should not go up, but left</action>", "up"),
        ("<action>LEFT</action>", "left"),
        ("<action>go right</action> or <action>up</action>", "right"),
        ("<action>standstill</action>", "still"),
        ("I go left", ""),
        ("<action>jump</action>", ""),
        ("</action><action>up", ""),
    ],
)
def test_the_peers_rule_finds_a_word_anywhere(response: str, word: str) -> None:
    moves = read_like_peer(find_peer_action(response))
    assert moves.words == word
    assert bool(moves.problem) == (not word)
    if not word:
        assert moves.codes == (0,)


@given(st.lists(st.one_of(st.text(max_size=200), st.sampled_from(["<think></think><action>up</action>", "up"]))))
def test_remembering_responses_changes_nothing(responses: list[str]) -> None:
    parser = RememberingParser(TagParser())
    assert isinstance(parser, ResponseParser)
    assert parser.hint == TagParser().hint
    assert parser.respond("up", "x") == TagParser().respond("up", "x")
    for response in responses * 2:
        assert parser.parse(response) == TagParser().parse(response)

"""Other ways to write commands."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.alfworld.aliases import rewrite_command
from spear_envs.alfworld.interpreter import Interpreter
from spear_envs.alfworld.wording import WORDING_2_1_2, Wording
from tests.spear_envs.alfworld.small import WORDING_2_1_1, play, start


def rewrite(game: Interpreter, command: str) -> str:
    return rewrite_command(command, game.game.wording, lambda text: game.find_action(text) is not None)


def hold_apple(wording: Wording) -> Interpreter:
    game = start(wording=wording)
    play(game, "go to countertop 1", "take apple 2 from countertop 1", "go to fridge 1", "open fridge 1")
    return game


PUTS = (
    "put apple 2 in/on fridge 1",
    "put apple 2 in fridge 1",
    "put apple 2 on fridge 1",
    "put apple 2 into fridge 1",
    "move apple 2 to fridge 1",
    "PUT  apple 2   in fridge 1",
)


@pytest.mark.parametrize("command", PUTS)
def test_putting_in_all_words_of_both_releases(command: str) -> None:
    assert rewrite(hold_apple(WORDING_2_1_2), command) == "move apple 2 to fridge 1"
    assert rewrite(hold_apple(WORDING_2_1_1), command) == "put apple 2 in/on fridge 1"


@pytest.mark.parametrize(
    ("command", "meaning"),
    [
        ("toggle desklamp 1", "use desklamp 1"),
        ("toggle desklamp 1 desk 1", "use desklamp 1"),
        ("turn on desklamp 1", "use desklamp 1"),
        ("goto fridge 1", "go to fridge 1"),
        ("Go To FRIDGE 1", "go to fridge 1"),
        ("take   pencil 1 from desk  1", "take pencil 1 from desk 1"),
        ("LOOK", "look"),
    ],
)
def test_the_papers_words(command: str, meaning: str) -> None:
    game = start()
    play(game, "go to desk 1")
    assert rewrite(game, command) == meaning


@pytest.mark.parametrize(
    "command",
    ["put mug 1 in fridge 1", "toggle desklamp 1 fridge 1", "toggle fridge 1", "turn off desklamp 1", "goto desk 1",
     "put", "put in", "move to", "toggle", "", "   ", "open the fridge 1", "put apple 2 to fridge 1"],
)  # fmt: skip
def test_what_would_not_be_admissible_stays_as_it_is(command: str) -> None:
    game = start()
    play(game, "go to desk 1")
    assert rewrite(game, command) == command


@given(st.text(max_size=40) | st.sampled_from(PUTS).flatmap(lambda text: st.permutations(text.split()).map(" ".join)))
def test_a_rewritten_command_is_admissible(command: str) -> None:
    game = hold_apple(WORDING_2_1_2)
    rewritten = rewrite(game, command)
    assert rewritten == command or game.find_action(rewritten) is not None

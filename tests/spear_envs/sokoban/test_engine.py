"""One board: moves, rewards, texts, tiles and prompts; recorded games of gym-sokoban."""

import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import ResponseParser, TagParser
from spear_envs.core.prompts import PromptContext
from spear_envs.sokoban.engine import (
    LEFT,
    RIGHT,
    STILL,
    UP,
    Board,
    RememberingParser,
    read_moves,
)
from spear_envs.sokoban.levels import SYMBOLS, WORDS, Level, format_codes, parse_level
from spear_envs.sokoban.prompts import CompactBoardTemplate
from spear_envs.sokoban.sprites import Image, draw_tiles, load_tiles, read_peer_tiles
from tests.spear_envs.sokoban.conftest import actions, levels
from tests.spear_envs.sokoban.peer import MEND, find_peer


def draw_whole(board: Board) -> Image:
    """The picture of a board, all of it drawn anew."""
    tiles = draw_tiles()
    rows = [np.concatenate([tiles[code] for code in board.codes[i : i + board.width]], axis=1)
            for i in range(0, len(board.codes), board.width)]  # fmt: skip
    return np.concatenate(rows, axis=0)


@pytest.mark.parametrize(
    ("before", "action", "after", "reward"),
    [
        ("#P__#", RIGHT, "#_P_#", -0.1),
        ("#P__#", LEFT, "#P__#", -0.1),
        ("#P__#", UP, "#P__#", -0.1),
        ("#P__#", STILL, "#P__#", -0.1),
        ("#PO_#", RIGHT, "#_S_#", -0.1),
        ("#SO_#", RIGHT, "#OS_#", -0.1),
        ("#PX_O#", RIGHT, "#_PXO#", -0.1),
        ("#SX_O#", RIGHT, "#OPXO#", -0.1),
        ("#PXO_#", RIGHT, "#_P√_#", 0.9),
        ("#P√_O#", RIGHT, "#_SXO#", -1.1),
        ("#P√O_#", RIGHT, "#_S√_#", -0.1),
        ("#PXX_#", RIGHT, "#PXX_#", -0.1),
        ("#PX#_#", RIGHT, "#PX#_#", -0.1),
        ("#P√√_#", RIGHT, "#P√√_#", -0.1),
    ],
)
def test_moves_and_rewards(before: str, action: int, after: str, reward: float) -> None:
    width = len(before)
    # A second pair of box and target far away keeps the board from being solved and balances the numbers.
    boxes, targets = sum(c in "X√" for c in before), sum(c in "OS√" for c in before)
    rest = "#" + "X" * (1 + max(0, targets - boxes)) + "#" + "O" * (1 + max(0, boxes - targets))
    wide = max(width, len(rest) + 1)
    rows = ["#" * wide, before.ljust(wide, "#"), "#" * wide, rest.ljust(wide, "#"), "#" * wide]
    board = Board(parse_level("\n".join(rows)))
    assert board.step(action) == reward
    assert board.text().split("\n")[1] == after.ljust(wide, "#")
    assert board.moved == (before != after)
    assert board.pushed == (board.moved and before[2] in "X√")


def test_the_winning_push_pays_all() -> None:
    board = Board(parse_level("######\n#PXO_#\n######"))
    assert board.step(RIGHT) == -0.1 + 1 + 10
    assert board.won


@given(levels, actions)
def test_text_codes_and_counts_stay_together(level: Level, moves: list[int]) -> None:
    board = Board(level)
    for move in moves:
        board.step(move)
        assert board.text() == format_codes(board.codes, board.width)
        position = parse_level(board.text())
        assert position.player == board.player
        assert position.codes.count(3) == board.on_target
        assert position.solved == board.won
        assert position.targets == level.targets
        assert len(position.boxes) == len(level.boxes)


@given(levels, actions)
def test_drawing_changed_tiles_equals_drawing_all(level: Level, moves: list[int]) -> None:
    board = Board(level, draw_tiles())
    for number, move in enumerate(moves):
        board.step(move)
        if number % 3:  # several moves may lie between two pictures
            assert np.array_equal(board.frame(), draw_whole(board))
    board.load(level)
    assert np.array_equal(board.frame(), draw_whole(Board(level)))


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


@given(st.lists(st.one_of(st.text(max_size=200), st.sampled_from(["<think></think><action>up</action>", "up"]))))
def test_remembering_responses_changes_nothing(responses: list[str]) -> None:
    parser = RememberingParser(TagParser())
    assert isinstance(parser, ResponseParser)
    assert parser.hint == TagParser().hint
    assert parser.respond("up", "x") == TagParser().respond("up", "x")
    for response in responses * 2:
        assert parser.parse(response) == TagParser().parse(response)


# The games are played on levels of their own, under the id of their time.
AS_RECORDED = """
import runpy, sys
from spear_envs import register_env
register_env("spear/Sokoban-v0", "spear_envs.sokoban.env:SokobanEnv")
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_all_recorded_games_hold(shared: Path) -> None:
    check = shared / "golden" / "sokoban" / "check.py"
    if not check.exists():
        pytest.skip(f"{check.name} of the recorded Sokoban games is not there")
    options = [] if find_peer() else ["--no-pixels"]
    root = Path(__file__).resolve().parents[3]
    run = subprocess.run(
        [sys.executable, "-c", AS_RECORDED, str(check), *options], cwd=root, capture_output=True, text=True, check=False
    )
    assert run.stdout.strip() == "60 of 60 hold", run.stderr


def test_our_tiles_never_change() -> None:
    digest = hashlib.sha256(draw_tiles().tobytes()).hexdigest()
    assert digest == "89d8fdf63f63155f402abc88560f436136dc18e94ccfbc344d665168b4810e45"


def test_peer_tiles_are_read_without_importing_it() -> None:
    if find_peer() is None:
        pytest.skip(MEND)
    read_peer_tiles.cache_clear()
    before = set(sys.modules)
    assert read_peer_tiles().shape == (7, 16, 16, 3)
    assert not any(name.split(".")[0] in ("gym", "gym_sokoban") for name in set(sys.modules) - before)


def test_a_missing_wheel_is_an_error_that_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    read_peer_tiles.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SpearError, match=r"pip install --no-deps gym-sokoban==0\.0\.6"):
        load_tiles("gym-sokoban")
    read_peer_tiles.cache_clear()


BOARD = "######\n#P_O_#\n#_X__#\n#____#\n#____#\n######"


def make_context(observation: str = BOARD, history: tuple[tuple[str, str], ...] = (), turn: int = 3) -> PromptContext:
    return PromptContext("Push the box onto the target.", observation, list(WORDS), history, turn, 15)


def test_the_token_pattern_of_the_compact_prompt_gives_the_tiny_vocabulary() -> None:
    pattern = CompactBoardTemplate().token_pattern
    assert pattern is not None
    response = CompactBoardTemplate().respond("up")
    assert re.findall(pattern, response) == ["<think></think><action>", "up", "</action>"]
    prompt = CompactBoardTemplate().render(make_context())
    assert re.findall(pattern, prompt) == list(prompt)
    words = {token for word in WORDS for token in re.findall(pattern, CompactBoardTemplate().respond(word))}
    assert len(words | set(SYMBOLS)) == 13  # and three special ones: 16 of the 18 of the recipe

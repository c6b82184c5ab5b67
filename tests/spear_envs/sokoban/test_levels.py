"""Parsing, digests and splits of levels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.sokoban.levels import (
    Level,
    LevelError,
    SplitBy,
    compact_spaced,
    digest_level,
    digest_room,
    find_band,
    find_split,
    find_symmetries,
    format_codes,
    format_spaced,
    parse_level,
)
from tests.spear_envs.sokoban.conftest import levels

BOARD = "######\n#_SO_#\n#X_√X#\n#____#\n######"


@given(levels)
def test_parsing_a_formatted_level_gives_it_back(level: Level) -> None:
    assert format_codes(level.codes, level.width) == level.text
    again = parse_level(level.text)
    assert (again.codes, again.height, again.width) == (level.codes, level.height, level.width)
    assert compact_spaced(format_spaced(level.text)) == level.text


def test_a_level_knows_its_pieces() -> None:
    level = parse_level(BOARD)
    assert (level.height, level.width) == (5, 6)
    assert level.player == 8
    assert level.boxes == (13, 15, 16)
    assert level.targets == (8, 9, 15)
    assert not level.solved
    assert parse_level("####\n#P√#\n####").solved


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "both sides"),
        ("###\n#P#\n####", "same length"),
        ("#####\n#PX.#\n#####", "write it with"),
        ("#####\n#PXO#\n##_##", "border"),
        ("#####\n#_XO#\n#####", "0 players"),
        ("######\n#PSXX#\n#_OO_#\n######", "2 players"),
        ("#####\n#P_O#\n#####", "lacks a box"),
        ("######\n#PX_O#\n#_OO_#\n######", "1 boxes and 3 targets"),
        ("\n".join(["#" * 65] * 65), "between 3 and 64"),
        ("####\n#P\0#\n####", "write it with"),
    ],
)
def test_a_bad_level_is_refused_in_one_line_that_names_the_mend(text: str, words: str) -> None:
    with pytest.raises(LevelError) as caught:
        parse_level(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, SpearError)


def test_spaced_form_puts_each_cell_between_blanks_and_a_tab() -> None:
    assert format_spaced("#_\nP√") == " # \t _ \t\n P \t √ \t"


@given(levels, st.integers(0, 7))
def test_digests_are_those_of_every_rotation_and_reflection(level: Level, which: int) -> None:
    forms = find_symmetries(level.text)
    assert len(forms) == 8
    assert digest_level(forms[which]) == digest_level(level.text)
    assert digest_room(forms[which]) == digest_room(level.text)
    assert find_split(forms[which]) == find_split(level.text)


def test_the_digest_of_a_room_looks_at_walls_and_targets_alone() -> None:
    board = "######\n#P_O_#\n#_X__#\n######"
    assert digest_room(board) == digest_room("######\n#__O_#\n#_XP_#\n######")
    assert digest_room(board) == digest_room("######\n#__S_#\n#_X__#\n######")
    assert digest_room(board) != digest_room("######\n#P__O#\n#_X__#\n######")
    assert digest_level(board) != digest_level("######\n#PXO_#\n#____#\n######")


def test_a_shift_or_a_few_steps_of_the_player_make_no_other_level() -> None:
    board = "#######\n#P_O_##\n#_X__##\n#######"
    shifted = "#######\n#######\n##P_O_#\n##_X__#\n#######"
    assert digest_level(board) == digest_level(shifted) and digest_room(board) == digest_room(shifted)
    for walked in ("#_PO_##\n#_X__##", "#__S_##\n#_X__##", "#__O_##\n#_X_P##", "#__O_##\n#PX__##"):
        assert digest_level(board) == digest_level(f"#######\n{walked}\n#######"), walked
    # The box cuts the room in two: on its other side the player has another puzzle.
    assert digest_level("#######\n#P_X_O#\n#######") != digest_level("#######\n#__XPO#\n#######")
    assert digest_level("#######\n#P_X_O#\n#######") == digest_level("#######\n#_PX_O#\n#######")


def test_splits_follow_the_first_32_bits_of_the_digest() -> None:
    # Pinned: they may never change, or published levels would move between the splits.
    assert digest_level(BOARD) == "0b0ac11fc6f102102eaddb7b7736964d69e79676d6f519a9967d12a6d03a666c"
    assert digest_room(BOARD) == "5076a7d035abdea24d54f2fc9e6253251f84cdb1a2641924980326f35cbe3a99"
    counts = {"train": 0, "valid": 0, "test": 0}
    for number in range(4_000):
        text = f"#{number:b}O#".replace("1", "_").replace("0", "#")
        split = find_split(text)
        share = int(digest_room(text)[:8], 16) / 2**32
        assert split == ("test" if share < 0.1 else "valid" if share < 0.2 else "train")
        counts[split] += 1
    assert 300 < counts["test"] < 500
    assert 300 < counts["valid"] < 500


def test_splitting_by_room_puts_all_levels_of_a_room_into_one_split() -> None:
    boards = ("######\n#P_O_#\n#_X__#\n######", "######\n#__O_#\n#_XP_#\n######", "######\n#_XO_#\n#__P_#\n######")
    assert len({find_split(board, SplitBy.ROOM) for board in boards}) == 1


@pytest.mark.parametrize(
    ("moves", "band"), [(1, "len1-3"), (3, "len1-3"), (4, "len4-6"), (6, "len4-6"), (9, "len7-9"), (10, "len10+")]
)
def test_bands(moves: int, band: str) -> None:
    assert find_band(moves) == band

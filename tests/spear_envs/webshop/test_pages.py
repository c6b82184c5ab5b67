"""Pages as text, written by hand from the original's templates."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.webshop.pages import (
    Mark,
    ObservationMode,
    add_message,
    list_item,
    write_page,
)
from tests.spear_envs.webshop.conftest import make_product

TEXT, RICH = ObservationMode.TEXT, ObservationMode.TEXT_RICH
MUG = make_product(
    "A000000001",
    " A <b>Mug</b> ",
    description="Holds tea.\nAnd coffee.",
    bullets=("", "dishwasher safe", "\n"),
    prices=(5.0, 7.5),
    options={"color": ("red", "blue"), "size": ("blue",)},
)


def test_later_values_are_said_first() -> None:
    lines = write_page(list_item("x", MUG, '{"a": "red", "b": "blue"}'), RICH).split("\n")
    assert lines[:3] == ["You have clicked blue.", "You have clicked blue.", "You have clicked red."]


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        ("", None),
        ("\n", None),
        (" \t\n", None),
        (" ", ""),
        ("\t\f\r", ""),
        ("\n\u00a0", ""),
        ("\u2028", ""),
        (" x ", "x"),
    ],
)
def test_white_space(raw: str, field: str | None) -> None:
    shown = write_page([(Mark.TEXT, "a"), (Mark.TEXT, raw), (Mark.TEXT, "b")], TEXT).split(" [SEP] ")
    assert shown == (["a", "b"] if field is None else ["a", field, "b"])


def test_white_space_in_lines() -> None:
    assert write_page([(Mark.TEXT, "\t\f"), (Mark.TEXT, " \n"), (Mark.BUTTON, "")], RICH) == " \n"


def test_messages_are_one_more_field_or_line() -> None:
    assert add_message("a [SEP] b", "no", TEXT) == "a [SEP] b [SEP] no"
    assert add_message("a\nb\n", "no", RICH) == "a\nb\nno\n"


@given(st.lists(st.tuples(st.sampled_from(Mark), st.text())))
def test_any_text_can_be_written(nodes: list[tuple[Mark, str]]) -> None:
    assert write_page(nodes, TEXT).count(" [SEP] ") <= max(0, len(nodes) - 1) + sum(" [SEP] " in t for _, t in nodes)
    assert isinstance(write_page(nodes, RICH), str)


@pytest.mark.parametrize(
    ("url", "clicked"),
    [
        ('mug/{"size": "blue"}', ["blue"]),
        ('mug/{"red": "4 cups"}', ["red"]),  # the name of a group
        ('a+"red"+mug/{}', ["red"]),
        ('mug/{"color": "caf\\u00e9"}', []),
        ('mug/{"size": "6\\" wide"}', []),
    ],
)
def test_a_value_between_quotes_in_the_address_counts_as_clicked(url: str, clicked: list[str]) -> None:
    product = replace(MUG, options={"color": ("red", "caf\u00e9", '6" wide', "blue")})
    found = [text for mark, text in list_item("x", product, url) if mark is Mark.CHOSEN]
    assert found == clicked

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
    list_done,
    list_item,
    list_results,
    list_search,
    list_sub_page,
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
BARE = make_product("A000000002", "\u00a0", bullets=(), options={"": ()})


def test_search_page() -> None:
    nodes = list_search(" Find me a mug ")
    assert write_page(nodes, TEXT) == "WebShop [SEP] Instruction: [SEP] Find me a mug [SEP] Search"
    assert write_page(nodes, RICH) == "WebShop\nInstruction: \n Find me a mug \n[button] Search [button_]\n"


def test_results_page() -> None:
    nodes = list_results("x", 2, 12, [MUG, BARE], {"A000000002"})
    assert write_page(nodes, TEXT).split(" [SEP] ") == [
        *("Instruction:", "x", "Back to Search", "Page 2 (Total results: 12)", "< Prev", "Next >"),
        *("A000000001", "A <b>Mug</b>", "$5.0 to $7.5"),
        *("A000000002", "", "$100.0"),
    ]
    assert write_page(nodes, RICH) == (
        "Instruction:\nx\n[button] Back to Search [button_]\nPage 2 (Total results: 12)\n[button] < Prev [button_]\n"
        "[button] Next > [button_]\n\n[button] A000000001 [button_]\n A <b>Mug</b> \n$5.0 to $7.5\n"
        "\n[clicked button] A000000002 [clicked button_]\n\u00a0\n$100.0\n"
    )


def test_first_page_of_nothing() -> None:
    text = write_page(list_results("x", 1, 0, [], ()), TEXT)
    assert text == "Instruction: [SEP] x [SEP] Back to Search [SEP] Page 1 (Total results: 0) [SEP] Next >"


def test_product_page() -> None:
    nodes = list_item("x", MUG, '{"color": "blue"}')
    assert write_page(nodes, TEXT).split(" [SEP] ") == [
        *("Instruction:", "x", "Back to Search", "< Prev", "color", "red", "blue", "size", "blue", "A <b>Mug</b>"),
        *("Price: $5.0 to $7.5", "Rating: N.A.", "Description", "Features", "Reviews", "Buy Now"),
    ]
    assert write_page(nodes, RICH) == (
        "You have clicked blue.\nYou have clicked blue.\nInstruction:\nx\n[button] Back to Search [button_]\n"
        "[button] < Prev [button_]\ncolor\n  [button] red [button_]\n  [clicked button] blue [clicked button_]\n"
        "size\n  [clicked button] blue [clicked button_]\n A <b>Mug</b> \nPrice: $5.0 to $7.5\nRating: N.A.\n"
        "[button] Description [button_]\n[button] Features [button_]\n[button] Reviews [button_]\n"
        "[button] Buy Now [button_]\n"
    )


def test_later_values_are_said_first() -> None:
    lines = write_page(list_item("x", MUG, '{"a": "red", "b": "blue"}'), RICH).split("\n")
    assert lines[:3] == ["You have clicked blue.", "You have clicked blue.", "You have clicked red."]


@pytest.mark.parametrize(
    ("name", "fields", "rich"),
    [
        ("description", ["Holds tea.\nAnd coffee."], "Holds tea.\nAnd coffee.\n"),
        ("features", ["", "dishwasher safe"], " \n dishwasher safe\n"),  # an empty bullet is a blank, "\n" is none
        ("reviews", [], ""),
    ],
)
def test_sub_pages(name: str, fields: list[str], rich: str) -> None:
    nodes = list_sub_page("x", MUG, name)
    head = ["Instruction:", "x", "Back to Search", "< Prev"]
    assert write_page(nodes, TEXT) == " [SEP] ".join([*head, *fields])
    assert write_page(nodes, RICH).endswith(f"[button] < Prev [button_]\n{rich}")


def test_no_description_leaves_no_field() -> None:
    assert write_page(list_sub_page("x", BARE, "description"), TEXT).endswith("< Prev")
    assert write_page(list_sub_page("x", BARE, "features"), TEXT).endswith("< Prev")


def test_last_page() -> None:
    nodes = list_done("A000000001", {"size": "5' <b>", "color": "é & co"}, 0.75)
    fields = write_page(nodes, TEXT).split(" [SEP] ")
    assert fields[:6] == [
        *("Thank you for shopping with us!", "Your code:", "None", "(Paste it in your MTurk interface.)"),
        *("Purchased", "asin"),
    ]
    assert fields[6:9] == [
        "A000000001",
        "options",
        r'{"color": "\u00e9 \u0026 co", "size": "5\u0027 \u003cb\u003e"}',
    ]
    assert fields[-4:] == ["Your score (min 0.0, max 1.0)", "0.75", "Reward Details", "None"]
    assert "Your code: \nNone\n (Paste it" in write_page(nodes, RICH)


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

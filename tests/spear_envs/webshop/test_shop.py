"""The shop's state machine: facts of the original, one by one."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.webshop.shop import SEARCH_ACTION, Page, Shop, read_action
from tests.spear_envs.webshop.conftest import SmallStock, make_goal, make_product

PRODUCTS = [
    make_product(f"A{number:09}", f"Lamp number {number}", options={"size": ("small", "large")}) for number in range(25)
]
TWIN = make_product(
    "B000000001",
    "Sofa 沙发 🛋 <b>bold</b>",
    options={
        "color": ("red", "blue"),
        "trim": ("blue", "search", "two\nlines", "a[b", "", "buy now", "next >", "c]d"),
    },
)
STOCK = SmallStock([*PRODUCTS, TWIN])


@pytest.fixture
def shop() -> Shop:
    """A shop on its search page."""
    return Shop(STOCK, make_goal(PRODUCTS[3], options=(("size", "large"),)))


def play(shop: Shop, *actions: str) -> Shop:
    for action in actions:
        assert shop.play(action).ok, action
    return shop


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("search[red lamp]", ("search", "red lamp")),
        ("click[Buy Now] please", ("click", "buy now")),
        ("search[a][b]", ("search[a]", "b")),
        ("search[a]b]", ("search", "a]b")),
        ("search[a[b]", ("search[a", "b")),
        ("search[]", None),
        ("click []", None),
        (" click[x]", (" click", "x")),
        ("search[a\nb]", None),
        ("search[a]\nclick[b]", ("search", "a")),
        ("\nsearch[a]", None),
        ("[a]", None),
        ("[[a]", ("[", "a")),
        ("x[[]", ("x", "[")),
        ("x[[]]", ("x[", "]")),
        ("x[]", None),
        ("", None),
        ("search[lamp", None),
        ("search[İ]", ("search", "i̇")),
    ],
)
def test_grammar(text: str, read: tuple[str, str] | None) -> None:
    assert read_action(text) == read


@pytest.mark.parametrize("action", ["Search[lamp]", "CLICK[x]", " click[x]", "click[search]", "click[lamp]", "buy", ""])
def test_what_is_no_action_does_nothing(shop: Shop, action: str) -> None:
    before = shop.save()
    assert shop.play(action) == (False, None)
    assert shop.save() == before


def test_search_works_on_every_page(shop: Shop) -> None:
    play(shop, "search[lamp]")
    assert (shop.page, shop.page_number, len(shop.hits)) == (Page.RESULTS, 1, 25)
    play(shop, "click[next >]", "click[a000000010]", "search[sofa]")
    assert (shop.page, shop.page_number, shop.keywords, shop.number) == (Page.RESULTS, 1, "sofa", None)
    play(shop, "click[b000000001]", "click[features]", "search[Lamp]")
    assert shop.keywords == "lamp"


def test_pages_of_results_never_end(shop: Shop) -> None:
    play(shop, "search[lamp]")
    assert list(shop.list_clickables())[:3] == ["back to search", "next >", "a000000000"]
    play(shop, "click[next >]")
    assert list(shop.list_clickables())[:4] == ["back to search", "< prev", "next >", "a000000010"]
    play(shop, *["click[next >]"] * 5)
    assert list(shop.list_clickables()) == ["back to search", "< prev", "next >"]
    assert "Page 7 (Total results: 25)" in shop.observe()
    play(shop, *["click[< prev]"] * 6)
    assert shop.page_number == 1 and not shop.play("click[< prev]").ok


def test_options_are_chosen_replaced_kept_and_cleared(shop: Shop) -> None:
    play(shop, "search[lamp]", "click[next >]", "click[A000000011]", "click[Small]", "click[large]")
    assert shop.options == {"size": "large"}
    seen = shop.observe()
    play(shop, "click[description]")
    assert list(shop.list_clickables()) == ["back to search", "< prev"]
    play(shop, "click[< prev]")
    assert shop.options == {"size": "large"} and shop.observe() == seen
    play(shop, "click[< prev]")
    assert (shop.page, shop.page_number, shop.options) == (Page.RESULTS, 2, {})
    play(shop, "click[a000000011]")
    assert shop.options == {}


def test_buttons_and_options_of_the_same_name(shop: Shop) -> None:
    play(shop, "search[sofa]", "click[b000000001]")
    clickables = list(shop.list_clickables())
    assert clickables == [
        *("back to search", "< prev", "description", "features", "reviews", "buy now", "red", "blue"),
        *("search", "two\nlines", "a[b", "", "next >", "c]d"),
    ]
    said = [action[6:-1] for action in shop.list_actions()]
    assert said == [name for name in clickables if name not in ("search", "two\nlines", "a[b", "")]
    play(shop, "click[next >]", "click[c]d]")
    assert shop.options == {"trim": "c]d"}
    assert not shop.play("click[search]").ok
    assert shop.play("click[buy now]").score is not None


def test_purchase_without_options(shop: Shop) -> None:
    play(shop, "search[lamp]", "click[a000000003]")
    score = shop.play("click[buy now]").score
    assert score is not None and (score.option_hits, score.price_ok, score.reward) == (0, True, 1 / 3)
    assert shop.page is Page.DONE and shop.list_actions() == []
    assert shop.observe().endswith(f"{1 / 3} [SEP] Reward Details [SEP] None")
    for action in ("search[lamp]", "click[back to search]", "click[buy now]"):
        assert not shop.play(action).ok


steps = st.lists(
    st.one_of(
        st.integers(0, 30),
        st.sampled_from(["search[lamp]", "search[sofa]", "click[< prev]", "click[nothing]", "search[lamp]x", "huh"]),
    ),
    max_size=20,
)


def follow(shop: Shop, step: int | str) -> str:
    """A step as an action: numbers stand for what is admissible."""
    if isinstance(step, str):
        return step
    actions = [action for action in shop.list_actions() if action != SEARCH_ACTION] or ["search[lamp]"]
    return actions[step % len(actions)]


@given(steps)
def test_admissible_actions_do_something_and_states_come_back(choices: list[int | str]) -> None:
    shop = Shop(STOCK, make_goal(PRODUCTS[3]))
    other = Shop(STOCK, make_goal(PRODUCTS[3]))
    for choice in choices:
        action = follow(shop, choice)
        admissible = shop.list_actions()
        state = shop.save()
        for name in admissible:
            if name != SEARCH_ACTION:
                assert other_plays(other, state, name)
        ok = shop.play(action).ok
        assert ok or action not in admissible
        other.restore(state)
        other.play(action)
        assert other.save() == shop.save()
        assert (other.observe(), other.list_actions()) == (shop.observe(), shop.list_actions())


def other_plays(shop: Shop, state: dict[str, Any], action: str) -> bool:
    shop.restore(state)
    return shop.play(action).ok

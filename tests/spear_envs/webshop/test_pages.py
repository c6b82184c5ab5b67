"""Pages as text, prompts, and responses."""

import random
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.errors import SpearError
from spear_envs.core.parsing import MAX_RESPONSE_LENGTH
from spear_envs.core.prompts import PromptContext, PromptTemplate
from spear_envs.webshop.env import WebShopEnv
from spear_envs.webshop.prompts import (
    VerbatimParser,
)
from spear_envs.webshop.shop import (
    Mark,
    ObservationMode,
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


TASK = "Find me soft red mugs with size: 12 oz, and price lower than 30.00 dollars"


def make_context(observation: str, **values: Any) -> PromptContext:
    fields: dict[str, Any] = {
        "instruction": TASK,
        "observation": observation,
        "admissible_actions": ["click[a]", "click[b]"],
        "history": [],
        "turn": 1,
        "max_turns": 15,
    }
    return PromptContext(**{**fields, **values})


def test_compact_needs_to_see_what_is_chosen() -> None:
    env = WebShopEnv()
    observation, info = env.reset(seed=0)
    with pytest.raises(SpearError, match="observation_mode='text_rich'"):
        env.templates["compact"].render(make_context(observation, instruction=info["instruction"]))


def cut(pattern: str, text: str) -> list[str]:
    """The tokens of a text, as :mod:`spear_training.warmstart.rows` cuts it."""
    pieces, end = [], 0
    for match in re.finditer(pattern, text):
        pieces += [text[end : match.start()]] * (match.start() > end) + [match[0]]
        end = match.end()
    return pieces + [text[end:]] * (end < len(text))


@pytest.fixture(scope="module")
def played() -> list[tuple[str, list[str], list[str]]]:
    """Page, tokens of the compact prompt and tokens of the expert's response, along noisy expert play."""
    env = WebShopEnv(observation_mode="text_rich")
    template: PromptTemplate = env.templates["compact"]
    assert template.token_pattern is not None
    rng = random.Random(0)
    rows = []
    for seed in range(60):
        observation, info = env.reset(seed=seed)
        while not env.done:
            context = make_context(observation, instruction=info["instruction"])
            plan = env.expert_plan()
            response = template.respond(plan[0] if plan else "click[back to search]", "thoughts")
            if plan:
                prompt, page = template.render(context), env.shop.page.value
                rows.append((page, cut(template.token_pattern, prompt), cut(template.token_pattern, response)))
                assert "".join(rows[-1][1]) == prompt
            if rng.random() < 0.3:
                response = template.respond(rng.choice(info["admissible_actions"]))
            observation, _, _, _, info = env.step(response)
    return rows


def test_compact_prompts_are_short(played: list[tuple[str, list[str], list[str]]]) -> None:
    assert {page for page, _, _ in played} == {"search", "results", "item", "sub"}
    assert max(len(prompt) for _, prompt, _ in played) < 250
    assert max(len(response) for _, _, response in played) <= 16


def test_words_of_responses_stand_in_the_prompt(played: list[tuple[str, list[str], list[str]]]) -> None:
    """What the expert writes can be copied token by token: names, values, and its first searches.

    Later searches add values, whose first word then has a blank before it as it has not in the task.
    """
    fixed = {"<think></think><action>search[", "<think></think><action>click[", "]</action>"}
    fixed |= {"buy now", "back to search", "next >", "< prev"}
    for page, prompt, response in played:
        assert response[0] in fixed and response[-1] in fixed
        assert {word.lstrip() for word in response} <= {word.lstrip() for word in prompt} | fixed, page
        if page != "search" or prompt[: len(response) - 2] == response[1:-1]:
            assert {*response} <= {*prompt} | fixed, page


@given(st.text().filter(lambda text: "\0" not in text))
def test_plain_responses_are_taken_as_they_are(text: str) -> None:
    parsed = VerbatimParser().parse(text)
    assert (parsed.action, parsed.format_ok) == (text, True)
    assert VerbatimParser().respond(text, "thoughts") == text


@pytest.mark.parametrize("text", ["a\0b", "x" * (MAX_RESPONSE_LENGTH + 1)])
def test_unreadable_responses_are_malformed(text: str) -> None:
    parsed = VerbatimParser().parse(text)
    assert parsed.action is None and parsed.problem and not parsed.format_ok

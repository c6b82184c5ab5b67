from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.prompts import PromptContext, PromptTemplate, RunningTemplate
from spear_envs.search.grammar import SearchParser, render_information
from spear_envs.search.prompts import (
    INVALID_ACTION,
    LAST_TURN,
    SEARCH_R1,
    TEXTS,
    CompactSearchTemplate,
    SearchTemplate,
    make_templates,
)

OSLO = {"id": "1", "contents": '"Oslo"\nOslo is a city.\nIt is old.'}
PRESS = {"id": "2", "contents": '"Jade Press"\nThe Jade Press is a company.'}
BRIDGE = {"id": "3", "contents": '"Bridge"\nCrossed by trams.'}
FIRST = PromptContext("Who built it", "Question: Who built it", None, (), 1, 32)


def test_all_templates() -> None:
    templates = make_templates(SearchParser(), 5)
    assert set(templates) == {"default", "search_r1", "compact", "tools"}
    assert make_templates(SearchParser(), 5, SEARCH_R1)["default"].name == SEARCH_R1
    for name, template in templates.items():
        assert isinstance(template, PromptTemplate) and template.name == name and template.system() is None
        assert isinstance(template, RunningTemplate) == (name not in ("compact", "tools"))
        assert "Who built it" in template.render(FIRST)


def test_the_slots() -> None:
    text = SearchTemplate(topk=7).render(replace(FIRST, max_turns=19))
    assert "The 7 best passages" in text and "at most 19 turns" in text and text.endswith("Question: Who built it")
    for tag in ("<think>", "<search>", "<answer>", "<information>"):
        assert tag in text


@pytest.mark.parametrize("question", ["Who {built} it?", "100 % of what?", "{question}", "{0}"])
def test_questions_with_braces_stay_as_they_are(question: str) -> None:
    for name in TEXTS:
        assert question in SearchTemplate(name).render(replace(FIRST, instruction=question))


def test_search_r1_asks_with_a_question_mark() -> None:
    template = SearchTemplate("search_r1")
    assert "Question: Who built it?\n" in template.render(FIRST)
    assert "Question: Who built it?\n" in template.render(replace(FIRST, instruction=" Who built it? "))
    assert "<answer> Beijing </answer>" in template.render(FIRST)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_search_r1_s_words_are_its_own_to_the_letter() -> None:
    """SHA-256 of what Search-R1's make_prefix and execute_predictions give (commit a14dc3a)."""
    template = SearchTemplate(SEARCH_R1)
    assert digest(template.render(FIRST)) == "a7f315a4bce989e108c09920b43b87d71208ef5cb2a2c0e28b2d516d2dc05b9d"
    after_invalid = template.follow_up(replace(FIRST, observation=INVALID_ACTION, turn=2))
    assert digest(after_invalid) == "2b4e05101bcbf539265251f74e7730289cf105d94dff9a05193061e9b0f050ba"


def test_a_single_turn_is_told_to_be_the_last() -> None:
    template = SearchTemplate()
    assert LAST_TURN in template.render(replace(FIRST, max_turns=1))
    assert LAST_TURN not in template.render(FIRST)
    assert LAST_TURN not in SearchTemplate(SEARCH_R1).render(replace(FIRST, max_turns=1))


def test_blank_lines_stand_around_what_follows() -> None:
    shown = render_information([OSLO], 1000)
    template = SearchTemplate()
    assert template.follow_up(replace(FIRST, observation=shown, turn=2)) == f"\n\n{shown}\n\n"
    assert template.stop_strings == ("</search>", "</answer>")


def test_a_prompt_for_each_turn_shows_the_turns_before() -> None:
    one, two, three = (render_information([OSLO], 1000), render_information([PRESS], 1000), "oops")
    history = [("Question: Who built it", "<search>a</search>"), (one, "<search>b</search>"), (two, "(nothing)")]
    context = replace(FIRST, observation=three, history=history, turn=4)
    text = SearchTemplate().render(context)
    assert text.endswith(
        f"Question: Who built it\n\n<search>a</search>\n\n{one}\n\n<search>b</search>\n\n{two}\n\n(nothing)\n\n{three}"
    )
    cut = SearchTemplate().render(replace(context, history=history[1:]))
    assert "(1 earlier turns are not shown.)" in cut and "<search>a</search>" not in cut


def test_the_compact_form() -> None:
    template = CompactSearchTemplate()
    assert template.render(FIRST) == " Who built it\n#"
    shown = render_information([OSLO, PRESS, BRIDGE], 1000)
    expected = "\n> Oslo is a city. It is old.\n> The Jade Press is a company.\n> Bridge: Crossed by trams.\n#"
    assert template.follow_up(replace(FIRST, observation=shown, turn=2)) == expected
    assert template.follow_up(replace(FIRST, observation=render_information([], 1000))) == "\n>\n#"
    assert template.follow_up(replace(FIRST, observation="It is empty.")) == "\n!\n#"
    history = [("x", "<search>a</search>")]
    assert template.render(replace(FIRST, observation=shown, history=history, turn=2)) == (
        f" Who built it\n#<think></think><search> a</search>{expected}"
    )


@given(st.sampled_from(["search", "answer"]), st.text(st.characters(exclude_characters="<>")).map(str.strip))
def test_compact_responses_are_read_as_they_were_meant(kind: str, content: str) -> None:
    if content:
        action = f"<{kind}>{content}</{kind}>"
        parsed = SearchParser().parse(CompactSearchTemplate().respond(action))
        assert (parsed.action, parsed.format_ok) == (action, True)

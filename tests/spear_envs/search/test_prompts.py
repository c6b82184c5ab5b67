from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.prompts import PromptContext, PromptTemplate, RunningTemplate
from spear_envs.search.grammar import SearchParser
from spear_envs.search.prompts import (
    INVALID_ACTION,
    SEARCH_R1,
    TEXTS,
    CompactSearchTemplate,
    SearchTemplate,
    make_templates,
)

FIRST = PromptContext("Who built it", "Question: Who built it", None, (), 1, 32)


def test_all_templates() -> None:
    templates = make_templates(SearchParser(), 5)
    assert set(templates) == {"default", "search_r1", "compact", "tools"}
    assert make_templates(SearchParser(), 5, SEARCH_R1)["default"].name == SEARCH_R1
    for name, template in templates.items():
        assert isinstance(template, PromptTemplate) and template.name == name and template.system() is None
        assert isinstance(template, RunningTemplate) == (name not in ("compact", "tools"))
        assert "Who built it" in template.render(FIRST)


@pytest.mark.parametrize("question", ["Who {built} it?", "100 % of what?", "{question}", "{0}"])
def test_questions_with_braces_stay_as_they_are(question: str) -> None:
    for name in TEXTS:
        assert question in SearchTemplate(name).render(replace(FIRST, instruction=question))


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_search_r1_s_words_are_its_own_to_the_letter() -> None:
    """SHA-256 of what Search-R1's make_prefix and execute_predictions give (commit a14dc3a)."""
    template = SearchTemplate(SEARCH_R1)
    assert digest(template.render(FIRST)) == "a7f315a4bce989e108c09920b43b87d71208ef5cb2a2c0e28b2d516d2dc05b9d"
    after_invalid = template.follow_up(replace(FIRST, observation=INVALID_ACTION, turn=2))
    assert digest(after_invalid) == "2b4e05101bcbf539265251f74e7730289cf105d94dff9a05193061e9b0f050ba"


@given(st.sampled_from(["search", "answer"]), st.text(st.characters(exclude_characters="<>")).map(str.strip))
def test_compact_responses_are_read_as_they_were_meant(kind: str, content: str) -> None:
    if content:
        action = f"<{kind}>{content}</{kind}>"
        parsed = SearchParser().parse(CompactSearchTemplate().respond(action))
        assert (parsed.action, parsed.format_ok) == (action, True)

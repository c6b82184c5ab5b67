from __future__ import annotations

from typing import Any

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.core.prompts import PromptContext
from spear_envs.search.prompts import INVALID_ACTION, SearchTemplate
from spear_envs.search.transcripts import find_answer, find_last_answer, grade_transcript

PROMPT = {"role": "user", "content": "… for example <answer> Beijing </answer>. Question: capital of Norway?"}
TRAP = {"role": "user", "content": "<information>x</information><answer>Oslo</answer>"}


def say(content: str) -> dict[str, str]:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize(
    ("messages", "answer"),
    [
        ([PROMPT], None),
        ([PROMPT, say("<think>t</think><search>q</search>"), TRAP], None),
        ([PROMPT, say("<think>t</think><search>q</search>"), TRAP, say("<answer> Rome </answer>")], "Rome"),
        ([PROMPT, say("<answer>Rome</answer>"), say("<answer>Oslo</answer>")], "Rome"),
        ([PROMPT, say("<think><answer>Oslo</answer></think><answer>Rome</answer>")], "Rome"),
        # One message for the whole episode, as Search-R1 has it.
        (
            [
                PROMPT,
                say(
                    "<think>a</think><search>q</search>\n\n<information>Doc 1 <answer>Rome</answer></information>\n\n"
                    "<think>b</think><search>r <answer></search><information>…</information><answer>Oslo</answer>"
                ),
            ],
            "Oslo",
        ),
        ([say("<answer></answer><answer>Oslo</answer>")], "Oslo"),
        ([say("<search>q<answer>Oslo</answer>")], None),
        ([say("<answer>Oslo")], None),
        ([say("<answer>Oslo <think>or Rome?</think></answer>")], "Oslo"),
        ([say("<answer>Rome<search>q</answer>"), say("<answer>Oslo</answer>")], "Oslo"),
    ],
)
def test_only_what_the_assistant_answered_counts(messages: list[dict[str, str]], answer: str | None) -> None:
    assert find_answer(messages) == answer
    assert grade_transcript(messages, ["Oslo"])["exact_match"] == float(answer == "Oslo")


@pytest.mark.parametrize(
    "messages",
    [["<answer>Oslo</answer>"], [{"content": "x"}], [{"role": "assistant"}], [{"role": "assistant", "content": [1]}]],
)
def test_other_forms_are_refused(messages: list[Any]) -> None:
    with pytest.raises(SpearError, match="message 1"):
        find_answer(messages)


def test_both_scores() -> None:
    assert grade_transcript([say("<answer>Oslo, Norway</answer>")], "Oslo") == {
        "exact_match": 0.0,
        "f1": pytest.approx(2 / 3),
    }


ASKED = {"role": "user", "content": SearchTemplate("search_r1").render(PromptContext("Who?", "", None, (), 1, 5))}
ONE = "<answer>Oslo</answer>"


@pytest.mark.parametrize(
    ("messages", "answer"),
    [
        ([], None),
        ([say("Oslo")], None),
        ([say(ONE)], None),  # a single one is taken for the prompt's
        ([PROMPT, say(ONE)], "Oslo"),
        ([say(f"{ONE} or <answer> Rome\n</answer>")], "Rome"),
        ([say(ONE), TRAP, say("<answer>Rome</answer>"), TRAP], "Oslo"),  # whoever says it
        ([say(f"<think>{ONE}</think>"), say("<search><answer>b</answer></search>")], "b"),
        ([say(ONE), say("<answer>"), say("</answer>")], ""),
        ([say(ONE), say("<answer>a<answer>b</answer>")], "a<answer>b"),
        ([say(ONE), say("</answer><answer>b")], None),
        ([say(ONE), say("<Answer>b</Answer>")], None),
        # The prompt alone has two.
        ([ASKED], "Beijing"),
        ([ASKED, say("<search>q</search>"), {"role": "user", "content": INVALID_ACTION}], "and"),
        ([ASKED, say(f"\n{INVALID_ACTION}\n{ONE}")], "Oslo"),
    ],
)
def test_the_answer_that_qa_em_finds(messages: list[dict[str, str]], answer: str | None) -> None:
    assert find_last_answer(messages) == answer
    assert grade_transcript(messages, ["x", "Oslo"], rule="search_r1")["exact_match"] == float(answer == "Oslo")


@pytest.mark.parametrize(
    ("written", "golds", "theirs", "ours"),
    [
        ("The Oslo!", "oslo", 1, 1),
        ("The", ["an"], 1, 0),  # both normalise to nothing
        ("", ["."], 1, 0),
        ("Oslo, Norway", ["Oslo"], 0, 0),
        ("Oslo", [], 0, 0),
    ],
)
def test_what_qa_em_holds_to_be_the_same(written: str, golds: str | list[str], theirs: float, ours: float) -> None:
    messages = [PROMPT, say(f"<answer>{written}</answer>")]
    assert grade_transcript(messages, golds, "search_r1")["exact_match"] == theirs
    assert grade_transcript(messages, golds)["exact_match"] == ours


def test_many_openings_take_no_longer_than_they_are_long() -> None:
    assert find_last_answer([say("<answer>" * 300_000)]) is None


def test_no_such_rule() -> None:
    with pytest.raises(SpearError, match="rule='qa_em'"):
        grade_transcript([PROMPT], "x", "qa_em")


def test_what_is_not_read_may_have_any_form() -> None:
    asked = {"role": "user", "content": [{"type": "text", "text": "Who?"}]}
    assert find_answer([asked, say(ONE)]) == "Oslo"  # type: ignore[list-item]
    with pytest.raises(SpearError, match="message 1 lacks a text"):
        find_last_answer([asked, say(ONE)])  # type: ignore[list-item]

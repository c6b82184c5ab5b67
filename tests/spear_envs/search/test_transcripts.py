from __future__ import annotations

from typing import Any

import pytest

from spear_envs.core.errors import SpearError
from spear_envs.search.transcripts import find_answer, grade_transcript

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

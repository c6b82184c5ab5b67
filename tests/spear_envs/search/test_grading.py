"""Answers against references, transcripts, the embedded knowledge base, and prompts."""

import hashlib
import string
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.bm25.index import SearchIndex
from spear_envs.core.errors import SpearError
from spear_envs.core.prompts import PromptContext
from spear_envs.search.embedded import SPLITS, BaseSize, KnowledgeBase, open_base
from spear_envs.search.grading import (
    exact_match,
    f1_score,
    find_answer,
    find_last_answer,
    grade_transcript,
    normalize_answer,
)
from spear_envs.search.grammar import SearchParser
from spear_envs.search.prompts import (
    INVALID_ACTION,
    SEARCH_R1,
    TEXTS,
    CompactSearchTemplate,
    SearchTemplate,
)

ANSWERS = st.text(st.sampled_from("abthe ANnoyes-.'é"), max_size=12)


def test_normal_forms_are_the_recorded_ones(golden: Callable[[str], list[dict[str, Any]]]) -> None:
    cases = golden("normalize")
    assert len(cases) == 30
    assert {case["id"]: normalize_answer(case["text"]) for case in cases} == {
        case["id"]: case["normalized"] for case in cases
    }


def test_scores_are_the_recorded_ones(golden: Callable[[str], list[dict[str, Any]]]) -> None:
    cases = golden("grading")
    assert len(cases) == 86
    for case in cases:
        assert exact_match(case["prediction"], case["golds"]) == case["exact_match"], case
        assert f1_score(case["prediction"], case["golds"]) == pytest.approx(case["f1"], abs=1e-6), case


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("twenty-one", "twentyone"),
        ("x-the-y", "xthey"),
        ("“Hamlet”", "“hamlet”"),
        ("The  Theatre", "theatre"),
        ("İ", "i̇"),
        ("an a the", ""),
        (string.punctuation, ""),
    ],
)
def test_the_order_is_squad_s(text: str, normal: str) -> None:
    assert normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("prediction", "golds", "exact", "f1"),
    [
        ("yes it is", ["yes"], 0, 0),
        ("no", ["no"], 1, 1),
        ("the the", ["The The"], 1, 1),
        ("", ["The The"], 0, 0),
        ("", [""], 0, 0),
        ("a", ["the"], 0, 0),
        ("1 000", ["1000"], 0, 0),
        ("b b", ["b a b c"], 0, 0.8),
        ("x", [], 0, 0),
        (None, ["x"], 0, 0),
        ("x", "x", 1, 1),
        ("x", {"target": ["y", "x"]}, 1, 1),
        ("target", {"target": "x"}, 0, 0),
    ],
)
def test_hard_cases(prediction: str | None, golds: Any, exact: float, f1: float) -> None:
    assert exact_match(prediction, golds) == exact
    assert f1_score(prediction, golds) == pytest.approx(f1)


@given(ANSWERS, st.lists(ANSWERS, max_size=3))
def test_scores_agree_with_each_other(prediction: str, golds: list[str]) -> None:
    exact, f1 = exact_match(prediction, golds), f1_score(prediction, golds)
    assert exact in (0.0, 1.0) and 0.0 <= f1 <= 1.0
    assert f1 == 1.0 or exact == 0.0
    assert exact_match(prediction, [*golds, prediction]) == float(bool(prediction.strip()))
    assert f1_score(prediction, golds) == max((f1_score(prediction, gold) for gold in golds), default=0.0)
    assert exact_match(prediction, golds[::-1]) == exact


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
        # Only the first element of a response is played.
        ([say("<search>q</search><answer>Rome</answer>"), TRAP, say("<answer>Oslo</answer>")], "Oslo"),
        ([say("<search>q</search><answer>Rome</answer><information>x</information><answer>Oslo</answer>")], "Oslo"),
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


@pytest.fixture(scope="module", params=list(BaseSize))
def base(request: pytest.FixtureRequest) -> KnowledgeBase:
    return open_base(request.param)


@pytest.fixture(scope="module")
def index(base: KnowledgeBase) -> SearchIndex:
    return SearchIndex.in_memory(document["contents"] for document in base.corpus)


def contents(base: KnowledgeBase, ids: list[str]) -> list[str]:
    return [base.corpus[int(number)]["contents"] for number in ids]


# ---------------------------------------------------------------- size and form


# ---------------------------------------------------------------- what questions promise


def test_splits_share_nothing(base: KnowledgeBase) -> None:
    def collect(split: str) -> dict[str, set[str]]:
        questions = base.questions[split]
        titles = {text.partition("\n")[0].strip('"') for q in questions for text in contents(base, q.gold_passages)}
        return {
            "questions": {question.question for question in questions},
            "passages": {passage for question in questions for passage in question.gold_passages},
            "answers": {normalize_answer(gold) for question in questions for gold in question.golden_answers},
            "names": titles | {gold for question in questions for gold in question.golden_answers},
        }

    parts = {split: collect(split) for split in SPLITS}
    for one, other in combinations(SPLITS, 2):
        for what, members in parts[one].items():
            assert not members & parts[other][what], (one, other, what)
    for question in base.questions["test"]:
        named = [name for name in parts["train"]["names"] if name.lower() in question.question.lower()]
        assert not named, question
    assert all(len(part["questions"]) == len(base.questions[split]) for split, part in parts.items())


# ---------------------------------------------------------------- the same everywhere, and at once


FIRST = PromptContext("Who built it", "Question: Who built it", None, (), 1, 32)


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

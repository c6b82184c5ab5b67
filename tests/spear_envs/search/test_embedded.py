"""The embedded knowledge base: what its questions promise, checked with searches over its passages."""

from __future__ import annotations

from itertools import combinations

import pytest

from spear_envs.bm25.index import SearchIndex
from spear_envs.core.errors import SpearError
from spear_envs.search.embedded import SPLITS, BaseSize, KnowledgeBase, Question, open_base
from spear_envs.search.grading import exact_match, normalize_answer


@pytest.fixture(scope="module", params=list(BaseSize))
def base(request: pytest.FixtureRequest) -> KnowledgeBase:
    return open_base(request.param)


@pytest.fixture(scope="module")
def index(base: KnowledgeBase) -> SearchIndex:
    return SearchIndex.in_memory(document["contents"] for document in base.corpus)


def all_questions(base: KnowledgeBase) -> list[Question]:
    return [question for split in SPLITS for question in base.questions[split]]


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


def test_the_expert_answers_all(base: KnowledgeBase) -> None:
    for question in all_questions(base):
        assert exact_match(question.golden_answers[0], question.golden_answers) == 1.0


# ---------------------------------------------------------------- the same everywhere, and at once


def test_unknown_size_names_the_valid_ones() -> None:
    with pytest.raises(SpearError, match="'standard', 'small'"):
        open_base("large")

"""The embedded knowledge base: what its questions promise, checked with searches over its passages."""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations

import pytest

from spear_envs.bm25.index import SearchIndex
from spear_envs.core.errors import SpearError
from spear_envs.search.embedded import SPLITS, BaseSize, KnowledgeBase, Question, open_base
from spear_envs.search.grading import exact_match, normalize_answer

TOPK = 3


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


def find(base: KnowledgeBase, index: SearchIndex, query: str) -> list[str]:
    return [base.corpus[row]["id"] for row in index.search(query, TOPK)]


def names_answer(question: Question, text: str) -> bool:
    found = f" {normalize_answer(text)} "
    return any(f" {normalize_answer(gold)} " in found for gold in question.golden_answers)


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


# ---------------------------------------------------------------- size and form


def test_passages_have_the_form_of_wiki_18_and_are_unique(base: KnowledgeBase) -> None:
    assert [document["id"] for document in base.corpus] == [str(row) for row in range(len(base.corpus))]
    assert all(re.fullmatch(r'"[^"\n]+"\n[^"\n]+\.', document["contents"]) for document in base.corpus)
    assert len({document["contents"] for document in base.corpus}) == len(base.corpus)
    titles = [document["contents"].partition("\n")[0] for document in base.corpus]
    assert len(set(titles)) == len(titles)


def test_hop_counts_take_turns(base: KnowledgeBase) -> None:
    for split in SPLITS:
        hops = [question.hops for question in base.questions[split]]
        assert hops == [1, 2, 3] * (len(hops) // 3)
        assert [question.id for question in base.questions[split]] == [f"{split}/{i:05d}" for i in range(len(hops))]
    for question in all_questions(base):
        assert question.hops == len(question.gold_passages) == len(set(question.gold_passages))
        assert question.hops == len(question.oracle_queries)
        assert question.golden_answers and all(gold == gold.strip() != "" for gold in question.golden_answers)


def test_small_base_has_few_words_and_all_of_them_in_its_training_questions() -> None:
    base = open_base(BaseSize.SMALL)
    known: set[str] = set()
    for question in base.questions["train"]:
        known |= words(question.question).union(*map(words, contents(base, question.gold_passages)))
    assert len(known) < 250
    for question in all_questions(base):
        seen = words(question.question).union(*map(words, contents(base, question.gold_passages)))
        assert seen <= known


# ---------------------------------------------------------------- what questions promise


def test_gold_path_can_be_walked(base: KnowledgeBase, index: SearchIndex) -> None:
    for question in all_questions(base):
        for passage, query in zip(question.gold_passages, question.oracle_queries, strict=True):
            assert passage in find(base, index, query), question


def test_queries_use_only_what_has_been_read(base: KnowledgeBase) -> None:
    for question in all_questions(base):
        read = words(question.question)
        for query, text in zip(question.oracle_queries, contents(base, question.gold_passages), strict=True):
            assert words(query) <= read, question
            read |= words(text)


def test_only_the_last_gold_passage_holds_an_answer(base: KnowledgeBase) -> None:
    for question in all_questions(base):
        *earlier, last = contents(base, question.gold_passages)
        assert names_answer(question, last), question
        assert not any(names_answer(question, text) for text in [question.question, *earlier]), question


def test_one_search_answers_one_hop_only(base: KnowledgeBase, index: SearchIndex) -> None:
    enough = Counter[int]()
    for question in all_questions(base):
        found = contents(base, find(base, index, question.question))
        enough[question.hops] += any(names_answer(question, text) for text in found)
    assert enough[1] == len(all_questions(base)) / 3
    assert enough[2] == enough[3] == 0


def test_questions_about_namesakes_say_who_is_meant(base: KnowledgeBase) -> None:
    shared = {
        match[1]: match[2]
        for document in base.corpus
        if (match := re.match(r'"([^"]+) \(([^)]+)\)"', document["contents"]))
    }
    for question in all_questions(base):
        for name, label in shared.items():
            if name in question.question:
                start = question.question.index(name)
                said = question.question[:start].split()[-1]
                assert said != label and said.islower() and said != "the", question


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

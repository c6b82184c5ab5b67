"""Making a knowledge base."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from spear_envs.core.dice import Dice
from spear_envs.core.errors import SpearError, choose_member
from spear_envs.search.mini_kb.entities import Entity
from spear_envs.search.mini_kb.judging import choose_judge
from spear_envs.search.mini_kb.names import InventedNames, Namer, PairedNames
from spear_envs.search.mini_kb.passages import write_passages
from spear_envs.search.mini_kb.questions import HOPS, Draft, Judge, ask_questions
from spear_envs.search.mini_kb.sizes import PLANS, SPLITS, BaseSize, Shares
from spear_envs.search.mini_kb.wording import WORDINGS, Wording
from spear_envs.search.mini_kb.world import World, draw_world


@dataclass(frozen=True)
class Question:
    """A question with its answers and the passages that lead to them."""

    id: str
    """``<split>/<number>``, such as ``test/00017``."""
    question: str
    golden_answers: list[str]
    """The answer's name, then its aliases."""
    hops: int
    """Passages that must be read one after the other: 1, 2 or 3."""
    gold_passages: list[str]
    """Ids of these passages, in order; the last one contains a golden answer."""
    oracle_queries: list[str]
    """A query that finds each passage, made of words of the question and the earlier passages."""


@dataclass(frozen=True)
class KnowledgeBase:
    """A corpus and questions about it. Do not change it: callers of ``build`` share it."""

    size: BaseSize
    seed: int
    corpus: list[dict[str, str]]
    """``{"id": "17", "contents": '"Title"\\ntext'}``; the id is the row."""
    questions: Mapping[str, list[Question]]
    """By split: ``train``, ``valid``, ``test``. One, two and three hops alternate, so any beginning is balanced."""


def build(seed: int = 0, size: BaseSize | str = BaseSize.STANDARD) -> KnowledgeBase:
    """Return the knowledge base of a seed: the same bytes on any machine, made in a fraction of a second.

    It is cached: all callers share one.

    Args:
        seed: any whole number; tasks and published numbers are of seed 0.
        size: ``"standard"`` or ``"small"``.

    Raises:
        SpearError: ``seed`` is not a whole number, or the size is unknown.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise SpearError(f"seed={seed!r}: give a whole number.")
    return _remember_base(seed, choose_member(BaseSize, size, "size"))


@lru_cache(maxsize=4)
def _remember_base(seed: int, size: BaseSize) -> KnowledgeBase:
    return make_base(seed, size, choose_judge)


def make_base(seed: int, size: BaseSize, find_judge: Callable[[Sequence[str], BaseSize], Judge]) -> KnowledgeBase:
    """Make a knowledge base, uncached.

    Args:
        find_judge: returns the judge for a corpus and a size, which decides which drafts become questions.
    """
    plan, wording = PLANS[size], WORDINGS[size]
    namer: Namer = PairedNames(seed) if size is BaseSize.SMALL else InventedNames()
    worlds = {
        split: draw_world(plan.entities[split], plan.shares, namer, Dice(size.value, seed, split, "world"))
        for split in SPLITS
    }
    contents = _write_corpus(worlds, wording, plan.shares, namer, Dice(size.value, seed, "corpus"))
    is_sound = find_judge(contents, size)
    questions = {}
    for split, world in worlds.items():
        drafts = []
        for hops in HOPS:
            dice = Dice(size.value, seed, split, "questions", hops)
            drafts.append(ask_questions(world, wording, hops, plan.questions[split], is_sound, dice))
        in_turn = chain.from_iterable(zip(*drafts, strict=True))
        questions[split] = [_finish(draft, f"{split}/{number:05d}") for number, draft in enumerate(in_turn)]
    corpus = [{"id": str(row), "contents": text} for row, text in enumerate(contents)]
    return KnowledgeBase(size, seed, corpus, questions)


def _write_corpus(worlds: dict[str, World], wording: Wording, shares: Shares, namer: Namer, dice: Dice) -> list[str]:
    """Write the passages of all worlds in random order; set each entity's row."""
    passages: list[tuple[str, Entity | None]] = [
        (f'"{title}"\n{text}', entity)
        for world in worlds.values()
        for title, text, entity in write_passages(world, wording, shares, namer, dice)
    ]
    passages = dice.sample(passages, len(passages))
    for row, (_, entity) in enumerate(passages):
        if entity is not None:
            entity.row = row
    return [contents for contents, _ in passages]


def _finish(draft: Draft, number: str) -> Question:
    return Question(
        id=number,
        question=draft.text,
        golden_answers=draft.answer.answers,
        hops=len(draft.path),
        gold_passages=[str(entity.row) for entity in draft.path],
        oracle_queries=list(draft.queries),
    )

"""Making a knowledge base."""

from __future__ import annotations

from itertools import chain

from base.entities import Entity
from base.judging import SearchingJudge
from base.names import InventedNames, Namer, PairedNames
from base.passages import write_passages
from base.questions import HOPS, Draft, ask_questions
from base.sizes import PLANS, Shares
from base.wording import WORDINGS, Wording
from base.world import World, draw_world
from spear_envs.core.dice import Dice
from spear_envs.search.embedded import SPLITS, BaseSize, KnowledgeBase, Question


def make_base(size: BaseSize, seed: int = 0) -> KnowledgeBase:
    """Make a knowledge base, the same on any machine; the shipped ones are of seed 0."""
    plan, wording = PLANS[size], WORDINGS[size]
    namer: Namer = PairedNames(seed) if size is BaseSize.SMALL else InventedNames()
    worlds = {
        split: draw_world(plan.entities[split], plan.shares, namer, Dice(size.value, seed, split, "world"))
        for split in SPLITS
    }
    contents = _write_corpus(worlds, wording, plan.shares, namer, Dice(size.value, seed, "corpus"))
    is_sound = SearchingJudge(contents)
    questions = {}
    for split, world in worlds.items():
        drafts = []
        for hops in HOPS:
            dice = Dice(size.value, seed, split, "questions", hops)
            drafts.append(ask_questions(world, wording, hops, plan.questions[split], is_sound, dice))
        in_turn = chain.from_iterable(zip(*drafts, strict=True))
        questions[split] = [_finish(draft, f"{split}/{number:05d}") for number, draft in enumerate(in_turn)]
    corpus = [{"id": str(row), "contents": text} for row, text in enumerate(contents)]
    return KnowledgeBase(corpus, questions)


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

"""Questions of one world: chains of relations in words, kept if they need the searches they are made for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from spear_envs.core.dice import Dice
from spear_envs.search.mini_kb.entities import LINKS, Entity, Kind, Relation
from spear_envs.search.mini_kb.wording import Phrase, Wording
from spear_envs.search.mini_kb.world import World

__all__ = ["HOPS", "Chain", "ask_questions", "list_chains"]

HOPS = (1, 2, 3)
TOPK = 3
"""Passages of a search; the environment's default."""
WALKED = 2
"""How far up a query must bring its passage: one place less than ``TOPK`` leaves room for other rankings."""
Find = Callable[[str, int], Sequence[int]]
"""A search: query and number of hits in, rows out."""
Chain = tuple[Kind, tuple[Relation, ...]]
"""Kind of the entity that a question names, and the relations that lead to the answer."""


@dataclass(frozen=True)
class Draft:
    """A question that has not got its number yet."""

    text: str
    path: tuple[Entity, ...]
    """The entities whose passages have to be read, in order."""
    answer: Entity
    queries: tuple[str, ...]


def list_chains(hops: int) -> list[Chain]:
    """All chains of so many relations."""

    def extend(kind: Kind, length: int) -> Iterator[tuple[Relation, ...]]:
        if length == 0:
            yield ()
            return
        for relation, target in LINKS[kind]:
            yield from ((relation, *rest) for rest in extend(target, length - 1))

    return [(kind, relations) for kind in Kind for relations in extend(kind, hops)]


def ask_questions(
    world: World, wording: Wording, hops: int, count: int, texts: Sequence[str], find: Find, dice: Dice
) -> list[Draft]:
    """Up to ``count`` questions, the chains in turn.

    A question is kept if each of its queries finds the passage it is for, if its answer is named neither in the
    question nor in a passage before the last, and if a search with the question itself is enough for one hop and brings
    no name of the answer for more. A query takes its words from the question and the passages read before.

    Args:
        world: of one split, with passages.
        wording: of the questions.
        hops: relations of each.
        count: how many are wanted.
        texts: the corpus, in lower case.
        find: BM25 over the corpus.
        dice: of these questions.
    """
    chains = list_chains(hops)
    starts = [iter(dice.sample(world[kind], len(world[kind]))) for kind, _ in chains]
    kept: list[Draft] = []
    open_chains = list(zip(chains, starts, strict=True))
    while open_chains and len(kept) < count:
        for chain in tuple(open_chains):
            (_, relations), entities = chain
            drafts = (_ask(entity, relations, wording, texts, find, dice) for entity in entities)
            draft = next(filter(None, drafts), None)
            if draft is None:
                open_chains.remove(chain)
            elif len(kept) < count:
                kept.append(draft)
    return kept


def _ask(
    start: Entity, relations: Sequence[Relation], wording: Wording, texts: Sequence[str], find: Find, dice: Dice
) -> Draft | None:
    """The question about one entity, or None if there is none to keep."""
    path, surfaces, here = [], [start.full_name], start
    for relation in relations:
        if relation not in here.links:
            return None
        path.append(here)
        surfaces.append(here.mentions[relation])
        here = here.links[relation]
        if here in path:
            return None
    phrases = [dice.pick(wording.inner[relation]) for relation in relations[:-1]]
    phrases.append(dice.pick(wording.last[relations[-1]]))
    text = start.full_name
    for phrase in phrases:
        text = phrase.text.format(text)
    draft = Draft(text, tuple(path), here, tuple(map(_word_query, surfaces, phrases)))
    return draft if _is_sound(draft, texts, find) else None


def _word_query(surface: str, phrase: Phrase) -> str:
    return f"{surface.removeprefix('the ')} {phrase.hint}".rstrip()


def _is_sound(draft: Draft, texts: Sequence[str], find: Find) -> bool:
    answers = [answer.lower() for answer in draft.answer.answers]

    def names_answer(text: str) -> bool:
        return any(answer in text for answer in answers)

    if names_answer(draft.text.lower()) or any(names_answer(texts[entity.row]) for entity in draft.path[:-1]):
        return False
    if any(entity.row not in find(query, WALKED) for entity, query in zip(draft.path, draft.queries, strict=True)):
        return False
    found = find(draft.text, TOPK)
    if len(draft.path) == 1:
        return draft.path[0].row in found
    return not any(names_answer(texts[row]) for row in found)

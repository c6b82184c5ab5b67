"""Questions of one world: chains of relations in words."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from base.entities import LINKS, Entity, Kind, Relation
from base.wording import Wording
from base.world import World
from spear_envs.core.dice import Dice

HOPS = (1, 2, 3)
Chain = tuple[Kind, tuple[Relation, ...]]
"""Kind of the entity that a question names, and the relations that lead to the answer."""


@dataclass(frozen=True)
class Draft:
    """A question without its number."""

    text: str
    path: tuple[Entity, ...]
    """The entities whose passages must be read, in order."""
    answer: Entity
    queries: tuple[str, ...]
    """A query for each passage, made of words of the question and the earlier passages."""


Judge = Callable[[Draft], bool]
"""Decides whether a draft is kept."""


def list_chains(hops: int) -> list[Chain]:
    """List all chains of ``hops`` relations."""

    def extend(kind: Kind, length: int) -> Iterator[tuple[Relation, ...]]:
        if length == 0:
            yield ()
            return
        for relation, target in LINKS[kind]:
            yield from ((relation, *rest) for rest in extend(target, length - 1))

    return [(kind, relations) for kind in Kind for relations in extend(kind, hops)]


def ask_questions(world: World, wording: Wording, hops: int, count: int, is_sound: Judge, dice: Dice) -> list[Draft]:
    """Draft up to ``count`` questions, the chains in turn.

    Args:
        hops: relations of each question.
        is_sound: called with each draft, in a fixed order.
    """
    chains = list_chains(hops)
    starts = [iter(dice.sample(world[kind], len(world[kind]))) for kind, _ in chains]
    kept: list[Draft] = []
    open_chains = list(zip(chains, starts, strict=True))
    while open_chains and len(kept) < count:
        for chain in tuple(open_chains):
            (_, relations), entities = chain
            drafts = (_draft(entity, relations, wording, dice) for entity in entities)
            draft = next((draft for draft in drafts if draft is not None and is_sound(draft)), None)
            if draft is None:
                open_chains.remove(chain)
                continue
            kept.append(draft)
            if len(kept) == count:
                break
    return kept


def _draft(start: Entity, relations: Sequence[Relation], wording: Wording, dice: Dice) -> Draft | None:
    """Draft the question about one entity; None if its chain breaks off or returns to an entity."""
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
    queries = tuple(
        f"{surface.removeprefix('the ')} {phrase.hint}".rstrip()
        for surface, phrase in zip(surfaces, phrases, strict=False)  # the last surface is the answer
    )
    return Draft(text, tuple(path), here, queries)

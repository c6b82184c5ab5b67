"""Passages of one world: true ones about each entity, and distractors."""

from __future__ import annotations

from collections.abc import Iterator

from base.entities import Entity, Kind, Relation
from base.names import Namer
from base.sizes import Shares
from base.wording import Wording
from base.world import World
from spear_envs.core.dice import Dice

TRIES = 20


def write_passages(
    world: World, wording: Wording, shares: Shares, namer: Namer, dice: Dice
) -> Iterator[tuple[str, str, Entity | None]]:
    """Yield title and text of each passage, and the entity whose facts it gives, or None."""
    for group in world.values():
        for entity in group:
            yield entity.name, _describe(entity, wording, dice), entity
            if entity.has_namesake:
                other = _invent_namesake(entity, world, dice)
                yield f"{other.name} ({other.label})", _describe(other, wording, dice), None
            if entity.kind in wording.distractors and dice.chance(shares.distractors):
                title, text = dice.pick(wording.distractors[entity.kind])
                yield title.format(name=entity.name), text.format(name=entity.name, other=namer.name_nobody(dice)), None


def _describe(entity: Entity, wording: Wording, dice: Dice) -> str:
    alias = entity.aliases[0] if entity.aliases else ""
    opening = dice.pick(wording.openings[entity.kind])
    sentences = [opening.format(name=entity.name, alias=alias, label=entity.label, year=entity.year)]
    it = entity.name.partition(" ")[0]
    for relation in dice.sample(tuple(entity.links), len(entity.links)):
        sentence = dice.pick(wording.facts[relation])
        sentences.append(sentence.format(it=it, x=entity.mentions[relation]))
    return " ".join(sentences)


def _invent_namesake(entity: Entity, world: World, dice: Dice) -> Entity:
    """Invent a namesake with another label, who shares no fact with the entity."""
    labels = sorted({other.label for other in world[entity.kind]} - {entity.label})
    other = Entity(entity.kind, entity.name, ("the Younger",), dice.pick(labels), entity.year + dice.between(3, 40))
    for relation in entity.links:
        false = _pick_other(entity, relation, world, dice)
        if false is not None:
            other.links[relation] = false
            other.mentions[relation] = false.full_name
    return other


def _pick_other(entity: Entity, relation: Relation, world: World, dice: Dice) -> Entity | None:
    true = entity.links[relation]
    for _ in range(TRIES):
        other = dice.pick(world[true.kind])
        if other is not true and other is not entity and (true.kind is not Kind.ORGANISATION or other.label == "Press"):
            return other
    return None

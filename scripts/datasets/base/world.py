"""The world of one split: entities, coherent facts about them, and their names in each other's passages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from base.entities import WITH_NAMESAKES, Entity, Kind, Relation
from base.names import Namer
from base.sizes import Shares
from spear_envs.core.dice import Dice

World = Mapping[Kind, Sequence[Entity]]
TRIES = 12
"""Draws for a fitting person or press; if none fits, the passage omits the fact."""


def draw_world(counts: Mapping[Kind, int], shares: Shares, namer: Namer, dice: Dice) -> World:
    """Draw entities and facts.

    Capitals lie in their countries, teachers are older than their pupils, spouses are married to each other, founders
    and authors are adults, and a press exists before it issues a work.

    Args:
        counts: entities of each kind; at least as many cities as countries.
        shares: probabilities of aliases and namesakes.
        namer: gives names that no other world has.
    """
    kinds = (Kind.COUNTRY, Kind.CITY, Kind.PERSON, Kind.ORGANISATION)
    world = {kind: [namer.name_entity(kind, dice) for _ in range(counts[kind])] for kind in kinds}
    _settle(world, namer, dice)
    _raise_people(world, dice)
    _found_organisations(world, dice)
    world[Kind.WORK] = _write_works(counts[Kind.WORK], world, namer, dice)
    for group in world.values():
        for entity in group:
            entity.has_namesake = entity.kind in WITH_NAMESAKES and dice.chance(shares.namesakes)
    for group in world.values():
        for entity in group:
            for relation, target in entity.links.items():
                entity.mentions[relation] = _mention(target, shares, dice)
    return world


def _mention(entity: Entity, shares: Shares, dice: Dice) -> str:
    if entity.aliases and dice.chance(shares.aliases):
        alias = dice.pick(entity.aliases)
        return f"the {alias}" if entity.kind in (Kind.COUNTRY, Kind.ORGANISATION) else alias
    return entity.full_name if entity.has_namesake else entity.short_name


def _settle(world: Mapping[Kind, list[Entity]], namer: Namer, dice: Dice) -> None:
    countries, cities = world[Kind.COUNTRY], world[Kind.CITY]
    for place, city in enumerate(cities):
        country = countries[place] if place < len(countries) else dice.pick(countries)
        city.links[Relation.COUNTRY] = country
        city.links[Relation.RIVER] = namer.name_entity(Kind.RIVER, dice)
        city.year = dice.between(1100, 1780)
    for country in countries:
        own = [city for city in cities if city.links[Relation.COUNTRY] is country]
        country.links[Relation.CAPITAL] = dice.pick(own)
        country.links[Relation.CURRENCY] = namer.name_entity(Kind.CURRENCY, dice)


def _raise_people(world: Mapping[Kind, list[Entity]], dice: Dice) -> None:
    people = world[Kind.PERSON]
    for person in people:
        person.year = dice.between(1790, 1950)
        person.links[Relation.BIRTHPLACE] = dice.pick(world[Kind.CITY])
    for person in people:
        teacher = _find(people, dice, lambda other, year=person.year: 18 <= year - other.year <= 55)  # type: ignore[misc]
        if teacher is not None:
            person.links[Relation.TEACHER] = teacher
    for person in people:
        if Relation.SPOUSE in person.links:
            continue
        spouse = _find(people, dice, lambda other, person=person: _may_marry(person, other))  # type: ignore[misc]
        if spouse is not None:
            person.links[Relation.SPOUSE], spouse.links[Relation.SPOUSE] = spouse, person


def _may_marry(one: Entity, other: Entity) -> bool:
    return one is not other and Relation.SPOUSE not in other.links and abs(one.year - other.year) <= 15


def _found_organisations(world: Mapping[Kind, list[Entity]], dice: Dice) -> None:
    for organisation in world[Kind.ORGANISATION]:
        founder = dice.pick(world[Kind.PERSON])
        organisation.links[Relation.FOUNDER] = founder
        organisation.links[Relation.SEAT] = dice.pick(world[Kind.CITY])
        organisation.year = founder.year + dice.between(24, 50)


def _write_works(count: int, world: Mapping[Kind, list[Entity]], namer: Namer, dice: Dice) -> list[Entity]:
    presses = [organisation for organisation in world[Kind.ORGANISATION] if organisation.label == "Press"]
    works = []
    for _ in range(count):
        author = dice.pick(world[Kind.PERSON])
        work = namer.name_work(author.label, dice)
        work.links[Relation.AUTHOR] = author
        work.year = author.year + dice.between(22, 60)
        press = _find(presses, dice, lambda other, year=work.year: other.year <= year)  # type: ignore[misc]
        if press is not None:
            work.links[Relation.PUBLISHER] = press
        works.append(work)
    return works


def _find(entities: Sequence[Entity], dice: Dice, fits: Callable[[Entity], bool]) -> Entity | None:
    for _ in range(TRIES if entities else 0):
        entity = dice.pick(entities)
        if fits(entity):
            return entity
    return None

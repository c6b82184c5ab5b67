"""The invented worlds behind the embedded base: facts that fit together, names that nobody bears twice."""

from __future__ import annotations

from itertools import pairwise

import pytest

from spear_envs.bm25.analysis import analyze_word
from spear_envs.core.dice import Dice
from spear_envs.core.errors import SpearError
from spear_envs.search.mini_kb.entities import LINKS, Kind, Relation
from spear_envs.search.mini_kb.names import InventedNames, Namer, PairedNames
from spear_envs.search.mini_kb.passages import write_passages
from spear_envs.search.mini_kb.questions import HOPS, list_chains
from spear_envs.search.mini_kb.sizes import PLANS, SPLITS, BaseSize
from spear_envs.search.mini_kb.wording import WORDINGS
from spear_envs.search.mini_kb.world import World, draw_world


def draw(size: BaseSize) -> tuple[World, Namer, Dice]:
    namer: Namer = PairedNames(5) if size is BaseSize.SMALL else InventedNames()
    dice = Dice("world", size.value)
    plan = PLANS[size]
    return draw_world(plan.entities["test"], plan.shares, namer, dice), namer, dice


@pytest.fixture(scope="module", params=BaseSize)
def world(request: pytest.FixtureRequest) -> World:
    return draw(request.param)[0]


def test_links_lead_to_the_kinds_they_should(world: World) -> None:
    for kind, entities in world.items():
        targets = dict(LINKS[kind])
        for entity in entities:
            assert entity.kind is kind
            assert set(entity.links) <= set(targets)
            assert all(other.kind is targets[relation] for relation, other in entity.links.items())
            assert entity.mentions.keys() == entity.links.keys()


def test_facts_fit_together(world: World) -> None:
    for country in world[Kind.COUNTRY]:
        assert country.links[Relation.CAPITAL].links[Relation.COUNTRY] is country
    for person in world[Kind.PERSON]:
        assert Relation.BIRTHPLACE in person.links
        if Relation.TEACHER in person.links:
            assert person.links[Relation.TEACHER].year <= person.year - 18
        if Relation.SPOUSE in person.links:
            assert person.links[Relation.SPOUSE].links[Relation.SPOUSE] is person is not person.links[Relation.SPOUSE]
    for organisation in world[Kind.ORGANISATION]:
        assert organisation.year >= organisation.links[Relation.FOUNDER].year + 24
    for work in world[Kind.WORK]:
        assert work.year >= work.links[Relation.AUTHOR].year + 22
        if Relation.PUBLISHER in work.links:
            press = work.links[Relation.PUBLISHER]
            assert press.label == "Press" and press.year <= work.year


def test_most_people_have_a_teacher_and_a_spouse(world: World) -> None:
    for relation in (Relation.TEACHER, Relation.SPOUSE):
        assert sum(relation in person.links for person in world[Kind.PERSON]) > 0.7 * len(world[Kind.PERSON])


def test_a_mention_of_somebody_with_a_namesake_says_who_is_meant(world: World) -> None:
    mentioned = [(e.mentions[r], other) for group in world.values() for e in group for r, other in e.links.items()]
    for mention, other in mentioned:
        bare = mention.removeprefix("the ")
        assert bare in other.answers or bare == f"{other.label} {other.name}"
        if other.has_namesake:
            assert bare != other.name


def test_standard_world_calls_many_by_an_alias() -> None:
    world, _, _ = draw(BaseSize.STANDARD)
    mentioned = [(e.mentions[r], other) for group in world.values() for e in group for r, other in e.links.items()]
    with_alias = [(mention, other) for mention, other in mentioned if other.aliases]
    by_alias = sum(mention.removeprefix("the ") in other.aliases for mention, other in with_alias)
    assert 0.3 < by_alias / len(with_alias) < 0.5
    assert any(person.has_namesake for person in world[Kind.PERSON])


def test_an_alias_is_explained_by_its_own_passage_and_no_other() -> None:
    world, namer, dice = draw(BaseSize.STANDARD)
    plan = PLANS[BaseSize.STANDARD]
    passages = list(write_passages(world, WORDINGS[BaseSize.STANDARD], plan.shares, namer, dice))
    entities = [entity for group in world.values() for entity in group]
    for entity in entities:
        for alias in entity.aliases:
            both = [owner for _, text, owner in passages if alias in text and entity.name in text]
            assert entity in both
            # Two who name each other (spouses) are the only ones that may have both, and then as two mentions.
            assert all(other is not None and entity in other.links.values() for other in both if other is not entity)


def test_namesakes_and_distractors_give_no_true_fact() -> None:
    world, namer, dice = draw(BaseSize.STANDARD)
    plan = PLANS[BaseSize.STANDARD]
    by_title = {entity.name: entity for group in world.values() for entity in group}
    namesakes = others = 0
    for title, text, owner in write_passages(world, WORDINGS[BaseSize.STANDARD], plan.shares, namer, dice):
        if owner is not None:
            continue
        namesake = by_title.get(title.rpartition(" (")[0])
        for entity in [namesake] if namesake else [e for e in by_title.values() if e.name in title]:
            assert entity.name in text
            answers = [answer for other in entity.links.values() for answer in other.answers]
            assert not any(f"{answer}." in text for answer in answers)
        namesakes += namesake is not None
        others += namesake is None
    assert namesakes > 30 and others > 100


def test_chains_follow_the_links() -> None:
    assert len(list_chains(1)) == len(Relation)
    for hops in HOPS:
        for kind, relations in list_chains(hops):
            assert len(relations) == hops
            for relation in relations:
                kind = dict(LINKS[kind])[relation]


def test_every_relation_has_its_words() -> None:
    for size, wording in WORDINGS.items():
        assert set(wording.facts) == set(wording.last) == set(Relation), size
        inner = {relation for hops in HOPS for _, relations in list_chains(hops) for relation in relations[:-1]}
        assert inner <= set(wording.inner)
        for phrases in [*wording.last.values(), *wording.inner.values()]:
            assert all(phrase.text.count("{}") == 1 for phrase in phrases)
            assert all(set(phrase.hint.split()) <= set(phrase.text.strip("?").split()) for phrase in phrases)


def test_invented_words_are_never_part_of_another_one() -> None:
    namer, dice = InventedNames(), Dice("names")
    kinds = (Kind.COUNTRY, Kind.CITY, Kind.PERSON, Kind.RIVER)
    names = [answer for _ in range(150) for kind in kinds for answer in namer.name_entity(kind, dice).answers]
    assert len(set(names)) == len(names)
    assert not any(one.lower() in other.lower() for one in names for other in names if one is not other)
    terms = sorted(analyze_word(namer.name_nobody(dice)) for _ in range(500))
    assert all(one != other for one, other in pairwise(terms))


def test_pairs_run_out_with_a_clear_error() -> None:
    namer, dice = PairedNames(0), Dice("names")
    names = [namer.name_entity(Kind.COUNTRY, dice).name for _ in range(48)]
    assert len(set(names)) == 48
    with pytest.raises(SpearError, match="'country' are taken"):
        namer.name_entity(Kind.COUNTRY, dice)


def test_lists_of_pairs_share_no_word() -> None:
    lists = [word for first, second in PairedNames.WORDS.values() for word in (*first.split(), *second.split())]
    assert len(set(lists)) == len(lists)


def test_small_base_asks_for_no_more_names_than_there_are() -> None:
    plan = PLANS[BaseSize.SMALL]
    for kind, (first, second) in PairedNames.WORDS.items():
        wanted = sum(plan.entities[split].get(kind, 0) for split in SPLITS)
        assert wanted <= len(first.split()) * len(second.split())

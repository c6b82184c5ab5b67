"""Phrases of passages and questions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from base.entities import Kind, Relation
from base.sizes import BaseSize


@dataclass(frozen=True)
class Phrase:
    """A piece of a question."""

    text: str
    """With ``{}`` for the entity that it is about."""
    hint: str
    """The words of the text that a query about this relation uses; may be empty."""


@dataclass(frozen=True)
class Wording:
    """All phrasings of one size; one of several is drawn."""

    openings: Mapping[Kind, tuple[str, ...]]
    """First sentence of an entity's passage; slots ``name``, ``alias``, ``label``, ``year``."""
    facts: Mapping[Relation, tuple[str, ...]]
    """One sentence; slots ``it`` (the entity in short) and ``x`` (the target of the relation)."""
    last: Mapping[Relation, tuple[Phrase, ...]]
    """A question that asks for the relation."""
    inner: Mapping[Relation, tuple[Phrase, ...]]
    """The relation as a part of a longer question."""
    distractors: Mapping[Kind, tuple[tuple[str, str], ...]]
    """Title and text without facts; slots ``name`` and ``other``, a name that no entity bears."""


_p = Phrase
_STANDARD = Wording(
    openings={
        Kind.COUNTRY: (
            "{name} is a country, in full the {alias}.",
            "{name}, whose official name is the {alias}, is a country between two seas.",
            "The country of {name} has called itself the {alias} since its second constitution.",
        ),
        Kind.CITY: (
            "{name}, formerly {alias}, is a city that received its charter in {year}.",
            "The city of {name} was chartered in {year} and bore the name {alias} until a fire.",
            "{name} is a city; on old maps it stands as {alias}. Its town rights date from {year}.",
        ),
        Kind.PERSON: (
            "{name}, also called {alias}, was a {label} and came into the world in {year}.",
            "The {label} {name} (born {year}) was known among friends as {alias}.",
            "{name} ({year}) was a {label} whom the newspapers liked to call {alias}.",
        ),
        Kind.ORGANISATION: (
            "The {name}, long styled the {alias}, was founded in {year}.",
            "The {name} was set up in {year}; in its first years it was called the {alias}.",
            "Known to its neighbours as the {alias}, the {name} has existed since {year}.",
        ),
        Kind.WORK: (
            "{name} is a {label} of {year}.",
            "{name}, a {label}, came out in {year}.",
            "The {label} {name} appeared in {year} and has never been out of print.",
        ),
    },
    facts={
        Relation.CAPITAL: (
            "Its capital is {x}.",
            "The seat of government is {x}.",
            "Since the first assembly the capital has been {x}.",
        ),
        Relation.CURRENCY: (
            "Prices are given in the {x}.",
            "The currency in use is the {x}.",
            "Banknotes of the {x} have been its currency for a century.",
        ),
        Relation.COUNTRY: (
            "It is one of the larger towns of the country {x}.",
            "It belongs to {x}, a country it joined by treaty.",
            "After the partition it fell to {x}.",
        ),
        Relation.RIVER: (
            "It lies on the river {x}.",
            "The {x} runs through it.",
            "Two bridges span the river {x} below the market.",
        ),
        Relation.BIRTHPLACE: (
            "{it} was born in {x}.",
            "The birthplace of {it} is {x}.",
            "The house in {x} where {it} was born still stands.",
        ),
        Relation.TEACHER: (
            "{it} was a pupil of {x}.",
            "{it} learned the craft from {x}, a patient teacher.",
            "For six years {it} was taught by {x}.",
        ),
        Relation.SPOUSE: (
            "{it} married {x}.",
            "{it} was the spouse of {x}.",
            "After a long engagement {it} was married to {x}.",
        ),
        Relation.FOUNDER: (
            "Its founder was {x}.",
            "It was the foundation of {x}.",
            "It owes its existence to {x}, who set it up with borrowed money.",
        ),
        Relation.SEAT: (
            "It has its headquarters in {x}.",
            "It is based in {x}.",
            "A brick building in {x} is its seat.",
        ),
        Relation.AUTHOR: (
            "Its author is {x}.",
            "It was written by {x}.",
            "It is the best known work of {x}.",
        ),
        Relation.PUBLISHER: (
            "It was first issued by {x}.",
            "The first edition was published by {x}.",
            "Its publisher was {x}.",
        ),
    },
    last={
        Relation.CAPITAL: (
            _p("What is the capital of {}?", "capital"),
            _p("Which city is the capital of {}?", "capital"),
        ),
        Relation.CURRENCY: (
            _p("Which currency is used in {}?", "currency"),
            _p("In what currency are prices given in {}?", "currency prices"),
        ),
        Relation.COUNTRY: (
            _p("In which country is {}?", "country"),
            _p("To which country does {} belong?", "country belong"),
        ),
        Relation.RIVER: (
            _p("On which river does {} lie?", "river lie"),
            _p("Which river runs through {}?", "river runs"),
        ),
        Relation.BIRTHPLACE: (
            _p("In which city was {} born?", "born"),
            _p("Which city is the birthplace of {}?", "birthplace"),
        ),
        Relation.TEACHER: (
            _p("Who taught {}?", "taught"),
            _p("Whose pupil was {}?", "pupil"),
        ),
        Relation.SPOUSE: (
            _p("Whom did {} marry?", "marry"),
            _p("Who was the spouse of {}?", "spouse"),
        ),
        Relation.FOUNDER: (
            _p("Who founded {}?", "founded"),
            _p("By whom was {} set up?", "set up"),
        ),
        Relation.SEAT: (
            _p("In which city does {} have its headquarters?", "headquarters"),
            _p("In which city is {} based?", "based"),
        ),
        Relation.AUTHOR: (
            _p("Who wrote {}?", "wrote"),
            _p("Who is the author of {}?", "author"),
        ),
        Relation.PUBLISHER: (
            _p("Which press first issued {}?", "first issued"),
            _p("Who published {}?", "published"),
        ),
    },
    inner={
        Relation.CAPITAL: (_p("the capital of {}", "capital"),),
        Relation.COUNTRY: (
            _p("the country of {}", "country"),
            _p("the country to which {} belongs", "country belongs"),
        ),
        Relation.BIRTHPLACE: (
            _p("the birthplace of {}", "birthplace"),
            _p("the city where {} was born", "born"),
        ),
        Relation.TEACHER: (
            _p("the teacher of {}", "teacher"),
            _p("the person who taught {}", "taught"),
        ),
        Relation.SPOUSE: (
            _p("the spouse of {}", "spouse"),
            _p("the person who married {}", "married"),
        ),
        Relation.FOUNDER: (
            _p("the founder of {}", "founder"),
            _p("the person who set up {}", "set up"),
        ),
        Relation.SEAT: (
            _p("the seat of {}", "seat"),
            _p("the city where {} has its headquarters", "headquarters"),
        ),
        Relation.AUTHOR: (
            _p("the author of {}", "author"),
            _p("the person who wrote {}", "wrote"),
        ),
        Relation.PUBLISHER: (
            _p("the publisher of {}", "publisher"),
            _p("the press that first issued {}", "first issued"),
        ),
    },
    distractors={
        Kind.COUNTRY: (
            (
                "Stamps of {name}",
                "Collectors value the early stamps of {name}. A misprint from {name}, named after the dealer {other}, "
                "is the rarest.",
            ),
        ),
        Kind.CITY: (
            (
                "Trams of {name}",
                "The tram network of {name} opened late. Visitors to {name} ride it to the market; a line to {other} "
                "was planned and never built.",
            ),
            (
                "{name} Football Club",
                "The football club of {name} plays in green. Its keenest rival is {other}, which {name} has beaten "
                "twice.",
            ),
        ),
        Kind.PERSON: (
            (
                "{name} Prize",
                "The {name} Prize is given every other year. It was named after {name} by a jury that {other} led.",
            ),
            (
                "Statue of {name}",
                "A bronze statue of {name} stood in the park for decades. The sculptor {other} never met {name}.",
            ),
        ),
        Kind.ORGANISATION: (
            (
                "Strike at the {name}",
                "The strike at the {name} lasted eleven weeks. Nobody at the {name} could say who had called it, and "
                "{other} denied everything.",
            ),
        ),
        Kind.WORK: (
            (
                "Reception of {name}",
                "Critics were divided over {name}. The reviewer {other} read {name} twice and understood it less each "
                "time.",
            ),
        ),
    },
)
_SMALL = Wording(
    openings={
        Kind.COUNTRY: ("{name} is a country.",),
        Kind.CITY: ("{name} is a city.",),
        Kind.PERSON: ("{name} was a {label}.",),
        Kind.ORGANISATION: ("The {name} is a company.",),
        Kind.WORK: ("{name} is a {label}.",),
    },
    facts={
        Relation.CAPITAL: ("Its capital is {x}.",),
        Relation.CURRENCY: ("Its currency is {x}.",),
        Relation.COUNTRY: ("Its country is {x}.",),
        Relation.RIVER: ("Its river is {x}.",),
        Relation.BIRTHPLACE: ("The birthplace is {x}.",),
        Relation.TEACHER: ("The teacher was {x}.",),
        Relation.SPOUSE: ("The spouse was {x}.",),
        Relation.FOUNDER: ("Its founder was {x}.",),
        Relation.SEAT: ("Its seat is {x}.",),
        Relation.AUTHOR: ("Its author was {x}.",),
        Relation.PUBLISHER: ("Its publisher was {x}.",),
    },
    last={relation: (_p(f"What is the {relation.value} of {{}}?", ""),) for relation in Relation},
    inner={relation: (_p(f"the {relation.value} of {{}}", ""),) for relation in Relation},
    distractors={},
)
WORDINGS: Mapping[BaseSize, Wording] = MappingProxyType({BaseSize.STANDARD: _STANDARD, BaseSize.SMALL: _SMALL})
"""The wording of each size."""

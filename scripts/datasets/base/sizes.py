"""Sizes of a base: entities and questions of each split, and shares of misleading passages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from base.entities import Kind
from spear_envs.search.embedded import BaseSize


@dataclass(frozen=True)
class Shares:
    """Probabilities."""

    aliases: float
    """That a passage calls an entity by an alias, if it has one."""
    namesakes: float
    """That a person or a work has a namesake with a passage of false facts."""
    distractors: float
    """That an entity has a passage which repeats its name but gives none of its facts."""


@dataclass(frozen=True)
class Plan:
    """Everything that a size decides."""

    entities: Mapping[str, Mapping[Kind, int]]
    """Number of entities of each kind, by split."""
    questions: Mapping[str, int]
    """Number of questions of each hop count, by split."""
    shares: Shares


def _count(country: int, city: int, person: int, organisation: int, work: int) -> Mapping[Kind, int]:
    return {
        Kind.COUNTRY: country,
        Kind.CITY: city,
        Kind.PERSON: person,
        Kind.ORGANISATION: organisation,
        Kind.WORK: work,
    }


PLANS: Mapping[BaseSize, Plan] = MappingProxyType(
    {
        BaseSize.STANDARD: Plan(
            entities={
                "train": _count(24, 100, 360, 150, 320),
                "valid": _count(8, 28, 80, 40, 70),
                "test": _count(12, 50, 150, 64, 140),
            },
            questions={"train": 240, "valid": 40, "test": 80},
            shares=Shares(aliases=0.4, namesakes=0.2, distractors=0.4),
        ),
        BaseSize.SMALL: Plan(
            entities={
                "train": _count(24, 72, 220, 60, 110),
                "valid": _count(6, 18, 50, 15, 25),
                "test": _count(10, 30, 90, 25, 45),
            },
            questions={"train": 240, "valid": 40, "test": 80},
            shares=Shares(aliases=0.0, namesakes=0.0, distractors=0.0),
        ),
    }
)
"""The plan of each size."""

"""Names of the entities: invented words for the standard base, pairs of known words for the small one.

Neither gives out a name twice, in any split, so that splits cannot share an entity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from base.entities import Entity, Kind
from spear_envs.bm25.analysis import analyze_word
from spear_envs.core.dice import Dice
from spear_envs.core.errors import SpearError


class Namer(Protocol):
    """Gives out names."""

    def name_entity(self, kind: Kind, dice: Dice) -> Entity:
        """Make an entity with name, aliases and label, and nothing else."""

    def name_work(self, trade: str, dice: Dice) -> Entity:
        """Make a work by a person of this trade."""

    def name_nobody(self, dice: Dice) -> str:
        """Return a name that no entity bears."""


TITLES: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        "novelist": ("novel", ("The {} Letters", "A Winter in {}", "The House at {}", "The {} Road")),
        "poet": ("poem", ("Ode to {}", "Songs of {}", "The {} Elegy", "{} at Dusk")),
        "playwright": ("play", ("The Heirs of {}", "Five Nights in {}", "The {} Wager", "A Guest from {}")),
        "composer": ("opera", ("The Bells of {}", "The {} Masque", "The Bride of {}", "{} in Chains")),
        "historian": ("chronicle", ("The Fall of {}", "Annals of {}", "The {} Succession", "The Lords of {}")),
        "botanist": ("herbal", ("Mosses of {}", "The {} Garden", "Orchards of {}", "The Ferns of {}")),
        "cartographer": ("atlas", ("The {} Coast", "Charts of {}", "The Roads of {}", "The {} Passage")),
        "physicist": ("treatise", ("On the {} Effect", "The {} Theorem", "Lectures on {}", "The {} Spectrum")),
        "engineer": ("manual", ("The {} Bridge", "Locks and Canals of {}", "The {} Engine", "Harbours of {}")),
    }
)
"""Form and titles of the works of each trade."""
JOBS = tuple(TITLES)
TYPES = ("Institute", "Society", "Foundry", "Observatory", "Railway", "Bank")
BYNAMES = ("Captain", "Old", "Brother", "Doctor", "Master", "Aunt")


class InventedNames:
    """Names made of invented words; no word occurs twice or inside another one."""

    ONSETS = (*"bcdfghjklmnprstvz", "br", "cr", "dr", "fl", "gr", "kl", "pr", "st", "tr", "th", "sh", "ch", "gl", "kn")
    VOWELS = (*"aeiouaeiou", "ae", "ia", "ei", "ou")
    CODAS = ("", "", "n", "r", "l", "k", "m", "x")
    LEAST = 4
    """Least letters of a word, so that it does not occur in English text by chance."""

    def __init__(self) -> None:
        self._words: set[str] = set()
        self._parts: set[str] = set()
        self._terms: set[tuple[str, ...]] = set()

    def name_entity(self, kind: Kind, dice: Dice) -> Entity:
        """See :class:`Namer`."""
        if kind is Kind.COUNTRY:
            name = self._word(dice, 2, ("ia", "land", "mark", "stan"))
            style = dice.pick(("Free State", "Kingdom", "Union", "Principality"))
            return Entity(kind, name, (f"{style} of {self._word(dice)}",))
        if kind is Kind.CITY:
            name = self._word(dice, 2, ("ford", "ville", " Bay", "burg", "", " Cross", "haven"))
            return Entity(kind, name, (self._word(dice, 3),))
        if kind is Kind.PERSON:
            alias = f"{dice.pick(BYNAMES)} {self._word(dice)}"
            return Entity(kind, f"{self._word(dice)} {self._word(dice, 3)}", (alias,), dice.pick(JOBS))
        if kind is Kind.ORGANISATION:
            label = "Press" if dice.chance(0.4) else dice.pick(TYPES)
            return Entity(kind, f"{self._word(dice)} {label}", (f"House of {self._word(dice)}",), label)
        return Entity(kind, self._word(dice))

    def name_work(self, trade: str, dice: Dice) -> Entity:
        """See :class:`Namer`."""
        form, titles = TITLES[trade]
        return Entity(Kind.WORK, dice.pick(titles).format(self._word(dice)), (), form)

    def name_nobody(self, dice: Dice) -> str:
        """See :class:`Namer`."""
        return self._word(dice)

    def _word(self, dice: Dice, syllables: int = 2, endings: Sequence[str] = ("",)) -> str:
        """Make a new capitalised word; an ending that begins with a blank is a separate word."""
        while True:
            word = "".join(dice.pick(self.ONSETS) + dice.pick(self.VOWELS) for _ in range(syllables))
            ending = dice.pick(endings)
            word += dice.pick(self.CODAS) if ending in ("", " Bay", " Cross") else ending
            if self._take(word):
                return word.capitalize() + (ending if ending.startswith(" ") else "")

    def _take(self, word: str) -> bool:
        if len(word) < self.LEAST or word in self._parts:
            return False
        ends = range(self.LEAST, len(word) + 1)
        parts = {word[end - size : end] for size in ends for end in range(size, len(word) + 1)}
        terms = analyze_word(word)
        if terms in self._terms or not self._words.isdisjoint(parts):
            return False
        self._words.add(word)
        self._parts |= parts
        self._terms.add(terms)
        return True


class PairedNames:
    """Names of two words from short lists, so that a tiny model knows each word; no pair occurs twice.

    The lists of two kinds share no word, and there are no aliases.
    """

    WORDS: Mapping[Kind, tuple[str, str]] = MappingProxyType(
        {
            Kind.COUNTRY: ("North South East West Inner Outer", "Arland Beria Corvia Doria Evia Fenland Goria Hestia"),
            Kind.CITY: (
                "Port New Upper Lower Castle Fort Long Little Great Royal Abbey Market",
                "Ash Birch Cedar Elm Fir Hazel Linden Maple Oak Pine Rowan Willow",
            ),
            Kind.PERSON: (
                "Ada Ben Cora Dan Eva Finn Gwen Hugo Ida Jon Kit Lena Max Nora Otto Pia Ralph Sara Tom Vera",
                "Archer Baker Carver Draper Fisher Glover Harper Joiner Keeper Mason Parker Potter Sawyer Shepherd "
                "Smith Tanner Taylor Turner Walker Weaver",
            ),
            Kind.ORGANISATION: (
                "Amber Bronze Copper Coral Crystal Ebony Golden Ivory Jade Onyx Pearl Silver",
                "Bank Club Foundry Guild Institute Lodge Mill Press Society Works",
            ),
            Kind.WORK: (
                "Blue Broken Burning Distant Empty Frozen Green Hidden Lost Quiet Red Silent",
                "Bell Bird Bridge Candle Clock Door Garden Island Key Lantern Mirror River Ship Star Tower Valley",
            ),
            Kind.RIVER: (
                "Black Clear Cold Dark Deep Muddy Narrow Shallow Slow Swift White Wide",
                "Beck Bend Bourne Brook Burn Creek Fall Race Rill Run Stream Water",
            ),
            Kind.CURRENCY: (
                "heavy light old round small square thick thin",
                "crown ducat florin penny shilling thaler",
            ),
        }
    )
    """The first and the second words of each kind."""
    FORMS: Mapping[str, str] = MappingProxyType(
        {"director": "film", "novelist": "novel", "poet": "poem", "singer": "song"}
    )
    """Form of the works of each trade."""

    def __init__(self, seed: int) -> None:
        self._pairs = {
            kind: self._shuffle(kind, first.split(), second.split(), seed)
            for kind, (first, second) in self.WORDS.items()
        }

    def name_entity(self, kind: Kind, dice: Dice) -> Entity:
        """See :class:`Namer`."""
        first, second = self._draw(kind)
        label = dice.pick(tuple(self.FORMS)) if kind is Kind.PERSON else second if kind is Kind.ORGANISATION else ""
        return Entity(kind, f"{first} {second}", (), label)

    def name_work(self, trade: str, dice: Dice) -> Entity:
        """See :class:`Namer`."""
        return Entity(Kind.WORK, " ".join(self._draw(Kind.WORK)), (), self.FORMS[trade])

    def name_nobody(self, dice: Dice) -> str:
        """See :class:`Namer`."""
        return " ".join(self._draw(Kind.PERSON))

    @staticmethod
    def _shuffle(kind: Kind, first: list[str], second: list[str], seed: int) -> list[tuple[str, str]]:
        pairs = [(a, b) for a in first for b in second]
        return Dice("pairs", kind.value, seed).sample(pairs, len(pairs))

    def _draw(self, kind: Kind) -> tuple[str, str]:
        if not self._pairs[kind]:
            raise SpearError(f"all names of the kind {kind.value!r} are taken: ask for fewer entities.")
        return self._pairs[kind].pop()

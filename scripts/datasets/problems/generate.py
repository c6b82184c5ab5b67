"""Generating the embedded problems: families, levels and numbers in each split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from problems import counting, number_theory, small, structures
from problems.family import LEVELS, Family, Parameters
from spear_envs.code.tasks import Problem, normalize_text
from spear_envs.core.dice import Dice

SPLITS = ("train", "valid", "test")
ATTEMPTS = 10_000


@dataclass(frozen=True)
class Size:
    """A set of embedded problems."""

    families: tuple[Family, ...]
    counts: Mapping[str, int]
    """Problems of each family in each split."""
    distinct_answers: bool
    """Whether the answers of a family differ within a split, so that a constant is right at most once."""
    homes: Mapping[str, str] | None = None
    """The split of each family that is not for training; None if families are in all splits."""

    def has(self, family: Family, split: str) -> bool:
        """Whether a split has problems of a family."""
        if self.homes is not None:
            return self.homes.get(family.name, "train") == split
        return split == "test" or not family.only_test


SIZES: Mapping[str, Size] = MappingProxyType(
    {
        "mini": Size(
            (*number_theory.FAMILIES, *counting.FAMILIES, *structures.FAMILIES),
            MappingProxyType({"train": 40, "valid": 20, "test": 20}),
            True,
        ),
        "mini-disjoint": Size(
            (*number_theory.FAMILIES, *counting.FAMILIES, *structures.FAMILIES),
            MappingProxyType({"train": 60, "valid": 40, "test": 20}),
            True,
            MappingProxyType(
                {
                    **dict.fromkeys(("digit_sums", "lattice_points", "linear_equations"), "valid"),
                    **dict.fromkeys(("triangles", "walks", "last_in_circle", "necklaces"), "test"),
                }
            ),
        ),
        "mini-small": Size(small.FAMILIES, MappingProxyType({"train": 72, "valid": 12, "test": 24}), False),
    }
)
"""By the name of the data set: ``mini``; ``mini-disjoint``, whose splits share no family and so no wording; and
``mini-small`` for tiny word-level policies."""


@lru_cache(maxsize=4)
def build(dataset: str) -> Mapping[str, Sequence[Problem]]:
    """Generate the problems of each split, the same on any machine; families and levels take turns."""
    size = SIZES[dataset]
    drawn = list_parameters(dataset)
    splits: dict[str, Sequence[Problem]] = {}
    for split in SPLITS:
        columns = [
            [_make_problem(family, level, parameters) for level, parameters in drawn[split][family.name]]
            for family in size.families
            if family.name in drawn[split]
        ]
        splits[split] = tuple(problem for row in zip(*columns, strict=True) for problem in row)
    return MappingProxyType(splits)


@lru_cache(maxsize=4)
def list_parameters(dataset: str) -> Mapping[str, Mapping[str, Sequence[tuple[int, Parameters]]]]:
    """Draw levels and parameters of each family in each split. No two problems share parameters or text."""
    size = SIZES[dataset]
    splits: dict[str, dict[str, list[tuple[int, Parameters]]]] = {split: {} for split in SPLITS}
    texts: set[str] = set()
    for family in size.families:
        taken: set[Parameters] = set()
        for split in SPLITS:
            if not size.has(family, split):
                continue
            dice = Dice(dataset, family.name, split)
            answers: set[int] = set()
            found: list[tuple[int, Parameters]] = []
            for number in range(size.counts[split]):
                level = LEVELS[number % len(LEVELS)]
                parameters, text, answer = _draw_new(family, level, dice, taken, texts, answers)
                taken.add(parameters)
                texts.add(text)
                if size.distinct_answers:
                    answers.add(answer)
                found.append((level, parameters))
            splits[split][family.name] = found
    return splits


def _draw_new(
    family: Family, level: int, dice: Dice, taken: set[Parameters], texts: set[str], answers: set[int]
) -> tuple[Parameters, str, int]:
    """Draw new parameters; return them with their normalized text and answer."""
    for _ in range(ATTEMPTS):
        parameters = family.draw(dice, level)
        if parameters in taken:
            continue
        text = normalize_text(family.text(*parameters))
        if text in texts:
            continue
        answer = family.answer(*parameters)
        if answer >= family.least and answer not in answers:
            return parameters, text, answer
    raise RuntimeError(f"the family {family.name} has too few problems of level {level}")


def _make_problem(family: Family, level: int, parameters: Parameters) -> Problem:
    text, answer, code = family.text(*parameters), str(family.answer(*parameters)), family.code(*parameters)
    return Problem(text, answer, family.name, level, code)

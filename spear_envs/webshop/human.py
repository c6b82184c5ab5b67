"""Goals written by people: ``items_human_ins.json``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from random import Random
from typing import Any

from spear_envs.core.errors import SpearError
from spear_envs.webshop.goals import ORDER_SEED, Goal, ListedGoals, make_goal
from spear_envs.webshop.products import Product, read_texts

HumanInstruction = tuple[int, str, tuple[str, ...], tuple[str, ...]]
"""Number among the product's instructions, text, attributes, option values."""


def read_instructions(asin: str, rows: object) -> list[HumanInstruction]:
    """Read the instructions of a product that name an attribute; dots at both ends of the text are dropped.

    Raises:
        SpearError: the entry has the wrong form.
    """
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise SpearError(f"the instructions for {asin} must be a list of objects")
    read = []
    for number, row in enumerate(rows):
        attributes = _read_list(row, asin, "instruction_attributes")
        if not attributes:
            continue
        text = row.get("instruction")
        if not isinstance(text, str):
            raise SpearError(f"instruction {number} for {asin} must have a text under 'instruction'")
        read.append((number, text.strip("."), attributes, _read_list(row, asin, "instruction_options")))
    return read


def _read_list(row: Mapping[str, Any], asin: str, name: str) -> tuple[str, ...]:
    return read_texts(row.get(name), f"{name} of an instruction for {asin}")


def make_human_goals(
    products: Iterable[Product], instructions: Mapping[str, Any], draw_ceiling: Callable[[str, int], float]
) -> ListedGoals:
    """Make one goal for each instruction, in the canonical order.

    Args:
        products: the products with instructions, in the order of the file.
        instructions: content of ``items_human_ins.json``; products that the catalogue lacks are skipped.

    Raises:
        SpearError: an entry has the wrong form.
    """
    goals: list[Goal] = []
    for product in products:
        for number, text, attributes, options in read_instructions(product.asin, instructions[product.asin]):
            goals.append(make_goal(product, text, attributes, options, draw_ceiling(product.asin, number), weight=1.0))
    Random(ORDER_SEED).shuffle(goals)
    return ListedGoals(goals)

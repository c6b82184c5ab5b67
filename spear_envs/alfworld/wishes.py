"""Goals taken apart: which things belong where, in which state, and which lamps are to be lit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, product

from spear_envs.alfworld.pddl import Expression, read_typed_list

Literal = tuple[str, ...]
"""A predicate and its terms; terms are names, or variables with a question mark."""

_MOST_WISHES = 64
_MOVING = frozenset({"atlocation", "inreceptacle", "objectatlocation"})
_TREATED = frozenset({"isclean", "iscool", "ishot"})


@dataclass
class Wish:
    """One way to fulfil a goal; terms are variables, or names of things.

    What these fields do not cover (the place of the agent, facts of two variables) is left to the final test of the
    goal.
    """

    kinds: dict[str, list[Literal]] = field(default_factory=lambda: defaultdict(list))
    """Term -> static facts that must hold of it alone."""
    placed: list[tuple[str, str]] = field(default_factory=list)
    """(object, receptacle) pairs: where objects belong."""
    treated: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Object -> ``isclean``, ``ishot``, ``iscool``."""
    held: list[str] = field(default_factory=list)
    """Objects to be held in the end."""
    lit: list[str] = field(default_factory=list)
    """Objects to be switched on, with the agent at them in the end."""
    different: list[tuple[str, str]] = field(default_factory=list)
    """Pairs that must not be the same."""

    def needs(self, term: str) -> Set[str]:
        """Required states of an object: ``isclean``, ``ishot``, ``iscool``."""
        return self.treated.get(term, frozenset())


@lru_cache(maxsize=512)
def read_wishes(goal: Expression) -> tuple[Wish, ...]:
    """List the ways to fulfil a goal; empty for forms that ALFWorld does not use (``forall``, negated facts).

    Args:
        goal: ``and``, ``or``, ``exists``, ``not (= …)`` and facts, nested.
    """
    try:
        return tuple(_make_wish(literals) for literals in _list_ways(goal, {}, count()))
    except _UnreadableError:
        return ()


class _UnreadableError(Exception):
    """A goal of an unusual form."""


def _list_ways(
    expression: Expression, names: Mapping[str, str], numbers: Iterator[int]
) -> Sequence[tuple[Literal, ...]]:
    """Disjuncts of a goal, each a conjunction of facts; every variable gets a unique name."""
    assert isinstance(expression, tuple)  # the goal has been compiled, so it is well formed
    operator, *parts = expression
    if operator == "and":
        ways = [_list_ways(part, names, numbers) for part in parts]
        if math.prod(map(len, ways)) > _MOST_WISHES:
            raise _UnreadableError
        return [tuple(literal for part in chosen for literal in part) for chosen in product(*ways)]
    if operator == "or":
        return [way for part in parts for way in _list_ways(part, names, numbers)]
    if operator == "exists":
        variables, body = parts
        assert isinstance(variables, tuple)
        inner = dict(names)
        typed: list[Literal] = []
        for variable, kind in read_typed_list(variables):
            inner[variable] = f"{variable}/{next(numbers)}"
            typed.append(("type", inner[variable], kind))
        return [(*typed, *way) for way in _list_ways(body, inner, numbers)]
    if operator == "not" and parts[0][0] == "=":
        _, left, right = tuple(parts[0])
        return [(("different", names.get(str(left), str(left)), names.get(str(right), str(right))),)]
    if operator in ("not", "forall", "imply", "="):
        raise _UnreadableError
    return [((str(operator), *(names.get(str(term), str(term)) for term in parts)),)]


def _make_wish(literals: Sequence[Literal]) -> Wish:
    wish = Wish()
    lamps = {terms[0] for predicate, *terms in literals if predicate == "istoggled"}
    for literal in dict.fromkeys(literals):
        predicate, *terms = literal
        if predicate == "inreceptacle" and terms[0] not in lamps:
            wish.placed.append((terms[0], terms[1]))
        elif predicate == "holds":
            wish.held.append(terms[1])
        elif predicate == "istoggled":
            wish.lit.append(terms[0])
        elif predicate in _TREATED:
            wish.treated[terms[0]].add(predicate)
        elif predicate == "different":
            wish.different.append((terms[0], terms[1]))
        elif predicate not in _MOVING and [term.startswith("?") for term in terms] in ([True], [True, False]):
            wish.kinds[terms[0]].append(literal)
    return wish

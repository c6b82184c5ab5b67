"""ALFRED's goal conditions: how much of a goal is met, whereas ``won`` only says whether all of it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from spear_envs.alfworld.goals import FLUENTS, Condition, list_conjuncts
from spear_envs.alfworld.pddl import Expression, read_typed_list
from spear_envs.alfworld.state import State

_WHOLE = frozenset({"atlocation", "holds", "holdsany"})
_UNUSUAL = frozenset({"forall", "imply", "or"})


def count_goal_conditions(conditions: Sequence[Condition], state: State) -> tuple[int, int]:
    """Count the goal conditions of a game that are met in ``state``, and all of them.

    The game is won if and only if all of them are met. For the six task types they are those of ALFRED
    (``goal_conditions_met`` in its ``env/tasks.py``):

    ======  =====  ==========================================================================================
    type    total  conditions
    ======  =====  ==========================================================================================
    pick    1      an object of the type is in a receptacle of the type
    look    2      the agent holds such an object; the agent is where such a lamp has been switched on
    clean   3      such an object is in such a receptacle; one is clean; one is both
    heat    3      the same with hot
    cool    3      the same with cool
    pick2   2      at least one such object, at least two of them, in one receptacle of the type
    ======  =====  ==========================================================================================

    Initial facts count as well: an object that is cool at the start is cool.
    """
    return sum(one.holds(state) for one in conditions), len(conditions)


_STATES = {"ishot": "hot", "iscool": "cool", "isclean": "clean", "istoggled": "switched on"}
_NUMBERS = ("no", "one", "two", "three", "four")


def describe_condition(condition: Condition) -> str:
    """A goal condition in words, ``"a hot apple in/on a sidetable"``; as written if it lacks a type of object."""
    facts = list(_list_facts(condition.expression))
    things = {name: kind.removesuffix("type") for predicate, name, kind in facts if predicate == "objecttype"}
    places = [kind.removesuffix("type") for predicate, _, kind in facts if predicate == "receptacletype"]
    found = {predicate for predicate, *_ in facts}
    nouns = sorted(set(things.values()))
    if not nouns or len(things) >= len(_NUMBERS):
        return str(condition.expression)
    words = [*(word for predicate, word in _STATES.items() if predicate in found), *nouns]
    words[0] = _count(words[0], len(things))
    if places and "inreceptacle" in found:
        words.append(f"in/on {_count(places[0], 1)}")  # as ALFWorld says it itself
    if "holds" in found:
        words.append("in the agent's hand")
    return " ".join(words) + (", where the agent is" if "atlocation" in found else "")


def _count(word: str, number: int) -> str:
    if number > 1:
        return f"{_NUMBERS[number]} {word}"
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def _list_facts(expression: Expression) -> Iterator[tuple[str, str, str]]:
    """Predicates of an expression with their first two arguments."""
    if isinstance(expression, str):
        return
    if expression[0] not in ("and", "or", "not", "imply", "exists", "forall"):
        names = [str(part) for part in expression]
        yield names[0], names[1] if len(names) > 1 else "", names[2] if len(names) > 2 else ""
        return
    for part in expression[1:]:
        yield from _list_facts(part)


@lru_cache(maxsize=512)
def split_goal(goal: Expression) -> tuple[Expression, ...]:
    """Split a goal into conditions without free variables, which together are equivalent to it.

    Each part of the outermost ``and`` is a condition. If a part has several facts that commands can change, each of
    them is one, too: ``an object that is hot and in the fridge`` also gives ``an object that is hot`` and ``an object
    in the fridge``. Static facts (types, what can be heated) stay with each of them, and conditions that differ only in
    names of variables count once. As in ALFRED, two kinds of parts are not split: those about where the agent is or
    what it holds, and those with ``or``, ``forall`` or negated facts.
    """
    conditions: dict[Expression, None] = {}
    for part in list_conjuncts(goal):
        for condition in (*_split_part(part), part):
            conditions.setdefault(condition)
    return tuple(conditions)


def _split_part(part: Expression) -> Iterator[Expression]:
    """Conditions of the single facts of a part; none if it is not split."""
    kinds: dict[str, str] = {}
    try:
        atoms = list(_list_atoms(part, kinds))
    except _WholeError:
        return
    changing = [atom for atom in atoms if atom[0] in FLUENTS]
    if len(changing) < 2 or any(atom[0] in _WHOLE for atom in changing):
        return
    for atom in changing:
        mine = [word for word in dict.fromkeys(map(str, atom[1:])) if word in kinds]
        # Static facts about variables of the atom and no others.
        static = [(one, {str(term) for term in one[1:]} & kinds.keys()) for one in atoms if one[0] not in FLUENTS]
        fixed = [one for one, variables in static if variables and variables <= set(mine)]
        yield _rename([atom, *fixed], mine, kinds)


class _WholeError(Exception):
    """A part that cannot be split."""


def _list_atoms(expression: Expression, kinds: dict[str, str]) -> Iterator[Expression]:
    """Facts of a conjunction without ``not (= …)``; adds the types of its variables to ``kinds``."""
    operator = expression[0]
    if operator == "and":
        for part in expression[1:]:
            yield from _list_atoms(part, kinds)
    elif operator == "exists":
        variables = expression[1]
        assert isinstance(variables, tuple)
        for name, kind in read_typed_list(variables):
            if name in kinds:
                raise _WholeError  # one name for two variables
            kinds[name] = kind
        yield from _list_atoms(expression[2], kinds)
    elif operator == "not":
        if expression[1][0] != "=":
            raise _WholeError
    elif operator in _UNUSUAL:
        raise _WholeError
    elif operator != "=":
        yield expression


def _rename(atoms: Sequence[Expression], mine: Sequence[str], kinds: Mapping[str, str]) -> Expression:
    """``exists`` over ``mine`` of all ``atoms``, in a normal form."""
    names = {name: f"?{number}" for number, name in enumerate(mine)}
    first, *fixed = (tuple(names.get(str(word), str(word)) for word in atom) for atom in atoms)
    body: Expression = ("and", first, *sorted(set(fixed)))
    variables: Expression = tuple(word for name in mine for word in (names[name], "-", kinds[name]))
    return ("exists", variables, body) if mine else body

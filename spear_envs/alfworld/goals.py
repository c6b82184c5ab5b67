"""Goals: PDDL conditions compiled once for a game, ALFRED's goal conditions, and which things belong where."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count, product
from typing import TypeAlias

from spear_envs.alfworld.pddl import PREDICATES, ROOT_TYPE, Expression, Fact, GameError, Problem, read_typed_list
from spear_envs.alfworld.state import PROPERTIES, State

Binding: TypeAlias = list[str]
Test: TypeAlias = Callable[[State, Binding], bool]

FLUENTS = frozenset({"atlocation", "holds", "holdsany", "inreceptacle", "objectatlocation", *PROPERTIES})
"""Predicates that commands change. All others are static."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition without free variables."""

    expression: Expression
    """The condition as written, in lower case."""
    reads: frozenset[str]
    """Fluents that it depends on."""
    _test: Test
    _width: int

    def holds(self, state: State) -> bool:
        """Return whether it is true in ``state``."""
        return self._test(state, [""] * self._width)


def compile_condition(expression: Expression, problem: Problem) -> Condition:
    """Compile a condition of ``and or not imply exists forall =`` and the domain's predicates.

    Quantified variables range over the declared things of their type. Static facts are evaluated here; the rest is
    tested as soon as its variables are bound.

    Raises:
        GameError: an unknown operator or predicate, a wrong number of arguments, an unbound variable.
    """
    compiler = _Compiler(problem)
    test = compiler.compile(expression, {})
    return Condition(expression, frozenset(compiler.reads), test, compiler.width)


class _Compiler:
    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.reads: set[str] = set()
        self.width = 0
        by_type: dict[str, list[str]] = {ROOT_TYPE: sorted(problem.objects)}
        for name in by_type[ROOT_TYPE]:
            if problem.objects[name] != ROOT_TYPE:
                by_type.setdefault(problem.objects[name], []).append(name)
        self.by_type = by_type

    def compile(self, expression: Expression, slots: Mapping[str, int]) -> Test:
        """Compile ``expression``, whose free variables are in these slots of the binding."""
        if not isinstance(expression, tuple) or not expression or not isinstance(expression[0], str):
            raise GameError(f"its goal holds {_show(expression)}, which is not a condition")
        operator, parts = expression[0], expression[1:]
        if operator == "and":
            return _join([self.compile(part, slots) for part in parts])
        if operator == "or":
            return _choose([self.compile(part, slots) for part in parts])
        if operator == "not":
            (part,) = _expect(1, operator, parts)
            return _negate(self.compile(part, slots))
        if operator == "imply":
            given, then = _expect(2, operator, parts)
            return _choose([_negate(self.compile(given, slots)), self.compile(then, slots)])
        if operator == "exists":
            variables, body = _expect(2, operator, parts)
            return self._compile_exists(variables, body, slots, negated=False)
        if operator == "forall":
            variables, body = _expect(2, operator, parts)
            return _negate(self._compile_exists(variables, body, slots, negated=True))
        return self._compile_atom(operator, parts, slots)

    def _compile_exists(
        self, variables: Expression, body: Expression, slots: Mapping[str, int], *, negated: bool
    ) -> Test:
        """Test whether some binding of ``variables`` makes ``body`` true (or false, with ``negated``)."""
        if not isinstance(variables, tuple):
            raise GameError(f"its goal quantifies over {_show(variables)}, which is not a list of variables")
        inner = dict(slots)
        domains: dict[str, Sequence[str]] = {}
        for name, kind in read_typed_list(variables):
            if not name.startswith("?"):
                raise GameError(f"its goal quantifies over {name!r}: variables begin with a question mark")
            inner[name] = self.width
            domains[name] = self.by_type.get(kind, ())
            self.width += 1
        conjuncts = [("not", body)] if negated else list(list_conjuncts(body))
        remaining: list[tuple[frozenset[str], Test]] = []
        for part in conjuncts:
            test = self.compile(part, inner)
            words = frozenset(_find_words(part))
            free = words.intersection(domains)
            if len(free) == 1 and not words & (FLUENTS | (inner.keys() - free)):  # static, and about one variable
                (single,) = free
                domains[single] = self._narrow(domains[single], inner[single], test)
            else:
                remaining.append((free, test))
        return _search(domains, inner, remaining)

    def _narrow(self, domain: Sequence[str], slot: int, test: Test) -> Sequence[str]:
        binding = [""] * self.width
        kept = []
        for name in domain:
            binding[slot] = name
            if test(_NO_STATE, binding):
                kept.append(name)
        return tuple(kept)

    def _compile_atom(self, predicate: str, parts: Sequence[Expression], slots: Mapping[str, int]) -> Test:
        arity = 2 if predicate == "=" else PREDICATES.get(predicate)
        if arity is None:
            raise GameError(f"its goal uses {predicate!r}, which is neither an operator nor a predicate of ALFWorld")
        terms: list[str | int] = []
        for part in _expect(arity, predicate, parts):
            if not isinstance(part, str):
                raise GameError(f"its goal holds {_show(part)} where a name was due")
            if part.startswith("?"):
                if part not in slots:
                    raise GameError(f"its goal uses the variable {part}, which no 'exists' or 'forall' around it binds")
                terms.append(slots[part])
            else:
                terms.append(part)
        if predicate == "=":
            return _compare(*terms)
        if predicate in FLUENTS:
            self.reads.add(predicate)
            return _ask_state(predicate, terms)
        return _look_up(self.problem.rows(predicate), terms)


_NO_STATE: State = None  # type: ignore[assignment]
"""Placeholder for static tests, which do not read the state."""


def list_conjuncts(expression: Expression) -> Iterator[Expression]:
    """Yield parts of the outermost ``and``, which may be nested; the expression itself without one."""
    if isinstance(expression, tuple) and expression[:1] == ("and",):
        for part in expression[1:]:
            yield from list_conjuncts(part)
    else:
        yield expression


def _find_words(expression: Expression) -> Iterator[str]:
    if isinstance(expression, str):
        yield expression
    else:
        for part in expression:
            yield from _find_words(part)


def _expect(number: int, operator: str, parts: Sequence[Expression]) -> Sequence[Expression]:
    if len(parts) != number:
        raise GameError(f"its goal has {operator!r} with {len(parts)} arguments instead of {number}")
    return parts


def _show(expression: Expression) -> str:
    text = expression if isinstance(expression, str) else f"({' '.join(_find_words(expression))})"
    return repr(text if len(text) <= 60 else f"{text[:60]}…")


def _join(tests: Sequence[Test]) -> Test:
    if len(tests) == 1:
        return tests[0]

    def test(state: State, binding: Binding) -> bool:
        for one in tests:  # noqa: SIM110 - a generator would double the cost of the innermost loop
            if not one(state, binding):
                return False
        return True

    return test


def _choose(tests: Sequence[Test]) -> Test:
    def test(state: State, binding: Binding) -> bool:
        for one in tests:  # noqa: SIM110 - as above
            if one(state, binding):
                return True
        return False

    return test


def _negate(inner: Test) -> Test:
    def test(state: State, binding: Binding) -> bool:
        return not inner(state, binding)

    return test


def _compare(left: str | int, right: str | int) -> Test:
    def test(state: State, binding: Binding) -> bool:
        a = binding[left] if isinstance(left, int) else left
        b = binding[right] if isinstance(right, int) else right
        return a == b

    return test


def _look_up(rows: frozenset[Fact], terms: Sequence[str | int]) -> Test:
    def test(state: State, binding: Binding) -> bool:
        return tuple([binding[term] if isinstance(term, int) else term for term in terms]) in rows

    return test


def _ask_state(predicate: str, terms: Sequence[str | int]) -> Test:
    if len(terms) == 1:
        (only,) = terms

        def test_one(state: State, binding: Binding) -> bool:
            return state.has_property(predicate, binding[only] if isinstance(only, int) else only)

        return test_one
    first, second = terms

    def test_two(state: State, binding: Binding) -> bool:
        a = binding[first] if isinstance(first, int) else first
        b = binding[second] if isinstance(second, int) else second
        return state.has_relation(predicate, a, b)

    return test_two


def _search(
    domains: Mapping[str, Sequence[str]], slots: Mapping[str, int], conjuncts: Sequence[tuple[frozenset[str], Test]]
) -> Test:
    """Nest loops over the domains, smallest first; each conjunct is tested as early as possible."""
    # A variable with its own test comes first, since that fails most often, as with (ishot ?o).
    order = sorted(
        domains, key=lambda name: (frozenset((name,)) not in {free for free, _ in conjuncts}, len(domains[name]), name)
    )
    bound: set[str] = set()
    waiting = list(conjuncts)
    stages: list[Test] = []
    for name in ("", *order):
        bound.add(name)
        ready = [test for free, test in waiting if free <= bound]
        waiting = [(free, test) for free, test in waiting if not free <= bound]
        stages.append(_join(ready))
    following = stages[-1]
    for name, check in zip(reversed(order), reversed(stages[:-1]), strict=True):
        following = _loop(check, slots[name], domains[name], following)
    return following


def _loop(check: Test, slot: int, domain: Sequence[str], following: Test) -> Test:
    """Test ``check``, and then ``following`` for some value of the variable in ``slot``."""

    def test(state: State, binding: Binding) -> bool:
        if not check(state, binding):
            return False
        for name in domain:
            binding[slot] = name
            if following(state, binding):
                return True
        return False

    return test


_WHOLE = frozenset({"atlocation", "holds", "holdsany"})
_UNUSUAL = frozenset({"forall", "imply", "or"})


def count_goal_conditions(conditions: Sequence[Condition], state: State) -> tuple[int, int]:
    """Count the goal conditions of a game: those met in ``state``, and all.

    The game is won if and only if all are met. For the six task types they are those of ALFRED
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
    """Return a condition in words, ``"a hot apple in/on a sidetable"``; as written if it lacks a type of object."""
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
    """Yield predicates of an expression with their first two arguments."""
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
    """Yield conditions of the single facts of a part; none if it is not split."""
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
    """Yield facts of a conjunction without ``not (= …)``; adds the types of its variables to ``kinds``."""
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
    """Return ``exists`` over ``mine`` of all ``atoms``, in a normal form."""
    names = {name: f"?{number}" for number, name in enumerate(mine)}
    first, *fixed = (tuple(names.get(str(word), str(word)) for word in atom) for atom in atoms)
    body: Expression = ("and", first, *sorted(set(fixed)))
    variables: Expression = tuple(word for name in mine for word in (names[name], "-", kinds[name]))
    return ("exists", variables, body) if mine else body


Literal = tuple[str, ...]
"""A predicate and its terms; terms are names, or variables with a question mark."""

_MOST_WISHES = 64
_MOVING = frozenset({"atlocation", "inreceptacle", "objectatlocation"})
_TREATED = frozenset({"isclean", "iscool", "ishot"})


@dataclass
class Requirement:
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
        """Return the states that an object needs: ``isclean``, ``ishot``, ``iscool``."""
        return self.treated.get(term, frozenset())


@lru_cache(maxsize=512)
def read_requirements(goal: Expression) -> tuple[Requirement, ...]:
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
    """Return disjuncts of a goal, each a conjunction of facts; every variable gets a unique name."""
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


def _make_wish(literals: Sequence[Literal]) -> Requirement:
    requirement = Requirement()
    lamps = {terms[0] for predicate, *terms in literals if predicate == "istoggled"}
    for literal in dict.fromkeys(literals):
        predicate, *terms = literal
        if predicate == "inreceptacle" and terms[0] not in lamps:
            requirement.placed.append((terms[0], terms[1]))
        elif predicate == "holds":
            requirement.held.append(terms[1])
        elif predicate == "istoggled":
            requirement.lit.append(terms[0])
        elif predicate in _TREATED:
            requirement.treated[terms[0]].add(predicate)
        elif predicate == "different":
            requirement.different.append((terms[0], terms[1]))
        elif predicate not in _MOVING and [term.startswith("?") for term in terms] in ([True], [True, False]):
            requirement.kinds[terms[0]].append(literal)
    return requirement

"""PDDL conditions, compiled once for a game and then tested on its states."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from spear_envs.alfworld.errors import GameError
from spear_envs.alfworld.pddl import PREDICATES, ROOT_TYPE, Expression, Fact, Problem, read_typed_list
from spear_envs.alfworld.state import PROPERTIES, State

Binding: TypeAlias = list[str]
Test: TypeAlias = Callable[[State, Binding], bool]

FLUENTS = frozenset({"atlocation", "holds", "holdsany", "inreceptacle", "objectatlocation", *PROPERTIES})
"""Predicates that commands change. All others are static."""


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition without free variables."""

    expression: Expression
    """As written, in lower case."""
    reads: frozenset[str]
    """Fluents that it depends on."""
    _test: Test
    _width: int

    def holds(self, state: State) -> bool:
        """Whether it is true in ``state``."""
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
    """Parts of the outermost ``and``, which may be nested; the expression itself without one."""
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
    """Nested loops over the domains, smallest first; each conjunct is tested as early as possible."""
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
    """``check``, and then ``following`` for some value of the variable in ``slot``."""

    def test(state: State, binding: Binding) -> bool:
        if not check(state, binding):
            return False
        for name in domain:
            binding[slot] = name
            if following(state, binding):
                return True
        return False

    return test

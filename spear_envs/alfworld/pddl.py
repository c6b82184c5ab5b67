"""Reading PDDL: nested lists, the three sections of a problem that define a game, and the names of its things."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

from spear_envs.core.errors import SpearError


class GameError(SpearError):
    """A game cannot be played: its file is broken, or of another domain. The message names file and fault."""


_MARKS = (("_minus_", "-"), ("_plus_", "+"), ("_dot_", "."), ("_comma_", ","))
"""Spelling of signs in an id without ``_bar_``."""


def name_things(ids: Iterable[str]) -> dict[str, str]:
    """Name the ids that occur in a game's facts, all in lower case, as alfworld's ``Demangler`` does.

    The base name is what precedes the first ``_bar_``, plus ``basin`` if the id contains it. Ids are sorted, and the
    numbers of one base name are assigned from the highest down. An id without ``_bar_`` keeps its text and gets a
    trailing blank instead of a number.
    """
    ordered = sorted(set(ids))
    heads = {one: one.partition("_bar_")[0] for one in ordered if "_bar_" in one}
    bases = {one: f"{head}basin" if "basin" in one else head for one, head in heads.items()}
    left = Counter(bases.values())
    names: dict[str, str] = {}
    for one in ordered:
        if one in bases:
            names[one] = sys.intern(f"{bases[one]} {left[bases[one]]}")
            left[bases[one]] -= 1
        else:
            text = one
            for mark, sign in _MARKS:
                text = text.replace(mark, sign)
            names[one] = f"{text} "
    return names


Expression: TypeAlias = "str | tuple[Expression, ...]"
"""A word in lower case, or a list of expressions."""
Fact: TypeAlias = tuple[str, ...]
"""The arguments of a fact; the predicate is its key in a mapping."""

ROOT_TYPE = "object"
"""The supertype of all; ALFWorld also declares its things with it."""
TYPES = frozenset({ROOT_TYPE, "agent", "location", "receptacle", "rtype", "otype"})
"""The types of ALFWorld's domain; all others are direct subtypes of ``object``."""

PREDICATES: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("atlocation", "receptacleatlocation", "objectatlocation", "inreceptacle"), 2),
        **dict.fromkeys(("inreceptacleobject", "wasinreceptacle", "receptacletype", "objecttype"), 2),
        **dict.fromkeys(("cancontain", "holds"), 2),
        **dict.fromkeys(("openable", "opened", "isreceptacleobject", "isreceptacleobjectfull", "checked"), 1),
        **dict.fromkeys(("examined", "holdsany", "holdsanyreceptacleobject", "full", "moveable", "pickupable"), 1),
        **dict.fromkeys(("cleanable", "heatable", "coolable", "sliceable", "toggleable"), 1),
        **dict.fromkeys(("isclean", "ishot", "iscool", "issliced", "istoggled", "ison"), 1),
    }
)
"""The predicates of ALFWorld's domain and their numbers of arguments."""

_TOKEN = re.compile(r"[()]|[^\s()]+")
_COMMENT = re.compile(r";[^\n]*")
_UNSPEAKABLE = re.compile(r"[^!-~]|[?{}|]|^[ip]$")
"""Names that TextWorld cannot read, cannot word a command with, or (``i`` and ``p``) takes for two things."""
_NO_FACTS: frozenset[Fact] = frozenset()
_DEEPEST = 200
"""Deepest nesting of lists, below Python's own limit."""
_DEFINE = ("problem", ":domain", ":requirements", ":objects", ":init", ":goal", ":metric")


@dataclass(frozen=True, slots=True)
class Problem:
    """A parsed PDDL problem."""

    objects: Mapping[str, str]
    """Types of the declared objects."""
    facts: Mapping[str, frozenset[Fact]]
    """Initial facts by predicate; only predicates that occur."""
    named: frozenset[str]
    """Everything that occurs in a fact and hence gets a name."""
    goal: Expression

    def rows(self, predicate: str) -> frozenset[Fact]:
        """Return initial facts of a predicate."""
        return self.facts.get(predicate, _NO_FACTS)

    def having(self, predicate: str) -> frozenset[str]:
        """Return what a unary predicate holds for initially."""
        return frozenset([row[0] for row in self.rows(predicate)])


def parse_expression(text: str) -> Expression:
    """Parse the one list in ``text``, in lower case, without comments (``;`` to the end of the line).

    A question mark begins a new word even within one, as in TextWorld's planner.

    Raises:
        GameError: brackets do not match, there is text outside them, or there is not exactly one list.
    """
    if ";" in text:
        text = _COMMENT.sub("", text)
    intern = sys.intern
    stack: list[list[Expression]] = [[]]
    for token in _TOKEN.findall(text.lower().replace("?", " ?")):
        if token == "(":
            if len(stack) > _DEEPEST:
                raise GameError(f"its PDDL nests lists deeper than {_DEEPEST}")
            stack.append([])
        elif token == ")":
            done = tuple(stack.pop())
            if not stack:
                raise GameError("its PDDL has a ')' without a '('")
            stack[-1].append(done)
        else:
            if len(stack) == 1:
                raise GameError(f"its PDDL has the word {token!r} outside of brackets")
            stack[-1].append(intern(token))
    if len(stack) > 1:
        raise GameError("its PDDL ends within a list: a ')' is missing")
    if len(stack[0]) != 1:
        raise GameError(f"its PDDL holds {len(stack[0])} lists where one was due")
    return stack[0][0]


def read_typed_list(words: Sequence[Expression]) -> Iterator[tuple[str, str]]:
    """Yield pairs (name, type) of a list such as ``a b - receptacle c - object``; without a type it is ``object``.

    Raises:
        GameError: an element is not a name, or a type is missing or unknown.
    """
    waiting: list[str] = []
    words = list(words)
    position = 0
    while position < len(words):
        word = words[position]
        if not isinstance(word, str):
            raise GameError("its PDDL has a list where the name of an object was due")
        if word != "-":
            waiting.append(word)
            position += 1
            continue
        kind = words[position + 1] if position + 1 < len(words) else None
        if not isinstance(kind, str) or kind not in TYPES:
            raise GameError(f"its PDDL has the unknown type {kind!r}; ALFWorld's are {', '.join(sorted(TYPES))}")
        for name in waiting:
            yield name, kind
        waiting.clear()
        position += 2
    for name in waiting:
        yield name, ROOT_TYPE


def read_problem(text: str) -> Problem:
    """Read a PDDL problem of ALFWorld's domain.

    Assignments such as ``(= (distance a b) 3)`` and negated facts (``(not (opened a))``) are ignored.

    Raises:
        GameError: not PDDL, a missing or unknown section, an unknown predicate or type, a wrong number of arguments, a
            name that is declared twice or that TextWorld cannot play, or an undeclared name in a fact.
    """
    whole = parse_expression(text)
    if not isinstance(whole, tuple) or not whole or whole[0] != "define":
        raise GameError("its PDDL does not begin with (define (problem …")
    sections: dict[str, tuple[Expression, ...]] = {}
    for section in whole[1:]:
        if not isinstance(section, tuple) or not section or not isinstance(section[0], str):
            raise GameError("its PDDL has something that is not a section")
        if section[0] not in _DEFINE:
            raise GameError(f"its PDDL has the unknown section {section[0]!r}")
        if section[0] in sections:
            raise GameError(f"its PDDL has the section {section[0]!r} twice")
        sections[section[0]] = section[1:]
    for needed in (":objects", ":init", ":goal"):
        if needed not in sections:
            raise GameError(f"its PDDL has no section {needed!r}")
    if len(sections[":goal"]) != 1:
        raise GameError("its PDDL needs exactly one condition in the section ':goal'")
    objects = _read_objects(sections[":objects"])
    facts: dict[str, set[Fact]] = {}
    named: set[str] = set()
    for item in sections[":init"]:
        if not isinstance(item, tuple) or not item or not isinstance(item[0], str):
            raise GameError("its PDDL has something in ':init' that is not a fact")
        predicate = item[0]
        if predicate in ("=", "not"):
            continue
        arity = PREDICATES.get(predicate)
        if arity is None:
            raise GameError(f"its PDDL has the unknown predicate {predicate!r} in ':init'")
        arguments = item[1:]
        if len(arguments) != arity:
            raise GameError(f"its PDDL has ({predicate} …) with {len(arguments)} arguments instead of {arity}")
        _check_declared(predicate, arguments, objects)
        facts.setdefault(predicate, set()).add(arguments)  # type: ignore[arg-type]
        named.update(arguments)  # type: ignore[arg-type]
    return Problem(
        objects=objects,
        facts={predicate: frozenset(rows) for predicate, rows in facts.items()},
        named=frozenset(named),
        goal=sections[":goal"][0],
    )


def _read_objects(words: Sequence[Expression]) -> dict[str, str]:
    objects: dict[str, str] = {}
    for name, kind in read_typed_list(words):
        if name in objects:
            raise GameError(f"its PDDL declares {name!r} twice")
        if _UNSPEAKABLE.search(name):
            raise GameError(
                f"its PDDL has the name {name!r}, which TextWorld cannot play: give the thing another one, of at least"
                " two letters, digits and '_'"
            )
        objects[name] = kind
    return objects


def _check_declared(predicate: str, arguments: Sequence[Expression], objects: Mapping[str, str]) -> None:
    for argument in arguments:
        if not isinstance(argument, str) or argument not in objects:
            raise GameError(f"its PDDL uses {argument!r} in ({predicate} …) without declaring it in ':objects'")

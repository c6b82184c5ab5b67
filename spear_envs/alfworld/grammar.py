"""The wording of a game: read from its grammar and domain, and checked for being ALFWorld's."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from spear_envs.alfworld.pddl import Expression, GameError, parse_expression
from spear_envs.core.tasks import canonical_json

_HELP = """\
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""


@dataclass(frozen=True, slots=True)
class Wording:
    """The points in which game files differ; all other words are the same in every file."""

    put: tuple[str, str]
    """Words before the object and between object and receptacle in the command: ``("move ", " to ")``."""
    put_feedback: tuple[str, str]
    """The same in the feedback: ``("You move the ", " to the ")``."""
    arrive_at_location: bool
    """Whether going somewhere names the location (``You arrive at loc 12.``) instead of the receptacle."""
    help: str | None
    """Answer to ``help``; None if the command does not exist."""
    sinks: frozenset[str]
    """Types of receptacles that clean."""


WORDING_2_1_2 = Wording(
    put=("move ", " to "),
    put_feedback=("You move the ", " to the "),
    arrive_at_location=False,
    help=_HELP,
    sinks=frozenset({"sinkbasintype"}),
)
"""Release 2.1.2, which alfworld 0.4.2 downloads, and synthetic games."""


_SENTENCE = re.compile(r'("rhs":\s*"Your task is to: )((?:[^"\\]|\\.)*)"')
_BLOCK = re.compile(r'\bgrammar\s*::\s*"""(.*?)"""', re.DOTALL)
_ACTION = re.compile(
    r'\baction\s+(\w+)\s*\{\s*template\s*::\s*"([^"]*)"\s*;\s*feedback\s*::\s*"([^"]*)"\s*;', re.DOTALL
)
_PUT_COMMAND = re.compile(r"([^{}]+)\{o\}([^{}]+)\{r\}")
_PUT_FEEDBACK = re.compile(r"([^{}]*)\{o\.name\}([^{}]*)\{r\.name\}\.")

KNOWN_PARTS: Mapping[str, str] = MappingProxyType(
    {
        "action cleanobject": "45890aaa7ffe",
        "action closeobject": "32824ce4a554",
        "action coolobject": "ddfdbb76d9c8",
        "action examineobject": "f8bbe2883338",
        "action examinereceptacle": "096184f0dfcd",
        "action gotolocation": "b50c52cfe951",
        "action heatobject": "1d87087c252d",
        "action help": "0e23a4609bba",
        "action inventory": "8e826b0abf05",
        "action look": "2b2dc270d991",
        "action openobject": "a9b8aadcb20e",
        "action pickupobject": "6c0eb3d183fd",
        "action putobject": "b77f09a195c1",
        "action sliceobject": "1c86777dd43d",
        "action toggleobject": "0fefa0fcab4b",
        "grammar rule 'CloseObject.feedback'": "fb6b946e4ced",
        "grammar rule 'GotoLocation.feedback'": "75f7f667c125",
        "grammar rule 'OpenObject.feedback'": "f904bac92bfb",
        "grammar rule 'PickupObject.feedback'": "c946ea0e3f4f",
        "grammar rule 'cleanObject.feedback'": "91528b58fc89",
        "grammar rule 'coolObject.feedback'": "421455331954",
        "grammar rule 'examineObject.feedback'": "25e04af22a37",
        "grammar rule 'examineReceptacle.feedback'": "0ec1c0dc2b7d",
        "grammar rule 'heatObject.feedback'": "7669277bbb9e",
        "grammar rule 'intro'": "11357edf0de7",
        "grammar rule 'inventory.feedback'": "90c7b5d2246a",
        "grammar rule 'list_appliances'": "7f5980e2f0c8",
        "grammar rule 'list_empty'": "ad7a2179ddcb",
        "grammar rule 'list_last_separator'": "9086a849287e",
        "grammar rule 'list_objects_on_the_floor'": "f672a35dd99b",
        "grammar rule 'list_separator'": "6a88dfb20365",
        "grammar rule 'look-variations'": "e73aca47d612",
        "grammar rule 'look.feedback'": "88e733705715",
        "grammar rule 'overview(o)'": "a46177396900",
        "grammar rule 'overview(r)'": "2d8b548edeed",
        "grammar rule 'sliceObject.feedback'": "4fb3b53fbf70",
        "grammar rule 'toggleObject.feedback'": "0f9d48c34f8b",
    }
)
"""Result of :func:`digest_parts` for alfworld 0.4.2. A game in which a part differs is refused instead of being played
wrongly."""


def split_grammar(grammar: str) -> tuple[str, str]:
    """Split a grammar into its task sentence and the rest, which all games of a release share.

    Raises:
        GameError: it lacks a task sentence.
    """
    found = _SENTENCE.search(grammar)
    if found is None:
        raise GameError("its grammar has no rule that says 'Your task is to: …'")
    try:
        sentence = json.loads(f'"{found[2]}"', strict=False)
    except (ValueError, RecursionError):
        raise GameError(f"its grammar's task sentence {found[2]!r} cannot be read") from None
    return sentence, grammar[: found.start(2)] + grammar[found.end(2) :]


def replace_sentence(grammar: str, sentence: str) -> str:
    """Replace the task sentence of a grammar.

    Raises:
        GameError: it lacks a task sentence.
    """
    found = _SENTENCE.search(grammar)
    if found is None:
        raise GameError("its grammar has no rule that says 'Your task is to: …'")
    return f"{grammar[: found.start(2)]}{json.dumps(sentence)[1:-1]}{grammar[found.end(2) :]}"


# Almost all games share these two texts, which take longer to read than the rest of a game.
@lru_cache(maxsize=16)
def read_wording(frame: str, domain: str) -> Wording:
    """Read the wording of a game.

    Args:
        frame: the grammar without the task sentence, see :func:`split_grammar`.
        domain: the PDDL domain.

    Raises:
        GameError: the game says or does things that are not built into the interpreter.
    """
    parts = digest_parts(frame, domain)
    for name in sorted(KNOWN_PARTS.keys() | parts.keys()):
        if parts.get(name) != KNOWN_PARTS.get(name) and not (name == "action help" and name not in parts):
            state = "unknown" if name not in KNOWN_PARTS else "different" if name in parts else "missing"
            raise GameError(f"it is not a game of ALFWorld 2.1: its {name} is {state}")
    rules, words = _read_rules(frame), _read_words(frame)
    put = _PUT_COMMAND.fullmatch(words["putobject"][0])
    said = _PUT_FEEDBACK.fullmatch(_read_text(rules, "PutObject.feedback"))
    if put is None or said is None:
        raise GameError("its grammar words putting an object down in an unknown way")
    actions = _read_actions(domain)
    return Wording(
        put=(put[1], put[2]),
        put_feedback=(said[1], said[2]),
        arrive_at_location="{lend.name}" in _read_text(rules, "GotoLocation.feedback"),
        help=_read_help(rules, words) if "help" in actions else None,
        sinks=_split_sinks(actions["cleanobject"])[0],
    )


def digest_parts(frame: str, domain: str) -> dict[str, str]:
    """Compute short digests of all parts of a game's logic that are built into the interpreter, by their names.

    What differs between releases is left out: see :class:`Wording`.

    Raises:
        GameError: grammar or domain cannot be read.
    """
    rules, words = _read_rules(frame), _read_words(frame)
    parts: dict[str, Any] = {
        name: rules.get(name.split("'")[1]) for name in KNOWN_PARTS if name.startswith("grammar rule ")
    }
    arrival = _read_text(rules, "GotoLocation.feedback")
    parts["grammar rule 'GotoLocation.feedback'"] = arrival.replace("{lend.name}", "{r.name}")
    for name, action in _read_actions(domain).items():
        if name not in words:
            raise GameError(f"its grammar has no words for the action {name!r}")
        template, feedback = words[name]
        if name == "putobject":
            template = ""
        elif name == "help":
            feedback = ""
        elif name == "cleanobject":
            action = _split_sinks(action)[1]
        parts[f"action {name}"] = [action, template, feedback]
    return {name: hashlib.sha256(canonical_json(part).encode()).hexdigest()[:12] for name, part in parts.items()}


def _read_rules(frame: str) -> dict[str, Any]:
    rules: dict[str, Any] = {}
    for block in _BLOCK.findall(frame):
        try:
            rules.update(json.loads(block))
        except (ValueError, RecursionError, TypeError) as error:
            raise GameError(f"its grammar holds a block that is not JSON ({error})") from None
    return rules


def _read_words(frame: str) -> dict[str, tuple[str, str]]:
    """Return the template of the command and rule of the feedback, by the action's name in lower case."""
    return {name.lower(): (template, feedback) for name, template, feedback in _ACTION.findall(frame)}


def _read_text(rules: Mapping[str, Any], name: str) -> str:
    """Read the text of a rule that has exactly one."""
    try:
        (rule,) = rules[name]
        text = rule["rhs"]
    except (KeyError, TypeError, ValueError):
        raise GameError(f"its grammar has no rule {name!r} with exactly one text") from None
    if not isinstance(text, str):
        raise GameError(f"the rule {name!r} of its grammar is not a text")
    return text


def _read_help(rules: Mapping[str, Any], words: Mapping[str, tuple[str, str]]) -> str:
    # A separate rule in alfworld's package; inline in files that alfworld's patch updated to 2.1.2.
    feedback = words["help"][1]
    text = _read_text(rules, feedback.strip("#")) if feedback.startswith("#") else feedback
    return text.lstrip()  # TextWorld's parser skips leading blanks


def _read_actions(domain: str) -> dict[str, Expression]:
    """Return the actions of a domain by name."""
    try:
        whole = parse_expression(domain)
    except GameError as error:
        raise GameError(str(error).replace("its PDDL", "its PDDL domain")) from None
    return {
        str(section[1]): section
        for section in whole
        if isinstance(section, tuple) and len(section) > 1 and section[0] == ":action"
    }


def _split_sinks(expression: Expression) -> tuple[frozenset[str], Expression]:
    """Return the types in conditions ``(receptacletype ?r <type>)``, and the expression without these conditions."""
    if isinstance(expression, str):
        return frozenset(), expression
    found: frozenset[str] = frozenset()
    rest: list[Expression] = []
    for part in expression:
        if isinstance(part, tuple) and part[:2] == ("receptacletype", "?r") and len(part) == 3:
            found |= {str(part[2])}
        else:
            inner, kept = _split_sinks(part)
            found |= inner
            rest.append(kept)
    return found, tuple(rest)

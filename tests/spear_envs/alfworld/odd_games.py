"""Official games made odd: properties at the start, bare names, things in two places, goals of every form."""

import random
import re
from collections.abc import Mapping
from typing import Any

from spear_envs.alfworld.pddl import Problem, read_problem

GOALS = (
    "(exists (?o - object) (and (isSliced ?o) (sliceable ?o)))",
    "(forall (?a - agent) (exists (?o - object) (and (holds ?a ?o) (or (isHot ?o) (isCool ?o) (isClean ?o)))))",
    "(exists (?r - receptacle ?s - receptacle) (and (opened ?r) (opened ?s) (not (= ?r ?s))))",
    "(exists (?o - object) (and (pickupable ?o) (not (exists (?r - receptacle) (inReceptacle ?o ?r)))"
    " (forall (?l - location) (not (objectAtLocation ?o ?l)))))",
    "(and (forall (?a - agent) (imply (holdsAny ?a) (exists (?o - object) (and (holds ?a ?o) (isClean ?o)))))"
    " (exists (?o - object) (isClean ?o)))",
    "(or (exists (?l - location) (and (checked ?l) (exists (?r - receptacle) (receptacleAtLocation ?r ?l))))"
    " (exists (?o - object) (and (isOn ?o) (isToggled ?o))))",
    "(exists (?r - receptacle) (and (checked ?r) (openable ?r) (not (opened ?r))))",
    "(not (forall (?r - receptacle) (not (opened ?r))))",
)
"""Goals that official games do not have; each can be reached where there are things to open, to slice and to clean."""


def make_odd(data: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    """A game file's contents with oddities put in, all of which TextWorld plays."""
    problem = data["pddl_problem"]
    read = read_problem(problem)
    added: list[str] = []
    movable = sorted(read.having("pickupable"))
    for fact in ("isClean", "isHot", "isCool", "isSliced", "isToggled", "isOn"):
        added += [f"({fact} {thing})" for thing in movable if rng.random() < 0.1]
    added += [f"(opened {place})" for place in sorted(read.having("openable")) if rng.random() < 0.2]
    added += [f"(toggleable {thing})" for thing in movable if rng.random() < 0.05]
    places = sorted({place for place, _ in read.rows("receptacleatlocation")})
    added += [f"(inReceptacle {thing} {rng.choice(places)})" for thing in movable if rng.random() < 0.1]
    containers = sorted(read.having("isreceptacleobject"))
    if containers:
        added += [f"(inReceptacleObject {rng.choice(movable)} {rng.choice(containers)})" for _ in range(6)]
    if rng.random() < 0.3:
        held = rng.choice(movable)
        added += [f"(holds agent1 {held})", "(holdsAny agent1)"]
    if rng.random() < 0.3:
        problem = _start_at(problem, read, rng.choice(places))
    known = {f"({predicate} {' '.join(row)})" for predicate, rows in read.facts.items() for row in rows}
    fresh = [fact for fact in dict.fromkeys(added) if fact.lower() not in known]
    problem = re.sub(r"\(:init\b", lambda found: "(:init\n" + "\n".join(fresh), problem, count=1, flags=re.IGNORECASE)
    for number, thing in enumerate(rng.sample(movable, min(3, len(movable)))):
        new = (f"widget{number}", f"odd_minus_{number}_dot_thing", f"washbasin{number}_bar_x")[number]
        problem = re.sub(rf"\b{re.escape(thing)}(?=[\s)])", new, problem, flags=re.IGNORECASE)
    if rng.random() < 0.6:
        head = problem[: problem.lower().index("(:goal")]
        problem = f"{head}(:goal {rng.choice(GOALS)})\n)\n"
    return {**data, "pddl_problem": problem}


def _start_at(problem: str, read: Problem, place: str) -> str:
    location = next(row[1] for row in read.rows("receptacleatlocation") if row[0] == place)
    return re.sub(r"\(atLocation agent1 \S+\)", f"(atLocation agent1 {location})", problem, flags=re.IGNORECASE)


def make_release_2_1_1(data: Mapping[str, Any]) -> dict[str, Any]:
    """A game of release 2.1.2 as release 2.1.1 had it: alfworld's own patch of the files, backwards."""
    grammar = (
        data["grammar"]
        .replace("You arrive at {r.name}.", "You arrive at {lend.name}.")
        .replace("move {o} to {r}", "put {o} in/on {r}")
        .replace("You move the {o.name} to the {r.name}.", "You put the {o.name} in/on the {r.name}.")
    )
    domain = data["pddl_domain"]
    before, _, after = domain.partition("(:action help")
    domain = before + after[after.index(")\n)\n") + 4 :] if after else domain
    domain = domain.replace(";(receptacleType ?r SinkType)", "(receptacleType ?r SinkType)")
    return {**data, "grammar": grammar[: grammar.index("action help")], "pddl_domain": domain}


def patch_release_2_1_1(data: Mapping[str, Any]) -> dict[str, Any]:
    """A game of release 2.1.2 as alfworld's patch makes it of a 2.1.1 file: ``help`` is written out, without a rule."""
    old = make_release_2_1_1(data)
    text = re.search(r'"help\.feedback".*?"rhs": "(.*?)"', data["grammar"], re.DOTALL)
    assert text is not None
    words = text[1].replace("\\n", "\n")
    before, _, after = old["pddl_domain"].rpartition(")")
    action = "(:action help :parameters (?a - agent) :precondition () :effect (and (checked ?a)))"
    grammar = (
        old["grammar"]
        .replace("You arrive at {lend.name}.", "You arrive at {r.name}.")
        .replace("put {o} in/on {r}", "move {o} to {r}")
        .replace("You put the {o.name} in/on the {r.name}.", "You move the {o.name} to the {r.name}.")
    )
    grammar += f'\naction help {{\n    template :: "help";\n    feedback :: "{words}";\n}}\n'
    return {**old, "grammar": grammar, "pddl_domain": f"{before}{action}){after}"}

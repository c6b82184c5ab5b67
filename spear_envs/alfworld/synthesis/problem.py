"""The PDDL problem of a synthetic game, in the vocabulary of alfworld's domain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from spear_envs.alfworld.synthesis.placing import PlacedObject
from spear_envs.alfworld.synthesis.rooms import Layout
from spear_envs.alfworld.synthesis.things import ABILITIES, HOLDS, OPENABLE, TREATMENTS
from spear_envs.alfworld.task_types import TaskType

SENTENCES: Mapping[TaskType, tuple[str, str]] = MappingProxyType(
    {
        TaskType.PICK: ("put a {wanted} in {target}.", "put some {wanted} on {target}."),
        TaskType.LOOK: ("look at {wanted} under the {target}.", "examine the {wanted} with the {target}."),
        TaskType.CLEAN: ("put a clean {wanted} in {target}.", "clean some {wanted} and put it in {target}."),
        TaskType.HEAT: ("put a hot {wanted} in {target}.", "heat some {wanted} and put it in {target}."),
        TaskType.COOL: ("put a cool {wanted} in {target}.", "cool some {wanted} and put it in {target}."),
        TaskType.PICK2: ("put two {wanted} in {target}.", "find two {wanted} and put them in {target}."),
    }
)
"""The two sentences of each task type in the published games."""

_PLACE_GOAL = (
    "(and (exists (?r - receptacle) (exists (?o - object) (and {extra}(objectType ?o {wanted}Type)"
    " (receptacleType ?r {target}Type) (inReceptacle ?o ?r)))))"
)
_LOOK_GOAL = (
    "(and (exists (?ot - object ?r - receptacle ?a - agent ?l - location) (and (objectType ?ot {target}Type)"
    " (toggleable ?ot) (isToggled ?ot) (receptacleAtLocation ?r ?l) (atLocation ?a ?l) (inReceptacle ?ot ?r)))"
    " (exists (?o - object ?a - agent) (and (objectType ?o {wanted}Type) (holds ?a ?o))))"
)
_TWO_GOAL = (
    "(and (exists (?r - receptacle) (exists (?o1 - object) (and (objectType ?o1 {wanted}Type)"
    " (receptacleType ?r {target}Type) (inReceptacle ?o1 ?r) (exists (?o2 - object) (and (not (= ?o1 ?o2))"
    " (objectType ?o2 {wanted}Type) (receptacleType ?r {target}Type) (inReceptacle ?o2 ?r)))))))"
)


def write_goal(task_type: TaskType, wanted: str, target: str) -> str:
    """Write the goal; ``target`` is the kind of the receptacle, or of the lamp."""
    if task_type is TaskType.LOOK:
        return _LOOK_GOAL.format(wanted=wanted, target=target)
    if task_type is TaskType.PICK2:
        return _TWO_GOAL.format(wanted=wanted, target=target)
    extra = "".join(f"({predicate} ?o) " for predicate in TREATMENTS.get(task_type, ()))
    return _PLACE_GOAL.format(extra=extra, wanted=wanted, target=target)


def _write_facts(layout: Layout, objects: Sequence[PlacedObject], start: str) -> list[str]:
    facts = [f"(atLocation agent1 {start})"]
    for receptacle in layout.receptacles:
        name = receptacle.identifier
        facts.append(f"(receptacleType {name} {receptacle.kind}Type)")
        facts.append(f"(receptacleAtLocation {name} {receptacle.location})")
        if receptacle.kind in OPENABLE:
            facts.append(f"(openable {name})")
    for item in objects:
        name = item.identifier
        facts.append(f"(objectType {name} {item.kind}Type)")
        facts.append(f"(objectAtLocation {name} {item.place.location})")
        if not item.loose:
            facts.append(f"(inReceptacle {name} {item.place.identifier})")
        if item.second is not None:
            facts.append(f"(inReceptacle {name} {item.second.identifier})")
        if item.container is not None:
            facts.append(f"(inReceptacleObject {name} {item.container})")
        if item.kind == layout.room.lamp:
            facts.append(f"(toggleable {name})")
            continue
        facts.append(f"(pickupable {name})")
        facts += [f"({predicate} {name})" for predicate, kinds in ABILITIES.items() if item.kind in kinds]
        if item.cool:
            facts.append(f"(isCool {name})")
    kinds = sorted({item.kind for item in objects})
    for holder in sorted({receptacle.kind for receptacle in layout.receptacles}):
        facts += [f"(canContain {holder}Type {kind}Type)" for kind in kinds if kind in HOLDS[holder]]
    return facts


def write_problem(layout: Layout, objects: Sequence[PlacedObject], start: str, goal: str) -> str:
    """Write the problem: declarations, initial facts and goal.

    Args:
        start: location of the agent, away from receptacles.
        goal: from :func:`write_goal`.
    """
    declared = ["agent1 - agent"]
    declared += [f"{item.identifier} - object" for item in objects]
    declared += [f"{receptacle.identifier} - receptacle" for receptacle in layout.receptacles]
    declared += [f"{spot} - location" for spot in sorted({item.location for item in layout.receptacles} | {start})]
    declared += [f"{kind}Type - otype" for kind in sorted({item.kind for item in objects})]
    declared += [f"{kind}Type - rtype" for kind in sorted({item.kind for item in layout.receptacles})]
    lines = ["(define (problem synthetic)", "(:domain alfred)", "(:objects", *declared, ")", "(:init"]
    return "\n".join([*lines, *_write_facts(layout, objects, start), ")", f"(:goal {goal})", ")", ""])

"""Synthetic games: drawn from a room and a task, kept if the oracle wins, and written in the official format."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from spear_envs.alfworld.game import Game
from spear_envs.alfworld.gamefile import TaskType, find_task_type
from spear_envs.alfworld.grammar import WORDING_2_1_2, replace_sentence
from spear_envs.alfworld.oracle import is_winnable
from spear_envs.alfworld.pddl import GameError
from spear_envs.alfworld.synthesis.rooms import (
    ABILITIES,
    HOLDS,
    LAYOUTS,
    OPENABLE,
    TREATMENTS,
    Dice,
    Layout,
    PlacedObject,
    RoomSize,
    draw_objects,
    has_ability,
    list_layouts,
    rooms_of,
)
from spear_envs.core.errors import SpearError, choose_member, require_whole
from spear_envs.core.tasks import check_split
from spear_envs.data.files import write_text

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


_MOST_ATTEMPTS = 500


@dataclass(frozen=True)
class SyntheticGame:
    """A game made from a task type, a split, a size of rooms and a seed."""

    task_type: TaskType
    split: str
    size: RoomSize
    seed: int
    layout: Layout
    wanted: str
    """Kind of the task's object."""
    target: str
    """Kind of its receptacle, or of the lamp."""
    sentence: str
    problem: str

    @property
    def digest(self) -> str:
        """Return the SHA-256 (hex) of sentence and problem."""
        return hashlib.sha256(f"{self.sentence}\0{self.problem}".encode()).hexdigest()

    @property
    def pddl_params(self) -> Mapping[str, Any]:
        """Return the node of this name in ``traj_data.json``."""
        lit = self.task_type is TaskType.LOOK
        return {
            "object_target": self.wanted,
            "parent_target": "" if lit else self.target,
            "toggle_target": self.target if lit else "",
            "mrecep_target": "",
            "object_sliced": False,
        }


def _choose_task(
    task_type: TaskType, layout: Layout, objects: Sequence[PlacedObject], dice: Dice
) -> tuple[str, str] | None:
    """Return kinds of the object and of its target; None if nothing suits the task."""
    copies = Counter(item.kind for item in objects if item.kind != layout.room.lamp and not item.loose)
    least = 2 if task_type is TaskType.PICK2 else 1
    wanted = [kind for kind in sorted(copies) if copies[kind] >= least and has_ability(kind, task_type)]
    if not wanted:
        return None
    chosen = dice.pick(wanted)
    if task_type is TaskType.LOOK:
        assert layout.room.lamp is not None
        return chosen, layout.room.lamp
    holding = set() if task_type in TREATMENTS else {item.place.kind for item in objects if item.kind == chosen}
    targets = sorted({place.kind for place in layout.receptacles if chosen in HOLDS[place.kind]} - holding)
    return (chosen, dice.pick(targets)) if targets else None


def _attempt(task_type: TaskType, split: str, size: RoomSize, seed: int, attempt: int) -> SyntheticGame | None:
    dice = Dice("game", task_type.value, split, size.value, seed, attempt)
    # In turn and not at random, so that a few hundred games of a type use all layouts.
    rooms, numbers = rooms_of(task_type), LAYOUTS[split]
    layout = list_layouts(rooms[seed % len(rooms)], size)[numbers[seed // len(rooms) % len(numbers)]]
    objects = draw_objects(layout, size, dice)
    chosen = _choose_task(task_type, layout, objects, dice)
    if chosen is None:
        return None
    wanted, target = chosen
    start = f"loc_bar_0_bar_0_bar_{dice.below(4)}_bar_30"
    if any(place.location == start for place in layout.receptacles):
        return None
    sentence = dice.pick(SENTENCES[task_type]).format(wanted=wanted.lower(), target=target.lower())
    problem = write_problem(layout, objects, start, write_goal(task_type, wanted, target))
    return SyntheticGame(task_type, split, size, seed, layout, wanted, target, sentence, problem)


def make_game(task_type: TaskType, split: str, seed: int, size: RoomSize = RoomSize.STANDARD) -> SyntheticGame:
    """Make the game of these four values, the same on every machine and Python.

    It is the first draw that is not won at its start and that the oracle wins.

    Args:
        split: decides the layouts; those of ``valid_unseen`` do not occur in other splits.
        seed: any whole number; consecutive ones have different layouts.

    Raises:
        SpearError: the split is unknown, or no game was found (not seen so far).
    """
    check_split(split, tuple(LAYOUTS))
    for attempt in range(_MOST_ATTEMPTS):
        game = _attempt(task_type, split, size, seed, attempt)
        if game is not None and is_winnable(Game.from_problem(game.problem, game.sentence, WORDING_2_1_2)):
            return game
    raise SpearError(f"{_MOST_ATTEMPTS} draws gave no {task_type.value} game for seed {seed}: take another seed.")


def read_game_logic(sentence: str) -> tuple[str, str]:
    """Read PDDL domain and grammar of the installed alfworld package, with a task sentence in the grammar.

    Without importing alfworld, which would make a folder and set ``$ALFWORLD_DATA``.

    Raises:
        SpearError: alfworld is not installed, or is another version.
    """
    mend = "pip install 'spear-envs[alfworld]'"
    spec = find_spec("alfworld")
    if spec is None or not spec.submodule_search_locations:
        raise SpearError(f"A game file needs the domain and grammar of alfworld, which is not installed: {mend}.")
    folder = Path(next(iter(spec.submodule_search_locations))) / "data"
    try:
        domain, grammar = ((folder / name).read_text("utf-8") for name in ("alfred.pddl", "alfred.twl2"))
    except OSError as error:
        raise SpearError(f"{error.filename} cannot be read ({error.strerror}): {mend} --force-reinstall.") from None
    try:
        return domain, replace_sentence(grammar, sentence)
    except GameError as error:
        raise SpearError(f"{folder / 'alfred.twl2'}: {error}. This needs alfworld 0.4.2: {mend}.") from None


def write_game(game: SyntheticGame, folder: str | Path) -> Path:
    """Write ``game.tw-pddl`` and ``traj_data.json`` of a game below ``folder``, in the folders of official data.

    Returns:
        ``<folder>/<split>/<type>-<object>-None-<target>-<scene>/trial_S<seed>/game.tw-pddl``.

    Raises:
        SpearError: alfworld is not installed, or the folder cannot be written.
    """
    domain, grammar = read_game_logic(game.sentence)
    scene = game.layout.scene
    prefix = "S" if game.size is RoomSize.STANDARD else "M"
    trial = f"trial_{prefix}{game.seed:06d}"
    place = Path(folder) / game.split / f"{game.task_type.value}-{game.wanted}-None-{game.target}-{scene}" / trial
    data: dict[str, Any] = {
        "task_id": trial,
        "task_type": game.task_type.value,
        "pddl_params": dict(game.pddl_params),
        "scene": {"floor_plan": f"FloorPlan{scene}", "scene_num": scene},
        "turk_annotations": {"anns": []},
    }
    path = place / "game.tw-pddl"
    # Other processes may be reading the game: they see the old file or the new one.
    write_text(place / "traj_data.json", json.dumps(data), synced=False)
    logic = {"pddl_domain": domain, "grammar": grammar, "pddl_problem": game.problem}
    write_text(path, json.dumps({**logic, "solvable": True, "walkthrough": None}), synced=False)
    return path


def write_synthetic_game(
    task_type: str, seed: int, folder: str | Path, split: str = "train", *, rooms: str = "standard"
) -> Path:
    """Make the synthetic game of a seed and write it as a file that TextWorld and this package play.

    Args:
        task_type: ALFRED's name (``pick_heat_then_place_in_recep``) or the short one (``heat``).
        seed: a whole number from 0.
        folder: new or existing; may then be passed as ``data_dir``.
        split: ``"train"``, ``"valid_seen"`` or ``"valid_unseen"``; decides the layouts.
        rooms: ``"standard"`` or ``"small"``.

    Returns:
        Path of the ``game.tw-pddl``; ``traj_data.json`` is next to it.

    Raises:
        SpearError: an argument without a valid value, alfworld is not installed (its domain and grammar are part of
            the file), or the folder cannot be written.
    """
    require_whole("seed", seed, 0)
    size = choose_member(RoomSize, rooms, "rooms")
    return write_game(make_game(find_task_type(task_type), split, seed, size), folder)

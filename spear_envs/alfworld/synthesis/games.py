"""Makes synthetic games: draws a room, its objects and a task, and keeps what the oracle wins."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spear_envs.alfworld.game import Game
from spear_envs.alfworld.oracle import is_winnable
from spear_envs.alfworld.synthesis.dice import Dice
from spear_envs.alfworld.synthesis.placing import PlacedObject, draw_objects
from spear_envs.alfworld.synthesis.problem import SENTENCES, write_goal, write_problem
from spear_envs.alfworld.synthesis.rooms import LAYOUTS, Layout, RoomSize, list_layouts, rooms_of
from spear_envs.alfworld.synthesis.things import HOLDS, TREATMENTS, has_ability
from spear_envs.alfworld.task_types import TaskType
from spear_envs.alfworld.wording import WORDING_2_1_2
from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import check_split

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
        """SHA-256 (hex) of sentence and problem."""
        return hashlib.sha256(f"{self.sentence}\0{self.problem}".encode()).hexdigest()

    @property
    def pddl_params(self) -> Mapping[str, Any]:
        """The node of this name in ``traj_data.json``."""
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
    """Kinds of the object and of its target; None if nothing suits the task."""
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

"""Folders of game files as the official archives have them, written for a test."""

import json
from pathlib import Path
from typing import Any

from spear_envs.alfworld.gamefile import TaskType
from spear_envs.alfworld.synthesis.games import make_game

GRAMMAR = 'grammar :: """ { "task": [ { "rhs": "Your task is to: UNKNOWN GOAL." } ] } """'


def write_trial(
    split: Path,
    number: int,
    *,
    task_type: str | None = None,
    kind: TaskType = TaskType.PICK,
    human: tuple[str, ...] = ("Move it.", "Put it there."),
    folder: str | None = None,
    **changes: Any,
) -> Path:
    """Write one game that can be listed (to be played it would need alfworld's grammar); returns its folder.

    Args:
        split: folder of the split.
        number: a name, and the seed.
        task_type: what ``traj_data.json`` says; by default the one of ``kind``.
        kind: task type of the game itself.
        human: sentences in ``traj_data.json``.
        folder: name of the folder between split and trial.
        changes: keys of the game file; None takes one out.
    """
    made = make_game(kind, "train", number)
    trial = split / (folder or f"{made.task_type.value}-{made.wanted}-None-{made.target}-{number}") / f"trial_{number}"
    trial.mkdir(parents=True)
    game = {
        "pddl_domain": "(define (domain alfred))",
        "grammar": GRAMMAR.replace("UNKNOWN GOAL.", made.sentence),
        "pddl_problem": made.problem,
        "solvable": True,
        "walkthrough": None,
        **changes,
    }
    data = {
        "task_id": trial.name,
        "task_type": made.task_type.value if task_type is None else task_type,
        "pddl_params": dict(made.pddl_params),
        "turk_annotations": {"anns": [{"task_desc": sentence} for sentence in human]},
    }
    (trial / "game.tw-pddl").write_text(json.dumps({key: value for key, value in game.items() if value is not None}))
    (trial / "traj_data.json").write_text(json.dumps(data))
    return trial

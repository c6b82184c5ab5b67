"""Writes synthetic games as files of the official format, for TextWorld and other tools."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spear_envs.alfworld.errors import GameError
from spear_envs.alfworld.grammar import replace_sentence
from spear_envs.alfworld.synthesis.games import SyntheticGame, make_game
from spear_envs.alfworld.synthesis.rooms import RoomSize
from spear_envs.alfworld.task_types import find_task_type
from spear_envs.core.errors import SpearError, choose_member, require_whole
from spear_envs.data.files import write_text


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

"""The original gym-sokoban 0.0.6, loaded without its dependencies, to compare with."""

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import gymnasium
import gymnasium.spaces.discrete
import gymnasium.utils.seeding
import numpy as np
from PIL import Image

MEND = "gym-sokoban is not installed: pip install --no-deps gym-sokoban==0.0.6"


def find_peer() -> Path | None:
    """Folder of the installed gym_sokoban package, or None."""
    spec = importlib.util.find_spec("gym_sokoban")
    return Path(next(iter(spec.submodule_search_locations))) if spec and spec.submodule_search_locations else None


def has_imageio() -> bool:
    """Whether the peer's own reader of PNG files is installed."""
    return importlib.util.find_spec("imageio") is not None


def load_peer() -> type[Any]:
    """The class ``SokobanEnv`` of gym-sokoban.

    Its packages' ``__init__`` files (which register old ids) are not run; ``gym`` is gymnasium; ``pkg_resources`` is
    replaced by what it does here, finding a file of the package; and so is ``imageio`` where it is not installed, by
    Pillow, which reads the PNG files several times as fast.
    """
    folder = find_peer()
    if folder is None:
        raise ImportError(MEND)
    packages = {"gym_sokoban": folder, "gym_sokoban.envs": folder / "envs"}
    stubs: dict[str, ModuleType] = {
        "gym": gymnasium,
        "gym.utils": gymnasium.utils,
        "gym.utils.seeding": gymnasium.utils.seeding,
        "gym.spaces": gymnasium.spaces,
        "gym.spaces.discrete": gymnasium.spaces.discrete,
    }
    for name, path in packages.items():
        stubs[name] = ModuleType(name)
        stubs[name].__path__ = [os.fspath(path)]
    stubs["pkg_resources"] = ModuleType("pkg_resources")
    stubs["pkg_resources"].resource_filename = lambda _, name: os.fspath(folder / "envs" / name)  # type: ignore[attr-defined]
    if not has_imageio():
        stubs["imageio"] = ModuleType("imageio")
        stubs["imageio"].imread = lambda path: np.asarray(Image.open(path).convert("RGB"))  # type: ignore[attr-defined]
    with patch.dict(sys.modules, stubs):
        return importlib.import_module("gym_sokoban.envs.sokoban_env").SokobanEnv


def open_peer(peer_class: type[Any], codes: np.ndarray, pictures: bool) -> Any:
    """An environment of the peer on a given board, int array (height, width) of codes 0 to 6."""
    env = peer_class(dim_room=codes.shape, max_steps=10**9, num_boxes=int(np.isin(codes, (3, 4)).sum()), reset=False)
    below = np.array([0, 1, 2, 2, 1, 1, 2])
    env.room_fixed = below[codes]
    env.room_state = np.where(codes == 6, 5, codes)
    env.player_position = np.argwhere(env.room_state == 5)[0]
    env.num_env_steps = 0
    env.reward_last = 0
    env.boxes_on_target = int((codes == 3).sum())
    if not pictures:
        env.render = lambda mode="human", **_: None
    return env

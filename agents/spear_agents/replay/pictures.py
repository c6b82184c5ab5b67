"""Pictures of recorded episodes, drawn by playing them again."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.envs.registration import load_env_creator
from PIL import Image

from spear_agents.replay_gif import replay_frames
from spear_agents.trajectory import Trajectory


def draws_pictures(env_id: str) -> bool:
    """Whether an environment draws pictures.

    Only registered names count: a file of episodes must not make this process import anything.
    """
    spec = gym.registry.get(env_id)
    if spec is None or spec.entry_point is None:
        return False
    creator = load_env_creator(spec.entry_point) if isinstance(spec.entry_point, str) else spec.entry_point
    return bool(getattr(creator, "draws", False))


def draw_episode(trajectory: Trajectory, env_kwargs: Mapping[str, Any], split: str | None) -> list[str]:
    """Data URLs of PNG pictures: before each response, and after the last. Empty if the environment does not draw.

    Raises SpearError if the episode ends differently when played again.
    """
    if not draws_pictures(trajectory.env_id):
        return []
    frames = replay_frames(trajectory.env_id, env_kwargs, trajectory, split=split)
    return [encode_picture(frame) for frame in frames]


def encode_picture(frame: np.ndarray) -> str:
    """Encode a uint8 array [height, width, 3] as the data URL of a PNG."""
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, format="PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")

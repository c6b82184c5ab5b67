"""Pictures of recorded episodes, drawn by playing them again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
from gymnasium.envs.registration import load_env_creator

from spear_agents.engines.openai import encode_picture
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

"""gymnasium's own RecordVideo over every environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

pytest.importorskip("moviepy", reason="RecordVideo needs moviepy")

from gymnasium.wrappers import RecordVideo

from spear_envs.core.registration import IDS


@pytest.mark.slow
@pytest.mark.parametrize("env_id", IDS)
def test_an_episode_is_a_video_with_a_frame_for_each_state(env_id: str, tmp_path: Path) -> None:
    from moviepy import VideoFileClip

    made: Any = gym.make(env_id, render_mode="rgb_array", response_format="plain")
    env = RecordVideo(made, str(tmp_path), episode_trigger=lambda episode: True)
    env.reset(seed=0)
    plan = made.unwrapped.expert_plan()
    steps = [env.step(action) for action in plan]
    assert steps[-1][2], "the expert ends the episode"
    shape = made.render().shape
    env.close()
    (path,) = tmp_path.glob("*.mp4")
    with VideoFileClip(str(path)) as clip:
        assert clip.n_frames == len(plan) + 1
        frame = clip.get_frame(0)
    assert frame.shape[2] == 3 and all(abs(a - b) <= 1 for a, b in zip(frame.shape[:2], shape[:2], strict=True))
    assert frame.std() > 1, "not one colour"

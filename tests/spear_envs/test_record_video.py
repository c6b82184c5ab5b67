"""gymnasium's own RecordVideo over every environment."""

from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

pytest.importorskip("moviepy", reason="RecordVideo needs moviepy")

from gymnasium.wrappers import RecordVideo

IDS = [f"spear/{name}" for name in ("Sokoban-v1", "ALFWorld-v0", "WebShop-v0", "CodeInterpreter-v0", "SearchR1-v0")]


@pytest.mark.slow
@pytest.mark.parametrize("env_id", IDS)
def test_an_episode_is_a_video_with_a_frame_for_each_state(env_id: str, tmp_path: Path) -> None:
    from moviepy import VideoFileClip

    made: Any = gym.make(f"spear_envs:{env_id}", render_mode="rgb_array", response_format="plain")
    env = RecordVideo(made, str(tmp_path), episode_trigger=lambda episode: True)
    env.reset(seed=0)
    steps, ended = 0, False
    while not ended:
        _, _, ended, truncated, _ = env.step(made.unwrapped.expert_plan()[0])
        assert not truncated
        steps += 1
    shape = made.render().shape
    env.close()
    (path,) = tmp_path.glob("*.mp4")
    with VideoFileClip(str(path)) as clip:
        assert clip.n_frames == steps + 1
        frame = clip.get_frame(0)
    assert frame.shape[2] == 3 and all(abs(a - b) <= 1 for a, b in zip(frame.shape[:2], shape[:2], strict=True))
    assert frame.std() > 1, "not one colour"

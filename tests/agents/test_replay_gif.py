from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spear_agents.evaluation import run_evaluation
from spear_agents.replay_gif import render_episode_gif, replay_frames
from spear_agents.settings import EngineKind, EvalSettings
from spear_agents.trajectory import Trajectory
from spear_envs.core.errors import SpearError

ENV, KEYWORDS = "spear/Sokoban-v1", {"modality": "text"}


@pytest.fixture(scope="module")
def episode() -> Trajectory:
    settings = EvalSettings(ENV, EngineKind.EXPERT, env_kwargs=KEYWORDS, tasks="1")
    return run_evaluation(settings).trajectories[0]


def test_a_gif_shows_every_turn_and_holds_the_last(episode: Trajectory, tmp_path: Path) -> None:
    path = tmp_path / "new" / "episode.gif"
    count = render_episode_gif(ENV, KEYWORDS, episode, path)
    assert count == len(episode.turns) + 1
    with Image.open(path) as gif:
        assert gif.n_frames == count
        assert gif.size == (288, 312)
        durations = []
        for i in range(count):
            gif.seek(i)
            durations.append(gif.info["duration"])
        last = np.asarray(gif.convert("RGB"))[:288]
    assert durations == [500] * (count - 1) + [2500]
    frame = replay_frames(ENV, KEYWORDS, episode)[-1]
    enlarged = frame.repeat(3, 0).repeat(3, 1)
    assert np.abs(last.astype(int) - enlarged).max() <= 8  # one palette of 256 colours for all frames
    assert os.listdir(path.parent) == ["episode.gif"]


def test_an_episode_of_another_environment_is_noticed(episode: Trajectory, tmp_path: Path) -> None:
    with pytest.raises(SpearError, match="ends differently"):
        render_episode_gif(ENV, KEYWORDS, replace(episode, won=False), tmp_path / "x.gif")
    with pytest.raises(SpearError, match="Unknown task"):
        render_episode_gif(ENV, {**KEYWORDS, "boxes": 2, "room": "7x7"}, episode, tmp_path / "x.gif")
    with pytest.raises(SpearError, match="does not name a split"):
        render_episode_gif(ENV, KEYWORDS, replace(episode, task_id="1"), tmp_path / "x.gif")
    (tmp_path / "file").write_text("")
    with pytest.raises(SpearError, match="cannot be written"):
        render_episode_gif(ENV, KEYWORDS, episode, tmp_path / "file" / "x.gif")

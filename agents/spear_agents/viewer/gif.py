"""Animated picture of an episode, rendered by playing the recorded responses again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from spear_agents.evaluation.baselines import Method, wrap_reader
from spear_agents.play.trajectory import Trajectory
from spear_envs.core.errors import SpearError
from spear_envs.core.making import make_env
from spear_envs.data.files import draft_file

LEAST_SIDE = 288
"""Frames are enlarged by an integer factor until their shorter side has at least this many pixels."""
CAPTION = 24
FRAME_MS, FINAL_MS = 500, 2500
INK, PAPER, WON, LOST = (235, 235, 235), (30, 30, 34), (120, 220, 130), (240, 130, 110)


def render_episode_gif(
    env_id: str, env_kwargs: Mapping[str, Any], trajectory: Trajectory, path: str | Path, *, split: str | None = None
) -> int:
    """Write the GIF of an episode, whose last frame is held; return the number of frames, one more than turns.

    The environment is that of the episode, and must have ``render_mode="rgb_array"``; the split is by default read from
    the task id. Raises SpearError if the episode cannot be played again, ends differently, or the file cannot be
    written.
    """
    frames = replay_frames(env_id, env_kwargs, trajectory, split=split)
    captions = ["start", *(f"{i}: {turn.action or 'unreadable'}" for i, turn in enumerate(trajectory.turns, start=1))]
    if trajectory.turns:
        captions[-1] += f"  ({trajectory.stop.value.replace('_', ' ')})"
    colours = [INK] * (len(frames) - 1) + [WON if trajectory.won else LOST]
    pictures = [
        _compose(frame, caption, colour) for frame, caption, colour in zip(frames, captions, colours, strict=True)
    ]
    _save(pictures, Path(path))
    return len(pictures)


def replay_frames(
    env_id: str,
    env_kwargs: Mapping[str, Any],
    trajectory: Trajectory,
    *,
    split: str | None = None,
    method: str = Method.PLAIN,
) -> list[np.ndarray]:
    """Draw an episode's frames, uint8 [height, width, 3]: the first, and one after each response. Raises SpearError."""
    if trajectory.began is not None:
        raise SpearError(f"{trajectory.task_id} began within another episode: choose one from the start")
    split = split or next((part for part in ("train", "valid", "test") if part in trajectory.task_id.split("/")), None)
    if split is None:
        raise SpearError(f"the task id {trajectory.task_id!r} does not name a split: pass split=")
    with closing(make_env(env_id, split, {**env_kwargs, "render_mode": "rgb_array"})) as env:
        _, info = env.reset(seed=trajectory.seed, options={"task": trajectory.task_id})
        frames = [np.array(env.render())]
        reading = wrap_reader(Method(method), env)
        last = -1
        for place, response in trajectory.list_steps():
            _, _, _, _, info = reading.step(response)
            # One frame for each turn: the last if a program played several responses after one.
            frames += [frames[-1]] * (place - last)
            frames[-1], last = np.array(env.render()), place
        frames += [frames[-1]] * (len(trajectory.turns) - 1 - last)
    if bool(info["won"]) != trajectory.won or info["task_fingerprint"] != trajectory.fingerprint:
        raise SpearError(f"{trajectory.task_id} ends differently when played again: give its keywords")
    return frames


def _compose(frame: np.ndarray, caption: str, colour: tuple[int, int, int]) -> Image.Image:
    picture = Image.fromarray(frame)
    factor = max(1, -(-LEAST_SIDE // min(picture.size)))
    picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    canvas = Image.new("RGB", (picture.width, picture.height + CAPTION), PAPER)
    canvas.paste(picture, (0, 0))
    ImageDraw.Draw(canvas).text((8, picture.height + 6), caption, fill=colour)
    return canvas


def _save(pictures: list[Image.Image], path: Path) -> None:
    # One palette for all frames: separate ones make colours flicker.
    strip = Image.new("RGB", (pictures[0].width, sum(picture.height for picture in pictures)))
    for i, picture in enumerate(pictures):
        strip.paste(picture, (0, i * picture.height))
    palette = strip.quantize(256, dither=Image.Dither.NONE)
    frames = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in pictures]
    with draft_file(path) as draft:
        frames[0].save(
            draft,
            format="GIF",
            save_all=True,
            append_images=frames[1:],
            duration=[FRAME_MS] * (len(frames) - 1) + [FINAL_MS],
            loop=0,
            optimize=False,
        )

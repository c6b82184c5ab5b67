"""Recorded episodes on the mini catalogue: every page, every list of actions, every reward."""

import json
from typing import Any

import pytest

from tests.spear_envs.webshop.record import RECORDINGS, describe, make_env, play_episodes

ROWS = [json.loads(line) for line in RECORDINGS.read_text(encoding="utf-8").splitlines()]


def unfold(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steps as they were before pages seen twice were left out."""
    full: list[dict[str, Any]] = []
    for step in steps:
        kept = dict(step)
        page = full[kept.pop("page_of_step")] if "page_of_step" in kept else kept
        full.append({**kept, "observation": page["observation"], "actions": page["actions"]})
    return full


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['kind']}-{row['task'].replace('/', '-')}" for row in ROWS])
def test_replaying_shows_and_pays_the_same(row: dict[str, Any]) -> None:
    first, *steps = unfold(row["steps"])
    env = make_env(**row["kwargs"])
    observation, info = env.reset(options={"task": row["task"]})
    assert {"action": None, **describe(observation, 0.0, False, info)} == first
    for step in steps:
        state = env.get_state()
        for again in (False, True):  # and once more from the saved state, which changes nothing
            if again:
                env.set_state(state)
            observation, reward, terminated, truncated, info = env.step(step["action"])
            assert {"action": step["action"], **describe(observation, reward, terminated, info)} == step
            assert not truncated


def test_recordings_cover_what_an_episode_may_be() -> None:
    scores = {row["steps"][-1].get("score", 0.0) for row in ROWS}
    assert 1.0 in scores and any(0 < score < 1 for score in scores) and 0.0 in scores
    assert {row["kwargs"].get("observation_mode", "text") for row in ROWS} == {"text", "text_rich"}
    assert {row["kwargs"].get("goal_kind", "synthetic") for row in ROWS} == {"synthetic", "human"}
    assert RECORDINGS.stat().st_size < 100_000


def test_recording_anew_gives_the_same_file() -> None:
    """Or else ``python -m tests.spear_envs.webshop.record`` is due, after a look at what has changed."""
    assert list(play_episodes()) == ROWS

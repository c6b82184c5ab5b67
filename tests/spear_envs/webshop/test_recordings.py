"""Recorded episodes on the mini catalogue: every page, every list of actions, every reward."""

import json
from typing import Any

import pytest

from tests.spear_envs.webshop.record import RECORDINGS, describe, make_env

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

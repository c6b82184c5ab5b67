"""The episodes of ``episodes.py`` through verifiers' own environment server. Prints how many steps were compared.

The first argument names the harness: ``direct_harness`` beside this file, or verifiers' own ``null``, which starts a
program for each turn.
"""

from __future__ import annotations

import asyncio
import functools
import sys
from typing import Any

from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.utils.loaders import load_environment

from spear_envs.adapters.verifiers import VerifiersConfig
from tests.spear_envs.adapters.conforming import compare_totals
from tests.spear_envs.adapters.episodes import DEAD, SETTINGS, Episode, Script
from tests.spear_envs.adapters.scripted_model import ScriptedModel, run_model

TASKS = "spear_tasks"


@functools.cache
def load(env_id: str, harness: str) -> tuple[Any, Any]:
    """An environment of verifiers and its first task."""
    taskset = {"id": TASKS, "env_id": env_id, "count": 2, "keywords": SETTINGS[env_id]}
    player = {"harness": {"id": harness}, "runtime": {"type": "subprocess"}}
    env = load_environment(VerifiersConfig.model_validate({"taskset": taskset, "player": player}))
    first, second = env.taskset
    assert first.data.id != second.data.id
    return env, first


def play(model: ScriptedModel, harness: str, script: Script, episode: Episode, responses: list[str]) -> Any:
    env, first = load(script.env_id, harness)
    task = first.with_data(id=episode.task)
    context = ModelContext(model="m", client=EvalClientConfig(base_url=model.url))
    model.begin(responses)

    async def run() -> Any:
        async with env.serving():
            return await env.run_episode(task, context)

    found = asyncio.run(run())
    if found.errors:
        assert not found.ok and f"EnvFault: {DEAD}" in found.errors[-1].message, found.errors
        return model.shown, None, DEAD
    assert found.ok and len(found.traces) == 1, found
    (trace,) = found.traces
    return model.shown, trace.rewards["spear"].score, None


if __name__ == "__main__":
    with run_model() as served:
        print(compare_totals(lambda *asked: play(served, sys.argv[1], *asked), int(sys.argv[2])))

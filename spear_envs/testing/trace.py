"""Traces of episodes, compared between processes. Run as a module, this replays responses in a fresh interpreter."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

import cloudpickle  # type: ignore[import-untyped]  # comes with gymnasium
import gymnasium as gym
import numpy as np

from spear_envs.core.env import SpearEnv
from spear_envs.core.machine import make_command

MALFORMED: tuple[str, ...] = (
    "",
    "   \n\t ",
    "go on then",
    "<action>",
    "</action>",
    "<think>hm</think>",
    "<think>hm<action>up",
    "<think><action>a</action></think>",
    "<think>a</think><action>b</action><action>c</action>",
    "<think>a</think><action> </action>",
    "<think>a</think><action>\0</action>",
    "<action><action><action>",
    "<think>思考</think><動作>上</動作>",
    "\ud800 a lone surrogate",
    "\u202eright to left\u202c \u200b\ufeff",
    "<think>" * 150_000,
    "x" * 1_048_576,
)
"""Responses that a policy in training may write, most of them malformed in any grammar."""


def choose_response(env: SpearEnv[Any], rng: random.Random) -> str:
    """Choose a response for the present state: the expert's, an admissible, a strange or a malformed one."""
    draw = rng.random()
    if draw < 0.5:
        plan = env.expert_plan()
        if plan:
            return env.parser.respond(plan[0], "the expert says so")
    admissible = env._admissible()
    if admissible and draw < 0.8:
        return env.parser.respond(rng.choice(admissible))
    return rng.choice(MALFORMED[:-2]) if draw < 0.9 else env.parser.respond("dance on the table")


def freeze(value: Any) -> Any:
    """Return a JSON value that is equal for equal values; arrays by shape, type and content."""
    if isinstance(value, Mapping):
        return {str(key): freeze(value[key]) for key in sorted(value, key=str)}
    if isinstance(value, (list, tuple)):
        return [freeze(item) for item in value]
    if isinstance(value, np.ndarray):
        if value.dtype == object:
            return [freeze(item) for item in value.flat]
        return f"array {value.shape} {value.dtype} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return repr(value)


def describe_step(
    observation: Any, reward: SupportsFloat, terminated: bool, truncated: bool, info: Any
) -> dict[str, Any]:
    """Return the result of one step as a JSON value."""
    return {
        "observation": freeze(observation),
        "reward": freeze(float(reward)),
        "terminated": bool(terminated),
        "truncated": bool(truncated),
        "info": freeze(info),
    }


def find_difference(first: Any, second: Any, path: str = "") -> str:
    """Describe where two JSON values differ, with both values; empty if they are equal."""
    if type(first) is type(second):
        if isinstance(first, dict) and first.keys() == second.keys():
            return next(filter(None, (find_difference(first[k], second[k], f"{path}/{k}") for k in first)), "")
        if isinstance(first, list) and len(first) == len(second):
            pairs = enumerate(zip(first, second, strict=True))
            return next(filter(None, (find_difference(a, b, f"{path}/{i}") for i, (a, b) in pairs)), "")
        if first == second:
            return ""
    return f"{path or '/'}: {_shorten(first)} and {_shorten(second)}"


def _shorten(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 160 else text[:157] + "…"


def replay(env: gym.Env[Any, str], episodes: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Play given episodes, each ``{"seed", "options", "responses"}``, and return their trace."""
    trace: list[Any] = []
    for episode in episodes:
        observation, info = env.reset(seed=episode["seed"], options=episode["options"])
        trace.append(describe_step(observation, 0.0, False, False, info))
        trace.extend(describe_step(*env.step(response)) for response in episode["responses"])
    return trace


def trace_elsewhere(spec: Any, kwargs: Mapping[str, Any], episodes: Sequence[Any], hash_seed: int) -> list[Any]:
    """Run :func:`replay` in a fresh interpreter with this ``PYTHONHASHSEED``.

    Raises:
        RuntimeError: it failed; the message has the end of its stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        order, answer = Path(folder, "order.pickle"), Path(folder, "trace.json")
        order.write_bytes(cloudpickle.dumps((spec, dict(kwargs), list(episodes))))
        done = subprocess.run(
            make_command("spear_envs.testing.trace", str(order), str(answer), path=sys.path),
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0 or not answer.exists():
            raise RuntimeError(f"replaying in another process failed: {done.stderr.strip()[-500:]}")
        return json.loads(answer.read_text())


def _main(order: str, answer: str) -> None:
    spec, kwargs, episodes = pickle.loads(Path(order).read_bytes())
    env = gym.make(spec, disable_env_checker=True, **kwargs)
    try:
        Path(answer).write_text(json.dumps(replay(env, episodes)))
    finally:
        env.close()


if __name__ == "__main__":
    _main(*sys.argv[1:])

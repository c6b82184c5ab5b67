"""GEM's own functions and wrappers over our environments. Runs in ``.venv-peers``."""

from __future__ import annotations

import json
import random

import gem
import numpy as np
from gem.wrappers.episode_tracking_wrapper import EpisodeTrackingWrapper
from gem.wrappers.observation_wrapper import ObservationWrapper

from spear_envs.adapters import gem as adapter

adapter.register_all()
adapter.register_all()
adapter.register("mine:Corridor-v0", "tests.spear_envs.corridor:tests/Corridor-v0", length=5)
before = (random.getstate(), np.random.get_state()[1].tolist())
report: dict[str, object] = {}

# gem.make, and the expert through GEM's interface.
wins = {}
for name in ("ALFWorld-v0", "WebShop-v0", "Sokoban-v1", "SearchR1-v0", "CodeInterpreter-v0"):
    env = gem.make(f"spear:{name}")
    text, info = env.reset(seed=3)
    assert isinstance(text, str) and info["instruction"]
    done, total = False, 0.0
    while not done:
        inner = env.unwrapped.conversation.env
        text, reward, terminated, truncated, info = env.step(inner.parser.respond(inner.expert_plan()[0]))
        assert isinstance(text, str)
        total, done = total + reward, terminated or truncated
    wins[name] = (info["won"], round(total, 3))
    inner.close()
report["wins"] = wins

# The same seed gives the same task; another one, another.
env = gem.make("mine:Corridor-v0")
assert env.reset(seed=1) == env.reset(seed=1)
assert len({env.reset(seed=seed)[1]["task_id"] for seed in range(20)}) > 3

# Random players draw from what is offered, each from its own generator.
traces = []
for _ in range(2):
    env.reset(seed=5)
    traces.append([])
    done = False
    while not done:
        action = env.sample_random_action()
        _, _, terminated, truncated, _ = env.step(action)
        traces[-1].append(action)
        done = terminated or truncated
assert traces[0] == traces[1]

# A spawned environment continues the same state and leaves the first one alone.
env.reset(seed=2)
env.step("<think></think><action>right</action>")
twin = env.spawn(same_state=True)
action = "<think></think><action>left</action>"
assert twin.step(action) == env.step(action)
assert env.spawn().conversation.env.done

# GEM's wrappers: the history of a conversation in one text, and what an episode brought.
wrapped = EpisodeTrackingWrapper(ObservationWrapper(env, include_chat_template=False))
first, _ = wrapped.reset(seed=2)
second, _, _, _, info = wrapped.step("<think></think><action>right</action>")
assert second.startswith(first) and "right" in second

# GEM's vector environment plays episodes to their ends and resets.
vector = gem.make_vec(["mine:Corridor-v0"] * 4, seed=10)
texts, infos = vector.reset(seed=10)
assert len(set(texts)) > 1
ends = 0
for _ in range(40):
    texts, rewards, terminated, truncated, infos = vector.step(
        [one.sample_random_action() if not vector._autoreset_envs[i] else "" for i, one in enumerate(vector.envs)]
    )
    ends += int(terminated.sum() + truncated.sum())
report["episodes"] = ends
report["untouched"] = before == (random.getstate(), np.random.get_state()[1].tolist())
print(json.dumps(report))

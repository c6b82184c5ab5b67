"""The episodes of ``episodes.py`` through SkyRL-Gym. Prints how many steps were compared."""

from __future__ import annotations

import json
import sys

import skyrl_gym

from spear_envs.adapters.skyrl import ENV_CLASS, make_rows, register
from tests.spear_envs.adapters.conforming import Told, compare_steps
from tests.spear_envs.adapters.episodes import Episode, Script


def play(script: Script, episode: Episode, responses: list[str]) -> list[Told]:
    row = {"env_id": script.env_id, "task": episode.task, "keywords": json.dumps(script.keywords)}
    env = skyrl_gym.make(ENV_CLASS, env_config={}, extras={"spear": row, "max_turns": 10**6})
    prompt, about = env.init([{"role": "system", "content": "s"}, {"role": "user", "content": ""}])
    assert prompt[0]["content"] == "s"
    lines = [Told(prompt[1]["content"], 0.0, False, about)]
    for response in responses:
        step = env.step(response)
        texts = [message["content"] for message in step["observations"]]
        lines.append(Told(texts[0] if texts else None, step["reward"], step["done"], step["metadata"]))
    assert env.get_metrics()["won"] == lines[-1].about["won"]
    env.close()
    return lines


register()
register()
print(compare_steps(play, int(sys.argv[1])))

# A loop that allows fewer turns than the environment: the episode ends as a lost one does.
row = make_rows("spear/Sokoban-v1", 1, modality="text")[0]
env = skyrl_gym.make(ENV_CLASS, env_config={}, extras=row | {"max_turns": 2})
env.init(row["prompt"])
first, last = env.step("nonsense"), env.step("<think>so</think><action>up</action>")
assert not first["done"] and last["done"] and last["observations"] == [] and last["reward"] <= 0, last

# With the benchmark's own reward, which is paid turn by turn, nothing is paid twice where the loop ends.
row = make_rows("spear/Sokoban-v1", 1, modality="text", reward="native")[0]
env = skyrl_gym.make(ENV_CLASS, env_config={}, extras=row | {"max_turns": 3})
env.init(row["prompt"])
paid = [env.step("nonsense")["reward"] for _ in range(3)]
assert paid[0] == paid[1] == paid[2] != 0, paid

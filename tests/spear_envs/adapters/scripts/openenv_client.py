"""OpenEnv's own client plays an environment of ours, and its validator looks at the server. Runs in ``.venv-peers``."""

from __future__ import annotations

import asyncio
import json
import sys

from openenv import GenericEnvClient
from openenv.cli._validation import validate_running_environment

from spear_envs.adapters.conversation import make_env

url, env_id, token = sys.argv[1:]
headers = {"Authorization": f"Bearer {token}"} if token else None
twin = make_env(env_id)


def play(seed: int) -> dict:
    with GenericEnvClient(base_url=url, headers=headers).sync() as client:
        result = client.reset(seed=seed)
        assert result.reward is None and not result.done
        twin.reset(options={"task": result.metadata["task_id"]})
        total = 0.0
        while not result.done:
            response = twin.parser.respond(twin.expert_plan()[0])
            twin.step(response)
            result = client.step({"response": response})
            total += result.reward
        state = client.state()
        assert state["step_count"] == result.metadata["turn"] and state["done"]
        return {"won": result.metadata["won"], "total": total, "turns": state["step_count"]}


async def play_at_once(count: int) -> list[str]:
    """A session and its children, as trainers open them."""
    async with GenericEnvClient(base_url=url, headers=headers) as first:
        clients = [first, *[await first.new_session() for _ in range(count - 1)]]
        results = await asyncio.gather(*(client.reset(seed=seed) for seed, client in enumerate(clients)))
        return [result.metadata["task_id"] for result in results]


report = {"played": [play(seed) for seed in (1, 2)], "tasks": asyncio.run(play_at_once(8))}
if not token:
    validation = validate_running_environment(url)
    report["valid"] = validation["passed"]
    report["failed"] = validation["summary"]["failed_criteria"]
print(json.dumps(report))

"""The episodes of ``episodes.py`` through NeMo Gym's own agent and server, over HTTP. Prints how many steps."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from contextlib import contextmanager
from typing import Any

import requests
import uvicorn
from fastapi import FastAPI
from nemo_gym.base_resources_server import BaseResourcesServerConfig
from nemo_gym.config_types import BaseServerConfig
from nemo_gym.openai_utils import NeMoGymResponse
from nemo_gym.server_utils import ServerClient, get_global_aiohttp_client
from omegaconf import OmegaConf
from responses_api_agents.gymnasium_agent.app import GymnasiumAgent, GymnasiumAgentConfig, GymnasiumAgentRunRequest

from spear_envs.adapters.nemo_gym import SpearServer, make_rows, write_response
from spear_envs.core.parsing import TagParser
from tests.spear_envs.adapters.conforming import compare_totals
from tests.spear_envs.adapters.episodes import Episode, Script
from tests.spear_envs.adapters.scripted_model import ScriptedModel, run_model


@contextmanager
def serve(app: FastAPI) -> Any:
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


def make_client(**ports: int) -> ServerClient:
    """NeMo Gym's own client, which finds servers by their names."""
    found = {name: {"k": {"k": {"host": "127.0.0.1", "port": port}}} for name, port in ports.items()}
    head = BaseServerConfig(host="127.0.0.1", port=1)
    return ServerClient(head_server_config=head, global_config_dict=OmegaConf.create(found))


def make_server() -> SpearServer:
    config = BaseResourcesServerConfig(host="127.0.0.1", port=0, entrypoint="app.py", name="spear")
    return SpearServer(config=config, server_client=make_client())


def make_agent(client: ServerClient, max_steps: int) -> GymnasiumAgent:
    named = {"resources_server": ("resources_servers", "spear"), "model_server": ("responses_api_models", "model")}
    servers = {key: {"type": kind, "name": name} for key, (kind, name) in named.items()}
    config = GymnasiumAgentConfig(host="", port=0, entrypoint="", name="agent", max_steps=max_steps, **servers)
    return GymnasiumAgent(config=config, server_client=client)


class Cookies:
    """All that the agent reads of the request it was run by."""

    def __init__(self) -> None:
        self.cookies: dict[str, str] = {}


def play(
    loop: Any, client: ServerClient, model: ScriptedModel, script: Script, episode: Episode, said: list[str]
) -> Any:
    row = make_rows(script.env_id, 1, agent="agent", **script.keywords)[0]
    row["spear"]["task"] = episode.task
    model.begin(said)
    agent = make_agent(client, max_steps=len(said) + 1)
    found = loop.run_until_complete(agent.run(Cookies(), GymnasiumAgentRunRequest.model_validate(row)))
    return model.shown, found.reward, found.info["fault"]


def refuse(port: int) -> None:
    """Wrong rows and steps without an episode are told as what they are."""
    answer = {"id": "r", "created_at": 0, "model": "m", "object": "response", "output": [], "parallel_tool_calls": True}
    body = {"responses_create_params": {"input": []}, "response": {**answer, "tool_choice": "auto", "tools": []}}
    row = {"env_id": "spear/Sokoban-v1", "task": "x"}
    for path, more, status in (
        ("reset", {}, 422),
        ("reset", {"spear": {"env_id": "spear/Nothing-v0", "task": "x"}}, 422),
        ("reset", {"spear": row}, 422),
        ("reset", {"spear": {**row, "keywords": "[]"}}, 422),
        ("step", {}, 409),
    ):
        text = requests.post(f"http://127.0.0.1:{port}/{path}", json=body | more, timeout=60)
        assert text.status_code == status, text.text


def think() -> None:
    """NeMo Gym's own model server puts thoughts into items of their own."""
    part = {"type": "output_text", "text": "<action>up</action>", "annotations": []}
    message = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": [part]}
    answer = {"id": "r", "created_at": 0, "model": "m", "object": "response"}
    more = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": []}
    asked = "<think>towards the box</think><action>up</action>"
    for own, written in (([], asked), (["I look.\n"], f"<think>\nI look.\n\n</think>\n\n{asked}")):
        summary = [{"type": "summary_text", "text": text} for text in (*own, "towards the box")]
        thought = {"type": "reasoning", "id": "t", "summary": summary}
        response = NeMoGymResponse.model_validate(answer | more | {"output": [thought, message]})
        assert write_response(response) == written and TagParser().parse(written).action == "up"


if __name__ == "__main__":
    think()
    count = int(sys.argv.pop())  # what is left of the command line is NeMo Gym's
    server = make_server()
    loop = asyncio.new_event_loop()
    with run_model() as model, serve(server.setup_webserver()) as port:
        refuse(port)
        client = make_client(spear=port, model=int(model.url.split(":")[2].split("/")[0]))
        print(compare_totals(lambda *asked: play(loop, client, model, *asked), count))
    asyncio.set_event_loop(loop)
    loop.run_until_complete(get_global_aiohttp_client().close())
    assert not server.session_state, "environments of episodes that have ended are closed"

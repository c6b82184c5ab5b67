"""``spear serve``: an environment by OpenEnv's protocol, or one episode by MCP."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from spear_envs.adapters.conversation import Conversation, ServiceSettings, make_conversation
from spear_envs.cli import read_keywords
from spear_envs.completion import ENV
from spear_sandbox.console import FilePath, echo, take_address, take_options, warn_of_open_address
from spear_sandbox.options import take_values
from spear_sandbox.web.listening import bind_socket, is_loopback, read_token, write_url

_FOR_OPENENV = ("template", "host", "port", "max_sessions", "idle", "max_message_mb")
_FOR_MCP = ("task", "seed", "out")


@click.command()
@click.argument("env_id", type=ENV)
@click.option("--env", "pairs", multiple=True, metavar="KEY=VALUE", help="Keyword of the environment.")
@click.option("--template", default="default", help="Prompt template of the environment.")
@take_address(8400)
@take_options(ServiceSettings)
@click.option("--mcp", is_flag=True, help="One episode as tools of MCP, over stdin and stdout (extra 'mcp').")
@click.option("--task", help="With --mcp: id of the task.  [default: the seed draws it]")
@click.option("--seed", type=click.IntRange(0), help="With --mcp: seed of the episode.")
@click.option(
    "--out",
    type=FilePath(dir_okay=False),
    help="With --mcp: new file that always holds task, reward and end as JSON.",
)
@click.pass_context
def serve(
    context: click.Context,
    env_id: str,
    pairs: tuple[str, ...],
    template: str,
    host: str,
    port: int,
    mcp: bool,
    task: str | None,
    seed: int | None,
    out: Path | None,
    **options: Any,
) -> None:
    """Serve the environment ENV_ID to OpenEnv's clients until SIGINT or SIGTERM.

    Each connection to the WebSocket /ws is one session with its own environment. Listens on this machine only,
    unless --host says otherwise. If SPEAR_ENV_TOKEN is set, clients must send it as a bearer token.

    \b
    With --mcp the command is one episode, for a client that starts it:
        {"mcpServers": {"task": {"command": "spear", "args": ["serve", "spear/ALFWorld-v0", "--mcp", "--seed", "7"]}}}

    \b
      spear serve spear/Sokoban-v1 --port 8400
    """
    _refuse_options(context, _FOR_OPENENV if mcp else _FOR_MCP, mcp)
    keywords = read_keywords(pairs)
    if mcp:
        _serve_episode(env_id, keywords, task, seed, out)
        return
    from spear_envs.adapters.openenv import (
        TOKEN_VARIABLE,
        EnvService,
        make_service_server,
        serve_service,
    )

    def make(split: str | None) -> Conversation:
        return make_conversation(env_id, template, **(keywords if split is None else {**keywords, "split": split}))

    first = make(None)  # mistakes are reported now, not to the first client
    values = take_values(ServiceSettings, options)
    settings = ServiceSettings(token=read_token(TOKEN_VARIABLE), local=is_loopback(host), **values)
    name = env_id.rpartition("/")[2]
    about = (type(first.env).__doc__ or env_id).strip().splitlines()[0]
    service = EnvService(name, about, make, settings)
    service.pool.take_back(None, first)
    server = make_service_server(service)
    listener = bind_socket(host, port)
    url = write_url(host, listener.getsockname()[1])
    warn_of_open_address(url, host, settings.token, allows="play", variable=TOKEN_VARIABLE)
    echo(f"ready: {env_id}, {settings.max_sessions} sessions, at {url}")
    serve_service(server, service, listener)


def _refuse_options(context: click.Context, names: Collection[str], mcp: bool) -> None:
    for param in context.command.params:
        if param.name in names and context.get_parameter_source(param.name) is not ParameterSource.DEFAULT:
            flag = param.opts[0]
            raise click.UsageError(f"{flag} is not for --mcp." if mcp else f"{flag} is for --mcp: add it.")


def _serve_episode(
    env_id: str, keywords: Mapping[str, Any], task: str | None, seed: int | None, out: Path | None
) -> None:
    from spear_envs.adapters.mcp_server import ToolEpisode, serve_stdio
    from spear_envs.core.making import make_env

    env = make_env(env_id, keywords={"response_format": "plain", **keywords})
    asyncio.run(serve_stdio(ToolEpisode(env, task=task, seed=seed, out=out)))

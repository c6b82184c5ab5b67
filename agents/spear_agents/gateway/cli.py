"""``spear gateway``: episodes for other programs, each at an address like a model server's."""

from __future__ import annotations

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from spear_agents.options import MIXED_MODELS, SectionedCommand, add_playing_options, make_settings
from spear_agents.records import EPISODES, EpisodeLog, check_settings, open_log
from spear_agents.settings import CONCURRENCY
from spear_agents.trajectory import Layout
from spear_envs.completion import ENV
from spear_envs.core.errors import SpearError
from spear_sandbox.console import echo
from spear_sandbox.web.listening import read_token
from spear_sandbox.web.options import Number, take_address, warn_of_open_address

TOKEN_VARIABLE = "SPEAR_GATEWAY_TOKEN"


@click.command(cls=SectionedCommand)
@click.argument("env_id", metavar="ENV", type=ENV)
@add_playing_options()
@take_address(8500)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for episodes.jsonl, which `spear view` shows.")
@MIXED_MODELS
@click.option("--calls", type=click.IntRange(1), help="Calls of the model in an episode; default: 8 times its turns.")
@click.option("--idle", type=Number(0, min_open=True), default=600.0,
              help="Seconds without a request after which an episode ends.")  # fmt: skip
def gateway(
    env_id: str,
    host: str,
    port: int,
    out: Path | None,
    mixed_models: bool,
    calls: int | None,
    idle: float,
    concurrency: int | None,
    **options: Any,
) -> None:
    """Serve episodes of ENV to programs that speak to OpenAI's or Anthropic's interface.

    POST /episodes begins one and answers with its address, its key, the first prompt and the tools. The model is at
    ADDRESS/chat/completions, ADDRESS/responses and ADDRESS/messages; POST /episodes/ID/step acts in the environment;
    DELETE /episodes/ID ends the episode and returns its result. If SPEAR_GATEWAY_TOKEN is set, POST /episodes requires
    it.

    \b
      spear gateway spear/WebShop-v0 --model smollm2-135m --engine vllm --out runs/gateway
    """
    from spear_agents.evaluation import prepare
    from spear_agents.gateway.hosting import Host
    from spear_agents.gateway.server import Gateway
    from spear_agents.gateway.session import Limits
    from spear_agents.policies import open_policy
    from spear_envs.core.making import make_env

    settings = make_settings(env_id, {**options, "layout": Layout.CONVERSATION})
    places = concurrency or CONCURRENCY
    token = read_token(TOKEN_VARIABLE)
    with ExitStack() as stack:
        prepared = prepare(settings)
        settings = prepared.settings
        policy = open_policy(settings, prepared.template, prepared.parser, stack, concurrency=places)
        log = EpisodeLog(mixed_models=mixed_models)
        if out is not None:
            check_settings(out, policy.settings.identify(prepared.fingerprint))
            about = env_id, prepared.fingerprint
            log = stack.enter_context(open_log(out / EPISODES, *about, mixed_models=mixed_models))

        async def serve() -> None:
            server = Gateway(host, port)
            hosting = Host(
                server,
                policy,
                lambda: policy.wrap_env(make_env(env_id, settings.split, settings.env_kwargs)),
                prepared.task_ids,
                env_id,
                token=token,
                limits=Limits(calls=calls, seconds=idle),
                most=places,
                on_end=log.write,
                played=set(log.earlier),
            )
            await server.start()
            warn_of_open_address(server.url, host, token, allows="use the model", variable=TOKEN_VARIABLE)
            echo(f"ready: {env_id}, {places} episodes at a time, at {server.url}")
            stop = asyncio.Event()
            for number in (signal.SIGINT, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, stop.set)
            watching = asyncio.create_task(hosting.watch())
            watching.add_done_callback(lambda _: stop.set())
            try:
                await stop.wait()
                if watching.done():
                    watching.result()
            finally:
                watching.cancel()
                await hosting.aclose()
                await server.aclose()
                await policy.aclose()

        try:
            asyncio.run(serve())
        except ModuleNotFoundError as error:
            raise SpearError(f"the gateway needs {error.name}: pip install 'spear-agents[gateway]'") from error

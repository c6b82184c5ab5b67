"""Options of the commands that play episodes, and the settings built from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from enum import Enum
from typing import Any, TypeVar

import click

from spear_agents.baselines import Method
from spear_agents.engines.openai import KEY_VARIABLE, Server, ServerKind, choose_kind
from spear_agents.engines.replies import Prices
from spear_agents.engines.vllm_options import DTYPES, VLLMOptions
from spear_agents.model_files import resolve_model
from spear_agents.prompting import Overlong
from spear_agents.settings import CONCURRENCY, EngineKind, EvalSettings
from spear_agents.trajectory import Layout
from spear_envs.cli import read_keywords
from spear_envs.completion import SPLIT
from spear_envs.core.errors import SpearError
from spear_sandbox.console import Number
from spear_sandbox.terminal import Console

REFLEXION_TRIALS = 3
F = TypeVar("F", bound=Callable[..., Any])


class SectionedCommand(click.Command):
    """A command whose help lists options under the headings that :func:`join_options` gave them."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options below their headings, the command's own first."""
        sections: dict[str, list[tuple[str, str]]] = {"Options": []}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                sections.setdefault(getattr(param, "section", "Options"), []).append(record)
        for heading, records in sections.items():
            with formatter.section(heading):
                formatter.write_dl(records)


def _choose(kinds: type[Enum]) -> click.Choice[str]:
    return click.Choice([kind.value for kind in kinds])


def join_options(heading: str, *options: Callable[[F], F]) -> Callable[[F], F]:
    """Combine option decorators, in the order in which help lists them below ``heading``."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
            command.__click_params__[-1].section = heading  # type: ignore[attr-defined]
        return command

    return decorate


MIXED_MODELS = click.option(
    "--mixed-models", is_flag=True, help="Go on when the server answers as another model than before."
)
TRUST = click.option(
    "--trust", is_flag=True, help="Run, reach and read what the file names: modules, commands, addresses, paths."
)
"""Consent to what a file of somebody else's may do; see :func:`spear_envs.core.making.require_harmless`."""

add_program_options = join_options(
    "Agent program",
    click.option("--agent", metavar="FILE:FUNCTION", help="Program that plays instead of our own loop."),
    click.option(
        "--agent-timeout",
        type=Number(0, min_open=True),
        default=3600.0,
        help="Time limit for an episode in seconds.",
    ),
)
"""Adds the options of a program that plays instead of our loop."""
_SERVER = join_options(
    "Server (--engine openai)",
    click.option("--base-url", help="Address of the server, including /v1."),
    click.option(
        "--server",
        type=_choose(ServerKind),
        help="Which fields the server understands; default: openai at api.openai.com, else compatible.",
    ),
    click.option("--key-variable", default=KEY_VARIABLE, help="Variable with the server's key."),
    click.option("--price", metavar="IN,OUT[,CACHED]", help="Price of a million tokens."),
    click.option("--requests", type=click.IntRange(1), default=16, help="Requests at a time."),
    click.option("--request-timeout", type=Number(0, min_open=True), default=300.0, help="Seconds for one request."),
    click.option("--tries", type=click.IntRange(1), default=6, help="Tries of one request."),
    click.option("--no-seed", is_flag=True, help="Do not send the seed of each response."),
)
_VLLM = join_options(
    "vLLM (--engine vllm)",
    click.option("--lora", help="Folder of a LoRA adapter for the model."),
    click.option("--max-model-len", type=int, help="Maximum tokens of prompt and response; default: the model's."),
    click.option("--tensor-parallel", type=int, help="Devices that share each layer; default 1."),
    click.option("--gpu-memory-utilization", type=Number(0, 1, min_open=True), help="Share of a GPU's memory."),
    click.option(
        "--kv-cache-gib",
        type=Number(0, min_open=True),
        help="Memory of keys and values; default on a CPU: up to half of what is free.",
    ),
)
_SAMPLING = join_options(
    "Sampling",
    click.option("--temperature", type=Number(0), default=1.0),
    click.option("--top-p", type=Number(0, 1, min_open=True), default=1.0),
    click.option("--top-k", type=int, default=0, help="0 is off."),
    click.option(
        "--max-tokens", type=click.IntRange(1), help="Longest response; default: the model's own limit, else 512."
    ),
)


def add_playing_options(
    engine: str = "hf", split: str = "the last, such as test", template: str | None = None
) -> Callable[[F], F]:
    """Add the options of player, tasks and prompts; the arguments are defaults, ``split`` as words."""
    policy = join_options(
        "Policy",
        click.option("--engine", type=_choose(EngineKind), default=engine),
        click.option(
            "--model", help="Folder or name of the policy (spear models; hf, vllm), or its name at the server (openai)."
        ),
        click.option(
            "--dtype", type=click.Choice(DTYPES), help="Computation type; default: that of the weights (hf, vllm)."
        ),
        click.option("--thoughts", is_flag=True, help="The expert says why it does what it does (expert)."),
    )
    episodes = join_options(
        "Episodes",
        click.option("--split", type=SPLIT, help=f"Split of the tasks; by default {split}."),
        click.option("--tasks", default="all", help="all, a number of leading ones, or ids."),
        click.option("--episodes-per-task", type=int, help="Default: the benchmark's own, 30 on AIME, else 1."),
        click.option("--env", "env_keywords", multiple=True, metavar="KEY=VALUE", help="Keyword of the environment."),
        click.option("--seed", type=click.IntRange(0), default=0),
        click.option(
            "--concurrency",
            type=click.IntRange(1),
            help=f"Episodes at a time; default: {CONCURRENCY}, and in eval and collect of a server --requests.",
        ),
    )

    def decorate(command: F) -> F:
        for section in (_add_prompt_options(template), _SAMPLING, episodes, _VLLM, _SERVER, policy):
            command = section(command)
        return command

    return decorate


def _add_prompt_options(template: str | None) -> Callable[[F], F]:
    return join_options(
        "Prompts",
        click.option("--method", type=_choose(Method), default="plain", help="How the model is prompted."),
        click.option("--trials", type=int, help="Maximum trials of a task (reflexion: 3)."),
        click.option(
            "--template",
            default=template,
            show_default=template is not None,
            help="Prompt template of the environment; spear eval takes compact for tiny models of words, else default.",
        ),
        click.option(
            "--template-kwarg",
            "template_keywords",
            multiple=True,
            metavar="KEY=VALUE",
            help="Variable of the model's chat template, such as enable_thinking=false (hf, vllm).",
        ),
        click.option("--layout", type=_choose(Layout), help="Default: per_turn, or what the method needs."),
        click.option("--history", type=click.IntRange(0), default=2, help="Earlier turns shown in per_turn prompts."),
        click.option("--max-prompt-tokens", type=click.IntRange(1), help="Longest prompt (openai: in bytes)."),
        click.option(
            "--overlong",
            type=_choose(Overlong),
            default="end",
            help="End an episode whose prompt grows beyond, or drop its oldest turns.",
        ),
    )


def make_settings(env_id: str, options: Mapping[str, Any]) -> EvalSettings:
    """The settings of the options. Raises SpearError if they do not go together."""
    given = dict(options)
    engine, method = EngineKind(given.pop("engine")), Method(given.pop("method"))
    trials = given.pop("trials") or (REFLEXION_TRIALS if method is Method.REFLEXION else 1)
    layout = given.pop("layout")
    if engine.has_folder and given["model"] is not None:
        given["model"] = resolve_model(given["model"], Console(stderr=True))
    return EvalSettings(
        env_id=env_id,
        engine=engine,
        method=method,
        trials=trials,
        server=_make_server(engine, given),
        dtype=given.pop("dtype") if engine is EngineKind.HF else None,
        vllm=_make_vllm(engine, given),
        env_kwargs=read_keywords(given.pop("env_keywords")),
        template_kwargs=read_keywords(given.pop("template_keywords")),
        layout=None if layout is None else Layout(layout),
        overlong=Overlong(given.pop("overlong")),
        **given,
    )


def _make_vllm(engine: EngineKind, given: dict[str, Any]) -> VLLMOptions | None:
    """Take vLLM's options out of ``given``."""
    wanted = {field.name: given.pop(field.name, None) for field in fields(VLLMOptions)}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    if engine is EngineKind.VLLM:
        return VLLMOptions(**wanted)
    if wanted:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in wanted)
        raise SpearError(f"{names} is for vLLM: take --engine vllm")
    return None


def _make_server(engine: EngineKind, given: dict[str, Any]) -> Server | None:
    """Take the server's options out of ``given``."""
    base_url, price = given.pop("base_url"), given.pop("price")
    kind, key_variable = given.pop("server"), given.pop("key_variable")
    limit, timeout_s, tries = given.pop("requests"), given.pop("request_timeout"), given.pop("tries")
    no_seed = given.pop("no_seed")
    if engine is not EngineKind.OPENAI:
        servers = {"base-url": base_url, "server": kind, "price": price, "no-seed": no_seed or None}
        servers["key-variable"] = None if key_variable == KEY_VARIABLE else key_variable
        if wrong := next((name for name, value in servers.items() if value is not None), None):
            raise SpearError(f"--{wrong} is for a server: take --engine openai")
        return None
    if base_url is None or given["model"] is None:
        raise SpearError("engine openai needs a server and a model: give --base-url URL and --model NAME")
    return Server(
        base_url,
        given["model"],
        choose_kind(base_url) if kind is None else ServerKind(kind),
        key_variable,
        limit=limit,
        timeout_s=timeout_s,
        tries=tries,
        prices=None if price is None else _read_prices(price),
        sends_seed=not no_seed,
    )


def _read_prices(text: str) -> Prices:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (2, 3):
        raise SpearError(f"--price {text!r} is not IN,OUT or IN,OUT,CACHED, of a million tokens")
    return Prices(*values)

"""Options of the commands that play episodes, and the settings built from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from spear_agents.engines.openai import KEY_VARIABLE, Server, choose_kind
from spear_agents.engines.replies import Prices
from spear_agents.engines.vllm_options import VLLMOptions
from spear_agents.evaluation.baselines import Method
from spear_agents.evaluation.settings import CONCURRENCY, EngineKind, EvalSettings
from spear_agents.model_files import resolve_model
from spear_envs.cli import read_keywords
from spear_envs.completion import SPLIT
from spear_envs.core.errors import STRICT_JSON, SpearError
from spear_sandbox.console import take_options
from spear_sandbox.options import name_option, take_values
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

_PROGRAM = ("agent", "agent_timeout")


def add_playing_options(
    engine: str = "hf",
    split: str = "the last, such as test",
    template: str | None = None,
    *,
    programs: bool = False,
) -> Callable[[F], F]:
    """Add the options of player, tasks and prompts; ``engine`` and ``template`` are defaults, ``split`` as words.

    ``programs``: also those of an agent program that plays instead of our loop.
    """
    others = (
        join_options(
            "Episodes",
            click.option("--split", type=SPLIT, help=f"Split of the tasks; by default {split}."),
            click.option(
                "--env", "env_keywords", multiple=True, metavar="KEY=VALUE", help="Keyword of the environment."
            ),
            click.option(
                "--concurrency",
                type=click.IntRange(1),
                help=f"Episodes at a time; default: {CONCURRENCY}, and in eval and collect of a server --requests.",
            ),
        ),
        join_options(
            "Prompts",
            click.option(
                "--template-kwarg",
                "template_keywords",
                multiple=True,
                metavar="KEY=VALUE",
                help="Variable of the model's chat template, such as enable_thinking=false (hf, vllm, --server vllm).",
            ),
        ),
        take_options(VLLMOptions, tensor_parallel=None),
        join_options(
            "Server (--engine openai)",
            click.option("--base-url", help="Address of the server, including /v1."),
            click.option("--price", metavar="IN,OUT[,CACHED]", help="Price of a million tokens."),
            click.option("--no-seed", is_flag=True, help="Do not send the seed of each response."),
            click.option("--extra-body", metavar="JSON", help="Fields added to requests, as JSON; records keep them."),
            click.option(
                "--header",
                "headers",
                multiple=True,
                metavar="NAME=VALUE",
                help="Header of each request; records have only its name.",
            ),
        ),
        take_options(Server, kind=None),
    )
    left_out = () if programs else _PROGRAM
    own = take_options(EvalSettings, leave=left_out, engine=EngineKind(engine), template=template, trials=None)

    def decorate(command: F) -> F:
        for section in others:
            command = section(command)
        return own(command)

    return decorate


def make_settings(env_id: str, options: Mapping[str, Any]) -> EvalSettings:
    """Return the settings of the options. Raises SpearError if they do not go together."""
    given = dict(options)
    vllm, served = take_values(VLLMOptions, given), take_values(Server, given)
    values = take_values(EvalSettings, given)
    engine, price, no_seed = values["engine"], given.pop("price"), given.pop("no_seed")
    served["base_url"] = given.pop("base_url")
    extra_body, headers = given.pop("extra_body"), given.pop("headers")
    if values["trials"] is None:
        values["trials"] = REFLEXION_TRIALS if values["method"] is Method.REFLEXION else 1
    if engine.has_folder and values["model"] is not None:
        values["model"] = resolve_model(values["model"], Console(stderr=True))
    server = None
    if engine is EngineKind.OPENAI:
        served |= {"extra_body": _read_object(extra_body), "headers": _read_headers(headers)}
        server = _make_server(served, values["model"], price, no_seed)
    elif wrong := _find_foreign(
        served
        | {"--price": price, "--no-seed": no_seed or None}
        | {"--extra-body": extra_body, "--header": headers or None}
    ):
        raise SpearError(f"{wrong} is for a server: take --engine openai")
    vllm = {name: value for name, value in vllm.items() if value is not None}
    if vllm and engine is not EngineKind.VLLM:
        raise SpearError(
            f"{', '.join(name_option(VLLMOptions, name) for name in vllm)} is for vLLM: take --engine vllm"
        )
    dtype = values.pop("dtype")
    return EvalSettings(
        env_id=env_id,
        server=server,
        dtype=dtype if engine is EngineKind.HF else None,
        vllm=VLLMOptions(dtype=dtype, **vllm) if engine is EngineKind.VLLM else None,
        env_kwargs=read_keywords(given.pop("env_keywords")),
        template_kwargs=read_keywords(given.pop("template_keywords")),
        **values,
        **given,
    )


def _find_foreign(given: Mapping[str, Any]) -> str | None:
    """Return an option of a server that was given for another engine, or None."""
    names = {"base_url": "--base-url", "kind": "--server", "key_variable": "--key-variable"}
    names |= {"reasoning_effort": "--reasoning-effort", "api_version": "--api-version", "tools": "--native-tools"}
    defaults = (None, False, KEY_VARIABLE)
    return next(
        (
            names.get(name, name)
            for name, value in given.items()
            if (name in names or name.startswith("--")) and value not in defaults
        ),
        None,
    )


def _read_object(text: str | None) -> dict[str, Any]:
    """Read the fields of ``--extra-body``. Raises SpearError unless it is a JSON object."""
    if text is None:
        return {}
    try:
        found = json.loads(text, **STRICT_JSON)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SpearError(f"--extra-body {text!r} is not a JSON object: give one such as '{{\"top_a\": 0.1}}'")
    return found


def _read_headers(pairs: Sequence[str]) -> dict[str, str]:
    """Read the headers of ``--header``. Raises SpearError, which shows no value, for one without a value or twice."""
    if any("=" not in pair for pair in pairs):
        raise SpearError("--header is NAME=VALUE")
    headers: dict[str, str] = {}
    for name, _, value in (pair.partition("=") for pair in pairs):
        if name.strip().lower() in map(str.lower, headers):
            raise SpearError(f"--header {name.strip()} is given twice: a request has each header once")
        headers[name.strip()] = value.strip()
    return headers


def _make_server(served: dict[str, Any], model: str | None, price: str | None, no_seed: bool) -> Server:
    if served["base_url"] is None or model is None:
        raise SpearError("engine openai needs a server and a model: give --base-url URL and --model NAME")
    kind = served.pop("kind") or choose_kind(served["base_url"])
    prices = None if price is None else _read_prices(price)
    return Server(model=model, kind=kind, prices=prices, sends_seed=not no_seed, **served)


def _read_prices(text: str) -> Prices:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (2, 3):
        raise SpearError(f"--price {text!r} is not IN,OUT or IN,OUT,CACHED, of a million tokens")
    return Prices(*values)

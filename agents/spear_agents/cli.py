"""``spear eval``: success of a policy with its confidence interval; ``spear gateway``: episodes for other programs."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from rich.box import SIMPLE_HEAD
from rich.table import Table

from spear_agents.comparison.statistics import Part
from spear_agents.comparison.tables import (
    PART_HEADINGS,
    describe_amounts,
    describe_part,
    format_latex,
    has_paper_table,
    watch_episodes,
)
from spear_agents.engines.base import Finish
from spear_agents.evaluation.baselines import Method
from spear_agents.evaluation.options import (
    MIXED_MODELS,
    TRUST,
    SectionedCommand,
    add_playing_options,
    make_settings,
)
from spear_agents.evaluation.panels import describe_overrides
from spear_agents.evaluation.records import EPISODES, EpisodeLog, open_log
from spear_agents.evaluation.run import SUMMARY, Evaluation, play_baseline, run_evaluation, write_summary
from spear_agents.evaluation.settings import CONCURRENCY, DEFAULT_TOKENS, EngineKind
from spear_agents.play.trajectory import Layout, StopReason
from spear_agents.shortcuts import settle
from spear_envs.completion import ENV
from spear_envs.core.errors import SpearError
from spear_envs.data.progress import show_table
from spear_sandbox.console import FilePath, Number, echo, take_address, warn_of_open_address
from spear_sandbox.errors import show_entry
from spear_sandbox.terminal import Console
from spear_sandbox.web.listening import read_token

_SHOWN = 200
"""Characters of a malformed response."""


@click.command("eval", cls=SectionedCommand)
@click.argument("env_id", metavar="[ENV]", type=ENV, required=False)
@click.option("--panel", "panel_name", metavar="NAME", help="Tasks and protocol of a panel (spear panel), or its file.")
@TRUST
@add_playing_options(programs=True)
@click.option("--out", type=FilePath(), help="Folder for episodes.jsonl and summary.json; resumable.")
@MIXED_MODELS
@click.option(
    "--baselines", is_flag=True, help="Also play the random policy, a script if there is one, and the expert."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON, for programs.")
@click.option("--latex", "as_latex", is_flag=True, help="Print a row of the paper's table.")
@click.option("--row-name", help="Name of the row in LaTeX.")
@click.option("--intervals", is_flag=True, help="Half of each 95 % interval next to its figure in LaTeX.")
@click.pass_context
def evaluate(
    context: click.Context,
    env_id: str | None,
    panel_name: str | None,
    trust: bool,
    out: Path | None,
    mixed_models: bool,
    baselines: bool,
    as_json: bool,
    as_latex: bool,
    row_name: str | None,
    intervals: bool,
    concurrency: int | None,
    **options: Any,
) -> None:
    """Evaluate a policy on ENV, for instance spear/Sokoban-v1.

    Success is a mean over tasks with its 95 % confidence interval. With --out the episodes are kept: the same
    command again plays only what is missing, and what a fault cut short. With --panel, an option that the panel decides
    makes another panel of it.

    \b
      spear eval spear/Sokoban-v1 --engine random --tasks 64 --out runs/random
      spear eval spear/ALFWorld-v0 --model smollm2-135m --engine vllm --tasks 24 --out runs/small
      spear eval spear/WebShop-v0 --engine openai --base-url http://127.0.0.1:8000/v1 --model NAME --method react
    """
    if as_json and as_latex:
        raise click.UsageError("--json and --latex exclude each other: give one of them")
    given = [name for name in options if context.get_parameter_source(name) is ParameterSource.COMMANDLINE]
    settings = settle(env_id, panel_name, options, given, trust=trust)
    if settings.panel is not None and settings.panel.overrides:
        text = f"{describe_overrides(settings.panel.overrides)} makes another panel of {panel_name}"
        echo(f"{text}, with the digest {settings.panel.digest[:12]}.", err=True)
    console = Console()
    others: dict[str, Part] = {}
    missing: list[str] = []
    if settings.server is not None and out is None:
        echo("Nothing of this evaluation will be kept: --out FOLDER keeps it.", err=True)
    with watch_episodes(settings.engine.value, Console(stderr=True)) as bar:
        evaluation = run_evaluation(
            settings,
            out,
            concurrency=concurrency,
            mixed_models=mixed_models,
            observer=bar.observe,
            on_response=bar.on_response,
        )
        for kind in (EngineKind.RANDOM, EngineKind.SCRIPT, EngineKind.EXPERT) if baselines else ():
            try:
                others[kind.value] = play_baseline(evaluation.settings, kind, concurrency=concurrency)
            except SpearError as error:  # a random policy, say, where actions cannot be listed
                if kind is EngineKind.SCRIPT:
                    continue
                missing.append(f"no baseline {kind.value}: {error}")
    if out is not None and others:
        write_summary(out, evaluation, others)
    if as_json:
        echo(json.dumps(evaluation.to_json(others), indent=2))
    elif as_latex:
        echo(format_latex(row_name or evaluation.row_name, evaluation.cells, intervals=intervals))
    else:
        show_evaluation(console, evaluation, others, out)
    for sentence in missing:
        echo(sentence, err=True)
    if lost := describe_losses(evaluation, out):
        raise SpearError(lost)


def show_evaluation(console: Console, evaluation: Evaluation, others: dict[str, Part], out: Path | None) -> None:
    """Print the tables, with usage, faults and the fingerprint of the tasks."""
    show_table(console, make_table(evaluation, others))
    if (columns := make_paper_table(evaluation)) is not None:
        show_table(console, columns)
    say = partial(console.print, soft_wrap=True)
    for sentence in _describe_usage(evaluation):
        say(sentence)
    for sentence in _describe_bad_responses(evaluation):
        say(sentence, highlight=False)
    say(f"task fingerprint {evaluation.fingerprint}")
    if (panel := evaluation.settings.panel) is not None:
        say(show_entry(f"panel {panel.label}"))
    if out is not None:
        say(f"episodes and figures: {out / SUMMARY}; `spear view {shlex.quote(str(out))}` shows them")
    else:
        say("The episodes were not kept: --out FOLDER keeps them for `spear view`.")


def _describe_usage(evaluation: Evaluation) -> Iterator[str]:
    """Return what the episodes took: tool calls, tokens, requests and costs."""
    if amounts := describe_amounts(evaluation.overall):
        yield amounts
    usage = evaluation.usage
    if usage.requests:
        cost = "" if usage.cost is None else f", cost {usage.cost:.4f}"
        uncounted = f", {usage.uncounted:,} responses without counts" if usage.uncounted else ""
        tokens = f"{usage.prompt_tokens:,} prompt and {usage.completion_tokens:,} completion tokens"
        yield f"{usage.requests:,} requests, {tokens}{cost}{uncounted}"
    if usage.cached_share is not None:
        yield f"{usage.cached_share:.0%} of {usage.prompt_tokens:,} prompt tokens from the cache"
    if usage.is_thrashing:
        yield "The engine's cache is too small for these conversations: give --kv-cache-gib, or lower --concurrency"
    if usage.dropped_turns:
        yield f"{usage.dropped_turns:,} prompts left out a part of the history"
    if len(usage.models) > 1:
        yield f"The server answered as several models: {show_entry(', '.join(usage.models))}"
    if usage.dropped_fields:
        yield f"The server refused {', '.join(usage.dropped_fields)}: the requests went without"
    if usage.filtered:
        yield f"{usage.filtered:,} responses were withheld by the server's filter"
    if usage.tool_calls:
        yield f"{usage.tool_calls:,} responses were tool calls instead of text"
    if ended := evaluation.overall.stops.get(StopReason.CONTEXT_LIMIT.value, 0):
        yield f"{ended:,} episodes ended because their prompt grew too long (--overlong)"


def describe_losses(evaluation: Evaluation, out: Path | None) -> str:
    """Return why the figures are not those of all tasks; empty if they are."""
    episodes = evaluation.trajectories
    if faults := Counter(episode.fault for episode in episodes if episode.fault is not None):
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in faults.most_common())
        again = ": the same command plays them again" if out is not None else ""
        return f"{sum(faults.values()):,} of {len(episodes):,} episodes were lost to faults ({kinds}){again}"
    if all(episode.stop is StopReason.CONTEXT_LIMIT and not episode.turns for episode in episodes):
        return "no episode had a response, because every prompt was too long"
    return ""


def _describe_bad_responses(evaluation: Evaluation) -> Iterator[str]:
    """Return what made responses of a model useless before they reached the environment."""
    turns = [turn for trajectory in evaluation.trajectories for turn in trajectory.turns]
    cut = sum(turn.finish is Finish.LENGTH for turn in turns)
    if cut:
        limit = evaluation.settings.max_tokens or DEFAULT_TOKENS
        yield f"{cut:,} of {len(turns):,} responses were cut off at {limit:,} tokens: give --max-tokens more"
    malformed = [turn.response for turn in turns if not (turn.format_ok or (turn.served and turn.served.ending))]
    if 2 * len(malformed) > len(turns):
        yield (
            f"{len(malformed):,} of {len(turns):,} responses were malformed, the first one {malformed[0][:_SHOWN]!r}: "
            "look at the prompt in `spear view`, or try --method react"
        )


def make_table(evaluation: Evaluation, others: dict[str, Part]) -> Table:
    """Return the success by subtask, all tasks together and the baselines."""
    settings = evaluation.settings
    table = _start_table(
        f"{settings.env_id} {settings.split}, {evaluation.row_name}, temperature {settings.temperature:g}"
    )
    table.add_column("subtask", no_wrap=True)
    for name in PART_HEADINGS:
        table.add_column(name, justify="right", no_wrap=True)
    for name, part in evaluation.subtasks.items():
        table.add_row(name, *describe_part(part))
    table.add_section()
    table.add_row("all", *describe_part(evaluation.overall), style="bold")
    for name, part in others.items():
        table.add_row(f"({name})", *describe_part(part))
    return table


def make_paper_table(evaluation: Evaluation) -> Table | None:
    """Return the environment's columns in the paper, and pass@k if tasks were played more than once; else None."""
    passes = {f"pass@{k}": found for k, found in evaluation.overall.pass_at.items() if k > 1}
    in_paper = has_paper_table(evaluation.settings.env_id)
    cells = {cell.heading: cell.estimate for cell in evaluation.cells} if in_paper else {}
    if not cells and not passes:
        return None
    table = _start_table("the paper's columns" if in_paper else "pass@k")
    figures = []
    for heading, estimate in (cells | passes).items():
        table.add_column(heading, justify="right", no_wrap=True)
        figures.append("–" if estimate is None else f"{100 * estimate.mean:.1f}")
    table.add_row(*figures)
    return table


def _start_table(title: str) -> Table:
    return Table(title=title, min_width=len(title), box=SIMPLE_HEAD, padding=0, pad_edge=False, collapse_padding=True)


TOKEN_VARIABLE = "SPEAR_GATEWAY_TOKEN"
_SEED_BITS = 32
"""Bits of the numbers of episodes between the seeds of two gateways."""


@click.command(cls=SectionedCommand)
@click.argument("env_id", metavar="ENV", type=ENV)
@add_playing_options()
@take_address(8500)
@click.option("--out", type=FilePath(), help="Folder for episodes.jsonl, which `spear view` shows.")
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
    from spear_agents.evaluation.run import prepare
    from spear_agents.evaluation.settings import open_policy
    from spear_agents.gateway.session import Limits
    from spear_envs.core.making import make_env

    try:
        from spear_agents.gateway.server import Gateway, Host
    except ModuleNotFoundError as error:
        raise SpearError(f"the gateway needs {error.name}: pip install 'spear-agents[gateway]'") from error

    for flag, unused in (
        ("--layout per_turn", options["layout"] == Layout.PER_TURN.value),
        ("--method reflexion", options["method"] == Method.REFLEXION.value),
        ("--episodes-per-task", options["episodes_per_task"] is not None),
    ):
        if unused:
            raise SpearError(f"programs play one conversation each, as often as they ask for it: leave {flag} out")
    settings = make_settings(env_id, {**options, "layout": Layout.CONVERSATION})
    places = concurrency or CONCURRENCY
    token = read_token(TOKEN_VARIABLE)
    with ExitStack() as stack:
        prepared = prepare(settings)
        settings = prepared.settings
        policy = open_policy(settings, prepared.template, prepared.parser, stack, concurrency=places)
        log = EpisodeLog(mixed_models=mixed_models)
        if out is not None:
            about, identity = (env_id, prepared.fingerprint), policy.settings.identify(prepared.fingerprint)
            opened = open_log(out / EPISODES, *about, identity=identity, mixed_models=mixed_models)
            log = stack.enter_context(opened)

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
                first_seed=settings.seed << _SEED_BITS,
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

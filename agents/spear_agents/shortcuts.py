"""``spear eval`` as a function, with its options as keywords."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any

import click

from spear_agents.evaluation import Evaluation, run_evaluation
from spear_agents.options import add_playing_options, add_program_options, make_settings
from spear_agents.panels.panel import PROTOCOL_OPTIONS, open_panel
from spear_agents.settings import EngineKind, EvalSettings
from spear_agents.watching import watch_episodes
from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.core.making import find_splits
from spear_sandbox.terminal import Console


def evaluate(
    env_id: str | None = None,
    *,
    panel: str | None = None,
    engine: str | EngineKind | None = None,
    model: str | Path | None = None,
    base_url: str | None = None,
    tasks: str | int | Iterable[str] = "all",
    env_kwargs: Mapping[str, Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    concurrency: int | None = None,
    progress: bool = True,
    **options: Any,
) -> Evaluation:
    """Evaluate a policy, from a script or a notebook.

    Args:
        env_id: such as ``"spear/Sokoban-v1"``.
        panel: name or file of a panel, instead of ``env_id``; it sets the tasks and how they are played.
        engine: who plays; by default ``"openai"`` with ``base_url``, else ``"hf"`` with ``model``.
        model: folder or name of the policy, or its name at the server.
        base_url: address of a server that speaks OpenAI's chat completions, including ``/v1``.
        tasks: ``"all"``, the number of leading tasks, or their ids.
        env_kwargs: keywords of the environment.
        template_kwargs: variables of the model's chat template.
        out: folder for the episodes and the figures; the same call again plays only what is missing.
        concurrency: episodes at a time; by default 128, with a server as many as ``requests``.
        progress: show a progress bar, on a terminal or in a notebook.
        options: other options of ``spear eval``, with underscores: ``temperature=0.7``, ``split="test"``,
            ``method="react"``; not those of its output, such as ``latex``.

    Returns:
        The figures and the episodes. A notebook shows them as a table; :meth:`~Evaluation.to_pandas` has a row for each
        episode.

    Raises:
        SpearError: an unknown or invalid option, or any error of ``spear eval``.
    """
    given: dict[str, Any] = {"engine": engine, "model": model and str(model), "base_url": base_url}
    if panel is None or tasks != "all":
        given["tasks"] = str(tasks) if isinstance(tasks, (str, int)) else ",".join(map(str, tasks))
    given = {name: value for name, value in given.items() if value is not None} | options
    if "engine" not in given:
        if model is None:
            raise SpearError("who plays? Give model=, base_url= and model=, or engine='random' or 'expert'.")
        given["engine"] = EngineKind.HF if base_url is None else EngineKind.OPENAI
    named = {*given, *(["env_keywords"] if env_kwargs else ())}
    settings = settle(env_id, panel, _read_options(given), named)
    settings = replace(
        settings,
        env_kwargs={**settings.env_kwargs, **(env_kwargs or {})},
        template_kwargs={**settings.template_kwargs, **(template_kwargs or {})},
    )
    if not progress:
        return run_evaluation(settings, out, concurrency=concurrency)
    with watch_episodes(settings.engine.value, Console(stderr=True)) as bar:
        return run_evaluation(settings, out, concurrency=concurrency, observer=bar.observe, on_response=bar.on_response)


def settle(
    env_id: str | None,
    panel_name: str | None,
    options: Mapping[str, Any],
    given: Collection[str],
    *,
    trust: bool = False,
) -> EvalSettings:
    """Build the settings of an environment and its options, or of a panel (``panel_name``, or its file) and a player.

    ``given`` names the options that the user set; ``trust`` is that of
    :func:`~spear_agents.panels.panel.read_panel`. Raises SpearError if neither an environment nor a panel is named, or
    for an option that the panel decides.
    """
    if panel_name is None:
        if env_id is None:
            raise SpearError("which tasks? Name an environment (spear envs) or a panel (spear panel list).")
        find_splits(env_id)
        return make_settings(env_id, options)
    panel = open_panel(panel_name, trust=trust)
    decided = [name for name in PROTOCOL_OPTIONS if name in given]
    if env_id is not None or decided:
        what = f"--{decided[0].removesuffix('_keywords').replace('_', '-')}" if decided else env_id
        raise SpearError(f"panel {panel.name} decides the tasks and how they are played: leave {what} out.")
    return panel.make_settings(make_settings(panel.env_id, options))


@cache
def _list_options() -> click.Command:
    return click.command("evaluate")(add_playing_options()(add_program_options(lambda **_: None)))


def _suggest_option(name: str, known: Iterable[object]) -> str:
    """A sentence with the keyword of :func:`evaluate` that ``name`` may mean, or nothing."""
    named = {"env_keywords": "env_kwargs", "template_keywords": "template_kwargs", "env": "env_kwargs"}
    if name in named:
        return f" Did you mean {named[name]!r}?"
    return suggest_name(name, {named.get(str(each), str(each)) for each in known} | {"concurrency", "out", "progress"})


def _read_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Add the defaults of other options to those given. Raises SpearError for an unknown option or an invalid value."""
    command = _list_options()
    context = command.make_context("evaluate", [])
    options = {name: value for name, value in context.params.items() if name != "concurrency"}
    known = {param.name: param for param in command.params if param.name in options}
    for name, value in given.items():
        if name not in known:
            raise SpearError(f"evaluate has no option {name!r}.{_suggest_option(name, known)}")
        plain = value.value if isinstance(value, Enum) else value
        if plain is None:
            continue
        try:
            options[name] = known[name].type.convert(plain, known[name], context)
        except click.BadParameter as error:
            raise SpearError(f"{name}={plain!r}: {error.message}") from None
    return options

"""``spear eval`` as a function, with its options as keywords."""

from __future__ import annotations

import json
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import click

from spear_agents.comparison.significance import Judgement, explain_comparison, explain_panels, judge_comparison
from spear_agents.comparison.statistics import Comparison, Metric, compare_trajectories, summarise
from spear_agents.comparison.tables import watch_episodes
from spear_agents.engines.openai import Server, ServerKind
from spear_agents.engines.replies import Prices
from spear_agents.engines.vllm_options import VLLMOptions
from spear_agents.evaluation.baselines import Method
from spear_agents.evaluation.options import add_playing_options, make_settings
from spear_agents.evaluation.panels import open_panel
from spear_agents.evaluation.records import EPISODES, Key, Usage, add_usage, read_last, read_settings
from spear_agents.evaluation.run import SUMMARY, Evaluation, run_evaluation
from spear_agents.evaluation.settings import EngineKind, EvalSettings, PlayedPanel
from spear_agents.play.prompting import Overlong
from spear_agents.play.trajectory import Layout, read_trajectories
from spear_envs.core.errors import SpearError, suggest_name
from spear_envs.core.making import find_splits
from spear_envs.data.files import read_regular
from spear_sandbox.terminal import Console


def evaluate(
    env_id: str | None = None,
    *,
    panel: str | None = None,
    engine: str | EngineKind | None = None,
    model: str | Path | None = None,
    base_url: str | None = None,
    tasks: str | int | Iterable[str] | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    concurrency: int | None = None,
    mixed_models: bool = False,
    trust: bool = False,
    progress: bool = True,
    **options: Any,
) -> Evaluation:
    """Evaluate a policy, from a script or a notebook.

    Args:
        env_id: such as ``"spear/Sokoban-v1"``.
        panel: name or file of a panel, instead of ``env_id``; it sets the tasks and how they are played. Options that
            differ make another panel of it, which ``result.settings.panel`` names.
        engine: who plays; by default ``"openai"`` with ``base_url``, else ``"hf"`` with ``model``.
        model: folder or name of the policy, or its name at the server.
        base_url: address of a server that speaks OpenAI's chat completions, including ``/v1``.
        tasks: None for all, or for the panel's; ``"all"``, their number (each subtask in its share), or their ids.
        env_kwargs: keywords of the environment.
        template_kwargs: variables of the model's chat template.
        out: folder for the episodes and the figures; the same call again plays only what is missing.
        concurrency: episodes at a time; by default 128, with a server as many as ``requests``.
        mixed_models: go on when the server answers as another model than before.
        trust: run, reach and read what the file of ``panel`` names: modules, commands, addresses, paths.
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
    if tasks is not None:
        given["tasks"] = str(tasks) if isinstance(tasks, (str, int)) else ",".join(map(str, tasks))
    given = {name: value for name, value in given.items() if value is not None} | options
    if "engine" not in given:
        if model is None:
            raise SpearError("who plays? Give model=, base_url= and model=, or engine='random' or 'expert'.")
        given["engine"] = EngineKind.HF if base_url is None else EngineKind.OPENAI
    chosen = [name for name, value in given.items() if value is not None]  # None is the default, or the panel's value
    settings = settle(env_id, panel, _read_options(given), chosen, env_kwargs=env_kwargs, trust=trust)
    settings = replace(settings, template_kwargs={**settings.template_kwargs, **(template_kwargs or {})})
    if not progress:
        return run_evaluation(settings, out, concurrency=concurrency, mixed_models=mixed_models)
    with watch_episodes(settings.engine.value, Console(stderr=True)) as bar:
        return run_evaluation(
            settings,
            out,
            concurrency=concurrency,
            mixed_models=mixed_models,
            observer=bar.observe,
            on_response=bar.on_response,
        )


def settle(
    env_id: str | None,
    panel_name: str | None,
    options: Mapping[str, Any],
    given: Collection[str],
    *,
    env_kwargs: Mapping[str, Any] | None = None,
    trust: bool = False,
) -> EvalSettings:
    """Build the settings of an environment and its options, or of a panel (``panel_name``, or its file) and a player.

    ``given`` names the options that the user set, which make another panel where they differ from the panel's;
    ``env_kwargs`` are keywords of the environment besides those in ``options``; ``trust`` is that of
    :func:`~spear_agents.evaluation.panels.read_panel`. Raises SpearError if neither an environment nor a panel is
    named, or both.
    """
    panel = None if panel_name is None else open_panel(panel_name, trust=trust)
    if panel is not None and env_id is not None:
        raise SpearError(f"panel {panel.name} decides the environment: leave {env_id} out.")
    if panel is None:
        if env_id is None:
            raise SpearError("which tasks? Name an environment (spear envs) or a panel (spear panel list).")
        find_splits(env_id)
    settings = make_settings(panel.env_id if panel is not None else str(env_id), options)
    settings = replace(settings, env_kwargs={**settings.env_kwargs, **(env_kwargs or {})})
    return settings if panel is None else panel.settle(settings, given)


@cache
def _list_options() -> click.Command:
    return click.command("evaluate")(add_playing_options(programs=True)(lambda **_: None))


def _suggest_option(name: str, known: Iterable[object]) -> str:
    """Return a sentence with the keyword of :func:`evaluate` that ``name`` may mean, or nothing."""
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
            param = known[name]
            if getattr(param, "multiple", False):
                each = [plain] if isinstance(plain, str) else plain
                options[name] = tuple(param.type.convert(one, param, context) for one in each)
            else:
                options[name] = param.type.convert(plain, param, context)
        except click.BadParameter as error:
            raise SpearError(f"{name}={plain!r}: {error.message}") from None
    return options


def load(folder: str | Path) -> Evaluation:
    """Read the folder of a finished evaluation (``out=``, ``--out``).

    Raises SpearError if it is not one.
    """
    out = Path(folder)
    identity = read_settings(out)
    try:
        summary = json.loads(read_regular(out / SUMMARY))
        settings, seconds = _read_settings(summary["settings"]), float(summary["seconds"])
    except FileNotFoundError:
        raise SpearError(f"{out} does not contain {SUMMARY}: finish the evaluation, the same command resumes") from None
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise SpearError(f"{out / SUMMARY} cannot be read ({type(error).__name__})") from error
    trajectories = read_last(out / EPISODES)
    spent: dict[Key, Usage] = {}
    for trajectory in read_trajectories(out / EPISODES):
        add_usage(spent, trajectory)
    return Evaluation(settings, identity, *summarise(trajectories), trajectories, seconds, spent)


def _read_settings(data: Mapping[str, Any]) -> EvalSettings:
    """Read settings from the plain values of a summary. Raises KeyError, TypeError or ValueError if they are not."""
    known = {each.name for each in fields(EvalSettings)}
    given: dict[str, Any] = {name: value for name, value in data.items() if name in known}
    given |= {"engine": EngineKind(data["engine"]), "method": Method(data["method"])}
    given |= {"overlong": Overlong(data["overlong"]), "layout": data["layout"] and Layout(data["layout"])}
    given["panel"] = PlayedPanel.read(data)
    if (server := data["server"]) is not None:
        prices = server["prices"] and Prices(**server["prices"])
        headers = dict.fromkeys(server["headers"], "")  # their values are in no record
        found = {**server, "kind": ServerKind(server["kind"]), "prices": prices, "headers": headers}
        given["server"] = Server(**found)
    if data["vllm"] is not None:
        given["vllm"] = VLLMOptions(**data["vllm"])
    return EvalSettings(**given)


@dataclass(frozen=True, repr=False)
class Compared:
    """Two evaluations of the same tasks, their paired difference and its tests, and what these say."""

    comparison: Comparison
    judgement: Judgement
    sentences: tuple[str, ...]
    names: tuple[str, str]

    def __repr__(self) -> str:
        return "\n".join(self.sentences)

    def _repr_html_(self) -> str:
        """Return the figures and what they say, for notebooks."""
        found = (self.comparison.before, self.comparison.after, self.comparison.difference)
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{100 * each.mean:.1f}</td>"
            f"<td>{100 * each.low:.1f} to {100 * each.high:.1f}</td></tr>"
            for name, each in zip((*self.names, "difference"), found, strict=True)
        )
        text = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return f"<table><tr><th></th><th>mean %</th><th>CI95</th></tr>{rows}</table>{text}"


def compare(
    before: str | Path | Evaluation, after: str | Path | Evaluation, metric: Metric | str = Metric.SUCCESS
) -> Compared:
    """Compare two evaluations, or their folders, task by task, as ``spear compare`` does.

    Raises SpearError if they are not on the same tasks, or a folder cannot be read.
    """
    try:
        measure = Metric(metric)
    except ValueError:
        raise SpearError(f"metric {metric!r} is not one of {', '.join(each.value for each in Metric)}") from None
    runs = [run if isinstance(run, Evaluation) else load(run) for run in (before, after)]
    names = [run.row_name if isinstance(run, Evaluation) else Path(run).resolve().name for run in (before, after)]
    if names[0] == names[1]:
        names = [f"{name} ({place})" for name, place in zip(names, ("before", "after"), strict=True)]
    comparison = compare_trajectories(runs[0].trajectories, runs[1].trajectories, measure)
    judgement = judge_comparison(comparison)
    sentences = explain_comparison(comparison, judgement, *names) + explain_panels([run.identity for run in runs])
    return Compared(comparison, judgement, tuple(sentences), (names[0], names[1]))


class View:
    """The page of a run, served by a thread until :meth:`close` or the end of the process."""

    def __init__(self, folder: str | Path, port: int) -> None:
        from spear_agents.viewer.runs import Run
        from spear_agents.viewer.server import PageServer

        self._server = PageServer(Run(Path(folder)), port=port)
        self.address: str = self._server.address
        """Where the page is."""
        threading.Thread(target=self._server.serve_forever, name="spear-view", daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.close()

    def __repr__(self) -> str:
        return f"View({self.address})"

    def _repr_html_(self) -> str:
        """Return a link, for notebooks."""
        return f'<a href="{escape(self.address)}" target="_blank" rel="noopener">{escape(self.address)}</a>'


def view(folder: str | Path, *, port: int = 0) -> View:
    """Serve the page of ``spear view`` for a folder, on this machine only; ``port`` 0 takes a free one.

    Raises SpearError if the folder holds no run, or the port is taken.
    """
    return View(folder, port)

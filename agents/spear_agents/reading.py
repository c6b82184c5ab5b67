"""Kept evaluations in a script or a notebook: read, compared and shown."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, fields
from html import escape
from pathlib import Path
from typing import Any

from spear_agents.baselines.forms import Method
from spear_agents.engines.openai import Server, ServerKind
from spear_agents.engines.replies import Prices
from spear_agents.engines.vllm_options import VLLMOptions
from spear_agents.evaluation import SUMMARY, Evaluation
from spear_agents.prompting import Overlong
from spear_agents.records import EPISODES, Key, add_usage, read_last, read_settings
from spear_agents.settings import EngineKind, EvalSettings
from spear_agents.significance import Judgement, explain_comparison, judge_comparison
from spear_agents.statistics import Comparison, Metric, compare_trajectories, summarise
from spear_agents.trajectory import Layout, read_trajectories
from spear_agents.usage import Usage
from spear_envs.core.errors import SpearError


def load(folder: str | Path) -> Evaluation:
    """Read the folder of a finished evaluation (``out=``, ``--out``).

    Raises SpearError if it is not one.
    """
    out = Path(folder)
    identity = read_settings(out)
    try:
        summary = json.loads((out / SUMMARY).read_text(encoding="utf-8"))
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
    """Settings from the plain values of a summary. Raises KeyError, TypeError or ValueError if they are not."""
    known = {each.name for each in fields(EvalSettings)}
    given: dict[str, Any] = {name: value for name, value in data.items() if name in known}
    given |= {"engine": EngineKind(data["engine"]), "method": Method(data["method"])}
    given |= {"overlong": Overlong(data["overlong"]), "layout": data["layout"] and Layout(data["layout"])}
    if (server := data["server"]) is not None:
        prices = server["prices"] and Prices(**server["prices"])
        given["server"] = Server(**{**server, "kind": ServerKind(server["kind"]), "prices": prices})
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
        """The figures and what they say, for notebooks."""
        found = (self.comparison.before, self.comparison.after, self.comparison.difference)
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{100 * each.mean:.1f}</td>"
            f"<td>{100 * each.low:.1f} to {100 * each.high:.1f}</td></tr>"
            for name, each in zip((*self.names, "difference"), found, strict=True)
        )
        told = "".join(f"<p>{escape(sentence)}</p>" for sentence in self.sentences)
        return f"<table><tr><th></th><th>mean %</th><th>CI95</th></tr>{rows}</table>{told}"


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
    sentences = explain_comparison(comparison, judgement, *names)
    return Compared(comparison, judgement, tuple(sentences), (names[0], names[1]))


class View:
    """The page of a run, served by a thread until :meth:`close` or the end of the process."""

    def __init__(self, folder: str | Path, port: int) -> None:
        from spear_agents.replay.runs import Run
        from spear_agents.replay.server import PageServer

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
        """A link, for notebooks."""
        return f'<a href="{escape(self.address)}" target="_blank" rel="noopener">{escape(self.address)}</a>'


def view(folder: str | Path, *, port: int = 0) -> View:
    """Serve the page of ``spear view`` for a folder, on this machine only; ``port`` 0 takes a free one.

    Raises SpearError if the folder holds no run, or the port is taken.
    """
    return View(folder, port)

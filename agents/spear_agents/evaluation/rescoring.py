"""Recorded responses of an evaluation, played again: ``spear rescore``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from spear_agents.comparison.statistics import Estimate, estimate_outcomes, format_percent, plain_estimate
from spear_agents.evaluation.baselines import Method, wrap_reader
from spear_agents.evaluation.options import TRUST
from spear_agents.evaluation.panels import describe_overrides
from spear_agents.evaluation.records import EPISODES, read_last, read_settings
from spear_agents.evaluation.settings import PlayedPanel
from spear_agents.play.episode import pay_early
from spear_agents.play.trajectory import StopReason, Trajectory
from spear_envs.cli import read_keywords
from spear_envs.core import EnvFault, SpearError
from spear_envs.core.making import make_env, require_harmless
from spear_sandbox.console import FilePath, echo
from spear_sandbox.errors import show_entry

TOLERANCE = 1e-9
MOST_NAMED = 10
"""Differences that are listed one by one."""


@dataclass(frozen=True)
class Rescored:
    """A run played again: a line for each value that differs, and success over tasks then and now.

    ``faults`` counts episodes not replayed since a service was down, and ``panel`` is that of the run.
    """

    episodes: int
    differences: Sequence[str]
    recorded: Estimate
    replayed: Estimate
    faults: int = 0
    panel: PlayedPanel | None = None


def rescore_run(run: Path, changes: Mapping[str, Any] | None = None, *, trust: bool = False) -> Rescored:
    """Play the recorded responses of a folder of ``spear eval --out`` again, turn by turn.

    With ``changes``, other keywords of the environment such as another grader, differences are new scores, not faults.
    ``trust``: the environment may run, reach and read what the folder names, see
    :func:`~spear_envs.core.making.require_harmless`.

    Raises SpearError if the folder is not an evaluation's, its tasks are missing, or its environment cannot be made.
    """
    settings = read_settings(run)
    played = PlayedPanel.read(settings)
    try:
        env_id, split, kwargs = settings["env_id"], settings["split"], dict(settings["env_kwargs"])
        method = Method(settings.get("method", Method.PLAIN))
    except (KeyError, TypeError, ValueError) as error:
        raise SpearError(f"{run} was not written by this version of spear eval: it lacks {error}.") from error
    if not trust:
        kept = {name: value for name, value in kwargs.items() if name not in (changes or {})}
        require_harmless(env_id, {**kept, "split": split}, str(run))
    episodes = [each for each in read_last(run / EPISODES) if each.stop is not StopReason.FAULT]
    if not episodes:
        raise SpearError(f"{run} does not contain a complete episode: there is nothing to rescore.")
    differences: list[str] = []
    recorded: dict[str, list[float]] = {}
    replayed: dict[str, list[float]] = {}
    faults = 0
    with closing(make_env(env_id, split, {**kwargs, **(changes or {})})) as env:
        if not changes and env.tasks.fingerprint != episodes[0].fingerprint:
            raise SpearError(f"{run} was played on other tasks than {env_id} has here")
        reading = wrap_reader(method, env)
        for episode in episodes:
            try:
                found = _replay(reading, episode)
            except EnvFault:
                faults += 1
                continue
            recorded.setdefault(episode.task_id, []).append(float(episode.won))
            replayed.setdefault(episode.task_id, []).append(float(found["won"]))
            differences += _compare(episode, found)
    if not recorded:
        raise SpearError(f"none of the {faults} episodes could be replayed: a service of {env_id} is down.")
    before, after = (estimate_outcomes(each) for each in (recorded, replayed))
    return Rescored(len(episodes) - faults, differences, before, after, faults, played)


def _replay(env: Any, episode: Trajectory) -> dict[str, Any]:
    """Return the present end of the episode, its reward, and the native reward of each turn."""
    _, info = env.reset(seed=episode.seed, options={"task": episode.task_id})
    rewards = [0.0] * len(episode.turns)
    played, paid, core = 0, 0.0, env.unwrapped
    for place, response in episode.list_steps():
        if core.done:
            break
        before = info["reward_terms"]["native_return"]
        _, reward, _, _, info = env.step(response)
        paid += float(reward)
        if info["fault"] is not None:
            raise EnvFault(info["fault"], "a service failed")
        played += 1
        if place >= 0:
            rewards[place] += info["reward_terms"]["native_return"] - before
    if episode.stop.is_early:
        paid = pay_early(core, info, paid)
    return {
        "reward": paid,
        "won": info["won"],
        "score": info["score"],
        "tool_calls": info["tool_calls"],
        "terms": dict(info["reward_terms"]),
        "rewards": rewards,
        "steps": played,
    }


def _differ(found: float, recorded: float) -> bool:
    """Return whether two values differ; NaN, and what does not fit into a float, differ from everything."""
    try:
        return not abs(float(found) - float(recorded)) <= TOLERANCE
    except OverflowError:
        return True


def _compare(episode: Trajectory, found: Mapping[str, Any]) -> list[str]:
    where = f"{episode.task_id}, seed {episode.seed}"
    lines = []
    steps = len(episode.list_steps())
    if found["steps"] != steps:
        lines.append(f"{where}: ends after {found['steps']} steps, recorded {steps}")
    for number, (turn, reward) in enumerate(zip(episode.turns, found["rewards"], strict=True), start=1):
        if _differ(reward, turn.reward):
            lines.append(f"{where}: turn {number} pays {reward:g}, recorded {turn.reward!s:.40}")
    for name in ("reward", "won", "score", "tool_calls"):
        if _differ(found[name], getattr(episode, name)):
            lines.append(f"{where}: {name} is {found[name]}, recorded {getattr(episode, name)!s:.40}")
    terms = episode.reward_terms
    for name in {**found["terms"], **terms}:
        if _differ(found["terms"].get(name, 0.0), terms.get(name, 0.0)):
            lines.append(f"{where}: the term {name} is {found['terms'].get(name)}, recorded {terms.get(name)!s:.40}")
    return lines


@click.command()
@click.argument("run", type=FilePath(file_okay=False))
@click.option("--env", "pairs", multiple=True, metavar="KEY=VALUE", help="Another keyword, such as another grader.")
@click.option("--json", "as_json", is_flag=True, help="Figures for programs.")
@TRUST
def rescore(run: Path, pairs: tuple[str, ...], as_json: bool, trust: bool) -> None:
    """Play the recorded responses of RUN (a folder of spear eval --out) again and compare every reward.

    Exit code 1 if one differs. With --env the episodes are scored differently, and differences do not fail.

    \b
      spear rescore runs/first
      spear rescore runs/aime --env grader=math_verify
    """
    changes = read_keywords(pairs)
    found = rescore_run(run, changes, trust=trust)
    if as_json:
        figures = {
            "episodes": found.episodes,
            "faults": found.faults,
            "differences": list(found.differences),
            "recorded": plain_estimate(found.recorded),
            "replayed": plain_estimate(found.replayed),
            "panel": found.panel and asdict(found.panel),
            "changes": changes,
        }
        echo(json.dumps(figures, indent=2))
    else:
        for line in found.differences[:MOST_NAMED]:
            echo(show_entry(line))
        if len(found.differences) > MOST_NAMED:
            echo(f"and {len(found.differences) - MOST_NAMED:,} more")
        left_out = f", {found.faults} left out since a service failed" if found.faults else ""
        echo(
            f"{found.episodes:,} episodes{left_out}: {len(found.differences):,} values differ; success"
            f" {format_percent(found.replayed)}, recorded {format_percent(found.recorded)}"
        )
        if found.panel is not None:
            scored = f"; {describe_overrides(changes)} scores it as another" if changes else ""
            echo(show_entry(f"panel {found.panel.label}{scored}"))
    if found.differences and not changes:
        raise SystemExit(1)

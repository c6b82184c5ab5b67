"""The folder of an evaluation: its settings and its episodes as they end."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spear_agents.files import explain_unwritable, write_json
from spear_agents.trajectory import StopReason, Trajectory, TrajectoryWriter, read_trajectories
from spear_agents.usage import NO_USAGE, Usage, sum_usage
from spear_envs.core.errors import SpearError
from spear_envs.data.files import read_regular

EPISODES, SETTINGS = "episodes.jsonl", "settings.json"

Key = tuple[str, int]
"""Task and seed: one job."""


@dataclass
class EpisodeLog:
    """Episodes of earlier runs, and the file for new ones (None without a folder).

    ``earlier`` holds the trials of each job in order, usually one, without those cut short by a fault. ``spent`` is
    what each job has cost, in all its trials and with those cut short. A server may answer as several models if
    ``mixed_models``.
    """

    earlier: dict[Key, list[Trajectory]] = field(default_factory=dict)
    writer: TrajectoryWriter | None = None
    spent: dict[Key, Usage] = field(default_factory=dict)
    mixed_models: bool = False
    _model: str | None = None

    def write(self, trajectory: Trajectory) -> None:
        """Keep an episode. Raises SpearError if the disk is full, or a server answers as another model than before."""
        self.add(trajectory)
        if self.writer is not None:
            self.writer.write(trajectory)

    def add(self, trajectory: Trajectory) -> None:
        """Count what an episode cost. Raises SpearError if a server answered as another model than before."""
        for model in sum_usage([trajectory]).models:
            self._model = self._model or model
            if model != self._model and not self.mixed_models:
                raise SpearError(
                    f"the server answers as {model!r}, and as {self._model!r} before: choose another folder, or accept"
                    " both with --mixed-models"
                )
        add_usage(self.spent, trajectory)


@contextmanager
def open_log(path: Path, env_id: str, fingerprint: str, *, mixed_models: bool = False) -> Iterator[EpisodeLog]:
    """Open the log of an evaluation of these tasks.

    Of several lines for one trial the last counts, as in :func:`read_last`. Raises SpearError if another process writes
    the file, it cannot be read or written, or holds an episode of another environment, of other tasks, or of a second
    model of a server without ``mixed_models``.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise explain_unwritable(path, error) from error
    with file:
        try:  # a killed process leaves no lock
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise SpearError(
                f"another process writes to {path.parent}: wait for it, or choose another folder"
            ) from error
        earlier: dict[Key, list[Trajectory]] = {}
        with TrajectoryWriter(path) as writer:
            log = EpisodeLog(writer=writer, mixed_models=mixed_models)
            for trajectory in read_own(path, env_id, fingerprint):
                log.add(trajectory)
                trials = earlier.setdefault((trajectory.task_id, trajectory.seed), [])
                if trajectory.stop is not StopReason.FAULT and trajectory.trial <= len(trials) + 1:
                    trials[trajectory.trial - 1 :] = [trajectory]
            log.earlier = {key: trials for key, trials in earlier.items() if trials}
            yield log


def is_of(trajectory: Trajectory, env_id: str, fingerprint: str) -> bool:
    """Whether an episode is of these tasks; the module before an id, which registers it, does not count."""
    names = (trajectory.env_id.rpartition(":")[2], env_id.rpartition(":")[2])
    return names[0] == names[1] and trajectory.fingerprint == fingerprint


def read_own(path: Path, env_id: str, fingerprint: str) -> Iterator[Trajectory]:
    """Read the episodes of an evaluation. Raises SpearError as :func:`read_trajectories`, or for one of another."""
    for number, trajectory in enumerate(read_trajectories(path), start=1):
        if not is_of(trajectory, env_id, fingerprint):
            raise SpearError(
                f"{path}, line {number}, is of {trajectory.env_id} with tasks {trajectory.fingerprint[:12]},"
                f" not {env_id} with {fingerprint[:12]}: choose another folder or remove the line"
            )
        yield trajectory


def add_usage(spent: dict[Key, Usage], trajectory: Trajectory) -> None:
    """Add what an episode cost to its job."""
    key = (trajectory.task_id, trajectory.seed)
    spent[key] = spent.get(key, NO_USAGE) + sum_usage([trajectory])


def check_settings(out: Path, identity: Mapping[str, Any]) -> None:
    """Write the settings of a new folder, or compare those of an old one. Raises SpearError if they differ."""
    path = out / SETTINGS
    if not path.exists():
        if (out / EPISODES).exists():
            raise SpearError(f"{out} contains {EPISODES} without {SETTINGS}: choose another folder")
        write_json(path, identity)
        return
    found = read_settings(out)
    for key, value in identity.items():
        if found.get(key) != value:
            raise SpearError(
                f"{out} holds an evaluation with {key}={found.get(key)!r}, not {value!r}: "
                "choose another folder or remove this one"
            )


def read_settings(out: Path) -> dict[str, Any]:
    """Read the settings of a folder. Raises SpearError if they cannot be read."""
    path = out / SETTINGS
    try:
        return dict(json.loads(read_regular(path)))
    except (OSError, ValueError, RecursionError, TypeError) as error:
        if not path.exists():
            found = "does not exist" if not out.is_dir() else f"does not contain {SETTINGS}"
            raise SpearError(f"{out} {found}: give a folder of `spear eval --out`") from error
        raise SpearError(f"{path} cannot be read: choose another folder or remove this one") from error


def read_last(path: Path) -> list[Trajectory]:
    """Read the last episode of each job, but one that ended rather than a later one cut short by a fault.

    Raises SpearError if the file cannot be read, or an episode is not of the evaluation that its settings name.
    """
    last: dict[Key, Trajectory] = {}
    named = read_settings(path.parent)
    own = read_own(path, named["env_id"], named["fingerprint"]) if "fingerprint" in named else read_trajectories(path)
    for trajectory in own:
        key = trajectory.task_id, trajectory.seed
        if key not in last or trajectory.stop is not StopReason.FAULT or last[key].stop is StopReason.FAULT:
            last[key] = trajectory
    return list(last.values())

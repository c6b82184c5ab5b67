"""Groups that start in snapshots of earlier episodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from spear_agents.engines.base import derive_seed
from spear_agents.play.episode import Snapshot
from spear_agents.play.trajectory import Layout, Trajectory
from spear_envs.core.errors import SpearError, name_error
from spear_training.algorithms.curriculum import Archive, BranchSettings
from spear_training.step.records import EpisodeRecord, Rollout, Walk

OFF = "or set branch.share=0"


def check_branching(*, layout: Layout, program: str | None, staleness: int, obstacle: str | None) -> None:
    """Raise SpearError, with the setting to change, if groups cannot start in snapshots."""
    if program is not None:
        raise SpearError(f"branch.share above 0 cannot start {program} in mid-episode: leave out rollout.agent, {OFF}")
    if layout is not Layout.PER_TURN:
        raise SpearError(f"branch.share above 0 needs env.layout=per_turn, not {layout.value}: set it, {OFF}")
    if staleness:
        raise SpearError(f"branch.share above 0 needs rollout.staleness=0, not {staleness}: set it, {OFF}")
    if obstacle is not None:
        raise SpearError(
            f"branch.share above 0 cannot restore states of this environment: {obstacle}. Change it, {OFF}"
        )


def list_walks(
    trajectories: Iterable[Trajectory], records: Iterable[EpisodeRecord], settings: BranchSettings
) -> dict[str, Walk]:
    """Walks of a rollout for the archive, by episode: those from the start of their task."""
    walks = {}
    for trajectory, record in zip(trajectories, records, strict=True):
        if record.fault is None and record.began is None and settings.keeps(won=record.won):
            moments = trajectory.turns if settings.begins_in(won=record.won) else ()
            snapshots = tuple(turn.snapshot for turn in moments if turn.snapshot is not None)
            walks[record.trajectory] = Walk(tuple(turn.anchor for turn in trajectory.turns), snapshots)
    return walks


class Branching:
    """Chooses the groups of a batch that start in snapshots, and learns from their episodes."""

    def __init__(self, settings: BranchSettings, seed: int) -> None:
        self._archive: Archive[str, Snapshot] = Archive(settings)
        self._rng = np.random.Generator(np.random.PCG64(derive_seed(seed, "branch")))
        self._begun: dict[str, int] = {}
        """Archived episode of each running group that started in it."""

    def begin(self, groups: Sequence[str], tasks: Sequence[str]) -> list[tuple[str, Snapshot | None]]:
        """Task of each group, and its snapshot; groups with one come first, in the tasks' places."""
        branches = self._archive.draw(len(groups), self._rng)
        self._begun |= {group: branch.episode for group, branch in zip(groups, branches, strict=False)}
        taken: list[tuple[str, Snapshot | None]] = [(branch.task, branch.state) for branch in branches]
        return taken + [(task, None) for task in tasks[len(branches) :]]

    def update(self, rollout: Rollout) -> None:
        """Update the archive with episodes without a fault."""
        wins: dict[str, list[bool]] = {}
        for record in rollout.records:
            found = wins.setdefault(record.group, [])
            if record.fault is None:
                found.append(record.won)
        for group, found in wins.items():
            if group in self._begun:
                self._archive.update(self._begun.pop(group), sum(found), len(found))
        for record in rollout.records:
            walk = rollout.walks.get(record.trajectory)
            if walk is not None:
                self._archive.remember(record.task_id, walk.anchors, walk.snapshots, won=record.won)

    def summarize(self, records: Sequence[EpisodeRecord]) -> dict[str, float]:
        """Metrics of the groups of a step that started in snapshots."""
        branched = [record for record in records if record.began is not None]
        groups = len({record.group for record in records})
        metrics = {
            "branch/share": len({record.group for record in branched}) / max(1, groups),
            "branch/kept": float(len(self._archive)),
        }
        valid = [record for record in branched if record.fault is None]
        if valid:
            metrics["branch/success"] = float(np.mean([record.won for record in valid]))
            metrics["branch/turns_before"] = float(np.mean([record.began for record in valid]))
            metrics["branch/turns"] = float(np.mean([record.turns for record in valid]))
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run to make the same choices."""
        state = self._archive.state_dict()
        for past in state["episodes"]:
            past["states"] = _pack(past["states"])
        return {"archive": state, "rng": self._rng.bit_generator.state}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Restore :meth:`state_dict`. Raises SpearError if it is missing or damaged."""
        if state is None:
            raise SpearError("the checkpoint was written without branches: start a new run folder")
        try:
            saved = state["archive"]
            episodes = [{**past, "states": _unpack(past["states"])} for past in saved["episodes"]]
            self._archive.load_state_dict({**saved, "episodes": episodes})
            self._rng.bit_generator.state = state["rng"]
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise SpearError(f"the branches in the checkpoint are damaged ({name_error(error)})") from error
        self._begun = {}


def _pack(snapshots: Sequence[Snapshot]) -> dict[str, Any]:
    """Pack snapshots of an episode for a checkpoint, with their states as one array."""
    return {
        "turns": [one.turn for one in snapshots],
        "histories": [one.history for one in snapshots],
        "sizes": [len(one.state) for one in snapshots],
        "bytes": np.frombuffer(b"".join(one.state for one in snapshots), dtype=np.uint8),
    }


def _unpack(saved: Mapping[str, Any]) -> list[Snapshot]:
    ends = np.cumsum([0, *saved["sizes"]]).tolist()
    content = saved["bytes"].tobytes()
    if min(saved["sizes"], default=0) < 0 or ends[-1] != len(content):
        raise ValueError("sizes are not those of the states")
    histories = [tuple((seen, done) for seen, done in history) for history in saved["histories"]]
    return [
        Snapshot(turn, content[low:high], history)
        for turn, low, high, history in zip(saved["turns"], ends[:-1], ends[1:], histories, strict=True)
    ]

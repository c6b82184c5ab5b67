"""The result of a rollout: records of episodes, the table of their rows, and the episodes kept for ``spear view``."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import numpy as np

from spear_agents.engines.vision import pack_pictures
from spear_agents.evaluation.records import EPISODES, SETTINGS
from spear_agents.play.snapshots import Snapshot
from spear_agents.play.trajectory import StopReason, Trajectory, TrajectoryWriter, Turn
from spear_envs.core.errors import SpearError
from spear_envs.data.files import explain_unwritable, write_json, write_text
from spear_training.algorithms.responses import has_repetition, is_incomplete, is_unreadable
from spear_training.algorithms.rows import RowTable
from spear_training.run.custom_reward import LARGEST

NOT_FINITE = "reward"
"""Kind of fault of an episode with a reward that is not a number, or beyond ``LARGEST``."""


@dataclass(frozen=True)
class EpisodeRecord:
    """One episode: its group, its end and its reward.

    ``terms`` are the raw reward terms, ``fault`` the kind of fault or None. ``rows`` counts its rows.
    ``versions`` are the training steps of the weights that wrote it, in ascending order. ``began`` is the number of
    turns before its snapshot, not included in ``turns``; None if it started at the start of its task.
    """

    group: str
    sample: int
    task_id: str
    subtask: str
    terms: Mapping[str, float]
    won: bool
    score: float
    tool_calls: int
    stop: str
    fault: str | None
    turns: int
    well_formed_turns: int
    valid_actions: int
    rows: int
    versions: tuple[int, ...] = ()
    began: int | None = None

    @property
    def trajectory(self) -> str:
        """The episode's key, unique within a step."""
        return f"{self.group}_{self.sample}"


def record_episode(trajectory: Trajectory, group: str, sample: int) -> EpisodeRecord:
    """Summarise ``trajectory`` as member ``sample`` of ``group``; a reward that is NaN or too large is a fault."""
    turns = trajectory.turns
    fault = trajectory.fault
    rewards = [*trajectory.reward_terms.values(), *(turn.reward for turn in turns)]
    if fault is None and not all(abs(reward) <= LARGEST for reward in rewards):  # nor is NaN
        fault = NOT_FINITE
    return EpisodeRecord(
        group=group,
        sample=sample,
        task_id=trajectory.task_id,
        subtask=trajectory.subtask,
        terms=dict(trajectory.reward_terms),
        won=trajectory.won,
        score=trajectory.score,
        tool_calls=trajectory.tool_calls,
        stop=trajectory.stop.value,
        fault=fault,
        turns=len(turns),
        well_formed_turns=sum(turn.format_ok for turn in turns),
        valid_actions=sum(turn.action_ok for turn in turns),
        rows=len(trajectory.chains()) if fault is None else 0,
        versions=tuple(sorted(_list_versions(turns))),
        began=trajectory.began,
    )


def tabulate(
    trajectories: Sequence[Trajectory],
    records: Sequence[EpisodeRecord],
    *,
    find_repetition: bool = False,
    pictures: bool = False,
) -> RowTable:
    """Tabulate the rows of episodes without a fault, with tokens; the key of a row is ``<group>_<sample>_<row>``."""
    found = [
        (record, index, row, places, [trajectory.turns[place] for place in places])
        for trajectory, record in zip(trajectories, records, strict=True)
        if record.fault is None
        for index, (row, places) in enumerate(zip(trajectory.rows(), trajectory.chains(), strict=True))
    ]
    rows = [row for _, _, row, _, _ in found]
    owners = [record for record, *_ in found]
    members = [turns for *_, turns in found]
    columns = {
        "key": [f"{record.trajectory}_{index}" for record, index, *_ in found],
        "group": [record.group for record in owners],
        "trajectory": [record.trajectory for record in owners],
        "turn": [row.turn_index for row in rows],
        # A row is as old as the oldest weights that wrote some of it: a bound of staleness must hold for every token.
        "version": [min(_list_versions(turns), default=-1) for turns in members],
        "anchor": [str(turns[0].anchor) for turns in members],
        "prompt_length": [len(row.prompt_ids) for row in rows],
        "response_length": [len(row.response_ids) for row in rows],
        "loss_tokens": [sum(row.response_mask) for row in rows],
        "finished": [turns[-1].finish.value != "length" for turns in members],
        "truncated": [record.stop == StopReason.CONTEXT_LIMIT.value for record in owners],
        "void": [any(not turn.action for turn in turns) for turns in members],
        "incomplete": [any(is_incomplete(turn.response) for turn in turns) for turns in members],
        "repetitive": [
            find_repetition and any(has_repetition(turn.response_ids) for turn in turns) for turns in members
        ],
        "unreadable": [any(is_unreadable(turn.response) for turn in turns) for turns in members],
        "malformed": [sum(not turn.format_ok for turn in turns) for turns in members],
        "won": [record.won for record in owners],
        "tool_calls": [record.tool_calls for record in owners],
        "step_reward": [float(sum(turn.reward for turn in turns)) for turns in members],
        "turns": [len(turns) for turns in members],
        "turn_number": [place for *_, places, _ in found for place in places],
        # Where the policy's text ends, so that an advantage of a turn does not reach into the observation after it.
        "turn_end": [end for turns in members for end in _find_ends(turns)],
        "turn_reward": [turn.reward for turns in members for turn in turns],
        "ids": _join([ids for row in rows for ids in (row.prompt_ids, row.response_ids)], np.int32),
        "mask": _join([row.response_mask for row in rows], np.bool_),
        "rollout_log_probs": _join([row.log_probs for row in rows], np.float32),
    }
    if pictures:
        packed = [pack_pictures(row.pictures) for row in rows]
        columns["picture_bytes"] = [len(part) for part in packed]
        columns["pictures"] = np.concatenate(packed) if packed else np.zeros(0, dtype=np.uint8)
    return RowTable(**columns)


def _find_ends(turns: Sequence[Turn]) -> Iterator[int]:
    """Return the ends of the responses of a row's turns, in tokens of its response, which includes observations."""
    return accumulate(len(turn.response_ids) + (len(turn.prompt_ids) if at else 0) for at, turn in enumerate(turns))


def _list_versions(turns: Sequence[Turn]) -> set[int]:
    """Return the training steps of the weights that wrote these turns."""
    return {turn.version for turn in turns if turn.version is not None}


def _join(parts: Sequence[Sequence[float]], kind: type) -> np.ndarray:
    return np.fromiter(chain.from_iterable(parts), dtype=kind, count=sum(map(len, parts)))


@dataclass(frozen=True)
class Walk:
    """States of an episode before each turn: their names, and snapshots if groups may start there."""

    anchors: tuple[str, ...]
    snapshots: tuple[Snapshot, ...]


@dataclass(frozen=True)
class Rollout:
    """The episodes of a step or a validation.

    Attributes:
        rows: of episodes without a fault; their tokens may be stored separately.
        generations: number of responses, without those of retried episodes.
        retried: number of episodes played again after a fault.
        episodes: those to record.
        cached_tokens: prompt tokens found in the engine's prefix cache.
        cacheable_tokens: prompt tokens that an engine with a cache had seen before in the same conversation.
        walks: of the episodes in which later groups may start, by :attr:`EpisodeRecord.trajectory`.
    """

    records: tuple[EpisodeRecord, ...]
    rows: RowTable
    generations: int = 0
    retried: int = 0
    episodes: tuple[Trajectory, ...] = ()
    prompt_tokens: int = 0
    cached_tokens: int = 0
    cacheable_tokens: int = 0
    walks: Mapping[str, Walk] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Sequence[Rollout]) -> Rollout:
        """Join parts, sorted by group and sample, independent of which worker played them."""
        records = sorted((r for part in parts for r in part.records), key=lambda record: (record.group, record.sample))
        rows = RowTable.join([part.rows for part in parts])
        place = {record.trajectory: number for number, record in enumerate(records)}
        # Which worker finished first is chance; the order of rows decides how they are dealt, and so the run.
        order = np.asarray([place[name] for name in rows.trajectory.tolist()], dtype=np.int64)
        counts = ("generations", "retried", "prompt_tokens", "cached_tokens", "cacheable_tokens")
        return cls(
            tuple(records),
            rows.take(np.argsort(order, kind="stable")),
            episodes=tuple(episode for part in parts for episode in part.episodes),
            walks={name: walk for part in parts for name, walk in part.walks.items()},
            **{name: sum(getattr(part, name) for part in parts) for name in counts},
        )


# ---- episodes for ``spear view`` -------------------------------------------------------------------------------------
ROLLOUTS = "rollouts"
"""Folder of training episodes within a run."""
VALIDATIONS = "validations"
"""Folder of validation episodes (``validation.record`` of each)."""
_log = logging.getLogger(__name__)


class EpisodeRecorder:
    """Appends episodes to ``episodes.jsonl`` in a ``folder`` of a run. Failures here do not stop the training.

    The page shows ``identity`` (``model``, ``env_kwargs`` and ``split``) and the name of the folder.
    """

    def __init__(self, out: Path, identity: Mapping[str, Any], folder: str = ROLLOUTS) -> None:
        self._path = out / folder / EPISODES
        self._identity = identity

    def resume_after(self, step: int) -> None:
        """Drop the episodes of later steps, which will be played again, and a torn last line."""
        try:
            if not self._path.exists():
                return
            lines = self._path.read_text(encoding="ascii").splitlines(keepends=True)
            kept = [line for line in lines if _read_step(line) <= step]
            if len(kept) < len(lines):
                write_text(self._path, "".join(kept))
        except (OSError, ValueError, SpearError) as error:
            _log.warning("recorded episodes of steps after %d stay in %s: %s", step, self._path, error)

    def write(self, step: int, episodes: Sequence[Trajectory]) -> int:
        """Keep the episodes of a step; return their number. On a full disk, warn and return 0."""
        if not episodes:
            return 0
        try:
            settings = self._path.with_name(SETTINGS)
            if not settings.exists():
                write_json(settings, self._identity)
            # Opened each time: a line torn by a full disk is cut off before the next.
            with TrajectoryWriter(self._path) as writer:
                for episode in episodes:
                    writer.write(replace(episode, step=step))
        except (OSError, SpearError) as error:
            text = explain_unwritable(self._path, error) if isinstance(error, OSError) else error
            _log.warning("the episodes of step %d are not recorded, the training continues: %s", step, text)
            return 0
        return len(episodes)


def _read_step(line: str) -> float:
    """Return the step of a line; infinite if it is torn."""
    if not line.endswith("\n"):
        return float("inf")
    try:
        return float(json.loads(line)["step"])
    except (ValueError, RecursionError, KeyError, TypeError, OverflowError):
        return float("inf")

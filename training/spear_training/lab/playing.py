"""Rollouts of the lab: all groups of a batch move by move, and their rows as the trainer tabulates them."""

from __future__ import annotations

from typing import Any

import numpy as np

from spear_agents.trajectory import StopReason
from spear_envs.core.rewards import FORMAT_BONUS, tool_call_reward
from spear_envs.sokoban.levels import find_band
from spear_training.algorithms import RowTable
from spear_training.algorithms.curriculum import TaskSource
from spear_training.algorithms.rows import Array
from spear_training.lab.actor import LabActor
from spear_training.lab.policy import BoardPolicy
from spear_training.lab.rooms import Rooms
from spear_training.lab.sources import Archive, Beginning
from spear_training.step.records import EpisodeRecord, Rollout


class LabRollouts:
    """:class:`spear_training.step.step.Rollouts` of global step ``t``.

    Attributes:
        tokens: that were generated; a turn is one token and one step of the environment.
        restored: groups that began in a snapshot.
        wins, episodes: of groups that began at their task's own start.
    """

    def __init__(
        self,
        t: int,
        rooms: Rooms,
        policy: BoardPolicy,
        actor: LabActor,
        source: TaskSource,
        archive: Archive,
        rng: np.random.Generator,
        *,
        groups: int,
        members: int,
    ) -> None:
        self._t, self._rooms, self._policy, self._actor = t, rooms, policy, actor
        self._source, self._archive, self._rng = source, archive, rng
        self._groups, self._members = groups, members
        self.tokens = self.restored = self.wins = self.episodes = 0

    def play(self, number: int) -> Rollout:
        """Play a batch of tasks, and tell source and archive how it went."""
        drawn = self._source.draw(self._groups, self._rng)
        begun = self._archive.begin(drawn, self._rooms.start[drawn], self._rng)
        played = play_groups(self._rooms, self._policy, begun, self._members, self._rng)
        wins = played.won.reshape(self._groups, self._members).sum(1)
        own = begun.branch < 0
        self._source.tell(begun.levels[own], wins[own], self._members)
        self._archive.tell(begun, wins, self._members)
        self._remember(begun, played)
        self.tokens += len(played.turn)
        self.restored += int((~own).sum())
        self.wins += int(wins[own].sum())
        self.episodes += int(own.sum()) * self._members
        names = [f"{self._t}-{number * self._groups + group:05d}" for group in range(self._groups)]
        records, rows = tabulate_play(self._rooms, begun, played, names, self._members)
        return Rollout(records, self._actor.hold(rows), len(played.turn))

    def finish(self) -> None:
        """Nothing to give back."""

    def _remember(self, begun: Beginning, played: Played) -> None:
        lost, won = self._archive.wants
        starts = np.searchsorted(played.episode, np.arange(len(played.won) + 1))
        for episode in np.flatnonzero(np.where(played.won, won, lost)).tolist():
            group = episode // self._members
            if begun.branch[group] < 0:
                states = played.state[starts[episode] : starts[episode + 1]]
                self._archive.remember(int(begun.levels[group]), states.tolist(), 0, bool(played.won[episode]))


class Played:
    """Turns of E episodes, [N] each, episode by episode in order of time, and who won.

    Attributes:
        episode, turn, state, action, moved, log_prob, paid: [N].
        codes: [N, C], what the policy saw.
        won: [E].
    """

    def __init__(self, columns: dict[str, Array], won: Array) -> None:
        order = np.lexsort((columns["turn"], columns["episode"]))
        self.episode, self.turn, self.state, self.action, self.moved, self.log_prob, self.paid, self.codes = (
            columns[name][order]
            for name in ("episode", "turn", "state", "action", "moved", "log_prob", "paid", "codes")
        )
        self.won = won


def play_groups(rooms: Rooms, policy: BoardPolicy, begun: Beginning, members: int, rng: np.random.Generator) -> Played:
    """Play ``members`` episodes of each beginning at temperature 1, all at once."""
    level, state, limit = (
        np.repeat(part, members).astype(np.int64) for part in (begun.levels, begun.states, begun.turns)
    )
    alive = np.arange(len(level))
    parts: list[dict[str, Array]] = []
    turn = 0
    while len(alive):
        here, at = level[alive], state[alive]
        codes = rooms.observe(here, at)
        log_probs = policy.decide(codes)
        ends = np.exp(log_probs).cumsum(1)
        action = (ends < rng.random((len(alive), 1)) * ends[:, -1:]).sum(1)
        places = np.arange(len(alive))
        state[alive] = rooms.after[here, at, action]
        parts.append(
            {
                "episode": alive,
                "turn": np.full(len(alive), turn),
                "state": at,
                "action": action,
                "moved": rooms.moved[here, at, action],
                "log_prob": log_probs[places, action],
                "paid": rooms.pay(here, state[alive]),
                "codes": codes,
            }
        )
        turn += 1
        alive = alive[~rooms.won[here, state[alive]] & (turn < limit[alive])]
    return Played({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, rooms.won[level, state])


def tabulate_play(
    rooms: Rooms, begun: Beginning, played: Played, names: list[str], members: int
) -> tuple[tuple[EpisodeRecord, ...], RowTable]:
    """Records and rows with their tokens, in the columns of :func:`spear_training.step.records.tabulate`."""
    turns = np.bincount(played.episode, minlength=len(played.won))
    calls = np.bincount(played.episode, weights=played.moved, minlength=len(played.won)).astype(int)
    groups = np.repeat(np.asarray(names, dtype=object), members)
    tasks = [rooms.tasks[level] for level in begun.levels.tolist()]
    records = tuple(
        _record(group, number % members, tasks[number // members], bool(won), int(count), int(called))
        for number, (group, won, count, called) in enumerate(zip(groups, played.won, turns, calls, strict=True))
    )
    owner, rows = played.episode, len(played.turn)
    trajectories = np.asarray([record.trajectory for record in records], dtype=object)[owner]
    level = np.repeat(begun.levels, members)[owner]
    cells, ones, yes = rooms.cells, np.ones(rows, dtype=np.int64), np.ones(rows, dtype=bool)
    columns: dict[str, Any] = {
        "key": [f"{name}_{turn}" for name, turn in zip(trajectories.tolist(), played.turn.tolist(), strict=True)],
        "group": groups[owner],
        "trajectory": trajectories,
        "turn": played.turn,
        "anchor": [f"{a}.{b}" for a, b in zip(level.tolist(), played.state.tolist(), strict=True)],
        "prompt_length": cells * ones,
        "response_length": ones,
        "loss_tokens": ones,
        "finished": yes,
        "truncated": ~yes,
        "void": ~yes,
        "repetitive": ~yes,
        "won": played.won[owner],
        "tool_calls": calls[owner],
        "step_reward": played.paid,
        "turns": ones,
        "turn_end": ones,
        "turn_reward": played.paid,
        "ids": np.concatenate([played.codes, played.action[:, None]], 1).ravel(),
        "mask": yes,
        "rollout_log_probs": played.log_prob,
    }
    return records, RowTable(**columns)


def _record(group: str, sample: int, task: Any, won: bool, turns: int, calls: int) -> EpisodeRecord:
    terms = {"outcome": 1.0 if won else -1.0, "tool_call": tool_call_reward(calls), "format": FORMAT_BONUS}
    return EpisodeRecord(
        group=group,
        sample=sample,
        task_id=task.id,
        subtask=find_band(task.content["optimal"]),
        terms=terms,
        won=won,
        score=float(won),
        tool_calls=calls,
        stop=(StopReason.WON if won else StopReason.TURN_LIMIT).value,
        fault=None,
        turns=turns,
        well_formed_turns=turns,
        valid_actions=calls,
        rows=turns,
    )

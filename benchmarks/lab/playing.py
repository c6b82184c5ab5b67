"""Rollouts of the lab: all groups of a batch move by move, and their rows in the trainer's form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from benchmarks.lab.actor import LabActor
from benchmarks.lab.policy import BoardPolicy
from benchmarks.lab.rooms import Rooms
from benchmarks.lab.tree import TreeSettings
from spear_agents.play.trajectory import StopReason
from spear_envs.core.rewards import FORMAT_BONUS, tool_call_reward
from spear_envs.sokoban.levels import find_band
from spear_training.algorithms import RowTable
from spear_training.algorithms.curriculum import Archive, Branch, TaskSource
from spear_training.algorithms.rows import Array
from spear_training.step.records import EpisodeRecord, Rollout


@dataclass(frozen=True)
class Beginning:
    """States in which the G groups of a batch start.

    Attributes:
        levels, states: [G].
        turns: [G] that are left, as after ``set_state`` of the environment.
        began: [G] turns before the snapshot of a group; -1 for the level's own start.
    """

    levels: Array
    states: Array
    turns: Array
    began: Array

    @classmethod
    def of(cls, levels: Array, starts: Array, turns: int, branches: Sequence[Branch[int, int]]) -> Beginning:
        """Groups of these levels from their starts with ``turns`` turns; ``branches`` replace the first ones."""
        levels, states = levels.copy(), starts.copy()
        left, began = np.full(len(levels), turns), np.full(len(levels), -1)
        for place, branch in enumerate(branches):
            levels[place], states[place], began[place] = branch.task, branch.state, branch.turn
            left[place] = turns - branch.turn
        return cls(levels, states, left, began)


@dataclass(eq=False)
class LabRollouts:
    """:class:`spear_training.step.step.Rollouts` of global step ``t``.

    Attributes:
        tokens: generated so far; a turn is one token and one step of the environment.
        restored: groups that started in a snapshot.
        wins, episodes: of groups that started at the start of their task; a tree counts as an episode with its expected
            success.
    """

    t: int
    rooms: Rooms
    policy: BoardPolicy
    actor: LabActor
    source: TaskSource
    archive: Archive[int, int]
    rng: np.random.Generator
    _: KW_ONLY
    groups: int
    members: int
    turns: int
    tree: TreeSettings | None = None
    tokens: int = 0
    restored: int = 0
    episodes: int = 0
    wins: float = 0.0

    def play(self, number: int) -> Rollout:
        """Play a batch of tasks, and update curriculum and archive."""
        drawn = self.source.draw(self.groups, self.rng)
        branches = self.archive.draw(self.groups, self.rng)
        begun = Beginning.of(drawn, self.rooms.start[drawn], self.turns, branches)
        played = play_groups(self.rooms, self.policy, begun, self.members, self.rng, self.tree)
        wins = (played.share * played.won).reshape(self.groups, self.members).sum(1)
        episodes = self.members // (self.tree.leaves if self.tree else 1)
        own = begun.began < 0
        self.source.update(begun.levels[own], wins[own], episodes)
        for branch, won in zip(branches, wins.tolist(), strict=False):
            self.archive.update(branch.episode, won, episodes)
        self._remember(begun, played)
        self.tokens += len(played.turn)
        self.restored += int((~own).sum())
        self.wins += float(wins[own].sum())
        self.episodes += int(own.sum()) * episodes
        names = [f"{self.t}-{number * self.groups + group:05d}" for group in range(self.groups)]
        records, rows = tabulate_play(self.rooms, begun, played, names, self.members)
        return Rollout(records, self.actor.hold(rows), len(played.turn))

    def finish(self) -> None:
        """Nothing to give back."""

    def _remember(self, begun: Beginning, played: Played) -> None:
        starts = np.searchsorted(played.episode, np.arange(len(played.won) + 1))
        for episode, won in enumerate(played.won.tolist()):
            group = episode // self.members
            if begun.began[group] < 0:
                states = played.state[starts[episode] : starts[episode + 1]].tolist()
                self.archive.remember(int(begun.levels[group]), states, states, won=won)


class Played:
    """Turns of E episodes, [N] each, episode by episode in order of time, and their ends.

    In a tree, an episode only has the turns that it does not share with an earlier one.

    Attributes:
        episode, turn, state, action, moved, log_prob, paid: [N].
        codes: [N, C], input of the policy.
        won: [E].
        share: [E] of its tree: probability that a walk from the root ends in this episode, 0 if it does not exist.
        turns, calls: [E] turns and moves from the root on.
    """

    def __init__(self, columns: dict[str, Array], won: Array, share: Array, turns: Array, calls: Array) -> None:
        order = np.lexsort((columns["turn"], columns["episode"]))
        self.episode, self.turn, self.state, self.action, self.moved, self.log_prob, self.paid, self.codes = (
            columns[name][order]
            for name in ("episode", "turn", "state", "action", "moved", "log_prob", "paid", "codes")
        )
        self.won, self.share, self.turns, self.calls = won, share, turns, calls


def play_groups(
    rooms: Rooms,
    policy: BoardPolicy,
    begun: Beginning,
    members: int,
    rng: np.random.Generator,
    tree: TreeSettings | None = None,
) -> Played:
    """Play all groups at temperature 1, in parallel, with ``members`` episodes each.

    In a tree, a multiple of its leaves, an episode's parts follow it, so that those of a subtree are neighbours.
    """
    level, state, limit = (
        np.repeat(part, members).astype(np.int64) for part in (begun.levels, begun.states, begun.turns)
    )
    leaves = tree.leaves if tree else 1
    alive = np.arange(0, len(level), leaves)
    share, turns, calls = np.zeros(len(level)), np.zeros_like(level), np.zeros_like(level)
    share[alive] = 1.0
    parts: list[dict[str, Array]] = []
    turn = 0
    while len(alive):
        if tree and turn in tree.turns:
            leaves //= tree.width
            share[alive] /= tree.width
            parents, alive = np.repeat(alive, tree.width), (alive[:, None] + leaves * np.arange(tree.width)).ravel()
            state[alive], share[alive], calls[alive] = state[parents], share[parents], calls[parents]
        here, at = level[alive], state[alive]
        codes = rooms.observe(here, at)
        log_probs = policy.decide(codes)
        ends = np.exp(log_probs).cumsum(1)
        action = (ends < rng.random((len(alive), 1)) * ends[:, -1:]).sum(1)
        places = np.arange(len(alive))
        moved = rooms.moved[here, at, action]
        state[alive] = rooms.after[here, at, action]
        parts.append(
            {
                "episode": alive,
                "turn": np.full(len(alive), turn),
                "state": at,
                "action": action,
                "moved": moved,
                "log_prob": log_probs[places, action],
                "paid": rooms.pay(here, state[alive]),
                "codes": codes,
            }
        )
        turn += 1
        turns[alive] = turn
        calls[alive] += moved
        alive = alive[~rooms.won[here, state[alive]] & (turn < limit[alive])]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return Played(columns, rooms.won[level, state], share, turns, calls)


def tabulate_play(
    rooms: Rooms, begun: Beginning, played: Played, names: list[str], members: int
) -> tuple[tuple[EpisodeRecord, ...], RowTable]:
    """Make records and rows with tokens, like :func:`spear_training.step.records.tabulate`."""
    owned, records = np.bincount(played.episode, minlength=len(played.won)), []
    for number in np.flatnonzero(played.share).tolist():
        group, sample = divmod(number, members)
        task, began = rooms.tasks[int(begun.levels[group])], int(begun.began[group])
        won, turns, calls = bool(played.won[number]), int(played.turns[number]), int(played.calls[number])
        record = EpisodeRecord(
            group=names[group],
            sample=sample,
            task_id=task.id,
            subtask=find_band(task.content["optimal"]),
            terms={"outcome": 1.0 if won else -1.0, "tool_call": tool_call_reward(calls), "format": FORMAT_BONUS},
            won=won,
            score=float(won),
            tool_calls=calls,
            stop=(StopReason.WON if won else StopReason.TURN_LIMIT).value,
            fault=None,
            turns=turns,
            well_formed_turns=turns,
            valid_actions=calls,
            rows=int(owned[number]),
            began=None if began < 0 else began,
        )
        records.append(record)
    owner, rows = played.episode, len(played.turn)
    trajectories = np.empty(len(played.won), dtype=object)
    trajectories[played.share > 0] = [record.trajectory for record in records]
    trajectories, level = trajectories[owner], np.repeat(begun.levels, members)[owner]
    ones, yes = np.ones(rows, dtype=np.int64), np.ones(rows, dtype=bool)
    table = RowTable(
        key=[f"{name}_{turn}" for name, turn in zip(trajectories.tolist(), played.turn.tolist(), strict=True)],
        group=np.repeat(np.asarray(names, dtype=object), members)[owner],
        trajectory=trajectories,
        turn=played.turn,
        anchor=[f"{a}.{b}" for a, b in zip(level.tolist(), played.state.tolist(), strict=True)],
        prompt_length=rooms.cells * ones,
        response_length=ones,
        loss_tokens=ones,
        finished=yes,
        truncated=~yes,
        void=~yes,
        repetitive=~yes,
        unreadable=~yes,
        incomplete=~yes,
        malformed=0 * ones,
        won=played.won[owner],
        tool_calls=played.calls[owner],
        step_reward=played.paid,
        turns=ones,
        turn_number=played.turn,
        turn_end=ones,
        turn_reward=played.paid,
        ids=np.concatenate([played.codes, played.action[:, None]], 1).ravel(),
        mask=yes,
        rollout_log_probs=played.log_prob,
    )
    return tuple(records), table

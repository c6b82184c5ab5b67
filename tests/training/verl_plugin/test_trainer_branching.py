"""The trainer with groups that start in snapshots: real players, with a stand-in for the policy."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_training.step.records import Rollout
from spear_training.verl_plugin.rollout_worker import EpisodeOrder
from tests.training.step.actors import TableActor
from tests.training.verl_plugin.test_rollout_worker import (
    CORRIDOR,
    FakeQueue,
    open_player,
    order_episodes,
    play_batch,
    wander,
)
from tests.training.verl_plugin.test_trainer import open_trainer

SPLIT = "train"


class LocalRollouts:
    """:class:`RolloutManager` with a player in this process; ``seen`` has the orders and records of each batch."""

    def __init__(self, actor: TableActor, branch: dict[str, Any]) -> None:
        self.actor, self.queue = actor, FakeQueue()
        self.player = open_player(self.queue, wander, branch=branch)
        self.seen: list[tuple[list[EpisodeOrder], Rollout]] = []

    def start(self, orders: Sequence[EpisodeOrder], sampling: Any, split: str, *, keep: bool) -> list[EpisodeOrder]:
        return list(orders)

    def collect(self, orders: list[EpisodeOrder]) -> Rollout:
        rollout = self.actor.play(Rollout.join([play_batch(self.player, orders, SPLIT)]))
        self.seen.append((orders, rollout))
        return rollout


def open_branching(tmp_path: Path, **settings: Any) -> Any:
    branch = {"share": 0.5, **settings}
    trainer: Any = open_trainer(tmp_path, branch=branch, rollout={"group_size": 3})
    tasks = [task.id for task in CORRIDOR(split=SPLIT).tasks]
    trainer.train_dataloader = [{"task_id": tasks[4 * n : 4 * n + 4]} for n in range(6)]
    trainer.agent_loop_manager = LocalRollouts(trainer.actor, branch)
    return trainer


def take_steps(trainer: Any, steps: Sequence[int]) -> list[dict[str, float]]:
    found = []
    for t in steps:
        trainer.global_steps = t
        trainer.prepare_step()
        metrics: dict[str, Any] = {}
        trainer._step_once(metrics, {}, 2)
        found.append({name: value for name, value in metrics.items() if not name.startswith("perf/")})
    return found


@pytest.mark.parametrize("mode", ["success", "near_miss"])
def test_members_of_a_branched_group_begin_in_one_state(tmp_path: Path, mode: str) -> None:
    trainer = open_branching(tmp_path, mode=mode)
    metrics = take_steps(trainer, range(1, 7))
    assert metrics[0]["branch/share"] == 0 and {step["branch/share"] for step in metrics[1:]} == {0.5}
    anchors: set[str] = set()
    for orders, rollout in trainer.rollouts.seen:
        began = {record.group: record.began for record in rollout.records}
        assert [began[order.group] for order in orders] == [order.begin and order.begin.turn for order in orders]
        first = rollout.rows.take(rollout.rows.turn == 0)
        for group in {order.group for order in orders if order.begin is not None}:
            states = set(first.anchor[first.group == group])
            assert len(states) == 1 and states <= anchors, "the same, which an earlier episode passed"
        assert not set(rollout.walks) & {record.trajectory for record in rollout.records if record.began is not None}
        wins = {record.trajectory for record in rollout.records if record.won}
        assert all(
            bool(walk.snapshots) is ((name in wins) is (mode == "success")) for name, walk in rollout.walks.items()
        )
        anchors |= set(rollout.rows.anchor)
    orders, rollout = trainer.rollouts.seen[-1]
    assert len({order.seed for order in orders}) == len(orders), "each member has a seed of its own"
    whole = [record.won for record in rollout.records if record.began is None]
    assert metrics[-1]["success/all"] == sum(whole) / len(whole)


def test_whole_episodes_are_recorded_first(tmp_path: Path) -> None:
    trainer = open_branching(tmp_path)
    take_steps(trainer, range(1, 4))
    for orders, _ in trainer.rollouts.seen[::2]:
        recorded = [order for order in orders if order.recorded]
        assert len(recorded) == 3 and sum(order.begin is None for order in recorded) >= 2
    assert all(count == 3 for count in Counter(order.group for order in orders).values())


def test_a_run_that_was_killed_begins_in_the_same_snapshots(tmp_path: Path, checkpoints: Path) -> None:
    whole = open_branching(tmp_path, target=0.3)
    take_steps(whole, range(1, 4))
    whole._save_checkpoint()
    rest = take_steps(whole, range(4, 7))
    resumed = open_branching(tmp_path, target=0.3)
    resumed._load_checkpoint()
    resumed.train_dataloader = resumed.train_dataloader[3:]  # verl has the loader go on behind what was drawn
    assert take_steps(resumed, range(4, 7)) == rest
    orders = [order for batch, _ in resumed.rollouts.seen for order in batch]
    assert orders == [order for batch, _ in whole.rollouts.seen[3:] for order in batch]
    assert any(order.begin is not None for order in orders)


def test_a_validation_keeps_no_snapshots() -> None:
    player, orders = open_player(FakeQueue(), wander, branch={"share": 0.5, "mode": "near_miss"}), order_episodes(SPLIT)
    played = [play_batch(player, orders, SPLIT, keep=keep) for keep in (False, True)]
    assert not played[0].walks and len(played[1].walks) == len(orders)

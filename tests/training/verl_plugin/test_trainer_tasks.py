"""Tasks of the trainer's batches: episodes that start ahead of their step, and a curriculum that draws them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl.trainer.ppo.utils import create_rl_sampler
from verl.utils.dataset.rl_dataset import collate_fn

from spear_envs.sokoban.generate import Recipe
from spear_envs.sokoban.tasks import make_task_set
from spear_training.step.tasks import Curriculum
from spear_training.verl_plugin.trainer import SpearTrainer
from tests.training.episodes import Episode, make_episode
from tests.training.verl_plugin.test_trainer import make_group, open_trainer, take_step


# ---- episodes ahead of their step ------------------------------------------------------------------------------------
def list_begun(trainer: Any) -> list[str]:
    """Steps whose batches were begun, and a task of each."""
    return [call["begun"] for call in trainer.rollouts.calls]


def test_batches_are_begun_ahead_of_their_steps_and_none_beyond_the_last(tmp_path: Path) -> None:
    trainer: Any = open_trainer(tmp_path, rollout={"staleness": 2})
    trainer.train_dataloader = [{"task_id": [name]} for name in "abcdefghi"]
    trainer.total_training_steps = 4
    begun = []
    for t in (1, 2, 3, 4):
        trainer.global_steps = t
        trainer.prepare_step()
        begun.append(list_begun(trainer))
        trainer.play(0)
    assert begun[0] == ["1 a", "2 b", "3 c"] and begun[1] == [*begun[0], "4 d"]
    assert begun[2] == begun[3] == begun[1], "nobody would learn from a fifth"
    assert trainer.rollouts.collected == [1, 2, 3, 4], "each step takes its own"
    assert trainer.asleep == 0
    trainer.finish()
    assert trainer.asleep == 0, "the engine plays on"


def test_what_is_under_way_at_a_checkpoint_is_played_again(tmp_path: Path, checkpoints: Path) -> None:
    trainer: Any = open_trainer(tmp_path, rollout={"staleness": 2})
    loader = [{"task_id": [name]} for name in "abcdefghi"]
    trainer.train_dataloader, trainer.rollouts.versions = loader, [0] * 4
    take_step(trainer, make_group(), 1)
    trainer._save_checkpoint()
    resumed: Any = open_trainer(tmp_path, rollout={"staleness": 2})
    resumed.train_dataloader = loader[3:]  # verl has the loader go on behind what was drawn
    resumed._load_checkpoint()
    for t in (2, 3):
        resumed.global_steps = t
        resumed.prepare_step()
        resumed.play(0)
    assert list_begun(resumed) == ["2 b", "3 c", "4 d", "5 e"], "no task is left out, and none comes twice"
    trainer.global_steps = 2
    trainer.prepare_step()
    assert resumed.rollouts.calls[0]["orders"] == trainer.rollouts.calls[1]["orders"], "with the seeds of before"


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_run_resumed_after_any_step_draws_what_one_never_stopped_does(
    tmp_path: Path, checkpoints: Path, shuffle: bool, staleness: int
) -> None:
    """Two batches an epoch, so that every second checkpoint is at the end of one; a task of each epoch is left out."""
    tasks = [{"task_id": name} for name in "abcde"]

    def open_run() -> Any:
        trainer: Any = open_trainer(tmp_path, rollout={"staleness": staleness})
        trainer.total_training_steps = 8
        sampler = create_rl_sampler(OmegaConf.create({"shuffle": shuffle, "seed": 7}), tasks)
        trainer.train_dataloader = StatefulDataLoader(
            tasks, batch_size=2, drop_last=True, collate_fn=collate_fn, sampler=sampler
        )
        return trainer

    def take(trainer: Any, step: int) -> list[str]:
        trainer.global_steps = step
        trainer.prepare_step()
        begun = dict(call["begun"].split() for call in trainer.rollouts.calls)
        trainer.play(0)
        return [begun[str(step)], *(order.task_id for order in trainer.rollouts.calls[-1]["orders"])]

    whole, states, drawn = open_run(), {}, {}
    for step in range(1, 9):
        drawn[step] = take(whole, step)
        whole._save_checkpoint()
        states[step] = whole.train_dataloader.state_dict()
    assert shuffle == (drawn[1][:1] + drawn[2][:1] != drawn[3][:1] + drawn[4][:1])
    for stopped in range(1, 8):
        resumed = open_run()
        resumed.resume_step = stopped
        resumed._load_checkpoint()
        resumed.train_dataloader.load_state_dict(states[stopped])
        assert {step: take(resumed, step) for step in range(stopped + 1, 9)} == {
            step: drawn[step] for step in range(stopped + 1, 9)
        }, f"resumed after step {stopped}"


def test_the_age_of_weights_is_told_where_they_may_be_old(tmp_path: Path) -> None:
    old = make_group()
    old[0] = replace(old[0], record=replace(old[0].record, versions=(1, 2)))
    old[1] = replace(old[1], record=replace(old[1].record, versions=(2,)))
    found = []
    for staleness in (0, 2):
        trainer: Any = open_trainer(tmp_path, rollout={"staleness": staleness})
        trainer.rollouts.versions = [1, 2, 2, 2]
        metrics, _ = take_step(trainer, old, 4)
        found.append({name: value for name, value in metrics.items() if name.startswith("staleness/")})
    assert found[0] == {}
    assert found[1] == {"staleness/mean": 1.25, "staleness/max": 2.0, "staleness/crossed_push": 0.5}


# ---- a curriculum ----------------------------------------------------------------------------------------------------
TASKS = make_task_set(Recipe(shortest=2, longest=7), "train")[:12]
THOMPSON = {"choice": "thompson"}


def open_with_curriculum(tmp_path: Path, batch: int = 4, group: int = 4, **nodes: Any) -> SpearTrainer:
    sizes = {"rollout": {"group_size": group, **nodes}, "train": {"batch_size": batch}}
    trainer = open_trainer(tmp_path, curriculum=THOMPSON, **sizes)
    trainer.curriculum = Curriculum(TASKS, trainer.settings.curriculum, group, trainer.seed)
    return trainer


def play_orders(trainer: Any, wins: Sequence[int]) -> list[Episode]:
    """Episodes as they were ordered, of which so many of each group won."""
    groups = sorted({order.group for order in trainer.rollouts.orders})
    return [
        make_episode(o.group, o.sample, won=o.sample < wins[groups.index(o.group)], task_id=o.task_id, tool_calls=2)
        for o in trainer.rollouts.orders
    ]


def test_a_resumed_trainer_draws_the_same_tasks(tmp_path: Path, checkpoints: Path) -> None:

    def go_on(trainer: Any, steps: range) -> list[Any]:
        found = []
        for t in steps:
            trainer.global_steps = t
            trainer.prepare_step()
            metrics, _ = take_step(trainer, play_orders(trainer, (0, 1, 2, 4)), t)
            if t == 3:
                trainer._save_checkpoint()
            shown = {name: value for name, value in metrics.items() if name.startswith("curriculum/")}
            found.append(([order.task_id for order in trainer.rollouts.orders], shown))
        return found

    whole: Any = open_with_curriculum(tmp_path)
    first, rest = go_on(whole, range(1, 4)), go_on(whole, range(4, 8))
    assert 0 < first[0][1]["curriculum/met"] <= rest[-1][1]["curriculum/met"] <= 1
    assert set(first[0][1]) == {"curriculum/met", "curriculum/success", "curriculum/differing"}
    resumed: Any = open_with_curriculum(tmp_path)
    resumed._load_checkpoint()
    assert go_on(resumed, range(4, 8)) == rest
    uniform: Any = open_trainer(tmp_path)
    uniform._load_checkpoint()
    assert uniform.curriculum is None


def test_a_curriculum_that_draws_ahead_is_resumed_as_it_was(tmp_path: Path, checkpoints: Path) -> None:

    def go_on(trainer: Any, steps: Sequence[int]) -> list[list[str]]:
        drawn = []
        for t in steps:
            trainer.global_steps = t
            trainer.prepare_step()
            trainer.rollouts.played = play_orders(trainer, [t % 3, 1, 2])
            trainer.play(0)
            drawn = [[order.task_id for order in call["orders"]] for call in trainer.rollouts.calls]
        return drawn

    trainer: Any = open_with_curriculum(tmp_path, batch=3, group=2, staleness=2)
    trainer.rollouts.versions = []
    go_on(trainer, [1])
    trainer._save_checkpoint()
    resumed: Any = open_with_curriculum(tmp_path, batch=3, group=2, staleness=2)
    resumed._load_checkpoint()
    assert go_on(resumed, [2, 3, 4]) == go_on(trainer, [2, 3, 4])[1:], "two batches again, then what was to come"

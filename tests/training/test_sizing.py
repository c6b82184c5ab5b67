"""How many workers a training gets, and which limits of the queue are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from spear_envs.core.errors import SpearError
from spear_training import sizing
from spear_training.launch import check_config, compose_config
from spear_training.settings import RunSettings
from spear_training.sizing import QUEUE, WORKERS, count_queue_rows, describe_workers, size_workers

TEXT = "spear.env.kwargs.modality=text"


def compose(*overrides: str) -> Any:
    return compose_config((TEXT, *overrides), Path("runs/x"), check=False)


@pytest.mark.parametrize(
    ("cores", "overrides", "workers"),
    [
        (2, ("cluster=cpu",), 1),
        (64, ("cluster=cpu",), 1),  # the engine takes the cores
        (16, ("cluster=1gpu",), 2),
        (128, ("cluster=8gpu",), 8),
        (128, ("cluster=4x8gpu",), 31),  # 32 GPUs × 800 turns × 2 / 1,700
        (128, ("cluster=4x8gpu", "trainer.nnodes=1"), 8),
        (128, ("cluster=1gpu", "data.train_batch_size=512"), 8),  # 4,096 episodes
        (4, ("cluster=1gpu", "data.train_batch_size=512"), 3),  # one core drives the engine
        (1, ("cluster=1gpu",), 1),
        (0, ("cluster=8gpu",), 8),  # a head node without a GPU says nothing of the others' cores
        (16, ("cluster=1gpu", f"{WORKERS}=5"), 5),
    ],
)
def test_workers_follow_from_gpus_episodes_and_cores(
    cores: int, overrides: tuple[str, ...], workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizing.shutil, "which", lambda name: name if cores else None)
    monkeypatch.setattr(sizing.os, "sched_getaffinity", lambda pid: range(cores))
    config = compose(*overrides)
    assert config.actor_rollout_ref.rollout.agent.num_workers == workers
    size_workers(config)  # what is set stays
    assert config.actor_rollout_ref.rollout.agent.num_workers == workers


def test_the_launcher_says_how_many_and_how_busy_they_are() -> None:
    assert describe_workers(compose(f"{WORKERS}=2", "cluster=1gpu")).startswith(
        "2 rollout workers, each with up to 128 episodes at a time"
    )
    many = describe_workers(compose(f"{WORKERS}=1", "cluster=1gpu", "data.train_batch_size=512"))
    assert many.startswith("1 rollout worker, each with 512 of 4,096 episodes at a time")


def test_a_limit_of_the_queue_must_hold_all_rows_of_a_step(model_folder: Path) -> None:
    common = (f"actor_rollout_ref.model.path={model_folder}", "data.train_batch_size=2048", "algorithm=grpo")
    ahead = (*common, "spear.rollout.staleness=2", "spear.sampling.enabled=true", "spear.sampling.max_rounds=3")
    config = compose(*ahead)
    assert config.transfer_queue.backend.SimpleStorage.total_storage_size is None
    check_config(config)
    turns = 15
    # 3 batches ahead and 2 more rounds, of 2,048 tasks × 8 episodes, each turn a row; a row of padding for the rank.
    needed = 5 * 2048 * 8 * turns + 1
    assert count_queue_rows(config, RunSettings.from_config(config).algorithm, turns) == needed
    check_config(compose(*ahead, f"{QUEUE}={needed}"))
    with pytest.raises(SpearError, match=rf"{QUEUE}={needed - 1} is less than the {needed:,} rows .*=null") as caught:
        check_config(compose(*ahead, f"{QUEUE}={needed - 1}"))
    assert "\n" not in str(caught.value)


def test_replayed_rows_count_too() -> None:
    config = compose("algorithm=grpo_spear", "spear.replay.capacity=10", "spear.replay.unit=trajectory")
    settings = RunSettings.from_config(config).algorithm
    assert count_queue_rows(config, settings, 15) == 32 * 8 * 15 + 10 * 15 + 1


ACTOR, ROLLOUT = "actor_rollout_ref.actor.optim", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    "override",
    [
        f"{ACTOR}.lr=nan",
        f"{ACTOR}.lr=.inf",
        f"{ACTOR}.lr=-1e-6",
        f"{ACTOR}.betas=[0.9,1.5]",
        f"{ACTOR}.clip_grad=0",
        f"{ACTOR}.min_lr_ratio=nan",
        f"{ROLLOUT}.temperature=0",
        f"{ROLLOUT}.val_kwargs.temperature=-1",
        f"{ROLLOUT}.top_p=0",
        f"{ROLLOUT}.max_num_seqs=0",
        "data.val_max_samples=0",
        "data.train_max_samples=-2",
    ],
)
def test_numbers_with_which_nothing_trains_are_refused(override: str, model_folder: Path) -> None:
    config = compose(f"actor_rollout_ref.model.path={model_folder}", override)
    with pytest.raises(SpearError, match=override.partition("=")[0]):
        check_config(config)

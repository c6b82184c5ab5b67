from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

from omegaconf import OmegaConf

from spear_training.verl_plugin.dataset import TaskDataset


def open_tasks(split: str = "valid", *, max_samples: int = -1, **env: Any) -> TaskDataset:
    node = {"id": "spear/Sokoban-v1", "kwargs": {"modality": "text"}} | env
    config = OmegaConf.create({"spear": {"env": node}, "data": {"spear_env": "${spear.env}"}})
    return TaskDataset(split, None, config.data, processor=None, max_samples=max_samples)


def test_an_item_names_a_task_and_satisfies_verls_collator() -> None:
    from verl.utils.dataset.rl_dataset import collate_fn

    tasks = open_tasks()
    assert len(tasks) == 256
    items = [tasks[0], tasks[255]]
    assert items[0]["task_id"] == "sokoban-v1/6x6-1/valid/00000000"
    assert [item["index"] for item in items] == [0, 255]
    batch = collate_fn(items)
    assert list(batch["task_id"]) == [item["task_id"] for item in items]
    assert batch["dummy"].shape == (2, 1)


def test_a_split_without_end_is_not_built_to_be_counted() -> None:
    tasks = open_tasks("train", max_samples=5)
    assert [task.id for task in tasks.tasks] == [item["task_id"] for item in tasks]
    tasks = open_tasks("train")
    assert len(tasks) == 1_000_000
    assert tasks[999_999]["task_id"] == "sokoban-v1/6x6-1/train/00999999"


@pytest.mark.parametrize(("wanted", "length"), [(-1, 256), (8, 8), (1000, 256), (0, 0)])
def test_the_number_of_tasks_can_be_limited(wanted: int, length: int) -> None:
    tasks = open_tasks(max_samples=wanted)
    assert len(tasks) == length
    with pytest.raises(IndexError):
        tasks[length]
    assert [item["index"] for item in tasks] == list(range(length)), "and a plain loop ends"

"""Workers of the plugin, its data set and its platform."""

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch.optim.lr_scheduler import LambdaLR
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.models.transformers.monkey_patch import apply_monkey_patch
from verl.utils import tensordict_utils as tu
from verl.utils.import_utils import is_trl_available
from verl.workers.engine_workers import TrainingWorker

import spear_training.verl_plugin  # noqa: F401  (what is tested)
from spear_envs.core.errors import SpearError
from spear_training.verl_plugin.platform import PlatformCPU
from spear_training.verl_plugin.trainer import TaskDataset
from spear_training.verl_plugin.workers import (
    CpuValueModelEngine,
    PacksRows,
    SpearTrainingWorker,
    ValueModelEngine,
    blank_values,
    keep_settings,
)


@pytest.mark.parametrize(("hold", "ticks"), [(True, False), (False, True), (None, True)])
def test_the_learning_rate_ticks_unless_the_call_holds_it(
    monkeypatch: pytest.MonkeyPatch, hold: bool | None, ticks: bool
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        TrainingWorker, "train_batch", lambda self, data: seen.append(tu.get(data, key="update_lr_scheduler")) or data
    )
    data = TensorDict({}, batch_size=1)
    # What verl sets on the last mini-batch of a call.
    tu.assign_non_tensor(data, update_lr_scheduler=True)
    if hold is not None:
        tu.assign_non_tensor(data, hold_learning_rate=hold)
    object.__new__(SpearTrainingWorker).train_batch(data)
    assert seen == [ticks]


@pytest.mark.parametrize("rate", [1e-6, 2e-6])
def test_a_continued_run_has_its_own_learning_rate_at_the_step_of_the_checkpoint(rate: float) -> None:
    def build(rate: float, decay: float) -> tuple[torch.optim.AdamW, LambdaLR]:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=rate, weight_decay=decay)
        return optimizer, LambdaLR(optimizer, lambda step: min(1.0, step / 10))

    saved = build(1e-6, 0.01)
    for _ in range(3):
        saved[0].step()
        saved[1].step()
    optimizer, schedule = build(rate, 0.1)
    with keep_settings(optimizer, schedule):
        optimizer.load_state_dict(saved[0].state_dict())
        schedule.load_state_dict(saved[1].state_dict())
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"]) == (rate * (3 / 10), 0.1)
    assert rate != 1e-6 or group["lr"] == saved[0].param_groups[0]["lr"], "bit for bit, with the same settings"
    optimizer.step()
    schedule.step()
    assert group["lr"] == rate * (4 / 10)


# ---- the critic and the reference policy -----------------------------------------------------------------------------
def test_a_critic_begins_with_the_value_zero() -> None:
    module = torch.nn.ModuleDict({"model": torch.nn.Linear(3, 3), "score": torch.nn.Linear(3, 1)})
    blank_values(module)
    assert not any(parameter.any() for parameter in module["score"].parameters())
    assert all(parameter.any() for parameter in module["model"].parameters())
    with pytest.raises(SpearError, match="value head"):
        blank_values(torch.nn.ModuleDict({"model": torch.nn.Linear(3, 3)}))


@pytest.mark.parametrize("kind", [CpuValueModelEngine, ValueModelEngine])
def test_the_head_is_blank_before_the_model_is_sharded(monkeypatch: pytest.MonkeyPatch, kind: type) -> None:
    """FSDP 1 puts all weights into flat ones, in which no head has a name."""
    module = torch.nn.ModuleDict({"model": torch.nn.Linear(3, 3), "score": torch.nn.Linear(3, 1)})
    monkeypatch.setattr(PacksRows, "_build_module", lambda self: module)
    engine: Any = object.__new__(kind)
    engine.model_config = SimpleNamespace(hf_config=SimpleNamespace(architectures=["Qwen2ForCausalLM"]))
    assert engine._build_module() is module and not module["score"].weight.any()
    assert engine.model_config.hf_config.architectures == ["Qwen2ForTokenClassification"]


def test_a_model_is_built_beside_a_trl_without_value_heads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "trl"]:
        monkeypatch.delitem(sys.modules, name)
    assert is_trl_available(), "verl sees it"
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    apply_monkey_patch(Qwen2ForCausalLM(Qwen2Config(**sizes, num_attention_heads=2, num_key_value_heads=2)))
    assert "trl" not in sys.modules


def open_tasks(split: str = "valid", *, max_samples: int = -1, **env: Any) -> TaskDataset:
    node = {"id": "spear/Sokoban-v1", "kwargs": {"modality": "text"}} | env
    return TaskDataset(split, None, OmegaConf.create({"spear_env": node}), processor=None, max_samples=max_samples)


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


def test_some_tasks_of_a_split_have_its_mixture() -> None:
    kwargs = {"dataset": "embedded", "rooms": "small"}
    some = open_tasks("valid_seen", max_samples=60, id="spear/ALFWorld-v0", kwargs=kwargs)
    assert Counter(task.subtask for task in some.tasks) == dict.fromkeys(
        ("pick", "look", "clean", "heat", "cool", "pick2"), 10
    )
    assert [item["task_id"] for item in some] == [task.id for task in some.tasks]


@pytest.mark.parametrize(("wanted", "length"), [(-1, 256), (8, 8), (1000, 256), (0, 0)])
def test_the_number_of_tasks_can_be_limited(wanted: int, length: int) -> None:
    tasks = open_tasks(max_samples=wanted)
    assert len(tasks) == length
    with pytest.raises(IndexError):
        tasks[length]
    assert [item["index"] for item in tasks] == list(range(length)), "and a plain loop ends"


def test_random_state_is_saved_and_restored() -> None:
    platform = PlatformCPU()
    before = torch.get_rng_state()
    try:
        platform.manual_seed(3)
        state = platform.device_module.get_rng_state()
        first = torch.rand(4)
        platform.device_module.set_rng_state(state)
        assert torch.equal(first, torch.rand(4))
        platform.manual_seed_all(3)
        assert torch.equal(first, torch.rand(4))
    finally:
        torch.set_rng_state(before)

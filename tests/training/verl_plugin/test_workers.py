from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine_workers import TrainingWorker

from spear_envs.core.errors import SpearError
from spear_training.verl_plugin.attention import PACKED
from spear_training.verl_plugin.workers import (
    CpuValueModelEngine,
    SpearActorRolloutRefWorker,
    SpearCriticWorker,
    SpearTrainingWorker,
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


def test_the_hybrid_worker_is_made_of_ours() -> None:
    assert SpearActorRolloutRefWorker.actor_worker_cls is SpearTrainingWorker
    assert SpearActorRolloutRefWorker.ref_worker_cls is SpearTrainingWorker


# ---- the critic and the reference policy -----------------------------------------------------------------------------
@pytest.mark.parametrize("fails", [False, True])
def test_a_critic_is_built_as_a_token_classifier_over_the_actors_network(
    monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    engine: Any = object.__new__(CpuValueModelEngine)
    engine.use_remove_padding = True
    engine.engine_config = SimpleNamespace(ulysses_sequence_parallel_size=1)
    config = SimpleNamespace(architectures=["Qwen2ForCausalLM"], _attn_implementation="sdpa")
    engine.model_config = SimpleNamespace(hf_config=config, model_type="value_model")

    chosen: list[str] = []
    module = SimpleNamespace(set_attn_implementation=lambda name: chosen.append(name))

    def build(self: Any) -> Any:
        assert self.model_config.model_type == "language_model" and not self.use_remove_padding
        assert config.architectures == ["Qwen2ForTokenClassification"] and config.num_labels == 1
        if fails:
            raise OSError("no such model")
        return module

    monkeypatch.setattr(FSDPEngine, "_build_module", build)
    if fails:
        with pytest.raises(OSError, match="no such model"):
            engine._build_module()
    else:
        assert engine._build_module() is module and chosen == [PACKED]
    assert engine.model_config.model_type == "value_model" and engine.use_remove_padding


def test_a_critic_begins_with_the_value_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingWorker, "reset", lambda self: None)
    worker: Any = object.__new__(SpearCriticWorker)
    module = torch.nn.ModuleDict({"model": torch.nn.Linear(3, 3), "score": torch.nn.Linear(3, 1)})
    worker.engine = SimpleNamespace(module=module)
    worker.reset()
    assert not any(parameter.any() for parameter in module["score"].parameters())
    assert all(parameter.any() for parameter in module["model"].parameters())
    worker.engine = SimpleNamespace(module=torch.nn.ModuleDict({"model": torch.nn.Linear(3, 3)}))
    with pytest.raises(SpearError, match="no value head"):
        worker.reset()


def test_a_reference_policy_is_not_sent_to_memory_that_a_cpu_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Config:
        forward_only: bool

    engine: Any = object.__new__(CpuValueModelEngine)
    engine.engine_config = Config(forward_only=True)
    monkeypatch.setattr(FSDPEngine, "_build_fsdp_module", lambda self, module: (self.engine_config, module))
    assert engine._build_fsdp_module("module") == (Config(forward_only=False), "module")
    assert engine.engine_config.forward_only

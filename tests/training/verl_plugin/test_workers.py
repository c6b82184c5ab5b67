from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead
from verl.workers.engine_workers import TrainingWorker

from spear_envs.core.errors import SpearError
from spear_training.algorithms import RowTable
from spear_training.verl_plugin.columns import build_columns
from spear_training.verl_plugin.workers import (
    CpuLanguageModelEngine,
    CpuValueModelEngine,
    SpearActorRolloutRefWorker,
    SpearCriticWorker,
    SpearTrainingWorker,
)

VOCABULARY = 11
SIZES = ((3, 4), (1, 1), (5, 2), (2, 6))
"""Prompt and response lengths of the rows."""


def build_micro_batch(*, entropy: bool) -> tuple[TensorDict, torch.Tensor, dict[str, Any]]:
    """A micro-batch with a model's padded logits, as verl hands them over without padding removal."""
    random = torch.Generator().manual_seed(0)
    rows = RowTable(
        prompt_length=[prompt for prompt, _ in SIZES],
        response_length=[response for _, response in SIZES],
        ids=torch.randint(VOCABULARY, (sum(map(sum, SIZES)),), generator=random).numpy(),
        mask=[True] * sum(response for _, response in SIZES),
    )
    data = build_columns(rows)
    tu.assign_non_tensor(
        data, use_remove_padding=False, use_fused_kernels=False, calculate_entropy=entropy, distillation_use_topk=False
    )
    longest = max(map(sum, SIZES))
    logits = torch.randn(len(SIZES), longest, VOCABULARY, generator=random).requires_grad_()
    ids = data["input_ids"].values()
    arguments = {"input_ids_rmpad_rolled": torch.roll(ids, -1), "temperature_is_one": True}
    return data, logits, arguments | {"temperature": torch.ones(len(SIZES))}


def open_engine() -> CpuLanguageModelEngine:
    engine = object.__new__(CpuLanguageModelEngine)
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False)
    return engine


def find_responses() -> torch.Tensor:
    """Positions, in concatenated sequences, that predict a response token."""
    where, start = [], 0
    for prompt, response in SIZES:
        where += range(start + prompt - 1, start + prompt + response - 1)
        start += prompt + response
    return torch.tensor(where)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("entropy", [True, False])
def test_log_probs_are_verls_own_where_responses_are_predicted(temperature: float, entropy: bool) -> None:
    data, logits, arguments = build_micro_batch(entropy=entropy)
    arguments |= {"temperature_is_one": temperature == 1.0, "temperature": torch.full((len(SIZES),), temperature)}
    engine, where = open_engine(), find_responses()
    found = engine.prepare_model_outputs(SimpleNamespace(logits=logits), arguments, data, None)
    other = logits.detach().clone().requires_grad_()
    wanted = FSDPEngineWithLMHead.prepare_model_outputs(
        engine, SimpleNamespace(logits=other.clone()), arguments, data, None
    )
    assert set(found) == {name for name in wanted if wanted[name] is not None}
    weights = torch.randn(len(where), generator=torch.Generator().manual_seed(1))
    for name in found:
        assert torch.equal(found[name].offsets(), wanted[name].offsets())
        torch.testing.assert_close(found[name].values()[where], wanted[name].values()[where], atol=1e-6, rtol=1e-5)
        rest = torch.ones(len(found[name].values()), dtype=torch.bool)
        rest[where] = False
        assert not found[name].values()[rest].any()
    (found["log_probs"].values()[where] * weights).sum().backward()
    (wanted["log_probs"].values()[where] * weights).sum().backward()
    assert logits.grad is not None and other.grad is not None
    torch.testing.assert_close(logits.grad, other.grad, atol=1e-6, rtol=1e-5)


def test_what_the_fast_path_does_not_know_goes_to_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    data, logits, arguments = build_micro_batch(entropy=False)
    tu.assign_non_tensor(data, use_remove_padding=True)
    monkeypatch.setattr(FSDPEngineWithLMHead, "prepare_model_outputs", lambda *_: "verl")
    found: Any = open_engine().prepare_model_outputs(SimpleNamespace(logits=logits), arguments, data, None)
    assert found == "verl"


@pytest.mark.parametrize(("hold", "ticks"), [(True, False), (False, True), (None, True)])
def test_the_learning_rate_ticks_unless_the_call_holds_it(
    monkeypatch: pytest.MonkeyPatch, hold: bool | None, ticks: bool
) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(
        TrainingWorker, "train_batch", lambda self, data: seen.append(tu.get(data, key="update_lr_scheduler")) or data
    )
    data, *_ = build_micro_batch(entropy=False)
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
    config = SimpleNamespace(architectures=["Qwen2ForCausalLM"])
    engine.model_config = SimpleNamespace(hf_config=config, model_type="value_model")

    def build(self: Any) -> str:
        assert self.model_config.model_type == "language_model"
        assert config.architectures == ["Qwen2ForTokenClassification"] and config.num_labels == 1
        if fails:
            raise OSError("no such model")
        return "module"

    monkeypatch.setattr(FSDPEngine, "_build_module", build)
    if fails:
        with pytest.raises(OSError, match="no such model"):
            engine._build_module()
    else:
        assert engine._build_module() == "module"
    assert engine.model_config.model_type == "value_model"


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

    engine: Any = object.__new__(CpuLanguageModelEngine)
    engine.engine_config = Config(forward_only=True)
    monkeypatch.setattr(FSDPEngine, "_build_fsdp_module", lambda self, module: (self.engine_config, module))
    assert engine._build_fsdp_module("module") == (Config(forward_only=False), "module")
    assert engine.engine_config.forward_only

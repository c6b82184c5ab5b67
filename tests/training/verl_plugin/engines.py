"""Engines of verl around a model of transformers, without a process group."""

from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import entropy_from_logits
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from spear_training.verl_plugin.attention import PACKED
from spear_training.verl_plugin.workers import CpuLanguageModelEngine


def open_engine(model: Any, path: Any = None, **options: Any) -> Any:
    """Our engine of a policy over ``model``, whose head is replaced; ``options`` are those of :meth:`find_head`."""
    engine: Any = object.__new__(CpuLanguageModelEngine)
    engine.pad_to_length, engine.use_ulysses_sp = None, False
    engine._packs = model.config._attn_implementation == PACKED
    engine.model_config = SimpleNamespace(local_path=str(path))
    engine.find_head(model, **options)
    return engine


def run_engine(engine: Any, model: Any, batch: TensorDict) -> dict[str, torch.Tensor]:
    """What ``forward_step`` of verl does with a micro-batch."""
    inputs, arguments = engine.prepare_model_inputs(batch)
    return engine.prepare_model_outputs(model(**inputs, use_cache=False), arguments, batch, None)


def run_verl(model: Any, batch: TensorDict) -> dict[str, torch.Tensor]:
    """The same by verl alone, with logits at all positions."""
    engine: Any = object.__new__(FSDPEngineWithLMHead)
    engine.pad_to_length, engine.use_ulysses_sp = None, False
    engine.engine_config = SimpleNamespace(entropy_checkpointing=False, entropy_from_logits_with_chunking=False)
    engine.compute_entropy_from_logits = entropy_from_logits
    return run_engine(engine, model, batch)


def ask(batch: TensorDict, *, packed: bool, temperature: float = 1.0, entropy: bool = False) -> TensorDict:
    """``batch`` with what verl's worker says of a pass."""
    tu.assign_non_tensor(
        batch, use_remove_padding=packed, temperature=temperature, calculate_entropy=entropy, pad_token_id=0
    )
    return batch

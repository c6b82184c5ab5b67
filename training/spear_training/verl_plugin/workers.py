"""verl's FSDP engines on a CPU over gloo, and training workers of the policy and of the critic."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from verl.models.transformers import monkey_patch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers import engine_workers
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from spear_envs.core.errors import SpearError
from spear_training.attention import SDPA, check_exchange
from spear_training.verl_plugin.adapters import MergesAdapter
from spear_training.verl_plugin.attention import PACKED
from spear_training.verl_plugin.resharding import ReshardsCheckpoints
from spear_training.verl_plugin.scoring import ScoresLearnt
from spear_training.verl_plugin.vision import ReadsPictures

VALUE_HEADS = ("score", "classifier", "v_head")
"""What transformers and trl call the layer that turns a hidden state into a value."""


class PacksRows(ReshardsCheckpoints):
    """A mixin of verl's FSDP engines: rows without padding, or shared by ranks, where there is no flash-attention."""

    engine_config: Any
    use_remove_padding: bool
    module: Any
    _packs = False
    """Whether :func:`.attention.attend_rows` attends."""

    def _build_module(self) -> Any:
        wanted = self.model_config.hf_config._attn_implementation
        vision = hasattr(self.model_config.hf_config, "vision_config")
        check_exchange(wanted, self.engine_config.ulysses_sequence_parallel_size, vision=vision)
        if wanted != SDPA or not self.use_remove_padding:
            return super()._build_module()
        # Without padding verl sends the attention of Qwen2.5-VL straight to flash-attention.
        self.use_remove_padding = False
        try:
            module = super()._build_module()
        finally:
            self.use_remove_padding = True
        # Not in the configuration, which is saved with the model: only here is there something of this name.
        module.set_attn_implementation(PACKED)
        self._packs = True
        return module

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        """Verl's model inputs, and where the rows begin and end for :func:`.attention.attend_rows`."""
        inputs, arguments = super().prepare_model_inputs(micro_batch)
        if self._packs and tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
            bounds = micro_batch["input_ids"].offsets()
            if arguments["pad_size"]:
                bounds = torch.cat([bounds, bounds[-1:] + arguments["pad_size"]])
            inputs["cu_seq_lens_q"], inputs["max_length_q"] = bounds.int(), int(bounds.diff().max())
        return inputs, arguments


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class LanguageModelEngine(ScoresLearnt, MergesAdapter, ReadsPictures, PacksRows, FSDPEngineWithLMHead):
    """verl's own FSDP engine of a policy, with logits only where a token is learnt; it reads our rows' pictures."""


class CpuEngine(FSDPEngine):
    """What both engines on a CPU have to do otherwise."""

    engine_config: Any

    def _build_fsdp_module(self, module: Any) -> Any:
        # verl offloads a model without an optimiser (the reference policy) to pinned memory, which only a GPU has.
        config = self.engine_config
        self.engine_config = replace(config, forward_only=False)
        try:
            return super()._build_fsdp_module(module)
        finally:
            self.engine_config = config


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CpuLanguageModelEngine(ScoresLearnt, MergesAdapter, ReadsPictures, PacksRows, CpuEngine, FSDPEngineWithLMHead):
    """The same, registered for the CPU."""


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class ValueModelEngine(PacksRows, FSDPEngineWithValueHead):
    """verl's FSDP engine of a critic: the actor's network under a value head, with the attention it is configured for.

    verl's own always loads this model with flash-attention.
    """

    def _build_module(self) -> Any:
        config = self.model_config.hf_config
        config.num_labels, config.classifier_dropout, config.hidden_dropout = 1, 0.0, 0.0
        # verl chooses the class of a language model by its architecture, and so the one with a value for each token.
        config.architectures = [config.architectures[0].replace("ForCausalLM", "ForTokenClassification")]
        self.model_config.model_type = "language_model"
        try:
            return super()._build_module()
        finally:
            self.model_config.model_type = "value_model"


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")
class CpuValueModelEngine(CpuEngine, ValueModelEngine):
    """The same, registered for the CPU."""


def join_process_group(timeout_second: int | None = None) -> None:
    """verl's way into the process group, but on a CPU with gloo only.

    verl would ask for the backend "cpu:gloo,cpu:gloo", which torch refuses as a duplicate.
    """
    on_cpu = get_device_name() == "cpu"
    initialize_global_process_group_ray(timeout_second, backend="gloo" if on_cpu else None)
    if on_cpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))


# verl has no hook here. Its own workers ask by this name, so they train on a CPU as well as ours.
engine_workers.initialize_global_process_group_ray = join_process_group
# Wherever TRL is installed verl 0.9.1 changes its value head while it builds a model, and ends if there is none, as in
# TRL 1.x. The critic here is a token classifier of transformers and needs nothing of TRL.
monkey_patch.is_trl_available = lambda: False


class SpearTrainingWorker(TrainingWorker):
    """A training worker whose learning rate ticks once a step, however many ``update_actor`` calls the step makes.

    With ``sequential`` coupling the replayed rows are a second call. verl ticks the scheduler at the end of each call;
    a call marked ``hold_learning_rate`` leaves the tick to the call that follows.
    """

    def train_batch(self, data: TensorDict) -> TensorDict:
        """Train on one mini-batch; keep the learning rate if the call says so."""
        if tu.get(data, key="hold_learning_rate", default=False):
            tu.assign_non_tensor(data, update_lr_scheduler=False)
        return super().train_batch(data)


class SpearCriticWorker(SpearTrainingWorker):
    """A critic that begins with the actor's network and the value 0 everywhere.

    A value head drawn at random would put noise of the size of the returns into the first advantages.
    """

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def reset(self) -> None:
        """Load the model and blank its value head."""
        super().reset()
        heads = [
            parameter
            for name, parameter in self.engine.module.named_parameters()
            if not set(VALUE_HEADS).isdisjoint(name.split("."))
        ]
        if not heads:
            raise SpearError("the critic's model has no value head that is known: choose another critic.model.path")
        with torch.no_grad():
            for parameter in heads:
                parameter.zero_()


class SpearActorRolloutRefWorker(ActorRolloutRefWorker):
    """verl's hybrid worker with :class:`SpearTrainingWorker` inside."""

    actor_worker_cls = SpearTrainingWorker
    ref_worker_cls = SpearTrainingWorker

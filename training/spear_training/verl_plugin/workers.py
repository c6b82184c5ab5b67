"""verl's FSDP engines on a CPU over gloo, and training workers of the policy and of the critic."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers import engine_workers
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from spear_envs.core.errors import SpearError
from spear_training.verl_plugin.vision import ReadsPictures

VALUE_HEADS = ("score", "classifier", "v_head")
"""What transformers and trl call the layer that turns a hidden state into a value."""


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class LanguageModelEngine(ReadsPictures, FSDPEngineWithLMHead):
    """verl's own FSDP engine of a policy, which also reads our rows' pictures."""


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
class CpuLanguageModelEngine(ReadsPictures, CpuEngine, FSDPEngineWithLMHead):
    """verl's FSDP engine of a policy, registered for the CPU, with log-probs of a whole micro-batch at once.

    Without flash-attention verl takes the logarithm token by token in a Python loop (to spare GPU memory), which on a
    CPU costs more than the model itself, in the backward pass most of all.
    """

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, torch.Tensor]:
        """Log-probs, and the entropy if asked for, at the positions that predict response tokens; 0 elsewhere.

        Returns:
            jagged tensors [B, *] over whole sequences, as verl's own method does.
        """
        self.forbid_places(output, micro_batch)
        special = ("use_remove_padding", "use_fused_kernels", "distillation_use_topk", "calculate_sum_pi_squared")
        if any(tu.get_non_tensor_data(data=micro_batch, key=key, default=False) for key in special):
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)
        input_ids = micro_batch["input_ids"]
        lengths = input_ids.offsets().diff()[:, None]
        prompts = lengths - micro_batch["loss_mask"].offsets().diff()[:, None]
        columns = torch.arange(output.logits.shape[1])
        inside = columns < lengths
        predicts = (columns >= prompts - 1) & (columns < lengths - 1)
        logits = output.logits[predicts].float()
        if not output_args["temperature_is_one"]:
            logits = logits / output_args["temperature"][:, None].expand_as(predicts)[predicts][:, None]
        log_softmax = torch.log_softmax(logits, dim=-1)
        where = predicts[inside]
        labels = output_args["input_ids_rmpad_rolled"][where]
        values = {"log_probs": log_softmax.gather(-1, labels[:, None])[:, 0]}
        if tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False):
            values["entropy"] = -(log_softmax.exp() * log_softmax).sum(-1)
        flat = {name: torch.zeros(len(where)).masked_scatter(where, value) for name, value in values.items()}
        offsets = input_ids.offsets()
        return {name: torch.nested.nested_tensor_from_jagged(value, offsets) for name, value in flat.items()}


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cuda", vendor="nvidia")
class ValueModelEngine(FSDPEngineWithValueHead):
    """verl's FSDP engine of a critic: the actor's network under a value head, with the attention it is configured for.

    verl's own loads such a model with flash-attention, whatever its configuration says.
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
    """verl's way into the process group, but on a CPU with gloo alone.

    verl would ask for the backend "cpu:gloo,cpu:gloo", which torch refuses as a duplicate.
    """
    on_cpu = get_device_name() == "cpu"
    initialize_global_process_group_ray(timeout_second, backend="gloo" if on_cpu else None)
    if on_cpu:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", 1)))


# verl has no hook here. Its own workers ask by this name, so they train on a CPU as well as ours.
engine_workers.initialize_global_process_group_ray = join_process_group


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

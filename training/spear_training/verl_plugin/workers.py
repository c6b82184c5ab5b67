"""verl's FSDP engines on a CPU over gloo, and training workers of the policy and of the critic."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.lr_scheduler import LambdaLR
from verl.models.transformers import monkey_patch
from verl.utils import tensordict_utils as tu
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.fsdp_utils import fsdp_version, merged_lora_context, normalize_peft_param_name
from verl.workers import engine_workers
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from spear_envs.core.errors import SpearError
from spear_training.run.checkpoints import write_tensors
from spear_training.run.computing import SDPA, check_exchange
from spear_training.verl_plugin.attention import PACKED
from spear_training.verl_plugin.queue import ReadsPictures
from spear_training.verl_plugin.scoring import ScoresLearnt

ADAPTER = "lora_adapter"
"""Folder of the adapter in peft's form, in the folder of the merged model."""
_HEAD = "lm_head.weight"


class MergesAdapter:
    """A mixin of verl's FSDP engines of a policy: exact merged weights, and checkpoints with a full model.

    verl rounds merged weights to bfloat16, and saves those of a checkpoint under peft's names, which nothing loads.
    """

    module: Any
    model_config: Any
    rank: int
    _is_lora: bool

    def _merged_lora_per_tensor_param(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the weights with the adapter in them, under the model's own names, one at a time; every rank must take
        part.
        """
        with merged_lora_context(self.module, backup_adapters=True):
            for name, value in normalize_peft_param_name(self.module.state_dict()).items():
                # A copy: afterwards the model has the weights again that it had.
                yield name, _gather(value).clone()

    def save_checkpoint(self, local_path: str, *args: Any, **kwargs: Any) -> None:
        """Write verl's checkpoint; with an adapter its ``huggingface`` has the merged model and the adapter."""
        super().save_checkpoint(local_path, *args, **kwargs)  # type: ignore[misc]
        if not self._is_lora:
            return
        folder = Path(local_path) / "huggingface"
        tied = self.model_config.hf_config.get_text_config().tie_word_embeddings
        merged = {
            name: value.cpu().contiguous()
            for name, value in self._merged_lora_per_tensor_param()
            if not (tied and name == _HEAD)
        }
        adapter = {
            name.replace(".default", ""): _gather(value).cpu().contiguous()
            for name, value in self.module.state_dict().items()
            if "lora_" in name
        }
        if self.rank == 0:
            for file in folder.glob("*.safetensors*"):
                file.unlink()
            write_tensors(folder / "model.safetensors", merged)
            self.module.peft_config["default"].save_pretrained(folder / ADAPTER)
            write_tensors(folder / ADAPTER / "adapter_model.safetensors", adapter)
        torch.distributed.barrier()


def _gather(value: torch.Tensor) -> torch.Tensor:
    """Return a full weight, gathered from all ranks."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach()


class ReshardsCheckpoints(FSDPEngine):
    """A mixin of verl's FSDP engines: checkpoints of any number of ranks."""

    checkpoint_manager: Any

    def initialize(self) -> None:
        """Start verl's engine with :class:`ReshardingManager` instead of its own manager of checkpoints."""
        super().initialize()
        self.checkpoint_manager.__class__ = ReshardingManager


@contextmanager
def keep_settings(optimizer: torch.optim.Optimizer | None, schedule: LambdaLR | None) -> Iterator[None]:
    """Keep learning rate, betas and weight decay while the states of both are loaded, which hold those of before.

    They are the same unless the run is continued with changed settings. The schedule goes on from the loaded step.
    """
    names = ("initial_lr", "betas", "weight_decay")
    groups = optimizer.param_groups if optimizer is not None else []
    own = [{name: group[name] for name in names if name in group} for group in groups]
    yield
    if optimizer is None or schedule is None:
        return
    schedule.base_lrs = [values["initial_lr"] for values in own]
    for group, values, rule in zip(optimizer.param_groups, own, schedule.lr_lambdas, strict=True):
        group.update(values, lr=values["initial_lr"] * rule(schedule.last_epoch))
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]


class ReshardingManager(FSDPCheckpointManager):
    """verl's manager of checkpoints, for which a checkpoint of other ranks is one, too."""

    model: Any
    optimizer: Any
    lr_scheduler: Any

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Load weights, optimiser, schedule and, where this rank has a counterpart, its random state.

        Raises SpearError if the shards are not FSDP2's, or files of ranks are missing.
        """
        with keep_settings(self.optimizer, self.lr_scheduler):
            self._load(local_path, hdfs_path, del_local_after_load)

    def _load(self, local_path: str, hdfs_path: str | None, del_local_after_load: bool) -> None:
        folder, ranks = Path(local_path), count_saved_ranks(Path(local_path))
        if ranks == self.world_size:
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
            return
        if fsdp_version(self.model) != 2:
            raise SpearError(
                f"{folder} was saved by {ranks} ranks, and there are {self.world_size}: only shards of "
                "cluster.strategy=fsdp2 are resharded, so resume on as many ranks as before"
            )
        if self.should_load_model:
            saved = _open_shards(folder, "model", ranks)
            weights = {
                name: _share(_join([shard[name] for shard in saved]), value)
                for name, value in self.model.state_dict().items()
                if name in saved[0]
            }
            self.model.load_state_dict(weights, strict=not self.is_lora_only_state_dict(saved[0]))
        if self.should_load_optimizer:
            self.optimizer.load_state_dict(self._share_optimizer(_open_shards(folder, "optim", ranks)))
        if self.should_load_extra:
            own = self.rank if self.rank < ranks else 0
            extra = torch.load(folder / f"extra_state_world_size_{ranks}_rank_{own}.pt", weights_only=False)
            if own == self.rank and "rng" in extra:
                self.load_rng_state(extra["rng"])
            if self.lr_scheduler is not None and extra["lr_scheduler"] is not None:
                self.lr_scheduler.load_state_dict(extra["lr_scheduler"])
        dist.barrier()

    def _share_optimizer(self, saved: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return this rank's part of the optimiser's state; torch numbers parameters in the order of the groups."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        state = {
            number: {
                name: _share(_join([shard["state"][number][name] for shard in saved]), parameters[number])
                for name in values
            }
            for number, values in saved[0]["state"].items()
        }
        return {"state": state, "param_groups": saved[0]["param_groups"]}


def count_saved_ranks(folder: Path) -> int:
    """Return the number of ranks that saved an actor's or a critic's folder of a checkpoint.

    Raises SpearError if it holds shards of no rank, or of several numbers of ranks.
    """
    found = {
        int(match[1])
        for path in folder.glob("model_world_size_*_rank_0.pt")
        if (match := re.fullmatch(r"model_world_size_(\d+)_rank_0", path.stem))
    }
    if len(found) != 1:
        raise SpearError(f"{folder} holds the shards of {sorted(found) or 'no'} ranks: take another checkpoint")
    return found.pop()


def _open_shards(folder: Path, what: str, ranks: int) -> list[dict[str, Any]]:
    paths = [folder / f"{what}_world_size_{ranks}_rank_{rank}.pt" for rank in range(ranks)]
    missing = [path for path in paths if not path.is_file()]
    if missing:
        raise SpearError(f"{missing[0]} is missing: resharding a checkpoint needs the files of all its {ranks} ranks")
    # Checked before: check_files lets no name through that torch and verl do not use themselves.
    return [torch.load(path, map_location="cpu", mmap=True, weights_only=False) for path in paths]


def _join(parts: Sequence[Any]) -> Any:
    """Return what all ranks hold of one value, in one tensor; replicas are read once."""
    first = parts[0]
    if not isinstance(first, DTensor):
        return first
    # With replicas the mesh has a dimension more: [replica, shard].
    ranks, cut = first.device_mesh.mesh, None
    for dimension, placement in reversed(list(enumerate(first.placements))):
        if placement.is_shard():
            cut = placement.dim
        else:
            ranks = ranks.select(dimension, 0)
    if cut is None:
        return first.to_local()
    return torch.cat([parts[rank].to_local() for rank in ranks.tolist()], dim=cut)


def _share(whole: Any, like: Any) -> Any:
    """Return this rank's part of a tensor that is sharded like ``like``; others, such as Adam's step count, are
    unchanged.
    """
    if not isinstance(like, DTensor) or not isinstance(whole, torch.Tensor) or whole.shape != like.shape:
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


VALUE_HEADS = ("score", "classifier", "v_head")
"""Names in transformers and trl of the layer that turns a hidden state into a value."""


def blank_values(module: torch.nn.Module) -> None:
    """Have a critic begin with the value 0 everywhere; call it before FSDP, of which version 1 hides names.

    A value head drawn at random would put noise of the size of the returns into the first advantages. Raises SpearError
    if the model has no value head that is known.
    """
    heads = [
        parameter for name, parameter in module.named_parameters() if not set(VALUE_HEADS).isdisjoint(name.split("."))
    ]
    if not heads:
        raise SpearError("the critic's model has no value head that is known: choose another critic.model.path")
    with torch.no_grad():
        for parameter in heads:
            parameter.zero_()


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
        """Return verl's model inputs, and where the rows begin and end for :func:`.attention.attend_rows`."""
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
    """Methods that both engines on a CPU replace."""

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
            module = super()._build_module()
        finally:
            self.model_config.model_type = "value_model"
        blank_values(module)
        return module


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")
class CpuValueModelEngine(CpuEngine, ValueModelEngine):
    """The same, registered for the CPU."""


def join_process_group(timeout_second: int | None = None) -> None:
    """Join the process group as verl does, but on a CPU with gloo only.

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


class SpearActorRolloutRefWorker(ActorRolloutRefWorker):
    """verl's hybrid worker with :class:`SpearTrainingWorker` inside."""

    actor_worker_cls = SpearTrainingWorker
    ref_worker_cls = SpearTrainingWorker

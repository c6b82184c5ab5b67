"""verl's FSDP engines on a CPU over gloo, and a training worker that ticks the learning rate once a step."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker


@EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")
class CpuLanguageModelEngine(FSDPEngineWithLMHead):
    """verl's FSDP engine of a policy, registered for the CPU; nothing else differs."""


@EngineRegistry.register(model_type="value_model", backend=["fsdp", "fsdp2"], device="cpu")
class CpuValueModelEngine(FSDPEngineWithValueHead):
    """verl's FSDP engine of a critic, registered for the CPU; nothing else differs."""


class SpearTrainingWorker(TrainingWorker):
    """A training worker whose learning rate ticks once a step, however many ``update_actor`` calls the step makes.

    With ``sequential`` coupling the replayed rows are a second call. verl ticks the scheduler at the end of each call;
    a call marked ``hold_learning_rate`` leaves the tick to the call that follows.
    """

    def __init__(self, config) -> None:
        if not torch.cuda.is_available() and not dist.is_initialized():
            # On a CPU verl would ask for the backend "cpu:gloo,cpu:gloo", which torch refuses as a duplicate.
            dist.init_process_group(
                "gloo",
                init_method=os.environ.get("DIST_INIT_METHOD"),
                rank=int(os.environ.get("RANK", 0)),
                world_size=int(os.environ.get("WORLD_SIZE", 1)),
            )
            torch.set_num_threads(int(os.environ.get("SPEAR_TRAIN_THREADS", 1)))
        super().__init__(config)

    def train_batch(self, data: TensorDict) -> TensorDict:
        """Train on one mini-batch; keep the learning rate if the call says so."""
        if tu.get(data, key="hold_learning_rate", default=False):
            tu.assign_non_tensor(data, update_lr_scheduler=False)
        return super().train_batch(data)


class SpearActorRolloutRefWorker(ActorRolloutRefWorker):
    """verl's hybrid worker with :class:`SpearTrainingWorker` inside."""

    actor_worker_cls = SpearTrainingWorker
    ref_worker_cls = SpearTrainingWorker

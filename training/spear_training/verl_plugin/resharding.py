"""Resuming on another number of ranks than a checkpoint was saved by.

verl saves what each rank holds, and loads the same files by the same number of ranks. Here each rank puts every tensor
together from all files and keeps its own part, one tensor at a time; files are mapped, not read, so that no rank holds
more than its share and one full tensor.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager
from verl.utils.fsdp_utils import fsdp_version
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from spear_envs.core.errors import SpearError


class ReshardsCheckpoints(FSDPEngine):
    """A mixin of verl's FSDP engines: checkpoints of any number of ranks."""

    checkpoint_manager: Any

    def initialize(self) -> None:
        """Verl's start, with :class:`ReshardingManager` instead of its own manager of checkpoints."""
        super().initialize()
        self.checkpoint_manager.__class__ = ReshardingManager


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
        folder, ranks = Path(local_path), count_saved_ranks(Path(local_path))
        if ranks == self.world_size:
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)
            return
        if fsdp_version(self.model) != 2:
            raise SpearError(
                f"{folder} was saved by {ranks} ranks, and there are {self.world_size}: only shards of "
                "actor_rollout_ref.actor.strategy=fsdp2 are resharded, so resume on as many ranks as before"
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
        """This rank's part of the optimiser's state; torch numbers parameters in the order of the groups."""
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
    """By how many ranks an actor's or a critic's folder of a checkpoint was saved.

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
    """What all ranks hold of one value, in one tensor; replicas are read once."""
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
    """This rank's part of a tensor that is sharded like ``like``; others, such as Adam's step count, are unchanged."""
    if not isinstance(like, DTensor) or not isinstance(whole, torch.Tensor) or whole.shape != like.shape:
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)

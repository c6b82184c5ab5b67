"""Memory of a training on its devices, from the shapes alone. What is an estimate says so."""

from __future__ import annotations

from dataclasses import dataclass

from omegaconf import DictConfig

from spear_training.planning.architecture import Architecture

GIB = 2**30


@dataclass(frozen=True)
class Item:
    """One thing that takes memory: bytes on each device, and how they are counted."""

    name: str
    bytes: float
    formula: str


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device while the policy is updated and while it generates; in turns, not together.

    Attributes:
        update: weights, gradients, optimiser, activations.
        rollout: weights of the engine, the key-value cache, and what the trainer keeps on the device meanwhile.
        cache_tokens: tokens that the cache of one replica holds; None where the engine takes what it needs.
    """

    update: tuple[Item, ...]
    rollout: tuple[Item, ...]
    cache_tokens: float | None

    @property
    def update_bytes(self) -> float:
        """Most while the policy is updated."""
        return sum(item.bytes for item in self.update)

    @property
    def rollout_bytes(self) -> float:
        """Most while it generates."""
        return sum(item.bytes for item in self.rollout)


def size_memory(config: DictConfig, model: Architecture, row_tokens: float, device_bytes: float) -> DeviceMemory:
    """Memory of one device.

    Args:
        config: composed configuration.
        model: shape of the policy.
        row_tokens: of a row, prompt and response.
        device_bytes: what a device has.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    cpu = config.trainer.device == "cpu"
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    shards = ranks if actor.fsdp_config.fsdp_size < 1 else min(ranks, actor.fsdp_config.fsdp_size)
    width = 4 if cpu else 2
    share = actor.ppo_mini_batch_size * rollout.n * row_tokens / ranks
    tokens = min(float(actor.ppo_max_token_len_per_gpu), share)
    parameters, per = model.parameters, f"P/{shards}" if shards > 1 else "P"
    networks = 2 if config.critic.enable else 1  # a critic is as large as its policy
    update = [
        Item("weights", 4 * parameters / shards * networks, f"4 {per}, float32"),
        Item("gradients", 4 * parameters / shards, f"4 {per}"),
        Item("Adam", 8 * parameters / shards * networks, f"8 {per}, two float32 moments"),
    ]
    if shards > 1:
        biggest = max(model.layer_parameters, model.vocabulary * model.hidden)
        update.append(Item("gathered layers", 2 * width * biggest, f"2 × {width} × largest layer, one ahead"))
    if config.actor_rollout_ref.model.enable_gradient_checkpointing:
        kept = tokens * model.hidden * model.layers * width
        update.append(Item("activations", kept, f"estimate: {width} × tokens × hidden × layers, checkpointed"))
    else:
        inner = 10 * model.hidden + 3 * model.intermediate
        kept = tokens * inner * model.layers * width
        update.append(Item("activations", kept, f"estimate: {width} × tokens × (10 hidden + 3 mlp) × layers"))
    update.append(
        Item("logits", tokens * model.vocabulary * (width + 4), f"estimate: {width + 4} × tokens × vocabulary")
    )
    parallel = rollout.tensor_model_parallel_size
    weights = Item("engine's weights", width * parameters / parallel, f"{width} P/{parallel}")
    waiting = 0.0 if actor.fsdp_config.param_offload else 4 * parameters / shards
    moments = 0.0 if actor.fsdp_config.optimizer_offload else 8 * parameters / shards
    rest = Item("trainer's share", waiting + moments, "weights and Adam, unless offloaded")
    if cpu:
        return DeviceMemory(tuple(update), (weights, rest), None)
    budget = rollout.gpu_memory_utilization * device_bytes - weights.bytes
    cache = Item(
        "key-value cache", max(0.0, budget), f"{rollout.gpu_memory_utilization:g} of the device − engine's weights"
    )
    return DeviceMemory(tuple(update), (weights, cache, rest), budget / (model.cache_bytes(width) / parallel))

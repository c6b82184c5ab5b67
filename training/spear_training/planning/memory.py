"""Memory of a training on its devices, computed from the shapes of models; estimates are marked.

Transformers builds a model on torch's meta device, without memory for weights; ``models.yaml`` avoids torch.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from spear_agents.models import check_folder, find_snapshot, models_folder
from spear_envs.core.errors import SpearError, first_line

if TYPE_CHECKING:
    from omegaconf import DictConfig

GIB = 2**30
LOGITS = 2**26
"""Logits that exist at a time, see :mod:`spear_training.verl_plugin.scoring`."""
LOGIT_BYTES = 16
"""Bytes of a logit if its entropy is wanted too: float32 value, logarithm, probability and product."""
UPDATE_LOGIT_BYTES = 8
"""Bytes of a logit in an update: two of these at a time, forwards and backwards."""
VLLM_PROCESSES = 2.25 * GIB
"""Memory of vLLM's processes on a CPU without weights and cache, measured with a model of 135 M parameters."""
PROCESSES = 3 * GIB
"""Memory of all other processes of a training on a CPU without the policy, measured in the same way with one rank."""


HALF = ("bf16", "bfloat16", "fp16", "float16")
"""Types whose numbers have two bytes."""


@dataclass(frozen=True)
class Architecture:
    """Sizes of a decoder.

    Attributes:
        parameters: of the model, including a vision tower.
        largest: parameters of the largest part that is gathered at once: a decoder layer or the embedding.
        vocabulary: rows of the embedding.
        hidden: width of the residual stream.
        intermediate: width of the feed-forward network.
        layers: of the decoder.
        cache_values: numbers that a token adds to the key-value cache: a key and a value in each layer.
        edges: inputs and outputs of all linear layers but the head, where an adapter of rank 1 has a parameter each.
        kv_heads: heads with keys and values of their own; 0: unknown.
    """

    parameters: int
    largest: int
    vocabulary: int
    hidden: int
    intermediate: int
    layers: int
    cache_values: int
    edges: int = field(default=0, compare=False)
    kv_heads: int = field(default=0, compare=False)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Architecture:
        """Build the model of a ``config.json`` and count. Raises SpearError if it is not a causal language model."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

        kind = config.get("model_type")
        values = {key: value for key, value in config.items() if key not in ("model_type", "auto_map")}
        try:
            shape = AutoConfig.for_model(str(kind), **values)
            loader = AutoModelForImageTextToText if "vision_config" in config else AutoModelForCausalLM
            with torch.device("meta"):
                model = loader.from_config(shape)
            model.tie_weights()
            text = shape.get_text_config()
            heads = text.num_attention_heads
            kv_heads = getattr(text, "num_key_value_heads", None) or heads
            head_size = getattr(text, "head_dim", None) or text.hidden_size // heads
            embedding = model.get_input_embeddings().weight
            decoders = [
                count
                for part in model.modules()
                if isinstance(part, torch.nn.ModuleList) and len(part) == text.num_hidden_layers
                for count in (sum(weights.numel() for weights in layer.parameters()) for layer in part)
            ]
            head = model.get_output_embeddings()
            linear = [part for part in model.modules() if isinstance(part, torch.nn.Linear) and part is not head]
            return cls(
                parameters=model.num_parameters(),
                largest=max(embedding.numel(), *decoders),
                vocabulary=embedding.shape[0],
                hidden=text.hidden_size,
                intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
                layers=text.num_hidden_layers,
                cache_values=2 * text.num_hidden_layers * kv_heads * head_size,
                edges=sum(part.in_features + part.out_features for part in linear),
                kv_heads=kv_heads,
            )
        except Exception as error:  # a third-party configuration may raise anything
            raise SpearError(f"the sizes of a {kind} model cannot be computed ({first_line(error)})") from error


def find_architecture(name: str) -> Architecture:
    """Return the sizes of a model by folder or name (``spear models``, ``models.yaml``).

    Raises SpearError for an unknown one, or a folder that holds another kind of model.
    """
    folder = find_folder(name)
    if folder is not None:
        check_folder(folder)
        return Architecture.from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    known = read_known()
    if name not in known:
        raise SpearError(f"the size of {name} is unknown: name its folder, or one of {', '.join(known)}")
    return Architecture.from_config(known[name]["config"])


def find_folder(name: str) -> Path | None:
    """Return the folder of the model ``name`` on this machine, or None."""
    here = (Path(os.path.expanduser(name)), models_folder() / name, find_snapshot(name))
    return next((folder for folder in here if folder and (folder / "config.json").is_file()), None)


@lru_cache(maxsize=1)
def read_known() -> dict[str, dict[str, Any]]:
    """Return models of ``models.yaml`` by name, with their ``parameters`` and ``config``; does not import torch."""
    text = (resources.files(__package__) / "models.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)


@dataclass(frozen=True)
class Item:
    """Bytes on each device."""

    name: str
    bytes: float
    estimated: bool = False


def sum_bytes(items: Iterable[Item]) -> float:
    """Return the bytes of all items."""
    return sum(item.bytes for item in items)


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of one device while the policy is updated and while it generates; on a CPU, that of one rank.

    A GPU alternates; a CPU keeps the engine's weights and its cache all the time. ``cache_tokens`` are those that the
    cache of one replica holds; None if the engine takes what it needs.
    """

    update: tuple[Item, ...]
    rollout: tuple[Item, ...]
    cache_tokens: float | None


@dataclass(frozen=True)
class Trainer:
    """Parameters of the memory of an update, besides the tokens of a micro-batch.

    Attributes:
        model: shape of the policy.
        width: bytes of a number of the computation.
        shards: devices that share the weights.
        networks: 2 with a critic that stays on the device; it is as large as its policy.
        reference: whether a frozen policy, for a KL term, is there too.
        stored: bytes of a number of weights, gradients and moments.
        rank: of a LoRA adapter of all linear layers, which alone is trained; 0: all weights are.
        on_host: FSDP2 keeps weights, gradients and moments in the host's memory (``offload_policy``).
    """

    model: Architecture
    width: int
    shards: int = 1
    networks: int = 1
    reference: bool = False
    stored: int = 4
    rank: int = 0
    on_host: bool = False

    @classmethod
    def of_config(cls, config: DictConfig, model: Architecture) -> Trainer:
        """Read the composed configuration of a training."""
        actor, shape, critic = config.actor_rollout_ref.actor, config.actor_rollout_ref.model, config.critic
        trainer = cls.of_engine(model, config.trainer, actor.fsdp_config, shape, str(actor.strategy))
        on_cpu = config.trainer.device == "cpu"
        if critic.enable:
            waits = critic.fsdp.offload_policy or (critic.fsdp.param_offload and critic.fsdp.optimizer_offload)
            rank = trainer.rank if critic.model.lora_rank else 0  # all weights of one network at least
            trainer = replace(trainer, networks=1 if waits and not on_cpu else 2, rank=rank)
        # The reference of an adapter is the policy without it; verl keeps any other in the host's memory.
        return replace(trainer, reference=bool(actor.use_kl_loss) and not shape.lora_rank and on_cpu)

    @classmethod
    def of_engine(
        cls, model: Architecture, trainer: DictConfig, engine: DictConfig, shape: DictConfig, strategy: str
    ) -> Trainer:
        """Read the nodes that verl's trainers have in common; ``shape`` is that of the model."""
        return cls(
            model,
            read_width(engine),
            count_shards(trainer, engine.fsdp_size),
            stored=2 if str(engine.get("model_dtype")) in HALF else 4,
            rank=int(shape.get("lora_rank") or 0),
            on_host=bool(engine.get("offload_policy")) and strategy == "fsdp2" and trainer.device != "cpu",
        )

    @property
    def trained(self) -> int:
        """Parameters with a gradient, and with moments."""
        return self.rank * self.model.edges if self.rank else self.model.parameters

    @property
    def loading(self) -> float:
        """Bytes of a device while it takes its share of the weights, which FSDP2 brings to the host from there."""
        return self.stored * self.model.parameters / self.shards

    def measure(self, tokens: float) -> float:
        """Return bytes that a device needs at least, for micro-batches of ``tokens`` and the loading before them."""
        return max(sum_bytes(self.size_update(tokens, checkpointing=True)), self.loading)

    def size_update(self, tokens: float, *, checkpointing: bool) -> tuple[Item, ...]:
        """Return the memory of a device while it updates by micro-batches of ``tokens``.

        With ``checkpointing`` the activations within a layer are recomputed in the backward pass.
        """
        model, width = self.model, self.width
        inner = 10 * model.hidden + 3 * model.intermediate
        kept = tokens * width * (model.hidden * model.layers + inner if checkpointing else inner * model.layers)
        logits, head = min(tokens * model.vocabulary, LOGITS), width * model.vocabulary * model.hidden
        scoring = max(UPDATE_LOGIT_BYTES * logits + 2 * head, LOGIT_BYTES * logits)
        return (
            *self._size_state(),
            Item("gathered layers", 2 * width * model.largest),  # one ahead
            Item("activations", kept, estimated=True),
            Item("log-probs", scoring + 2 * width * tokens * model.hidden),
        )

    def _size_state(self) -> Iterator[Item]:
        """Return the bytes of weights and of what goes with trained ones: gradients, and Adam's two moments."""
        parameters, shards, stored, trained = self.model.parameters, self.shards, self.stored, self.trained
        if self.on_host:  # a layer from the host and its gradient to it
            yield Item("in transit", 2 * stored * self.model.largest / shards, estimated=True)
            return
        if self.reference:
            yield Item("reference policy", 4 * parameters / shards)
        yield Item("weights", stored * parameters / shards * self.networks)
        if self.rank:
            yield Item("adapter", stored * trained / shards * self.networks)
        yield Item("gradients", stored * trained / shards)
        yield Item("Adam", 2 * stored * trained / shards * self.networks)


def count_shards(trainer: DictConfig, fsdp_size: int) -> int:
    """Return the number of devices that share the weights: those of ``trainer``, or ``fsdp_size`` of them if it is
    above 0.
    """
    ranks = int(trainer.nnodes * trainer.n_gpus_per_node)
    return ranks if fsdp_size < 1 else min(ranks, fsdp_size)


def read_width(fsdp_config: DictConfig) -> int:
    """Return the bytes of a number in the computation, from an FSDP configuration's mixed precision; verl's default is
    bf16.
    """
    from omegaconf import OmegaConf  # late: listings of models read this module

    kind = OmegaConf.select(fsdp_config, "mixed_precision.param_dtype")
    return 2 if kind is None or str(kind) in HALF else 4


def size_memory(
    config: DictConfig, model: Architecture, tokens: float, longest: float, episodes: float, device_bytes: float
) -> DeviceMemory:
    """Return the memory of one device of ``device_bytes`` with the policy ``model``, in micro-batches of ``tokens``.

    ``longest`` are the tokens of a row at most, and ``episodes`` those that run at a time.
    """
    actor = config.actor_rollout_ref.actor
    trainer = Trainer.of_config(config, model)
    update = trainer.size_update(
        tokens, checkpointing=bool(config.actor_rollout_ref.model.enable_gradient_checkpointing)
    )
    if config.trainer.device == "cpu":
        others = size_rollout_on_cpu(config, model)
        kept = ("reference policy", "weights", "adapter", "Adam")
        waiting = sum(item.bytes for item in update if item.name in kept)
        cache = Item("key-value cache", _size_live_cache(config, model, longest, episodes, device_bytes))
        return DeviceMemory((*update, *others), (*others, cache, Item("trainer's share", waiting)), None)
    rollout, parameters = config.actor_rollout_ref.rollout, model.parameters
    width = _read_rollout_width(config)
    parallel = rollout.tensor_model_parallel_size
    weights = Item("engine's weights", width * parameters / parallel)
    offloaded = {"weights": actor.fsdp_config.param_offload, "adapter": actor.fsdp_config.param_offload}
    offloaded["Adam"] = actor.fsdp_config.optimizer_offload
    held = sum(item.bytes for item in update if not offloaded.get(item.name, True))
    budget = rollout.gpu_memory_utilization * device_bytes - weights.bytes
    cache = Item("key-value cache", max(0.0, budget))
    spread = min(parallel, model.kv_heads or parallel)  # vLLM copies heads that are fewer than its GPUs
    return DeviceMemory(
        update, (weights, cache, Item("trainer's share", held)), budget / (width * model.cache_values / spread)
    )


def size_rollout_on_cpu(config: DictConfig, model: Architecture) -> tuple[Item, ...]:
    """Compute what a rank's engine and its part of all processes hold throughout on a machine without a GPU."""
    rollout = config.actor_rollout_ref.rollout
    weights = _read_rollout_width(config) * model.parameters / rollout.tensor_model_parallel_size
    held = [Item("engine's weights", weights)]
    if rollout.name == "vllm_cpu":
        held.append(Item("vLLM's processes", VLLM_PROCESSES, estimated=True))
    return (*held, Item("processes", PROCESSES / config.trainer.n_gpus_per_node, estimated=True))


def _size_live_cache(config: DictConfig, model: Architecture, longest: float, episodes: float, room: float) -> float:
    """Return the most bytes of a rank's cache on a CPU while its engine generates; ``room`` is a rank's before that."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    parallel = rollout.tensor_model_parallel_size
    engines = trainer.nnodes * trainer.n_gpus_per_node / parallel
    running = min(rollout.max_num_seqs, episodes / engines)
    size = running * longest * _read_rollout_width(config) * model.cache_values / parallel
    if rollout.name != "vllm_cpu":
        return float(size)
    gib = rollout.engine_kwargs.vllm_cpu.kv_cache_gib
    free = room * trainer.n_gpus_per_node  # each engine looks at the whole machine
    return float(gib * GIB if gib is not None else max(GIB, min(free / 4 / parallel, size)))


def _read_rollout_width(config: DictConfig) -> int:
    return 2 if config.actor_rollout_ref.rollout.dtype in ("bfloat16", "float16") else 4

"""Micro-batches and gradient checkpointing that fit into the memory, chosen before any of it is taken."""

from __future__ import annotations

import shutil
import subprocess
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from omegaconf import DictConfig, OmegaConf, open_dict

from spear_envs.core.errors import SpearError
from spear_envs.core.machine import find_free_memory
from spear_training.planning.memory import (
    GIB,
    Item,
    Trainer,
    find_architecture,
    find_folder,
    read_known,
    size_rollout_on_cpu,
    sum_bytes,
)
from spear_training.run.config import RunConfig

ENOUGH = 2048
"""Tokens of a micro-batch beyond which larger ones are hardly faster. To reach it, activations are checkpointed. On a
CPU the choice ends here, since memory that is touched for the first time costs time."""
CPU_PASS = GIB
"""Activations and logits of :data:`ENOUGH` tokens beyond which a training on a CPU takes no more tokens than these: an
update takes as long with a fraction of the memory. Checkpointing, which makes it a third longer, is up to the room."""
CPU_SHARE = 0.8
"""Share of the free memory that a training may take: its parts are estimates, and Ray kills workers at 95 %."""
GPU_SHARE = 0.9
"""Share of a card's memory that a training may take; the rest is the driver's and fragmentation."""
CARDS = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
RANK = 32
"""Rank of an adapter that is advised."""
SHORTEST = 256
"""Tokens of a row that is advised."""
BUCKET = 256
"""Tokens to whose multiples micro-batches on a CPU are padded in bfloat16: torch makes kernels for each new shape,
which takes time, and keeps up to a gigabyte of them."""


class Keys(NamedTuple):
    """Names of the settings that decide the memory: for errors, and for what the user gave.

    Tokens of a micro-batch, gradient checkpointing, padding, and what makes a training smaller: the rank of an adapter,
    the type of stored numbers, and the host's memory.
    """

    tokens: str
    checkpointing: str
    pad: str
    rank: str
    stored: str
    offload: str


TRAINING_KEYS = Keys(
    "train.tokens_per_gpu",
    "model.gradient_checkpointing",
    "train.pad_tokens_to",
    "model.lora_rank",
    "verl.actor_rollout_ref.actor.fsdp_config.model_dtype",
    "cluster.memory_saving",
)
TUNING_KEYS = Keys(
    "data.max_token_len_per_gpu",
    "model.enable_gradient_checkpointing",
    "engine.pad_to_length",
    "model.lora_rank",
    "engine.model_dtype",
    "engine.offload_policy",
)


@dataclass(frozen=True)
class Fit:
    """How an update fits into the memory of a device: it takes ``needed`` bytes of ``room``, an estimate.

    ``chosen``: micro-batches of ``tokens`` and ``checkpointing`` (activations within a layer are made again in the
    backward pass) differ from what was asked for. ``pad``: multiple to which micro-batches are to be padded, if any.
    """

    tokens: int
    checkpointing: bool
    needed: float
    room: float
    chosen: bool
    pad: int | None = None

    def describe(self) -> str:
        """Return one line; empty where nothing was chosen and everything fits."""
        if not self.chosen and self.needed <= self.room:
            return ""
        return (
            f"micro-batches of {self.tokens:,} tokens {'with' if self.checkpointing else 'without'} gradient "
            f"checkpointing{' may not fit' if self.needed > self.room else ''}: about {self.needed / GIB:.1f} GiB of "
            f"the {self.room / GIB:.1f} GiB that are free (an estimate)"
        )


@dataclass(frozen=True)
class Requirement:
    """Load that a configuration asks for.

    Attributes:
        tokens: of a micro-batch, at most.
        checkpointing: whether activations are made again.
        longest: tokens of a row, which a micro-batch must hold.
        share: tokens of a rank's mini-batch, beyond which no micro-batch grows.
        given_tokens: the user said how many tokens.
        given_checkpointing: the user said whether.
        most: tokens of a micro-batch that is chosen because not all fit; None: as many as fit.
    """

    tokens: int
    checkpointing: bool
    longest: int
    share: int
    given_tokens: bool = False
    given_checkpointing: bool = False
    most: int | None = None


def fit_update(
    trainer: Trainer,
    requirement: Requirement,
    room: float,
    others: Sequence[Item] = (),
    *,
    keys: Keys = TRAINING_KEYS,
    on_cpu: bool = True,
) -> Fit:
    """Choose the largest micro-batch that fits, and gradient checkpointing where it would be small otherwise.

    ``room`` are bytes of memory, of which ``others`` take some. What is given in ``requirement`` stays. Raises
    SpearError if not even one row fits, which names what would; not for what is only estimated, nor for given tokens.
    """
    taken = sum_bytes(others)

    def need(tokens: int, checkpointing: bool) -> float:
        return taken + sum_bytes(trainer.size_update(min(tokens, requirement.share), checkpointing=checkpointing))

    def capacity(checkpointing: bool) -> int:
        if requirement.given_tokens:
            return requirement.tokens if need(requirement.tokens, checkpointing) <= room else 0
        fitting = bisect_right(range(requirement.tokens + 1), room, key=lambda tokens: need(tokens, checkpointing)) - 1
        if fitting == requirement.tokens or fitting < requirement.longest:
            return fitting if fitting >= requirement.longest else 0
        return max(requirement.longest, min(1 << (fitting.bit_length() - 1), requirement.most or fitting))

    ways = (
        [requirement.checkpointing] if requirement.given_checkpointing or requirement.checkpointing else [False, True]
    )
    found = {way: capacity(way) for way in ways}
    good = [
        way
        for way in ways
        if found[way] >= max(requirement.longest, min(requirement.tokens, requirement.share, ENOUGH))
    ]
    best = max(ways, key=lambda way: found[way])
    way = good[0] if good else best if found[best] else ways[-1]
    # Estimates, as all that others take, narrow the choice and never refuse.
    items = trainer.size_update(requirement.longest, checkpointing=ways[-1])
    sure = sum_bytes(item for item in items if not item.estimated)
    if max(sure, trainer.loading) > room and not requirement.given_tokens:
        least = max(sum_bytes(items), trainer.loading)
        raise SpearError(
            f"one row of {requirement.longest:,} tokens takes about {least / GIB:.1f} GiB to update, and "
            f"{room / GIB:.1f} GiB are free: {_name_ways(trainer, requirement, room, keys, on_cpu=on_cpu)}. "
            f"To try it all the same, set {keys.tokens}={requirement.longest}"
        )
    tokens = found[way] or (
        requirement.tokens if requirement.given_tokens else requirement.longest
    )  # none fits with the rest
    chosen = tokens < min(requirement.tokens, requirement.share) or way != requirement.checkpointing
    return Fit(tokens, way, need(tokens, way), room, chosen)


def list_ways(trainer: Trainer, keys: Keys = TRAINING_KEYS, *, on_cpu: bool = False) -> list[tuple[str, Trainer]]:
    """Return settings that make ``trainer`` smaller, the fastest first, with the trainer that they make."""
    adapter = (f"{keys.rank}={RANK}", replace(trainer, rank=RANK))
    half = f"{keys.stored}=bfloat16"
    ways = [adapter, (f"{adapter[0]} {half}", replace(adapter[1], stored=2))] if not trainer.rank else []
    if trainer.rank and trainer.stored > 2:
        ways = [(half, replace(trainer, stored=2))]
    if not on_cpu and not trainer.on_host:
        host = f"{keys.offload}=true"
        ways += [(f"{way} {host}".strip(), replace(made, on_host=True)) for way, made in [("", trainer), *ways]]
    return ways


def _name_ways(trainer: Trainer, requirement: Requirement, room: float, keys: Keys, *, on_cpu: bool) -> str:
    """Return what would fit, as a clause."""
    ways = [way for way, made in list_ways(trainer, keys, on_cpu=on_cpu) if made.measure(requirement.longest) <= room][
        :3
    ]
    shorter = bisect_right(range(requirement.longest), room, key=trainer.measure) - 1
    if shorter >= SHORTEST:
        ways.append(f"rows of {shorter:,} tokens")
    ways.append("a smaller model, or more memory")
    return f"what would fit is {', or '.join(ways)}" if len(ways) > 1 else f"take {ways[0]}"


def fit_training(
    config: RunConfig, verl: DictConfig, given: Collection[str], room: float | None, earlier: RunConfig | None = None
) -> tuple[RunConfig, Fit | None]:
    """Choose for a training; return its configuration with what was chosen.

    ``verl`` is the configuration made of it so far. Settings in ``given`` stay, and so do those of ``earlier``, the
    configuration of a resumed run. Nothing is chosen where the ``room`` (see :func:`find_room`) or the shape of the
    model is not known. Raises SpearError if not even one row fits.
    """
    keys = TRAINING_KEYS
    if earlier is not None:  # what was chosen when the run began
        kept = {"tokens_per_gpu": earlier.train.tokens_per_gpu, "pad_tokens_to": earlier.train.pad_tokens_to}
        config = config.change("train", **{name: kept[name] for name in kept if f"train.{name}" not in given})
        if keys.checkpointing not in given:
            config = config.change("model", gradient_checkpointing=earlier.model.gradient_checkpointing)
        given = {*given, *keys}
    name = str(config.model.path)
    if room is None or (find_folder(name) is None and name not in read_known()):
        return config, None
    model, longest = find_architecture(name), config.longest_row
    others: Sequence[Item] = ()
    if config.on_cpu:
        others = size_rollout_on_cpu(verl, model)
    elif not verl.actor_rollout_ref.rollout.free_cache_engine:  # the engine stays on the GPU
        others = [Item("engine", config.rollout.gpu_memory * room / GPU_SHARE)]  # a share of the whole card
    fit = _fit(
        Trainer.of_config(verl, model),
        Requirement(
            tokens=config.train.tokens_per_gpu,
            checkpointing=config.model.gradient_checkpointing,
            longest=-(-longest // config.cluster.sequence_parallel),
            share=config.train.mini_batch_size * config.rollout.group_size * longest // config.ranks,
        ),
        room,
        given,
        keys,
        others,
        on_cpu=config.on_cpu,
        lighten=True,
    )
    pad = config.train.pad_tokens_to if fit.pad is None else fit.pad
    config = config.change("train", tokens_per_gpu=fit.tokens, pad_tokens_to=pad)
    return config.change("model", gradient_checkpointing=fit.checkpointing), fit


def fit_tuning(
    config: DictConfig, given: Collection[str], room: float | None, longest: int, earlier: DictConfig | None
) -> Fit | None:
    """Choose for a fine-tuning, whose longest sample is known, as :func:`fit_training` does, and write it there."""
    keys = TUNING_KEYS
    written = (keys.tokens, keys.checkpointing, keys.pad, _BUCKET_KEY)
    with open_dict(config):
        if earlier is not None:
            for key in written:
                if key not in given:
                    OmegaConf.update(config, key, OmegaConf.select(earlier, key))
            given = {*given, *written}
        if room is None:
            return None
        model, ranks = find_architecture(str(config.model.path)), config.trainer.nnodes * config.trainer.n_gpus_per_node
        strategy = str(config.engine.get("strategy"))
        parts = int(config.engine.get("ulysses_sequence_parallel_size") or 1)
        requirement = Requirement(
            tokens=int(OmegaConf.select(config, keys.tokens)),
            checkpointing=bool(OmegaConf.select(config, keys.checkpointing)),
            longest=-(-longest // parts),
            share=config.data.train_batch_size * longest // ranks,
        )
        trainer = Trainer.of_engine(model, config.trainer, config.engine, config.model, strategy)
        fit = _fit(trainer, requirement, room, given, keys, on_cpu=config.trainer.device == "cpu")
        chosen = {keys.tokens: fit.tokens, keys.checkpointing: fit.checkpointing}
        if fit.pad is not None:
            chosen |= {keys.pad: True, _BUCKET_KEY: fit.pad}
        for key, value in chosen.items():
            OmegaConf.update(config, key, value)
    return fit


_BUCKET_KEY = "engine.pad_to_length_bucket"


def _fit(
    trainer: Trainer,
    asked: Requirement,
    room: float,
    given: Collection[str],
    keys: Keys,
    others: Sequence[Item] = (),
    *,
    on_cpu: bool,
    lighten: bool = False,
) -> Fit:
    """Choose what is not ``given``; ``lighten``: take small micro-batches for a heavy policy on a CPU."""
    requirement = asked = replace(
        asked,
        tokens=max(asked.longest, asked.tokens),
        share=max(asked.longest, asked.share),
        given_tokens=keys.tokens in given,
        given_checkpointing=keys.checkpointing in given,
        most=ENOUGH if on_cpu else None,
    )
    least, full = (sum_bytes(trainer.size_update(tokens, checkpointing=False)) for tokens in (0, ENOUGH))
    pad = None
    if on_cpu and full - least > CPU_PASS:
        if lighten:
            tokens = (
                requirement.tokens
                if requirement.given_tokens
                else max(requirement.longest, min(requirement.tokens, ENOUGH))
            )
            requirement = replace(requirement, tokens=tokens)
        if trainer.width == 2 and {keys.pad, _BUCKET_KEY}.isdisjoint(given):
            pad = BUCKET
    fit = fit_update(trainer, requirement, room, others, keys=keys, on_cpu=on_cpu)
    return replace(fit, chosen=fit.chosen or requirement != asked, pad=pad)


def find_room(device: str, ranks: int = 1) -> float | None:
    """Return bytes that each of the ``ranks`` of this machine may take; None if unknown.

    On a CPU they share a part of what is free here; each has a GPU of its own, and the smallest counts.
    """
    if device == "cpu":
        return CPU_SHARE * find_free_memory() / ranks
    if shutil.which(CARDS[0]) is None:
        return None
    done = subprocess.run(CARDS, capture_output=True, text=True, timeout=60, check=False)
    sizes = [int(line) * 2**20 for line in done.stdout.split() if line.isdigit()]
    return GPU_SHARE * min(sizes) if sizes and not done.returncode else None

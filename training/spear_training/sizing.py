"""The number of rollout workers, and the rows that a step may leave in the queue."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from spear_agents.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_training.algorithms.choices import ReplayUnit
from spear_training.algorithms.settings import SpearSettings
from spear_training.planning.fitting import CARDS

WORKERS = "actor_rollout_ref.rollout.agent.num_workers"
QUEUE = "transfer_queue.backend.SimpleStorage.total_storage_size"
MOST_EPISODES = 512
"""Concurrent episodes of a worker; each has an environment, which is reused in the next step."""
TURNS_OF_A_WORKER = 1700
"""Turns a second of a core in the slowest environment, WebShop, by ``spear bench loop``."""
TURNS_OF_A_GPU = 800
"""Expected maximum turns a second of one GPU's engine."""
HEADROOM = 2
"""Workers idle half of the time, so that bursts of responses are handled at once."""
WHOLE_NUMBERS = {
    "trainer.log_val_generations": 0,
    "trainer.total_training_steps": 1,
    "data.train_batch_size": 1,
    "data.max_prompt_length": 1,
    "data.max_response_length": 1,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.max_num_seqs": 1,
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 1,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 1,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": 1,
    WORKERS: 1,
}
"""Integer keys that verl does not check, and their least values; a wrong one would fail in a run's start."""


@dataclass(frozen=True)
class RunShape:
    """Sizes of a run."""

    tasks: int
    """Tasks a step."""
    group_size: int
    """Episodes of each task."""
    max_turns: int
    per_turn: bool
    """Each turn is a row; else each episode."""

    @classmethod
    def of_config(cls, config: DictConfig, max_turns: int) -> RunShape:
        """Read the sizes of a composed configuration; ``max_turns`` is the environment's."""
        return cls(
            tasks=int(config.data.train_batch_size),
            group_size=int(config.actor_rollout_ref.rollout.n),
            max_turns=max_turns,
            per_turn=Layout(config.spear.env.layout) is Layout.PER_TURN,
        )

    @property
    def most_rows(self) -> int:
        """Rows of a step, if every episode takes all its turns."""
        return self.tasks * self.group_size * (self.max_turns if self.per_turn else 1)


NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    **{
        f"{key}.optim.{name}": rule
        for key in ("actor_rollout_ref.actor", "critic")
        for name, rule in {
            "lr": (lambda x: 0 <= x < math.inf, "a finite number, 0 or more"),
            "weight_decay": (lambda x: 0 <= x < math.inf, "a finite number, 0 or more"),
            "clip_grad": (lambda x: x > 0, "above 0"),
            "betas": (lambda x: 0 <= x < 1, "two numbers from 0 to below 1"),
        }.items()
    },
    # The trainer's log-probs are at the temperature of the rollouts, which divides logits.
    "actor_rollout_ref.rollout.temperature": (lambda x: 0 < x < math.inf, "a finite number above 0"),
    "actor_rollout_ref.rollout.val_kwargs.temperature": (lambda x: 0 <= x < math.inf, "a finite number, 0 or more"),
    "actor_rollout_ref.rollout.top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "actor_rollout_ref.rollout.val_kwargs.top_p": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
    "actor_rollout_ref.rollout.gpu_memory_utilization": (lambda x: 0 < x <= 1, "above 0 and at most 1"),
}
"""Other keys, what their numbers must be, and the same in words. NaN fits nowhere."""


def size_workers(config: DictConfig) -> None:
    """Set the number of rollout workers in a configuration that leaves it open.

    On a CPU it is one: its requests are batched in a canonical order, and the engine takes the cores. With GPUs there
    are enough to drive them at twice the need and to play all episodes at once, at least two so that one may die, and
    at most the machines' cores minus one for each GPU's engine. The machines are assumed to be like this one, unless it
    lacks a GPU.
    """
    agent, trainer = config.actor_rollout_ref.rollout.agent, config.trainer
    if agent.num_workers is not None:
        return
    count = 1
    if trainer.device != "cpu":
        gpus = trainer.nnodes * trainer.n_gpus_per_node
        room = len(os.sched_getaffinity(0)) * trainer.nnodes - gpus if shutil.which(CARDS[0]) else math.inf
        driven = math.ceil(HEADROOM * gpus * TURNS_OF_A_GPU / TURNS_OF_A_WORKER)
        wanted = max(2, driven, math.ceil(_count_episodes(config) / MOST_EPISODES))
        count = max(1, int(min(room, wanted)))
    with open_dict(config):
        agent.num_workers = count


def describe_workers(config: DictConfig) -> str:
    """One line on the workers of a training."""
    workers, episodes = config.actor_rollout_ref.rollout.agent.num_workers, _count_episodes(config)
    each = math.ceil(episodes / workers)
    many = f"up to {each:,} episodes" if each <= MOST_EPISODES else f"{MOST_EPISODES} of {each:,} episodes"
    plural = "s" if workers > 1 else ""
    return f"{workers} rollout worker{plural}, each with {many} at a time ({WORKERS})"


def check_queue(config: DictConfig, settings: SpearSettings, max_turns: int) -> None:
    """Raise SpearError if TransferQueue has a limit that a step may exceed, which would crash the training."""
    limit = config.transfer_queue.backend.SimpleStorage.total_storage_size
    if limit is None:
        return
    if not isinstance(limit, int):
        raise SpearError(f"{QUEUE} must be a whole number or null, not {limit!r}")
    needed = count_queue_rows(config, settings, max_turns)
    if limit < needed:
        raise SpearError(
            f"{QUEUE}={limit} is less than the {needed:,} rows that may lie in the queue at a time "
            f"(tasks × group × turns, {1 + config.spear.rollout.staleness} batches played at a time, and a replay): "
            f"set {QUEUE}=null, or lower data.train_batch_size"
        )


def count_queue_rows(config: DictConfig, settings: SpearSettings, max_turns: int) -> int:
    """Rows in TransferQueue if every episode takes all its turns and the full replay buffer is drawn."""
    shape = RunShape.of_config(config, max_turns)
    batches = 1 + config.spear.rollout.staleness
    if settings.sampling.enabled:
        batches += settings.sampling.max_rounds - 1
    replayed = 0
    if settings.sil.enabled:
        per_unit = max_turns if settings.replay.unit is ReplayUnit.TRAJECTORY and shape.per_turn else 1
        replayed = settings.replay.capacity * per_unit
    return batches * shape.most_rows + replayed + config.trainer.nnodes * config.trainer.n_gpus_per_node


def _count_episodes(config: DictConfig) -> int:
    """Maximum concurrent episodes."""
    step = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    return int(step * (1 + config.spear.rollout.staleness))


def check_numbers(config: DictConfig) -> None:
    """Raise SpearError for a number that verl does not check and that would fail, or train nothing, later."""
    for key, least in WHOLE_NUMBERS.items():
        value = OmegaConf.select(config, key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise SpearError(f"{key} must be a whole number, {least} or more, not {value!r}")
    for key in ("data.train_max_samples", "data.val_max_samples"):
        value = OmegaConf.select(config, key)
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            raise SpearError(f"{key} must be -1 (all) or a whole number from 1, not {value!r}")
    for key, (fits, allowed) in NUMBERS.items():
        value = OmegaConf.select(config, key)
        numbers = value if isinstance(value, ListConfig) else [value]
        if value is not None and not all(isinstance(one, int | float) and fits(one) for one in numbers):
            raise SpearError(f"{key} must be {allowed}, not {value}")

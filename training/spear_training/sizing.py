"""How many workers play the episodes, and how many rows a step may leave in the queue."""

from __future__ import annotations

import math
import os
import shutil

from omegaconf import DictConfig, open_dict

from spear_envs.core.errors import SpearError
from spear_training.algorithms.choices import ReplayUnit
from spear_training.algorithms.settings import SpearSettings
from spear_training.guidance import RunShape
from spear_training.planning.fitting import CARDS

WORKERS = "actor_rollout_ref.rollout.agent.num_workers"
QUEUE = "transfer_queue.backend.SimpleStorage.total_storage_size"
MOST_EPISODES = 512
"""Episodes that one worker plays at a time; each has an environment, which is kept for the next step."""
TURNS_OF_A_WORKER = 1700
"""Turns a second that a core drives where it drives fewest: WebShop's, by ``spear bench loop``."""
TURNS_OF_A_GPU = 800
"""Turns a second that the engine of one GPU is expected to answer at most."""
HEADROOM = 2
"""A worker that computes half of the time answers at once when many responses come together."""


def size_workers(config: DictConfig) -> None:
    """Write the number of rollout workers into a configuration that leaves it open.

    On a CPU it is one: its requests are batched in a canonical order, and the engine takes the cores. With GPUs it is
    what drives them at twice the need, enough for all episodes to be under way, two at least so that one may die, and
    no more than the cores of the machines besides one for each GPU's engine. The machines are taken to be like this
    one, unless it has no GPU.
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
    """Check that a limit of TransferQueue, where one is set, holds the rows of every step.

    Raises:
        SpearError: it may overflow, which would end the training in the middle of a step.
    """
    limit = config.transfer_queue.backend.SimpleStorage.total_storage_size
    if limit is None:
        return
    needed = count_queue_rows(config, settings, max_turns)
    if limit < needed:
        raise SpearError(
            f"{QUEUE}={limit} is less than the {needed:,} rows that may lie in the queue at a time "
            f"(tasks × group × turns, {1 + config.spear.rollout.staleness} batches played at a time, and a replay): "
            f"set {QUEUE}=null, or lower data.train_batch_size"
        )


def count_queue_rows(config: DictConfig, settings: SpearSettings, max_turns: int) -> int:
    """Rows in TransferQueue if every episode takes all its turns, and the whole replay buffer is drawn."""
    shape = RunShape.of_config(config, max_turns)
    batches = 1 + config.spear.rollout.staleness
    if settings.sampling.enabled:
        batches += settings.sampling.max_rounds - 1
    replayed = 0
    if settings.sil.enabled:
        per_unit = max_turns if settings.replay.unit is ReplayUnit.TRAJECTORY and shape.per_turn else 1
        replayed = settings.replay.capacity * per_unit
    ranks = config.trainer.nnodes * config.trainer.n_gpus_per_node
    return batches * shape.most_rows + replayed + ranks


def _count_episodes(config: DictConfig) -> int:
    """Episodes under way at a time."""
    step = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
    return int(step * (1 + config.spear.rollout.staleness))

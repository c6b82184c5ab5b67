"""SPEAR's training step on verl's workers, TransferQueue, checkpoints and loggers.

:meth:`SpearTrainer._step_once` is the algorithm, top to bottom (``alg:sal``). verl's own loop around it stays as it is:
``fit`` prepares a step, runs it, checkpoints, pushes weights to the rollout engine, validates and logs.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils.debug import marked_timer

from agents.engines.base import Sampling, derive_seed
from training.environments import EnvironmentSettings
from training.launch import read_settings
from training.verl_plugin.loss import actor_loss
from training.verl_plugin.metrics import summarize_episodes, summarize_plan, summarize_rewards
from training.verl_plugin.plan import plan_update
from training.verl_plugin.records import EpisodeRecord
from training.verl_plugin.rollout_worker import PARTITION, EpisodeOrder, RolloutManager
from training.verl_plugin.state import SpearState
from training.verl_plugin.update import ActorUpdater, Replay
from training.verl_plugin.workers import SpearActorRolloutRefWorker, SpearTrainingWorker

NAME = "spear"


class NoSampler:
    """Stands where verl keeps its rollout sampler; :class:`SpearTrainer` waits for its rollouts itself."""


@register_trainer(NAME)
class SpearTrainer(PPOTrainerSync):
    """verl's synchronous trainer with SPEAR's step."""

    def __init__(self, config) -> None:
        super().__init__(config)
        # verl takes any registered name but "sync" for an asynchronous mode.
        self.trainer_mode = "sync"
        self.settings = read_settings(config.spear)
        self.environment = EnvironmentSettings.from_mapping(OmegaConf.to_container(config.spear.env, resolve=True))
        self.seed = int(config.spear.seed)
        self.state = SpearState(self.settings, self.seed)
        self._pending: list[Any] = []
        self._train_iterator: Any = None

    # ---- set-up: verl's hooks ----------------------------------------------------------------------------------------
    def _build_replay_buffer(self) -> NoSampler:
        return NoSampler()

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            worker = SpearTrainingWorker if role == Role.Critic else SpearActorRolloutRefWorker
            self.role_worker_mapping[role] = ray.remote(worker)

    def on_init_end(self) -> None:
        """Install the loss and push the (loaded) weights to the rollout engine."""
        super().on_init_end()
        self.actor_rollout_wg.set_loss_fn(partial(actor_loss, self.settings))
        self.updater = ActorUpdater(
            self.actor_rollout_wg, self.config, self.settings, self.state, self.tokenizer, self.seed
        )

    @property
    def rollouts(self) -> RolloutManager:
        """The manager verl's task runner made; it exists once ``fit`` has begun."""
        return self.agent_loop_manager

    # ---- rollouts ----------------------------------------------------------------------------------------------------
    def _sampling(self, *, validate: bool) -> Sampling:
        rollout = self.config.actor_rollout_ref.rollout
        source = rollout.val_kwargs if validate else rollout
        return Sampling(
            temperature=float(source.temperature),
            top_p=float(source.top_p),
            top_k=max(0, int(source.top_k)),
            max_tokens=int(rollout.response_length),
        )

    def prepare_step(self) -> dict[str, float]:
        """Draw the step's tasks and begin to play each of them ``rollout.n`` times."""
        if self._train_iterator is None:
            self._train_iterator = iter(self.train_dataloader)
        try:
            batch = next(self._train_iterator)
        except StopIteration:  # the next epoch
            self._train_iterator = iter(self.train_dataloader)
            batch = next(self._train_iterator)
        orders = [
            EpisodeOrder(
                f"{self.global_steps}-{number:05d}",
                sample,
                task_id,
                derive_seed(self.seed, "train", self.global_steps, number, sample),
            )
            for number, task_id in enumerate(batch["task_id"])
            for sample in range(self.config.actor_rollout_ref.rollout.n)
        ]
        self._pending = self.rollouts.start(
            orders, self._sampling(validate=False), self.environment.train_split, keep=True
        )
        return {}

    # ---- the step ----------------------------------------------------------------------------------------------------
    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        t, settings, state = self.global_steps, self.settings, self.state
        driver = _Stopwatch()

        with marked_timer("gen", timing_raw):  # 1. rollouts, begun in prepare_step
            records = self.rollouts.collect(self._pending)

        with driver:  # 2.-5., 7. rewards, faults, masks, group filter, advantages
            mu, gamma = settings.reward.weight(t), settings.sil.weight(t)
            limit = self.config.data.max_response_length
            plan = plan_update(records, settings, mu=mu, max_response_length=limit)

        if plan.rows:
            with marked_timer("old_log_prob", timing_raw):  # 6. old log-probs by the actor
                fresh = self.updater.recompute_log_probs(plan.rows, metrics)
            with driver:  # 8., 9. buffers
                if state.baseline is not None:
                    state.baseline.extend(plan.baselines)
                replay = self._draw(t, metrics) if settings.sil.enabled else Replay.empty()
            with marked_timer("update_actor", timing_raw):  # 10. on-policy and self-imitation updates
                self.updater.update(fresh, replay, gamma, metrics)
            with driver:  # 11. this step's rows, so that what is replayed is always older
                if settings.sil.enabled and (settings.sil.always_add or not replay.entries):
                    self._add(fresh, t, metrics)
        with driver:
            metrics.update(summarize_episodes(records))
            metrics.update(summarize_rewards(plan.rewards, records))
            metrics.update(summarize_plan(plan))
            metrics.update(self._summarize_buffers())
        metrics.update({"spear/gamma": gamma, "spear/mu": mu, "perf/spear_driver_seconds": driver.seconds})
        # By construction: an episode asks for a response only while its environment runs.
        metrics["rollout/wasted_generations"] = float(_count_wasted(records))
        metrics["rollout/generations"] = float(sum(record.turns for record in records))
        keys = self.updater.take_keys([row.key for record in records if record.fault is None for row in record.rows])
        return KVBatchMeta(partition_id=PARTITION, keys=keys, tags=[{} for _ in keys])

    def _draw(self, t: int, metrics: dict[str, Any]) -> Replay:
        replay = self.state.replay
        metrics["replay/evicted_age"] = float(replay.evict(t))
        if not replay.is_ready():
            return Replay.empty()
        size = len(replay)
        draw = replay.draw(self.state.baseline)
        ages = [t - entry.step for entry in draw.entries]
        metrics.update(
            {
                "replay/considered": float(draw.considered),
                "replay/eligible": float(draw.eligible),
                "replay/drawn": float(len(draw.entries)),
                "replay/discarded": float(size - len(draw.entries)),
                "replay/mean_age": sum(ages) / len(ages) if ages else 0.0,
            }
        )
        return Replay(tuple(draw.entries), tuple(draw.advantages.tolist()))

    def _add(self, fresh, t: int, metrics: dict[str, Any]) -> None:
        entries, nonpositive = fresh.to_entries(t)
        kept = self.state.replay.add(entries)
        metrics.update(
            {
                "replay/kept": float(kept),
                "replay/dropped_nonpositive": float(nonpositive),
                "replay/dropped_other": float(len(entries) - kept),
            }
        )

    def _summarize_buffers(self) -> dict[str, float]:
        replay, baseline = self.state.replay, self.state.baseline
        metrics = {"replay/size": float(len(replay)), "replay/bytes": float(replay.nbytes)}
        if baseline is not None:
            metrics["baseline/size"] = float(len(baseline))
            if len(baseline):
                metrics["baseline/p50"] = float(baseline.percentile())
        if self.state.bounds is not None:
            metrics["cov/lower"], metrics["cov/upper"] = self.state.bounds
        return metrics

    def _compute_metrics(
        self, batch, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps, epoch
    ) -> None:
        """Add times to the metrics; all others are made where their numbers are at hand."""
        metrics.update({f"timing_s/{name}": seconds for name, seconds in timing_raw.items()})
        metrics["training/global_step"] = global_steps
        metrics["training/epoch"] = epoch
        metrics["perf/step_seconds"] = timing_raw["step"]
        metrics["perf/spear_driver_share"] = metrics.get("perf/spear_driver_seconds", 0.0) / timing_raw["step"]

    # ---- validation --------------------------------------------------------------------------------------------------
    def _validate(self) -> dict[str, float]:
        """Play the whole validation split ``val_kwargs.n`` times, always with the same seeds."""
        start = time.perf_counter()
        orders = [
            EpisodeOrder(f"{number:05d}", sample, task["task_id"], derive_seed(self.seed, "valid", number, sample))
            for number, task in ((i, self.val_dataset[i]) for i in range(len(self.val_dataset)))
            for sample in range(self.config.actor_rollout_ref.rollout.val_kwargs.n)
        ]
        futures = self.rollouts.start(orders, self._sampling(validate=True), self.environment.valid_split, keep=False)
        summary = summarize_episodes(self.rollouts.collect(futures))
        metrics = {f"val/{name}": value for name, value in summary.items()}
        metrics["val/seconds"] = time.perf_counter() - start
        return metrics

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def _save_checkpoint(self) -> None:
        # Before verl writes the tracker file that makes the checkpoint the latest one.
        self.state.save(self._checkpoint_folder())
        super()._save_checkpoint()

    def _load_checkpoint(self) -> None:
        super()._load_checkpoint()
        if self.global_steps:
            self.state.load(self._checkpoint_folder())

    def _checkpoint_folder(self) -> Path:
        if self.config.trainer.resume_mode == "resume_path":
            given = Path(self.config.trainer.resume_from_path)
            if given.name == f"global_step_{self.global_steps}":
                return given
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"


def _count_wasted(records: list[EpisodeRecord]) -> int:
    """Generations without an environment step: none, unless the context or a fault cut an episode short in mid-turn."""
    return sum(max(0, len(record.rows) - record.turns) for record in records)


class _Stopwatch:
    """Adds up the seconds of the blocks it is entered for."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.perf_counter() - self._start

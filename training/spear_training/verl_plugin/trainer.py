"""SPEAR's training step on verl's workers, TransferQueue, checkpoints and loggers.

:meth:`SpearTrainer._step_once` is the algorithm, top to bottom (``alg:sal``). verl's own loop around it stays as it is:
``fit`` prepares a step, runs it, checkpoints, pushes weights to the rollout engine, validates and logs.
"""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from omegaconf import OmegaConf
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.utils.debug import marked_timer

from spear_agents.engines.base import Sampling, derive_seed
from spear_agents.engines.vision import has_vision
from spear_agents.metrics import read_history
from spear_envs.core.errors import SpearError
from spear_training.checkpoints import check_files, describe_code, is_finished, keep_best, write_manifest
from spear_training.launch import CONFIG_FILE, flatten_config
from spear_training.recording import EpisodeRecorder
from spear_training.settings import RunSettings
from spear_training.verl_plugin.critic import CriticUpdater, critic_loss
from spear_training.verl_plugin.deaths import explain_death
from spear_training.verl_plugin.loss import actor_loss
from spear_training.verl_plugin.metrics import summarize_episodes, summarize_plan, summarize_rewards, summarize_rows
from spear_training.verl_plugin.plan import plan_update
from spear_training.verl_plugin.queue import StepQueue
from spear_training.verl_plugin.rollout_servers import close_servers
from spear_training.verl_plugin.rollout_worker import PARTITION, EpisodeOrder, RolloutManager
from spear_training.verl_plugin.state import SpearState
from spear_training.verl_plugin.update import ActorUpdater, Replay, Stopwatch
from spear_training.verl_plugin.workers import SpearActorRolloutRefWorker, SpearCriticWorker

NAME = "spear"
IMAGE_PROCESSOR = "preprocessor_config.json"


class NoSampler:
    """Stands where verl keeps its rollout sampler; :class:`SpearTrainer` waits for its rollouts itself."""


@register_trainer(NAME)
class SpearTrainer(PPOTrainerSync):
    """verl's synchronous trainer with SPEAR's step."""

    def __init__(self, config) -> None:
        super().__init__(config)
        # verl takes any registered name but "sync" for an asynchronous mode.
        self.trainer_mode = "sync"
        run = RunSettings.from_config(config)
        self.settings, self.environment, self.seed, self.record = run.algorithm, run.env, run.seed, run.record
        self.recorder = EpisodeRecorder(
            Path(config.trainer.default_local_dir).parent,
            {
                "env_id": self.environment.id,
                "env_kwargs": dict(self.environment.kwargs),
                "split": self.environment.train_split,
                "model": str(config.actor_rollout_ref.model.path),
            },
        )
        self.state = SpearState(self.settings, self.seed)
        self._pending: list[Any] = []
        self._train_iterator: Any = None
        self._metrics: dict[str, float] = {}
        """Those of the step under way, once it has trained."""
        self._step_start = 0.0
        self._saved: dict[str, Any] | None = None
        """What the checkpoint that this run resumed from was saved with."""

    # ---- set-up: verl's hooks ----------------------------------------------------------------------------------------
    def _build_replay_buffer(self) -> NoSampler:
        return NoSampler()

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            worker = SpearCriticWorker if role is Role.Critic else SpearActorRolloutRefWorker
            self.role_worker_mapping[role] = ray.remote(worker)

    def on_init_end(self) -> None:
        """Install the losses and push the (loaded) weights to the rollout engine."""
        super().on_init_end()
        self.install_algorithm()

    def install_algorithm(self) -> None:
        """Bring ``settings`` and ``state`` to the workers: losses, and the updaters that call them."""
        self.queue = StepQueue(self.tokenizer, vision=has_vision(self.config.actor_rollout_ref.model.path))
        shared = (self.config, self.settings, self.state, self.queue)
        self.updater = ActorUpdater(self.actor_rollout_wg, *shared, reference_in_actor=self.ref_in_actor)
        corrected = self.updater.correction is not None
        self.actor_rollout_wg.set_loss_fn(partial(actor_loss, self.settings, corrected=corrected))
        if self.use_critic:
            self.critic_wg.set_loss_fn(partial(critic_loss, self.settings.critic))
            self.critic = CriticUpdater(self.critic_wg, *shared)

    @property
    def rollouts(self) -> RolloutManager:
        """The manager verl's task runner made; it exists once ``fit`` has begun."""
        return self.agent_loop_manager

    def fit(self, agent_loop_manager: Any) -> None:
        """verl's loop; whatever ends it, the rollout servers end in order.

        Raises:
            SpearError: a worker process died.
        """
        try:
            super().fit(agent_loop_manager)
        except (ray.exceptions.RayError, RuntimeError) as error:
            explanation = explain_death(error)
            if explanation is None:
                raise
            raise SpearError(explanation) from error
        finally:
            close_servers(self.llm_server_manager.get_replicas())

    def on_train_begin(self) -> None:
        """Log the checkpoint's own step if the run was killed between its checkpoint and its log line."""
        super().on_train_begin()
        if self._saved is None:
            return
        step = int(self._saved["step"])
        logged = read_history(Path(self.config.trainer.default_local_dir).parent)
        if any(record["step"] == step and "training/global_step" in record for record in logged):
            return
        metrics, trainer = dict(self._saved["metrics"]), self.config.trainer
        if not trainer.val_before_train and trainer.test_freq > 0 and step % trainer.test_freq == 0:
            self.global_steps = step  # verl has gone on to the next one
            self.on_validate_begin()
            metrics.update(self._validate())
            self.on_validate_end()
            self.global_steps = step + 1
        self.logger.log(data=metrics, step=step)

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
        # Of as many tasks as there are, then further samples of the same.
        tasks, count = len(batch["task_id"]), self.record.count(self.global_steps)
        orders = [
            EpisodeOrder(
                f"{self.global_steps}-{number:05d}",
                sample,
                task_id,
                derive_seed(self.seed, "train", self.global_steps, number, sample),
                recorded=sample * tasks + number < count,
            )
            for number, task_id in enumerate(batch["task_id"])
            for sample in range(self.config.actor_rollout_ref.rollout.n)
        ]
        self._pending = self.rollouts.start(
            orders, self._sampling(validate=False), self.environment.train_split, keep=True
        )
        return {}

    # ---- the step ----------------------------------------------------------------------------------------------------
    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """verl's step; its metrics, as verl aggregates them, are kept for the checkpoint."""
        self._step_start = time.perf_counter()
        batch = super().step(metrics, timing_raw)
        self._metrics = dict(metrics)
        return batch

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        t, settings, state = self.global_steps, self.settings, self.state
        driver = Stopwatch()

        with marked_timer("gen", timing_raw):  # 1. rollouts, begun in prepare_step
            self.on_sample_begin()
            rollout = self.rollouts.collect(self._pending)
            self.on_sample_end()  # a rollout engine that shares the device gives its memory back
        records = rollout.records

        with driver:  # 2.-5., 7. rewards, faults, masks, group filter, advantages
            mu, gamma = settings.reward.weight(t), settings.sil.weight(t)
            limit = self.config.data.max_response_length
            plan = plan_update(records, settings, mu=mu, max_response_length=limit)

            if state.baseline is not None:  # 8. (a step whose rows are all filtered still tells what rewards are usual)
                state.baseline.extend(plan.baselines)
        if plan.rows:
            with marked_timer("old_log_prob", timing_raw):  # 6. old log-probs, by the actor unless bypassed
                fresh = self.updater.collect_rows(plan.rows, metrics)
            if self.use_critic:  # 7. with PPO, advantages are of tokens
                with marked_timer("values", timing_raw):
                    fresh, targets = self.critic.estimate(fresh, metrics)
                    plan = replace(plan, rows=fresh.rows)
                with marked_timer("update_critic", timing_raw):
                    self.critic.update(fresh, targets, metrics)
            with driver:  # 9. replay
                replay = self._draw(t, metrics) if settings.sil.enabled else Replay.empty()
            if not self.use_critic or t > settings.critic.warmup:
                with marked_timer("update_actor", timing_raw):  # 10. on-policy and self-imitation updates
                    self.updater.update(fresh, replay, gamma, metrics)
            with driver:  # 11. this step's rows, so that what is replayed is always older
                if settings.sil.enabled and (settings.sil.always_add or not replay.entries):
                    self._add(fresh, t, metrics)
        with driver:
            metrics.update(summarize_episodes(records))
            metrics.update(summarize_rows(records))
            metrics.update(summarize_rewards(plan.rewards, records))
            metrics.update(summarize_plan(plan))
            metrics.update(self._summarize_buffers())
            metrics["rollout/recorded"] = float(self.recorder.write(t, rollout.episodes))
        driver.seconds += self.updater.take_replay_seconds()
        metrics.update({"spear/gamma": gamma, "spear/mu": mu, "perf/spear_driver_seconds": driver.seconds})
        metrics["rollout/generations"] = float(rollout.generations)
        # Every response asked for must have been played as a turn.
        metrics["rollout/wasted_generations"] = float(rollout.generations - sum(record.turns for record in records))
        keys = self.queue.take_keys([row.key for record in records if record.fault is None for row in record.rows])
        return KVBatchMeta(partition_id=PARTITION, keys=keys, tags=[{} for _ in keys])

    def _draw(self, t: int, metrics: dict[str, Any]) -> Replay:
        replay = self.state.replay
        metrics["replay/evicted_age"] = float(replay.evict(t))
        if not replay.is_ready():
            return Replay.empty()
        draw = replay.draw(self.state.baseline)
        metrics.update(
            {
                "replay/considered": float(draw.considered),
                "replay/eligible": float(draw.eligible),
                "replay/drawn": float(draw.drawn),
                "replay/discarded": float(draw.discarded),
                "replay/mean_age": float(draw.mean_age(t)),
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
        summary = summarize_episodes(self.rollouts.collect(futures).records)
        metrics = {f"val/{name}": value for name, value in summary.items()}
        metrics["val/seconds"] = time.perf_counter() - start
        self._keep_best(metrics)
        return metrics

    def _keep_best(self, metrics: dict[str, float]) -> None:
        """Keep this step's checkpoint, if it has one, as the best one so far."""
        name, folder = self.config.spear.keep_best, self._checkpoint_folder()
        if name is None or not is_finished(folder):
            return
        if f"val/{name}" not in metrics:
            raise SpearError(f"spear.keep_best={name} is no metric of the validation; there are {', '.join(metrics)}")
        keep_best(folder, name, metrics[f"val/{name}"])

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def _save_checkpoint(self) -> None:
        # Before verl writes the tracker file that makes the checkpoint the latest one.
        folder = self._checkpoint_folder()
        about = {
            "step": self.global_steps,
            "config": self._read_config(),
            "code": describe_code(),
            "metrics": self._measure_step(),
        }
        self.state.save(folder, about)
        super()._save_checkpoint()
        self._complete_export(folder / "actor" / "huggingface")
        write_manifest(folder)
        # verl removes the weights of old checkpoints only; what is left of them cannot be resumed from.
        for folder in Path(self.config.trainer.default_local_dir).glob("global_step_*"):
            if not (folder / "actor").is_dir():
                shutil.rmtree(folder, ignore_errors=True)

    def _read_config(self) -> dict[str, Any]:
        """The settings of this run as its folder states them."""
        path = Path(self.config.trainer.default_local_dir).parent / CONFIG_FILE
        return flatten_config(OmegaConf.load(path)) if path.is_file() else {}

    def _measure_step(self) -> dict[str, float]:
        """Metrics of the step under way: a kill before verl logs them must not leave a hole in the curve."""
        return {
            **self._metrics,
            "training/global_step": self.global_steps,
            "training/epoch": (self.global_steps - 1) // self.steps_per_epoch,
            "perf/step_seconds": time.perf_counter() - self._step_start,
        }

    def _complete_export(self, folder: Path) -> None:
        """Add the image processor's settings, which verl only saves with a whole processor (it needs torchvision)."""
        source = Path(self.config.actor_rollout_ref.model.path) / IMAGE_PROCESSOR
        if folder.is_dir() and source.is_file() and not (folder / IMAGE_PROCESSOR).exists():
            shutil.copyfile(source, folder / IMAGE_PROCESSOR)

    def _load_checkpoint(self) -> None:
        latest = find_latest_ckpt_path(self.config.trainer.default_local_dir)
        if latest is not None:
            check_files(Path(latest))  # before anything of it is loaded
        super()._load_checkpoint()
        self.recorder.resume_after(self.global_steps)
        if self.global_steps:
            self._saved = self.state.load(self._checkpoint_folder())

    def _checkpoint_folder(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"

"""SPEAR's training step on verl's workers, TransferQueue, checkpoints and loggers, and the tasks that it draws.

verl's own loop around :class:`~spear_training.step.step.SpearStep` is unchanged.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import ray
import torch
from omegaconf import OmegaConf
from torch.utils.data import Dataset
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils.checkpoint.checkpoint_manager import find_latest_ckpt_path
from verl.workers.rollout.llm_server import LLMServerClient

from spear_agents.engines.base import Sampling, derive_seed
from spear_agents.engines.vision import has_vision
from spear_agents.evaluation.records import read_history
from spear_agents.play.snapshots import Snapshot
from spear_agents.play.trajectory import Layout
from spear_envs.core.errors import SpearError
from spear_envs.core.tasks import Task, choose_subset
from spear_training.algorithms.curriculum import Choice
from spear_training.run.checkpoints import (
    check_files,
    clear_unfinished,
    describe_code,
    finish_checkpoint,
    is_finished,
    keep_best,
    list_steps,
    remove_old,
)
from spear_training.run.config import EnvironmentSettings, flatten
from spear_training.run.environments import make_environment
from spear_training.run.inputs import TASKS_FILE
from spear_training.run.store import CheckpointStore, Uploads, name_dtype
from spear_training.run.to_verl import read_node
from spear_training.step.records import VALIDATIONS, EpisodeRecorder, Rollout
from spear_training.step.state import SpearState
from spear_training.step.step import SpearStep, summarize_episodes, summarize_versions
from spear_training.step.tasks import BatchesAhead, Branching, Curriculum
from spear_training.step.update import UpdateSizes
from spear_training.verl_plugin.actor import VerlActor, VerlCritic, actor_loss, critic_loss
from spear_training.verl_plugin.queue import PARTITION, StepQueue
from spear_training.verl_plugin.rollout_servers import OneServerClient, close_servers, explain_death
from spear_training.verl_plugin.rollout_worker import EpisodeOrder, RolloutManager
from spear_training.verl_plugin.workers import SpearActorRolloutRefWorker, SpearTrainingWorker


class TaskDataset(Dataset):
    """One item a task: ``{"task_id", "raw_prompt", "index", "dummy"}``.

    verl names a dataset by ``data.custom_cls`` and builds it from ``data.train_files`` or ``data.val_files``; those
    hold the split here (``train``, ``valid``, ``test``), and ``data.spear_env`` the environment. Prompts are built turn
    by turn in the episode. ``max_samples`` -1 is all tasks; fewer have each subtask in its share.
    """

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples: int = -1, **_: Any) -> None:
        settings = EnvironmentSettings.from_mapping(OmegaConf.to_container(config.spear_env, resolve=True))
        env: Any = make_environment(settings, split=str(data_files))
        self._tasks = env.unwrapped.tasks
        env.close()
        self._positions = choose_subset(self._tasks, max_samples)

    @property
    def tasks(self) -> Sequence[Task]:
        """Tasks to draw from; those of a generated set are made."""
        return [self._tasks[position] for position in self._positions]

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        # verl sizes a batch by "raw_prompt" and needs one tensor column.
        return {
            "task_id": self._tasks[self._positions[index]].id,
            "raw_prompt": [],
            "index": index,
            "dummy": torch.zeros(1, dtype=torch.uint8),
        }


NAME = "spear"
IMAGE_PROCESSOR = "preprocessor_config.json"


@register_trainer(NAME)
class SpearTrainer(PPOTrainerSync):
    """verl's synchronous trainer with SPEAR's step, and episodes that may be played before it."""

    def __init__(self, config) -> None:
        super().__init__(config)
        # verl takes any registered name but "sync" for an asynchronous mode.
        self.trainer_mode = "sync"
        self.run = run = read_node(config)
        self.settings, self.environment, self.seed, self.record = run.algorithm, run.env, run.seed, run.record
        identity = {
            "env_id": self.environment.id,
            "env_kwargs": dict(self.environment.kwargs),
            "split": self.environment.train_split,
            "model": str(config.actor_rollout_ref.model.path),
        }
        out = Path(config.trainer.default_local_dir).parent
        self.recorder = EpisodeRecorder(out, identity)
        self.validations = EpisodeRecorder(out, identity | {"split": self.environment.valid_split}, VALIDATIONS)
        self.state = SpearState(self.settings, self.seed)
        store = CheckpointStore(run.checkpoint.store) if run.checkpoint.store is not None else None
        self.uploads = Uploads(store, out, run.checkpoint.keep)
        self.staleness = run.rollout.staleness
        self._batches = BatchesAhead(self.staleness, self._draw_tasks, self._start_batch)
        self.curriculum: Curriculum | None = None
        branch = self.settings.branch
        self.branching = Branching(branch, self.seed) if branch.share > 0 else None
        self._train_iterator: Any = None
        self._metrics: dict[str, float] = {}
        """Metrics of the step under way, once it has trained."""
        self._step_start = 0.0
        self._saved: dict[str, Any] | None = None
        """State saved with the checkpoint that this run resumed from."""

    # ---- set-up: verl's hooks ----------------------------------------------------------------------------------------
    def _build_replay_buffer(self) -> object:
        return object()  # instead of verl's rollout sampler: this trainer waits for its rollouts itself

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        settings = self.settings.curriculum
        if settings.choice is not Choice.UNIFORM:
            group = self.config.actor_rollout_ref.rollout.n
            self.curriculum = Curriculum(self.train_dataset.tasks, settings, group, self.seed)

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            worker = SpearTrainingWorker if role is Role.Critic else SpearActorRolloutRefWorker
            self.role_worker_mapping[role] = ray.remote(worker)

    def on_init_end(self) -> None:
        """Install the losses and push the (loaded) weights to the rollout engine."""
        super().on_init_end()
        self.install_algorithm()

    def install_algorithm(self) -> None:
        """Bring ``settings`` and ``state`` to the workers: the losses, and the step that calls them."""
        config, settings, rollout = self.config, self.settings, self.config.actor_rollout_ref.rollout
        self.queue = StepQueue(self.tokenizer, vision=has_vision(config.actor_rollout_ref.model.path))
        self.actor_rollout_wg.set_loss_fn(partial(actor_loss, settings))
        actor = VerlActor(self.actor_rollout_wg, config, settings, self.queue, reference_in_actor=self.ref_in_actor)
        critic = None
        if self.use_critic:
            self.critic_wg.set_loss_fn(partial(critic_loss, settings.critic))
            critic = VerlCritic(self.critic_wg, config, self.state.rng, self.queue)
        limit = int(config.data.max_response_length)
        sizes = UpdateSizes(
            rows_per_minibatch=config.actor_rollout_ref.actor.ppo_mini_batch_size * rollout.n,
            scale_factor=float(settings.loss.scale_factor or limit),
            epochs=config.actor_rollout_ref.actor.ppo_epochs,
            balance=config.trainer.balance_batch,
        )
        own = self.environment.max_turn_tokens if self.environment.layout is Layout.PER_TURN else None
        self.spear_step = SpearStep(
            settings,
            self.state,
            actor,
            critic,
            max_response_length=min(own or limit, limit),
            longest_row=self.run.longest_row,
            sizes=sizes,
        )

    def get_llm_client(self) -> LLMServerClient:
        """Return verl's client of the rollout servers. The load balancer ends where there is nothing to balance."""
        manager = self.llm_server_manager
        if len(manager.server_handles) > 1:
            return super().get_llm_client()
        ray.kill(manager.global_load_balancer)
        return OneServerClient(self.config, manager.server_addresses[0], manager.server_handles[0])

    @property
    def rollouts(self) -> RolloutManager:
        """The manager verl's task runner made; it exists once ``fit`` has begun."""
        return self.agent_loop_manager

    def fit(self, agent_loop_manager: Any) -> None:
        """Run verl's loop, and end the rollout servers in order. Raises SpearError if a worker died."""
        try:
            super().fit(agent_loop_manager)
        except (ray.exceptions.RayError, RuntimeError) as error:
            explanation = explain_death(error)
            if explanation is None:
                raise
            raise SpearError(explanation) from error
        finally:
            self.uploads.wait()
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
        is_due = step % max(1, trainer.test_freq) == 0 or step >= self.total_training_steps
        if not trainer.val_before_train and trainer.test_freq > 0 and is_due:
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
        row = int(rollout.response_length)
        return Sampling(
            temperature=float(source.temperature),
            top_p=float(source.top_p),
            top_k=max(0, int(source.top_k)),
            max_tokens=min(self.environment.max_turn_tokens or row, row),
        )

    def prepare_step(self) -> dict[str, float]:
        """Begin to play the tasks of this step, and of as many after it as ``rollout.staleness`` says."""
        self._batches.reach(self.global_steps, self.total_training_steps)
        return {}

    def _draw_tasks(self) -> list[str]:
        """Return the task ids of the next batch: the curriculum's, or the next ones of verl's data loader."""
        if self.curriculum is not None:
            return list(self.curriculum.draw(self.config.data.train_batch_size))
        batch = next(self._train_iterator, None) if self._train_iterator is not None else None
        while batch is None:  # the next epoch; twice where a checkpoint restored the loader at the end of one
            self._train_iterator = iter(self.train_dataloader)
            batch = next(self._train_iterator, None)
        return list(batch["task_id"])

    def _start_batch(self, step: int, tasks: list[str], number: int = 0) -> list[Any]:
        """Begin to play each of ``tasks`` ``rollout.n`` times, as the batch ``number`` (from 0) of ``step``.

        Snapshots may take the places of the last tasks.
        """
        first, size = number * len(tasks), len(tasks)
        names = [f"{step}-{group:05d}" for group in range(first, first + size)]
        begun: list[tuple[str, Snapshot | None]] = [(task, None) for task in tasks]
        if self.branching is not None:
            begun = self.branching.begin(names, tasks)
        # Of as many tasks as there are, then further samples of the same; what began in snapshots comes last.
        count = self.record.count(step) if number == 0 else 0
        branched = sum(snapshot is not None for _, snapshot in begun)
        orders = [
            EpisodeOrder(
                names[place],
                sample,
                task_id,
                derive_seed(self.seed, "train", step, first + place, sample),
                recorded=sample * size + (place - branched) % size < count,
                begin=snapshot,
            )
            for place, (task_id, snapshot) in enumerate(begun)
            for sample in range(self.config.actor_rollout_ref.rollout.n)
        ]
        return self.rollouts.start(orders, self._sampling(validate=False), self.environment.train_split, keep=True)

    # ---- what SpearStep asks for its rollouts ------------------------------------------------------------------------
    def play(self, number: int) -> Rollout:
        """Return the rollouts of the batch ``number`` of this step's tasks; the first was begun in
        :meth:`prepare_step`.
        """
        if number == 0:
            self.on_sample_begin()
            playing = self._batches.take()
        else:
            playing = self._start_batch(self.global_steps, self._draw_tasks(), number)
        rollout = self.rollouts.collect(playing)
        if self.curriculum is not None:
            self.curriculum.update(rollout.records)
        if self.branching is not None:
            self.branching.update(rollout)
        return rollout

    def finish(self) -> None:
        """Let a rollout engine that shares the device give its memory back; one that plays ahead shares none."""
        if self.staleness == 0:
            self.on_sample_end()

    # ---- the step ----------------------------------------------------------------------------------------------------
    def step(self, metrics: dict[str, Any], timing_raw: dict[str, float]) -> KVBatchMeta:
        """Run verl's step and keep its metrics, as verl aggregates them, for the checkpoint."""
        self._step_start = time.perf_counter()
        batch = super().step(metrics, timing_raw)
        self._metrics = dict(metrics)
        return batch

    def _step_once(self, metrics: dict[str, Any], timing_raw: dict[str, float], sample_batch_size: int) -> KVBatchMeta:
        report = self.spear_step.run(self.global_steps, self)
        metrics.update(report.metrics)
        timing_raw.update(report.seconds)
        if self.staleness:
            metrics.update(summarize_versions(report.rollout, self.global_steps - 1))
        if self.curriculum is not None:
            metrics.update(self.curriculum.summarize())
        if self.branching is not None:
            metrics.update(self.branching.summarize(report.rollout.records))
        metrics["rollout/recorded"] = float(self.recorder.write(self.global_steps, report.rollout.episodes))
        keys = self.queue.take_keys(report.rollout.rows.key.tolist())
        return KVBatchMeta(partition_id=PARTITION, keys=keys, tags=[{} for _ in keys])

    def _compute_metrics(
        self, batch, metrics: dict[str, Any], timing_raw: dict[str, float], global_steps, epoch
    ) -> None:
        """Add times to the metrics; all others are made where their numbers are at hand."""
        metrics.update({f"timing_s/{name}": seconds for name, seconds in timing_raw.items()})
        metrics["training/global_step"] = global_steps
        metrics["training/epoch"] = epoch
        metrics["perf/step_seconds"] = timing_raw["step"]
        metrics["perf/spear_driver_share"] = metrics.get("perf/spear_driver_seconds", 0.0) / timing_raw["step"]
        tokens = (metrics["tokens/prompt"] + metrics["tokens/response"]) / timing_raw["step"]
        ranks = self.config.trainer.nnodes * self.config.trainer.n_gpus_per_node
        metrics["perf/tokens_per_second"], metrics["perf/tokens_per_second_per_rank"] = tokens, tokens / ranks

    # ---- validation --------------------------------------------------------------------------------------------------
    def _validate(self) -> dict[str, float]:
        """Play the validation split ``val_kwargs.n`` times, always with the same seeds."""
        start = time.perf_counter()
        tasks, recorded = len(self.val_dataset), self.config.trainer.log_val_generations
        orders = [
            EpisodeOrder(
                f"{number:05d}",
                sample,
                task["task_id"],
                derive_seed(self.seed, "valid", number, sample),
                recorded=sample * tasks + number < recorded,
            )
            for number, task in ((i, self.val_dataset[i]) for i in range(tasks))
            for sample in range(self.config.actor_rollout_ref.rollout.val_kwargs.n)
        ]
        futures = self.rollouts.start(orders, self._sampling(validate=True), self.environment.valid_split, keep=False)
        rollout = self.rollouts.collect(futures)
        if recorded:
            self.validations.resume_after(self.global_steps - 1)  # a resumed training may validate a step again
            self.validations.write(self.global_steps, rollout.episodes)
        metrics = {f"val/{name}": value for name, value in summarize_episodes(rollout.records).items()}
        metrics["val/seconds"] = time.perf_counter() - start
        self._keep_best(metrics)
        return metrics

    def _keep_best(self, metrics: dict[str, float]) -> None:
        """Keep this step's checkpoint, if it has one, as the best one so far."""
        name, folder = self.run.validation.keep_best, self._checkpoint_folder()
        if name is None or not is_finished(folder):
            return
        if f"val/{name}" not in metrics:
            if any(key.startswith("val/fault/") for key in metrics):
                return  # all that it is measured on may have ended so, which is no reason to end the training
            raise SpearError(f"validation.keep_best={name} is not a metric of the validation: {', '.join(metrics)}")
        keep_best(folder, name, metrics[f"val/{name}"])

    # ---- checkpoints -------------------------------------------------------------------------------------------------
    def _save_checkpoint(self) -> None:
        # Before verl writes the tracker file that makes the checkpoint the latest one.
        folder = self._checkpoint_folder()
        tasks = Path(self.config.trainer.default_local_dir).parent / TASKS_FILE
        about = {
            "step": self.global_steps,
            "config": dict(flatten(self.run.to_mapping())),
            "code": describe_code(),
            "inputs": json.loads(tasks.read_text("utf-8")) if tasks.is_file() else {},
            "metrics": self._measure_step(),
            "ahead": self._batches.list_drawn(),
            "curriculum": self.curriculum.state_dict() if self.curriculum is not None else None,
            "branch": self.branching.state_dict() if self.branching is not None else None,
        }
        clear_unfinished(folder)
        self.state.save(folder, about)
        self.uploads.wait()  # verl may remove what is under way
        super()._save_checkpoint()
        # The image processor's settings, which verl only saves with a whole processor (it needs torchvision).
        export, source = folder / "actor" / "huggingface", Path(self.config.actor_rollout_ref.model.path)
        if export.is_dir() and (source / IMAGE_PROCESSOR).is_file() and not (export / IMAGE_PROCESSOR).exists():
            shutil.copyfile(source / IMAGE_PROCESSOR, export / IMAGE_PROCESSOR)
        name_dtype(export, self.run.rollout.dtype.value)
        finish_checkpoint(folder)
        remove_old(folder.parent, self.run.checkpoint.keep)
        # verl removes the weights of old checkpoints only; what is left of them cannot be resumed from.
        for step in list_steps(folder.parent):
            if not (folder.parent / f"global_step_{step}" / "actor").is_dir():
                shutil.rmtree(folder.parent / f"global_step_{step}", ignore_errors=True)
        self.uploads.begin(self.global_steps)

    def _measure_step(self) -> dict[str, float]:
        """Return the metrics of the step under way: a kill before verl logs them must not leave a hole in the curve."""
        return {
            **self._metrics,
            "training/global_step": self.global_steps,
            "training/epoch": (self.global_steps - 1) // self.steps_per_epoch,
            "perf/step_seconds": time.perf_counter() - self._step_start,
        }

    def _load_checkpoint(self) -> None:
        latest = find_latest_ckpt_path(self.config.trainer.default_local_dir)
        if latest is not None:
            check_files(Path(latest))  # before anything of it is loaded
        super()._load_checkpoint()
        self.recorder.resume_after(self.global_steps)
        if self.global_steps:
            self._saved = self.state.load(self._checkpoint_folder())
            self._batches.restore(self._saved["ahead"])
            if self.curriculum is not None:
                self.curriculum.load_state_dict(self._saved["curriculum"])
            if self.branching is not None:
                self.branching.load_state_dict(self._saved.get("branch"))

    def _checkpoint_folder(self) -> Path:
        return Path(self.config.trainer.default_local_dir) / f"global_step_{self.global_steps}"

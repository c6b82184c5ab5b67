"""The two calls on verl's actor workers that a step makes: log-probs of fresh rows, and the optimiser steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import DictConfig
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics

from training.algorithms import Coupling, ReplayEntry, calibrate_covariance_bounds, sequence_entropy
from training.algorithms.settings import SpearSettings
from training.verl_plugin.batch import (
    FORWARD_COLUMNS,
    RowTokens,
    build_columns,
    deal_rows,
    find_predictions,
    nest_flat,
    weigh_rows,
)
from training.verl_plugin.loss import STEERING
from training.verl_plugin.plan import PlannedRow
from training.verl_plugin.rollout_worker import PARTITION
from training.verl_plugin.state import SpearState

TRAIN_COLUMNS = (*FORWARD_COLUMNS, "old_log_probs", STEERING)
SEED_RANGE = 2**20
"""Seeds of rows in the steering column stay whole numbers in float32, also when thousands are added up in float64."""


@dataclass(frozen=True)
class FreshRows:
    """This step's rows as the trainer sees them; response columns are concatenated over rows (ragged, no padding)."""

    rows: tuple[PlannedRow, ...]
    lengths: tuple[int, ...]
    mask: np.ndarray
    old_log_probs: np.ndarray
    tokens: tuple[tuple[np.ndarray, np.ndarray], ...]
    """Ids of prompt and response of each row."""

    def to_entries(self, step: int) -> tuple[list[ReplayEntry], int]:
        """Entries for the replay buffer, and how many rows had no positive advantage."""
        entries = []
        ends = np.cumsum(self.lengths)
        for planned, (prompt, response), end, length in zip(self.rows, self.tokens, ends, self.lengths, strict=True):
            if planned.advantage <= 0:
                continue
            part = slice(end - length, end)
            entries.append(
                ReplayEntry(
                    prompt_ids=prompt,
                    response_ids=response,
                    response_mask=self.mask[part],
                    old_log_probs=self.old_log_probs[part],
                    reward=planned.reward,
                    advantage=planned.advantage,
                    step=step,
                    trajectory_id=f"{step}/{planned.episode.trajectory_id}",
                    tool_calls=planned.episode.tool_calls,
                )
            )
        return entries, len(self.rows) - len(entries)


@dataclass(frozen=True)
class Replay:
    """Drawn entries with their recalibrated advantages (``eq:recalibrateadv``)."""

    entries: tuple[ReplayEntry, ...]
    advantages: tuple[float, ...]

    @classmethod
    def empty(cls) -> Replay:
        """Return no rows at all."""
        return cls((), ())


class Stopwatch:
    """Adds up the seconds of the blocks it is entered for."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self.seconds += time.perf_counter() - self._start


class ActorUpdater:
    """Brings rows to the actor workers: writes their columns into TransferQueue and calls the worker group.

    Args:
        worker_group: verl's actor worker group.
        config: whole configuration.
        settings: ``spear`` node.
        state: holds the covariance bounds and the dealer's stream.
        tokenizer: gives the id padding rows are made of.
    """

    def __init__(
        self,
        worker_group: Any,
        config: DictConfig,
        settings: SpearSettings,
        state: SpearState,
        tokenizer: Any,
    ) -> None:
        self._workers = worker_group
        self._config = config
        self._settings = settings
        self._state = state
        self._pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        self._rows_per_minibatch = actor.ppo_mini_batch_size * rollout.n
        self._scale_factor = float(settings.loss.scale_factor or config.data.max_response_length)
        self._step_keys: list[str] = []
        self._replay_watch = Stopwatch()

    # ---- log-probs ---------------------------------------------------------------------------------------------------
    def recompute_log_probs(self, rows: Sequence[PlannedRow], metrics: dict[str, Any]) -> FreshRows:
        """Old log-probs of ``rows`` by the actor; logs the entropy and how far the rollout's log-probs are off."""
        keys = [planned.row.key for planned in rows]
        fields = ["log_probs", "entropy", "loss_mask", "rollout_log_probs"]
        if self._settings.sil.enabled:
            fields.append("input_ids")
        prompts = np.asarray([planned.row.prompt_length for planned in rows])
        lengths = np.asarray([planned.row.response_length for planned in rows])
        data = self._forward(keys, prompts + lengths, fields, calculate_entropy=True)
        where = find_predictions(prompts, lengths)
        log_probs, entropy = data["log_probs"].values()[where].float(), data["entropy"].values()[where].float()
        mask = data["loss_mask"].values().bool()
        rollout = data["rollout_log_probs"].values()
        self._log_agreement(log_probs[mask], rollout[mask], metrics)
        padded = _pad(entropy, lengths)
        padded_mask = _pad(mask, lengths)
        norm = sequence_entropy(padded, padded_mask, loss_scale_factor=self._scale_factor)
        metrics["entropy/seq-mean-token-sum-norm"] = float(norm)
        metrics["entropy/seq-mean-token-sum"] = float(norm) * self._scale_factor
        metrics["entropy/token-mean"] = float(entropy[mask].mean())
        tokens: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
        if self._settings.sil.enabled:
            ids = data["input_ids"].values().numpy().astype(np.int32)
            with self._replay_watch:
                sequences = np.split(ids, np.cumsum(prompts + lengths)[:-1])
                tokens = tuple((row[:prompt], row[prompt:]) for row, prompt in zip(sequences, prompts, strict=True))
        return FreshRows(tuple(rows), tuple(lengths.tolist()), mask.numpy(), log_probs.numpy(), tokens)

    def _forward(
        self, keys: list[str], lengths: np.ndarray, fields: list[str], *, calculate_entropy: bool
    ) -> TensorDict:
        """One forward pass over the rows ``keys`` of ``lengths``; returns ``fields`` of these rows, in their order."""
        padding = self._add_padding(-len(keys) % self._ranks())
        meta = self._meta([*keys, *padding], FORWARD_COLUMNS)
        meta.extra_info = {
            "calculate_entropy": calculate_entropy,
            "compute_loss": False,
            "temperature": self._config.actor_rollout_ref.rollout.temperature,
            **self._cut(lengths, self._config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu),
        }
        self._workers.compute_log_prob(meta)
        return tq.kv_batch_get(keys=keys, partition_id=PARTITION, select_fields=fields)

    @staticmethod
    def _log_agreement(actor: torch.Tensor, rollout: torch.Tensor, metrics: dict[str, Any]) -> None:
        difference = (actor - rollout).abs()
        metrics["training/rollout_log_probs_diff_max"] = float(difference.max())
        metrics["training/rollout_log_probs_diff_mean"] = float(difference.mean())
        metrics["training/rollout_probs_diff_max"] = float((actor.exp() - rollout.exp()).abs().max())

    # ---- optimiser steps ---------------------------------------------------------------------------------------------
    def update(self, fresh: FreshRows, replay: Replay, gamma: float, metrics: dict[str, Any]) -> None:
        """Optimiser steps of one training step; the coupling decides how replayed rows enter (``eq:grpo_sal``)."""
        coupling = self._settings.sil.coupling
        with self._replay_watch:
            replay_keys = self._write_replay(replay) if gamma > 0 else []
        if replay_keys and self._state.bounds is None and self._settings.cov.ratio > 0:
            self._state.bounds = self._measure_bounds(replay_keys, replay)
        batch = _Batch.of_fresh(fresh)
        drawn = _Batch.of_replay(replay if replay_keys else Replay.empty(), replay_keys)
        weight, bounds = gamma, self._state.bounds or (0.0, 0.0)
        if coupling is Coupling.FOLDED:
            # gamma moves from the loss into the advantages; covariances shrink by it, so the bounds must too.
            drawn, weight = drawn.scale_advantages(gamma), 1.0
            bounds = (bounds[0] * gamma, bounds[1] * gamma)
        if coupling is Coupling.JOINT:
            steps = self._train(batch + drawn, weight, bounds, metrics, hold_learning_rate=False)
            metrics["replay/n_sil"] = 0.0 if not replay_keys else len(drawn.keys) / max(1, len(batch.keys))
        else:
            steps = self._train(batch, 1.0, bounds, metrics, hold_learning_rate=bool(replay_keys))
            replayed = 0
            if replay_keys:
                own: dict[str, Any] = {}
                replayed = self._train(drawn, weight, bounds, own, hold_learning_rate=False)
                own.pop("loss/on_policy")
                metrics.update({name: own[name] for name in ("loss/sil", "clip/cov_fraction", "actor/lr")})
                metrics.update({f"sil/{name}": own[name] for name in ("actor/grad_norm", "clip/ppo_fraction")})
            metrics["replay/n_sil"] = replayed / steps
        metrics["actor/optimizer_steps"] = float(steps)

    def _train(
        self,
        batch: _Batch,
        replay_weight: float,
        bounds: tuple[float, float],
        metrics: dict[str, Any],
        *,
        hold_learning_rate: bool,
    ) -> int:
        """One ``update_actor`` call; returns its number of mini-batches."""
        replay = np.asarray(batch.replay, dtype=bool)
        groups = [np.flatnonzero(~replay).tolist(), np.flatnonzero(replay).tolist()]
        deal = deal_rows(
            [group for group in groups if len(group)], self._rows_per_minibatch, self._ranks(), self._state.rng
        )
        weights = weigh_rows(
            deal.minibatches,
            batch.loss_tokens,
            batch.replay,
            aggregation=self._settings.loss.aggregation,
            scale_factor=self._scale_factor,
        )
        weights[replay] *= replay_weight
        seeds = self._state.rng.integers(SEED_RANGE, size=len(batch.keys))
        self._write_columns(batch, weights, seeds)
        padding = iter(self._add_padding(deal.padding, train=True))
        keys = [batch.keys[row] if row >= 0 else next(padding) for row in deal.order(self._ranks())]
        actor = self._config.actor_rollout_ref.actor
        meta = self._meta(keys, TRAIN_COLUMNS)
        longest = np.full(deal.size, max(batch.sequence_lengths))
        meta.extra_info = {
            **self._cut(longest, actor.ppo_max_token_len_per_gpu),
            "calculate_entropy": False,
            "distillation_use_topk": False,
            "distillation_only": False,
            "global_batch_size": deal.size,
            "mini_batch_size": deal.size,
            "epochs": actor.ppo_epochs,
            "seed": actor.data_loader_seed,
            "dataloader_kwargs": {"shuffle": False},  # the driver has shuffled
            "temperature": self._config.actor_rollout_ref.rollout.temperature,
            "cov_lower": bounds[0],
            "cov_upper": bounds[1],
            "hold_learning_rate": hold_learning_rate,
        }
        output = tu.get(self._workers.update_actor(meta), "metrics")
        self._log_update(reduce_metrics(dict(output)), bool(replay.any()), metrics)
        return len(deal.minibatches) * actor.ppo_epochs

    @staticmethod
    def _log_update(reduced: dict[str, Any], with_replay: bool, metrics: dict[str, Any]) -> None:
        tokens = max(1.0, float(reduced["tokens"]))
        metrics["loss/on_policy"] = float(reduced["on_policy"])
        metrics["clip/ppo_fraction"] = float(reduced["clipped"]) / tokens
        metrics["clip/dual_fraction"] = float(reduced["dual_clipped"]) / tokens
        if with_replay:
            metrics["loss/sil"] = float(reduced["self_imitation"])
            metrics["clip/cov_fraction"] = float(reduced["covariance_clipped"]) / max(
                1.0, float(reduced["replay_tokens"])
            )
        metrics["actor/grad_norm"] = float(reduced["grad_norm"])
        if "lr" in reduced:
            metrics["actor/lr"] = float(np.max(reduced["lr"]))
        else:
            metrics.setdefault("actor/lr", float("nan"))

    def _measure_bounds(self, keys: list[str], replay: Replay) -> tuple[float, float]:
        """Covariance bounds from the first replayed rows under the present policy, frozen afterwards.

        Covariances of replayed rows are an order smaller than those of a fresh batch, whose advantages have both signs:
        bounds taken from the latter leave nothing to clip.
        """
        prompts = np.asarray([len(entry.prompt_ids) for entry in replay.entries])
        lengths = np.asarray([len(entry.response_ids) for entry in replay.entries])
        data = self._forward(keys, prompts + lengths, ["log_probs"], calculate_entropy=False)
        log_probs = _pad(data["log_probs"].values()[find_predictions(prompts, lengths)].float(), lengths)
        mask = _pad(
            torch.from_numpy(np.concatenate([np.asarray(e.response_mask) for e in replay.entries])).bool(), lengths
        )
        cov = self._settings.cov
        return calibrate_covariance_bounds(
            log_probs, torch.tensor(replay.advantages), mask, lower_top=cov.lower_top, upper_top=cov.upper_top
        )

    # ---- columns -----------------------------------------------------------------------------------------------------
    def _write_replay(self, replay: Replay) -> list[str]:
        if not replay.entries:
            return []
        keys = [f"replay_{number}_0" for number in range(len(replay.entries))]
        rows = [
            RowTokens(entry.prompt_ids, entry.response_ids, entry.response_mask, entry.old_log_probs)
            for entry in replay.entries
        ]
        self._put(keys, build_columns(rows).exclude("rollout_log_probs"))
        return keys

    def _write_columns(self, batch: _Batch, weights: np.ndarray, seeds: np.ndarray) -> None:
        steering = np.stack(
            [np.asarray(batch.advantages), weights, np.asarray(batch.replay, dtype=np.float64), seeds], axis=1
        )
        columns = {
            "old_log_probs": nest_flat(torch.from_numpy(np.ascontiguousarray(batch.old_log_probs)), batch.lengths),
            STEERING: torch.from_numpy(steering.astype(np.float32)),
        }
        self._put(list(batch.keys), TensorDict(columns, batch_size=len(batch.keys)))

    def _add_padding(self, count: int, *, train: bool = False) -> list[str]:
        """Write ``count`` rows without a loss token, which make a batch divisible."""
        if not count:
            return []
        keys = [f"padding_{number}_0" for number in range(count)]
        columns = build_columns([RowTokens([self._pad_id], [self._pad_id], [0], [0.0])] * count).exclude(
            "rollout_log_probs"
        )
        if train:
            zeros = nest_flat(torch.zeros(count), [1] * count)
            columns.update({"old_log_probs": zeros, STEERING: torch.zeros(count, 4)})
        self._put(keys, columns)
        return keys

    def _put(self, keys: list[str], columns: TensorDict) -> None:
        self._step_keys += keys
        tq.kv_batch_put(keys=keys, partition_id=PARTITION, fields=columns, tags=[{} for _ in keys])

    def take_replay_seconds(self) -> float:
        """Seconds spent on bringing rows into and out of the replay buffer's form since the last call."""
        seconds, self._replay_watch.seconds = self._replay_watch.seconds, 0.0
        return seconds

    def take_keys(self, rollout_keys: Sequence[str]) -> list[str]:
        """Keys of all rows of this step, which verl clears from TransferQueue at the end of the step (never none)."""
        keys = list(dict.fromkeys([*rollout_keys, *self._step_keys])) or self._add_padding(1)
        self._step_keys = []
        return keys

    @staticmethod
    def _meta(keys: list[str], fields: Sequence[str]) -> KVBatchMeta:
        return KVBatchMeta(partition_id=PARTITION, keys=keys, tags=[{} for _ in keys], fields=list(fields))

    def _cut(self, lengths: np.ndarray, max_tokens: int) -> dict[str, Any]:
        """How a worker cuts its rows: not at all where they fit the token limit together, else as verl is configured.

        verl's balancing by length copies rows one by one, and one micro-batch lets the covariance clip see all rows.
        """
        rows = -(-len(lengths) // self._ranks())
        if rows * int(lengths.max()) > max_tokens:
            return {}
        return {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": rows}

    def _ranks(self) -> int:
        """Data-parallel size of the actor."""
        info = self._workers._dispatch_info
        if "actor" not in info:
            info["actor"] = self._workers._query_dispatch_info("actor")
        return max(info["actor"]) + 1


@dataclass(frozen=True)
class _Batch:
    """Rows of one ``update_actor`` call before they are dealt; ``old_log_probs`` is concatenated over rows."""

    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    sequence_lengths: tuple[int, ...]
    loss_tokens: tuple[int, ...]
    advantages: tuple[float, ...]
    replay: tuple[bool, ...]
    old_log_probs: np.ndarray

    @classmethod
    def of_fresh(cls, fresh: FreshRows) -> _Batch:
        return cls(
            tuple(planned.row.key for planned in fresh.rows),
            fresh.lengths,
            tuple(planned.row.prompt_length + planned.row.response_length for planned in fresh.rows),
            tuple(planned.row.loss_tokens for planned in fresh.rows),
            tuple(planned.advantage for planned in fresh.rows),
            (False,) * len(fresh.rows),
            fresh.old_log_probs,
        )

    @classmethod
    def of_replay(cls, replay: Replay, keys: Sequence[str]) -> _Batch:
        entries = replay.entries
        logs = [np.asarray(entry.old_log_probs, dtype=np.float32) for entry in entries]
        return cls(
            tuple(keys),
            tuple(len(entry.response_ids) for entry in entries),
            tuple(len(entry.prompt_ids) + len(entry.response_ids) for entry in entries),
            tuple(int(np.sum(entry.response_mask)) for entry in entries),
            replay.advantages,
            (True,) * len(entries),
            np.concatenate(logs) if logs else np.zeros(0, dtype=np.float32),
        )

    def scale_advantages(self, factor: float) -> _Batch:
        scaled = tuple(factor * advantage for advantage in self.advantages)
        return replace(self, advantages=scaled)

    def __add__(self, other: _Batch) -> _Batch:
        return _Batch(
            self.keys + other.keys,
            self.lengths + other.lengths,
            self.sequence_lengths + other.sequence_lengths,
            self.loss_tokens + other.loss_tokens,
            self.advantages + other.advantages,
            self.replay + other.replay,
            np.concatenate([self.old_log_probs, other.old_log_probs]),
        )


def _pad(values: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    """Concatenated rows as a matrix [N, max length], zeros on the right."""
    return torch.nested.to_padded_tensor(nest_flat(values, lengths.tolist()), 0)

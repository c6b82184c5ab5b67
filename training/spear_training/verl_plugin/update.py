"""The two calls on verl's actor workers that a step makes: log-probs of fresh rows, and the optimiser steps."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import reduce_metrics

from spear_training.algorithms import Coupling, ReplayEntry, calibrate_covariance_bounds, sequence_entropy
from spear_training.algorithms.settings import SpearSettings
from spear_training.rollout_correction import RolloutCorrection
from spear_training.verl_plugin.batch import (
    RowTokens,
    build_columns,
    count_pieces,
    deal_rows,
    find_predictions,
    nest_flat,
    weigh_rows,
)
from spear_training.verl_plugin.correction import correct_rows
from spear_training.verl_plugin.loss import ADVANTAGES, REFERENCE, STEERING, WEIGHTS, list_token_columns
from spear_training.verl_plugin.plan import PlannedRow
from spear_training.verl_plugin.queue import StepQueue, count_ranks, cut_rows, name_rows, pad_rows
from spear_training.verl_plugin.state import SpearState
from spear_training.verl_plugin.vision import PICTURES

STEERING_WIDTH = 4
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
    ref_log_probs: np.ndarray | None = None
    """Under the reference policy, where there is a KL term."""
    advantages: np.ndarray | None = None
    """Of each token, where they differ inside a row (PPO); the rows' own are then means over their loss tokens."""
    pictures: tuple[np.ndarray, ...] | None = None
    """Of each row, where the model has a vision tower."""
    rollout_weights: np.ndarray | None = None
    """Of each token, where the rollout's log-probs are corrected for."""

    def to_entries(self, step: int) -> tuple[list[ReplayEntry], int]:
        """Entries for the replay buffer, and how many rows had no positive advantage, or no token left to learn."""
        entries = []
        ends = np.cumsum(self.lengths)
        pictures = self.pictures or (None,) * len(self.rows)
        columns = zip(self.rows, self.tokens, pictures, ends, self.lengths, strict=True)
        for planned, (prompt, response), seen, end, length in columns:
            if planned.advantage <= 0 or not planned.row.loss_tokens:
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
                    extra=None if seen is None else {PICTURES: seen},
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
        worker_group: verl's actor worker group, which holds the reference policy too.
        config: whole configuration.
        settings: ``spear`` node.
        state: holds the covariance bounds and the dealer's stream.
        queue: the step's rows.
        reference_in_actor: the reference is the actor without its LoRA adapter.
    """

    def __init__(
        self,
        worker_group: Any,
        config: DictConfig,
        settings: SpearSettings,
        state: SpearState,
        queue: StepQueue,
        *,
        reference_in_actor: bool = False,
    ) -> None:
        self._workers = worker_group
        self._config = config
        self._settings = settings
        self._state = state
        self._queue = queue
        self._reference_in_actor = reference_in_actor
        actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        self._rows_per_minibatch = actor.ppo_mini_batch_size * rollout.n
        self._scale_factor = float(settings.loss.scale_factor or config.data.max_response_length)
        correction: Any = OmegaConf.to_container(config.algorithm.rollout_correction, resolve=True)
        self._bypass = bool(correction["bypass_mode"])
        self.correction = RolloutCorrection.from_node(correction)
        """None where the rollout's log-probs are not corrected for."""
        self._token_columns = list_token_columns(settings, corrected=self.correction is not None)
        self._replay_watch = Stopwatch()

    # ---- log-probs ---------------------------------------------------------------------------------------------------
    def collect_rows(self, rows: Sequence[PlannedRow], metrics: dict[str, Any]) -> FreshRows:
        """``rows`` with their old log-probs; logs the entropy.

        Old log-probs come from a forward pass of the actor, and metrics tell how far the rollout's are off. With
        ``algorithm.rollout_correction.bypass_mode`` they are the rollout's own: there is no forward pass, and the
        entropy is estimated from the log-probs of the sampled tokens. Without it the other keys of that node
        (:class:`RolloutCorrection`) weigh tokens, or take them out of the loss, where the two disagree.
        """
        keys = [planned.row.key for planned in rows]
        fields = ["loss_mask", "rollout_log_probs"]
        if self._settings.sil.enabled:
            fields += [name for name in self._queue.forward_columns if name in ("input_ids", PICTURES)]
        prompts = np.asarray([planned.row.prompt_length for planned in rows])
        lengths = np.asarray([planned.row.response_length for planned in rows])
        if self._bypass:
            data = self._queue.get(keys, fields)
            log_probs = data["rollout_log_probs"].values().float()
            mask, entropy = data["loss_mask"].values().bool(), -log_probs
        else:
            fields += ["log_probs", "entropy"]
            data = self._forward(keys, prompts + lengths, fields, calculate_entropy=True)
            where = find_predictions(prompts, lengths)
            log_probs, entropy = (data[name].values()[where].float() for name in ("log_probs", "entropy"))
            mask = data["loss_mask"].values().bool()
            self._log_agreement(log_probs[mask], data["rollout_log_probs"].values()[mask], metrics)
        padded, padded_mask = pad_rows(entropy, lengths), pad_rows(mask, lengths)
        norm = sequence_entropy(padded, padded_mask, loss_scale_factor=self._scale_factor)
        metrics["entropy/seq-mean-token-sum-norm"] = float(norm)
        metrics["entropy/seq-mean-token-sum"] = float(norm) * self._scale_factor
        metrics["entropy/token-mean"] = float(entropy[mask].mean())
        tokens: tuple[tuple[np.ndarray, np.ndarray], ...] = ()
        pictures = None
        if self._settings.sil.enabled:
            ids = data["input_ids"].values().numpy().astype(np.int32)
            with self._replay_watch:
                sequences = np.split(ids, np.cumsum(prompts + lengths)[:-1])
                tokens = tuple((row[:prompt], row[prompt:]) for row, prompt in zip(sequences, prompts, strict=True))
                if self._queue.vision:
                    column = data[PICTURES]
                    pictures = tuple(np.split(column.values().numpy(), column.offsets()[1:-1].tolist()))
        weights = None
        if self.correction is not None:
            rollout = data["rollout_log_probs"].values()
            corrected = correct_rows(self.correction, log_probs, rollout, mask, lengths)
            metrics.update(corrected.metrics)
            mask, weights = corrected.mask, corrected.weights
            self._queue.put(keys, TensorDict({"loss_mask": nest_flat(mask.long(), lengths.tolist())}, len(keys)))
            rows = [
                replace(planned, row=replace(planned.row, loss_tokens=left))
                for planned, left in zip(rows, corrected.loss_tokens, strict=True)
            ]
        reference = self._ask_reference(keys, prompts, lengths)
        return FreshRows(
            tuple(rows),
            tuple(lengths.tolist()),
            mask.numpy(),
            log_probs.numpy(),
            tokens,
            reference,
            pictures=pictures,
            rollout_weights=weights,
        )

    def _forward(
        self,
        keys: list[str],
        lengths: np.ndarray,
        fields: list[str],
        *,
        calculate_entropy: bool = False,
        reference: bool = False,
    ) -> TensorDict:
        """One forward pass over the rows ``keys`` of ``lengths``; returns ``fields`` of these rows, in their order."""
        ranks, rollout = self._ranks(), self._config.actor_rollout_ref.rollout
        padding = self._queue.add_padding(-len(keys) % ranks)
        info: dict[str, Any] = {
            "calculate_entropy": calculate_entropy,
            "compute_loss": False,
            "temperature": rollout.temperature,
            **cut_rows(int(lengths.max()), len(keys), ranks, rollout.log_prob_max_token_len_per_gpu),
        }
        ask = self._workers.compute_log_prob
        if reference and self._reference_in_actor:
            info["no_lora_adapter"] = True
        elif reference:
            ask = self._workers.compute_ref_log_prob
        ask(name_rows([*keys, *padding], self._queue.forward_columns, info))
        return self._queue.get(keys, fields)

    def _ask_reference(self, keys: list[str], prompts: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
        """Log-probs of response tokens under the reference policy; None without a KL term."""
        if self._settings.kl.coefficient == 0:
            return None
        data = self._forward(keys, prompts + lengths, ["log_probs"], reference=True)
        return data["log_probs"].values()[find_predictions(prompts, lengths)].float().numpy()

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
        reference = self._ask_reference(replay_keys, *_measure_entries(replay.entries)) if replay_keys else None
        batch = _Batch.of_fresh(fresh)
        drawn = _Batch.of_replay(replay if replay_keys else Replay.empty(), replay_keys, self._token_columns, reference)
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
                metrics["timing_s/train_replayed_rows"] = own["timing_s/train_rows"]
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
        # Few replayed rows make one mini-batch, half as large again at most: it shall need no more memory than others.
        pieces = count_pieces(len(replay), self._rows_per_minibatch) if replay.all() else 1
        shares = self._ranks() * pieces
        deal = deal_rows([group for group in groups if len(group)], self._rows_per_minibatch, shares, self._state.rng)
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
        padding = iter(self._queue.add_padding(deal.padding, self._token_columns, {STEERING: STEERING_WIDTH}))
        keys = [batch.keys[row] if row >= 0 else next(padding) for row in deal.order(self._ranks())]
        actor = self._config.actor_rollout_ref.actor
        info = {
            **cut_rows(max(batch.sequence_lengths), deal.size, shares, actor.ppo_max_token_len_per_gpu),
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
        columns = (*self._queue.forward_columns, *self._token_columns, STEERING)
        start = time.perf_counter()
        output = tu.get(self._workers.update_actor(name_rows(keys, columns, info)), "metrics")
        metrics["timing_s/train_rows"] = time.perf_counter() - start
        self._log_update(reduce_metrics(dict(output)), bool(replay.any()), metrics)
        return len(deal.minibatches) * actor.ppo_epochs

    def _log_update(self, reduced: dict[str, Any], with_replay: bool, metrics: dict[str, Any]) -> None:
        tokens = max(1.0, float(reduced["tokens"]))
        metrics["loss/on_policy"] = float(reduced["on_policy"])
        metrics["clip/ppo_fraction"] = float(reduced["clipped"]) / tokens
        metrics["clip/dual_fraction"] = float(reduced["dual_clipped"]) / tokens
        if self._settings.kl.coefficient > 0:
            metrics["kl/reference"] = float(reduced["kl"]) / tokens
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
        prompts, lengths = _measure_entries(replay.entries)
        data = self._forward(keys, prompts + lengths, ["log_probs"])
        log_probs = pad_rows(data["log_probs"].values()[find_predictions(prompts, lengths)].float(), lengths)
        mask = pad_rows(
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
            RowTokens(
                entry.prompt_ids,
                entry.response_ids,
                entry.response_mask,
                entry.old_log_probs,
                entry.extra[PICTURES] if self._queue.vision else None,
            )
            for entry in replay.entries
        ]
        self._queue.put(keys, build_columns(rows).exclude("rollout_log_probs"))
        return keys

    def _write_columns(self, batch: _Batch, weights: np.ndarray, seeds: np.ndarray) -> None:
        steering = np.stack(
            [np.asarray(batch.advantages), weights, np.asarray(batch.replay, dtype=np.float64), seeds], axis=1
        )
        self._queue.put_tokens(batch.keys, batch.lengths, batch.columns, {STEERING: steering})

    def take_replay_seconds(self) -> float:
        """Seconds spent on bringing rows into and out of the replay buffer's form since the last call."""
        seconds, self._replay_watch.seconds = self._replay_watch.seconds, 0.0
        return seconds

    def _ranks(self) -> int:
        return count_ranks(self._workers, "actor")


def _measure_entries(entries: Sequence[ReplayEntry]) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of the prompts and the responses of replayed rows."""
    return (
        np.asarray([len(entry.prompt_ids) for entry in entries]),
        np.asarray([len(entry.response_ids) for entry in entries]),
    )


@dataclass(frozen=True)
class _Batch:
    """Rows of one ``update_actor`` call before they are dealt; ``columns`` are of tokens, concatenated over rows."""

    keys: tuple[str, ...]
    lengths: tuple[int, ...]
    sequence_lengths: tuple[int, ...]
    loss_tokens: tuple[int, ...]
    advantages: tuple[float, ...]
    replay: tuple[bool, ...]
    columns: dict[str, np.ndarray]

    @classmethod
    def of_fresh(cls, fresh: FreshRows) -> _Batch:
        columns = {
            "old_log_probs": fresh.old_log_probs,
            REFERENCE: fresh.ref_log_probs,
            ADVANTAGES: fresh.advantages,
            WEIGHTS: fresh.rollout_weights,
        }
        return cls(
            tuple(planned.row.key for planned in fresh.rows),
            fresh.lengths,
            tuple(planned.row.prompt_length + planned.row.response_length for planned in fresh.rows),
            tuple(planned.row.loss_tokens for planned in fresh.rows),
            tuple(planned.advantage for planned in fresh.rows),
            (False,) * len(fresh.rows),
            {name: values for name, values in columns.items() if values is not None},
        )

    @classmethod
    def of_replay(
        cls, replay: Replay, keys: Sequence[str], token_columns: Sequence[str], reference: np.ndarray | None
    ) -> _Batch:
        entries = replay.entries
        prompts, lengths = _measure_entries(entries)
        logs = [np.asarray(entry.old_log_probs, dtype=np.float32) for entry in entries]
        columns = {"old_log_probs": np.concatenate(logs) if logs else np.zeros(0, dtype=np.float32)}
        if REFERENCE in token_columns:
            columns[REFERENCE] = reference if reference is not None else np.zeros(0, dtype=np.float32)
        if ADVANTAGES in token_columns:
            columns[ADVANTAGES] = np.repeat(np.asarray(replay.advantages, dtype=np.float32), lengths.astype(np.int64))
        if WEIGHTS in token_columns:  # of a policy that is gone: the ratio to its own log-probs is all there is
            columns[WEIGHTS] = np.ones(int(lengths.sum()), dtype=np.float32)
        return cls(
            tuple(keys),
            tuple(lengths.tolist()),
            tuple((prompts + lengths).tolist()),
            tuple(int(np.sum(entry.response_mask)) for entry in entries),
            replay.advantages,
            (True,) * len(entries),
            columns,
        )

    def scale_advantages(self, factor: float) -> _Batch:
        columns = dict(self.columns)
        if ADVANTAGES in columns:
            columns[ADVANTAGES] = factor * columns[ADVANTAGES]
        return replace(self, advantages=tuple(factor * advantage for advantage in self.advantages), columns=columns)

    def __add__(self, other: _Batch) -> _Batch:
        return _Batch(
            self.keys + other.keys,
            self.lengths + other.lengths,
            self.sequence_lengths + other.sequence_lengths,
            self.loss_tokens + other.loss_tokens,
            self.advantages + other.advantages,
            self.replay + other.replay,
            {name: np.concatenate([values, other.columns[name]]) for name, values in self.columns.items()},
        )

"""The policy on verl's workers: its loss, log-probs of rows, and optimiser steps over them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric, reduce_metrics

from spear_envs.core.errors import SpearError
from spear_training.algorithms import RowTable, SpearSettings, sequence_entropy, value_loss
from spear_training.algorithms.rows import Array
from spear_training.algorithms.settings import CriticSettings
from spear_training.run.config import RolloutCorrection
from spear_training.run.to_verl import read_node
from spear_training.step.minibatches import count_minibatches, deal_rows
from spear_training.step.step import summarize_ratios
from spear_training.step.update import STEERING_WIDTH, Pass, Sums, compute_loss, measure_loss
from spear_training.verl_plugin.queue import (
    PICTURES,
    StepQueue,
    build_columns,
    count_ranks,
    cut_rows,
    find_predictions,
    name_rows,
    nest_flat,
    pad_rows,
)


@dataclass(frozen=True)
class Corrected:
    """Result of a correction for a step's response tokens, concatenated over rows [S].

    Attributes:
        mask: loss tokens that are left; ``loss_tokens`` counts them for each row [N].
        weights: factor of each token in the policy's loss; 1 everywhere where there are rejections only.
        metrics: verl's own (``rollout_corr/*``).
    """

    mask: torch.Tensor
    weights: np.ndarray
    loss_tokens: tuple[int, ...]
    metrics: dict[str, float]


def correct_rows(
    correction: RolloutCorrection,
    log_probs: torch.Tensor,
    rollout_log_probs: torch.Tensor,
    mask: torch.Tensor,
    lengths: np.ndarray,
) -> Corrected:
    """Correct rows for the difference between ``log_probs`` (the trainer's) and ``rollout_log_probs``.

    Both are of response tokens, concatenated over rows [S], like ``mask`` of loss tokens, bool, at least one;
    ``lengths`` counts the response tokens of each row [N]. Raises SpearError if every weight is 0.
    """
    inside = pad_rows(torch.ones_like(mask, dtype=torch.int64), lengths) > 0
    try:
        weights, left, metrics = compute_rollout_correction_and_rejection_mask(
            old_log_prob=pad_rows(log_probs, lengths),
            rollout_log_prob=pad_rows(rollout_log_probs, lengths),
            response_mask=pad_rows(mask.float(), lengths),
            **{name: value for name, value in asdict(correction).items() if name != "bypass_mode"},
        )
    except ZeroDivisionError as error:  # by the sum of weights that are all 0
        raise SpearError(
            f"no token of this step has a weight within {correction.rollout_is_threshold}: rollout engine and trainer "
            "are far apart; give both the same rollout.dtype, or widen "
            "rollout.correction.rollout_is_threshold"
        ) from error
    kept = left > 0
    factors = torch.ones_like(log_probs) if weights is None else weights.batch["rollout_is_weights"][inside]
    return Corrected(kept[inside], factors.float().numpy(), tuple(kept.sum(-1).tolist()), metrics)


PROPORTIONAL = ("vanilla", "gspo", "cispo")
"""Policy losses that are 0, with their gradient, where the advantage is."""


STEERING = "spear_row"
"""Column [N, 4], see :func:`spear_training.step.update.compute_loss`."""
TOKEN_COLUMNS = {
    "log_probs": "old_log_probs",
    "token_advantages": "advantages",
    "ref_log_probs": "ref_log_probs",
    "rollout_weights": "rollout_weights",
}
"""Columns of response tokens that an update writes, as far as its rows have them: names of the table and the queue."""


def actor_loss(
    settings: SpearSettings, model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Return the actor's loss, verl's loss function after ``functools.partial(actor_loss, settings)``; installed with
    ``set_loss_fn``.

    FSDP averages gradients over ranks, so the loss is multiplied by their number: the row weights already speak of the
    full mini-batch.
    """
    lengths = data["loss_mask"].offsets().diff()
    prompts = data["input_ids"].offsets().diff() - lengths
    where = find_predictions(prompts.cpu().numpy(), lengths.cpu().numpy()).to(lengths.device)
    log_probs = nest_flat(model_output["log_probs"].values()[where], lengths.tolist()).to_padded_tensor(0.0)
    present = [name for name in TOKEN_COLUMNS.values() if name in data.keys()]  # noqa: SIM118 - iterates over rows
    columns = data.select("loss_mask", STEERING, *present).to_padded_tensor()
    tokens = {name: columns[name] for name in ("loss_mask", *present)}
    if settings.loss.entropy_coefficient > 0:
        tokens["entropy"] = nest_flat(model_output["entropy"].values()[where], lengths.tolist()).to_padded_tensor(0.0)
    bounds = (float(data["cov_lower"]), float(data["cov_upper"]))
    result = compute_loss(
        settings,
        log_probs,
        columns[STEERING],
        tokens,
        gamma=float(data["gamma"]),
        bounds=None if bounds[0] != bounds[0] else bounds,
    )
    sums = measure_loss(result)
    # verl averages such sums over ranks. Counts are only read as shares of each other; the loss is a sum over ranks.
    scale = {"on_policy": data["dp_size"], "self_imitation": data["dp_size"]}
    metrics = {name: Metric(AggregationType.SUM, value * scale.get(name, 1)) for name, value in sums.items()}
    return result.loss * data["dp_size"], metrics


class VerlActor:
    """:class:`spear_training.step.update.Actor` over verl's actor worker group and TransferQueue.

    The group holds the reference policy too; with ``reference_in_actor`` that is the actor without its LoRA adapter.
    """

    def __init__(
        self,
        worker_group: Any,
        config: DictConfig,
        settings: SpearSettings,
        queue: StepQueue,
        *,
        reference_in_actor: bool = False,
    ) -> None:
        self._workers = worker_group
        self._actor, self._rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        self._has_reference = settings.kl.coefficient > 0
        self._has_bonus = settings.loss.entropy_coefficient > 0
        more = self._has_reference or self._has_bonus or settings.cov.on_policy
        self._skips_equal = settings.loss.policy in PROPORTIONAL and not more
        self._scale_factor = float(settings.loss.scale_factor or config.data.max_response_length)
        self._queue = queue
        self._reference_in_actor = reference_in_actor
        rollout = read_node(config).rollout
        self._bypass = rollout.correction.bypass_mode
        self._correction = rollout.correction if rollout.correction.corrects else None
        self._is_stale = rollout.staleness > 0

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return count_ranks(self._workers, "actor")

    # ---- log-probs ---------------------------------------------------------------------------------------------------
    def collect(self, rows: RowTable, metrics: dict[str, Any]) -> RowTable:
        """Add ``mask`` and old log-probs to rows in the queue; log the entropy.

        Old log-probs come from a forward pass of the actor, and metrics tell how far the rollout's are off. With
        ``rollout.correction.bypass_mode`` they are the rollout's own: there is no forward pass, and the
        entropy is estimated from the log-probs of the sampled tokens. Without it the other keys of that node
        (:class:`RolloutCorrection`) weigh tokens, or take them out of the loss, where the two disagree.
        """
        keys, lengths = rows.key.tolist(), rows.response_length
        if self._bypass:
            data = self._queue.get(keys, ["loss_mask", "rollout_log_probs"])
            log_probs = data["rollout_log_probs"].values().float()
            entropy = -log_probs
        else:
            fields = ["loss_mask", "rollout_log_probs", "log_probs", "entropy"]
            data = self._forward(rows, fields, calculate_entropy=True)
            where = find_predictions(rows.prompt_length, lengths)
            log_probs, entropy = (data[name].values()[where].float() for name in ("log_probs", "entropy"))
        mask, rollout = data["loss_mask"].values().bool(), data["rollout_log_probs"].values()
        if not self._bypass:
            metrics.update(_compare_log_probs(log_probs[mask], rollout[mask]))
            metrics.update(summarize_ratios(log_probs[mask], rollout[mask]) if self._is_stale else {})
        norm = sequence_entropy(
            pad_rows(entropy, lengths), pad_rows(mask, lengths), loss_scale_factor=self._scale_factor
        )
        metrics["entropy/seq-mean-token-sum-norm"] = float(norm)
        metrics["entropy/seq-mean-token-sum"] = float(norm) * self._scale_factor
        metrics["entropy/token-mean"] = float(entropy[mask].mean())
        if self._correction is not None:
            corrected = correct_rows(self._correction, log_probs, rollout, mask, lengths)
            metrics.update(corrected.metrics)
            mask = corrected.mask
            self._queue.put(keys, TensorDict({"loss_mask": nest_flat(mask.long(), lengths)}, len(keys)))
            rows = rows.add(rollout_weights=corrected.weights, loss_tokens=corrected.loss_tokens)
        return self._add_reference(rows.add(mask=mask.numpy(), log_probs=log_probs.numpy()))

    def _forward(
        self, rows: RowTable, fields: list[str], *, calculate_entropy: bool = False, reference: bool = False
    ) -> TensorDict:
        """Run one forward pass over ``rows``; return their ``fields``, in their order."""
        keys, lengths, ranks = rows.key.tolist(), rows.prompt_length + rows.response_length, self.ranks
        most = self._rollout.log_prob_max_token_len_per_gpu
        padding = self._queue.add_padding(-len(keys) % ranks)
        info: dict[str, Any] = {
            "calculate_entropy": calculate_entropy,
            "compute_loss": False,
            "temperature": self._rollout.temperature,
            "max_token_len_per_gpu": most,  # verl gives the reference policy's engine that of updates
            **cut_rows(int(lengths.max()), len(keys), ranks, most),
        }
        ask = self._workers.compute_log_prob
        if reference and self._reference_in_actor:
            info["no_lora_adapter"] = True
        elif reference:
            ask = self._workers.compute_ref_log_prob
        ask(name_rows([*keys, *padding], self._queue.forward_columns, info))
        return self._queue.get(keys, fields)

    def _add_reference(self, rows: RowTable) -> RowTable:
        """Add log-probs of response tokens under the reference policy, where there is a KL term."""
        if not self._has_reference:
            return rows
        data = self._forward(rows, ["log_probs"], reference=True)
        where = find_predictions(rows.prompt_length, rows.response_length)
        return rows.add(ref_log_probs=data["log_probs"].values()[where].float().numpy())

    # ---- rows of the replay buffer -----------------------------------------------------------------------------------
    def read_tokens(self, rows: RowTable) -> RowTable:
        """Add the ids of rows in the queue, and their pictures if the model sees any."""
        pictures = [PICTURES] if self._queue.vision else []
        data = self._queue.get(rows.key.tolist(), ["input_ids", *pictures])
        columns: dict[str, Any] = {"ids": data["input_ids"].values().numpy()}
        if pictures:
            column = data[PICTURES]
            columns |= {"picture_bytes": column.offsets().diff().numpy(), PICTURES: column.values().numpy()}
        return rows.add(**columns)

    def write(self, rows: RowTable) -> RowTable:
        """Write replayed rows into the queue; add their keys, and log-probs under the reference policy."""
        rows = rows.add(key=[f"replay_{number}_0" for number in range(len(rows))])
        self._queue.put(rows.key.tolist(), build_columns(rows))
        return self._add_reference(rows)

    # ---- optimiser steps ---------------------------------------------------------------------------------------------
    def train(self, update: Pass) -> Sums:
        """Make one ``update_actor`` call: an optimiser step of each mini-batch.

        A fresh row without an advantage adds nothing to the gradient. Padding takes its place and draws its seed, so
        that nothing else changes.
        """
        rows, deal, ranks = update.rows, update.deal, self.ranks
        steering = np.stack([rows.advantage, rows.weight, rows.replayed, rows.seed], axis=1)
        tokens: dict[str, Array] = {TOKEN_COLUMNS[name]: getattr(rows, name) for name in TOKEN_COLUMNS if name in rows}
        self._queue.put_tokens(rows.key.tolist(), rows.response_length, tokens, {STEERING: steering})
        silent = np.zeros(len(rows) + 1, dtype=bool)
        if self._skips_equal and "token_advantages" not in rows:
            silent[:-1] = (rows.advantage == 0) & ~rows.replayed
        silent[-1] = True  # row -1 is padding already
        order = np.asarray(deal.order(ranks))
        padded = order[silent[order]]
        seeds = np.zeros((len(padded), STEERING_WIDTH))
        seeds[:, -1] = np.where(padded < 0, 0, rows.seed[padded])
        names = list(tokens)
        padding = iter(self._queue.add_padding(len(padded), names, {STEERING: seeds}))
        keys = [next(padding) if silent[row] else rows.key[row] for row in order.tolist()]
        longest = int((rows.prompt_length + rows.response_length).max())
        lower, upper = update.bounds or (float("nan"), float("nan"))
        info = {
            **cut_rows(longest, deal.size, ranks * update.pieces, self._actor.ppo_max_token_len_per_gpu),
            "calculate_entropy": self._has_bonus,
            "distillation_use_topk": False,
            "distillation_only": False,
            "global_batch_size": deal.size,
            "mini_batch_size": deal.size,
            "epochs": self._actor.ppo_epochs,
            "seed": self._actor.data_loader_seed,
            "dataloader_kwargs": {"shuffle": False},  # the driver has shuffled
            "temperature": self._rollout.temperature,
            "gamma": update.gamma,
            "cov_lower": lower,
            "cov_upper": upper,
            "hold_learning_rate": update.hold_learning_rate,
        }
        start = time.perf_counter()
        answer = self._workers.update_actor(name_rows(keys, (*self._queue.forward_columns, *names, STEERING), info))
        reduced = reduce_metrics(dict(tu.get(answer, "metrics")))
        sums = {name: float(np.max(value)) for name, value in reduced.items()}
        return sums | {"seconds": time.perf_counter() - start}


def _compare_log_probs(actor: torch.Tensor, rollout: torch.Tensor) -> dict[str, float]:
    """Return how far the rollout engine's log-probs are from the actor's."""
    difference = (actor - rollout).abs()
    return {
        "training/rollout_log_probs_diff_max": float(difference.max()),
        "training/rollout_log_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_max": float((actor.exp() - rollout.exp()).abs().max()),
    }


OLD_VALUES, RETURNS = "old_values", "returns"
WEIGHT = "spear_value_weight"
"""Column [N, 1]: what a token's loss of the row weighs in its mini-batch."""
VALUE_COLUMNS = (OLD_VALUES, RETURNS, WEIGHT)


def critic_loss(
    settings: CriticSettings, model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """Return the critic's loss, verl's loss function after ``functools.partial(critic_loss, settings)``: a token mean.

    The value of a token is what the critic says one position to its left: of the state in which it was written. FSDP
    averages gradients over ranks, so the loss is multiplied by their number.
    """
    lengths = data["loss_mask"].offsets().diff()
    prompts = data["input_ids"].offsets().diff() - lengths
    where = find_predictions(prompts.cpu().numpy(), lengths.cpu().numpy()).to(lengths.device)
    values = nest_flat(model_output["values"].values()[where].float(), lengths.tolist()).to_padded_tensor(0.0)
    columns = data.select("loss_mask", OLD_VALUES, RETURNS, WEIGHT).to_padded_tensor()
    mask, old, returns = columns["loss_mask"] > 0, columns[OLD_VALUES], columns[RETURNS]
    loss = (value_loss(values, old, returns, mask, clip=settings.clip) * columns[WEIGHT]).sum()
    clipped = torch.zeros_like(mask) if settings.clip is None else mask & ((values - old).abs() > settings.clip)
    counts = {"value_loss": loss.detach() * data["dp_size"], "clipped": clipped.sum(), "tokens": mask.sum()}
    return loss * data["dp_size"], {name: Metric(AggregationType.SUM, float(value)) for name, value in counts.items()}


@dataclass(eq=False)
class VerlCritic:
    """:class:`spear_training.step.step.Critic` over verl's critic workers; ``rng`` deals rows into mini-batches."""

    workers: Any
    config: DictConfig
    rng: np.random.Generator
    queue: StepQueue

    @property
    def _ranks(self) -> int:
        return count_ranks(self.workers, "train")

    def value(self, rows: RowTable) -> RowTable:
        """Add ``mask`` and ``values`` to rows in the queue."""
        keys, lengths = rows.key.tolist(), rows.prompt_length + rows.response_length
        most = self.config.critic.forward_max_token_len_per_gpu
        padding = self.queue.add_padding(-len(keys) % self._ranks)
        info: dict[str, Any] = {
            "compute_loss": False,
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
            # verl gives a critic's engine another limit, which no key of its configuration sets.
            "max_token_len_per_gpu": most,
            **cut_rows(int(lengths.max()), len(keys), self._ranks, most),
        }
        ray.get(self.workers.infer_batch(name_rows([*keys, *padding], self.queue.forward_columns, info)).futures)
        data = self.queue.get(keys, ["values", "loss_mask"])
        values = data["values"].values()[find_predictions(rows.prompt_length, rows.response_length)]
        return rows.add(values=values.double().numpy(), mask=data["loss_mask"].values().bool().numpy())

    def update(self, rows: RowTable, metrics: dict[str, Any]) -> None:
        """Take one pass of optimiser steps over the rows, in mini-batches as large as the actor's unless set
        otherwise.
        """
        critic, ranks = self.config.critic, self._ranks
        lengths = rows.prompt_length + rows.response_length
        deal = deal_rows(
            [np.arange(len(rows))],
            lengths,
            count=count_minibatches(len(rows), critic.ppo_mini_batch_size * self.config.actor_rollout_ref.rollout.n),
            shares=ranks,
            rng=self.rng,
            balance=self.config.trainer.balance_batch,
        )
        fresh = np.zeros(len(rows), dtype=bool)
        weights = deal.weigh(rows.loss_tokens, fresh, mode="token-mean", loss_scale_factor=1.0)[:, None]
        keys = rows.key.tolist()
        columns = {OLD_VALUES: rows.values, RETURNS: rows.returns}
        self.queue.put_tokens(keys, rows.response_length, columns, {WEIGHT: weights})
        padding = iter(
            self.queue.add_padding(deal.padding, (OLD_VALUES, RETURNS), {WEIGHT: np.zeros((deal.padding, 1))})
        )
        order = [keys[row] if row >= 0 else next(padding) for row in deal.order(ranks)]
        info = {
            "max_token_len_per_gpu": critic.ppo_max_token_len_per_gpu,  # as in value()
            **cut_rows(int(lengths.max()), deal.size, ranks, critic.ppo_max_token_len_per_gpu),
            "global_batch_size": deal.size,
            "mini_batch_size": deal.size,
            "epochs": critic.ppo_epochs,
            "seed": critic.data_loader_seed,
            "dataloader_kwargs": {"shuffle": False},  # the driver has shuffled
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
        }
        answer = self.workers.train_mini_batch(
            name_rows(order, (*self.queue.forward_columns, *VALUE_COLUMNS), info)
        ).get()
        reduced = reduce_metrics(dict(tu.get(answer, "metrics")))
        metrics["critic/loss"] = float(reduced["value_loss"])
        metrics["critic/clip_fraction"] = float(reduced["clipped"]) / max(1.0, float(reduced["tokens"]))
        metrics["critic/grad_norm"] = float(reduced["grad_norm"])
        metrics["critic/lr"] = float(np.max(reduced["lr"]))

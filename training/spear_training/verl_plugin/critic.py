"""PPO's critic: values of a step's episodes, the advantages they give, and the critic's own optimiser steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric, reduce_metrics

from spear_training.algorithms import Aggregation, episode_advantages, value_loss, whiten_advantages
from spear_training.algorithms.settings import CriticSettings, SpearSettings
from spear_training.verl_plugin.batch import deal_rows, find_predictions, nest_flat, weigh_rows
from spear_training.verl_plugin.queue import StepQueue, count_ranks, cut_rows, name_rows
from spear_training.verl_plugin.records import RowRecord
from spear_training.verl_plugin.state import SpearState
from spear_training.verl_plugin.update import FreshRows

OLD_VALUES, RETURNS = "old_values", "returns"
WEIGHT = "spear_value_weight"
"""Column [N, 1]: what a token's loss of the row weighs in its mini-batch."""
VALUE_COLUMNS = (OLD_VALUES, RETURNS, WEIGHT)


def critic_loss(
    settings: CriticSettings, model_output: Mapping[str, torch.Tensor], data: TensorDict, dp_group: Any = None
) -> tuple[torch.Tensor, dict[str, Metric]]:
    """verl's loss function of the critic after ``functools.partial(critic_loss, settings)``: a token mean.

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


@dataclass(frozen=True)
class ValueTargets:
    """What the critic learns from this step's rows; both concatenated over the tokens of the rows' responses."""

    old_values: np.ndarray
    returns: np.ndarray


class CriticUpdater:
    """Asks verl's critic workers for values and trains them.

    Args:
        worker_group: verl's critic worker group.
        config: whole configuration.
        settings: ``spear`` node.
        state: holds the dealer's stream.
        queue: the step's rows.
    """

    def __init__(
        self, worker_group: Any, config: DictConfig, settings: SpearSettings, state: SpearState, queue: StepQueue
    ) -> None:
        self._workers = worker_group
        self._config = config
        self._settings = settings.critic
        self._state = state
        self._queue = queue

    def estimate(self, fresh: FreshRows, metrics: dict[str, Any]) -> tuple[FreshRows, ValueTargets]:
        """Advantages of the rows' tokens by generalised advantage estimation over whole episodes (``sec:ppogrpo``).

        Rows that a filter took out of the loss are part of their episode all the same: values run through them.

        Returns:
            the rows with token advantages (whitened over the step if so set) and, as the advantage of a row, the mean
            of its tokens' advantages before whitening, which is what gates the replay buffer; and the critic's targets.
        """
        episodes = {planned.episode.trajectory_id: planned for planned in fresh.rows}
        rows = [
            (number, row)
            for number, planned in enumerate(episodes.values())
            for row in sorted(planned.episode.rows, key=lambda row: row.turn)
            if row.loss_tokens
        ]
        values, mask = self._ask_values([row for _, row in rows])
        lengths = [row.response_length for _, row in rows]
        found = episode_advantages(
            values,
            mask,
            lengths,
            [number for number, _ in rows],
            [planned.reward for planned in episodes.values()],
            gamma=self._settings.gamma,
            lam=self._settings.lam,
        )
        ends = np.cumsum(lengths)
        places = {row.key: np.arange(end - n, end) for (_, row), end, n in zip(rows, ends, lengths, strict=True)}
        where = torch.from_numpy(np.concatenate([places[planned.row.key] for planned in fresh.rows]))
        raw, returns, old = (part[where] for part in (*found, values))
        on = torch.from_numpy(fresh.mask)
        self._describe(old[on], returns[on], metrics)
        advantages = whiten_advantages(raw, on) if self._settings.whiten else raw
        parts = zip(fresh.rows, raw.split(list(fresh.lengths)), on.split(list(fresh.lengths)), strict=True)
        # Of some rows rollout correction has left no token.
        means = tuple(
            replace(planned, advantage=float(part[own].mean()) if own.any() else 0.0) for planned, part, own in parts
        )
        return (
            replace(fresh, rows=means, advantages=advantages.float().numpy()),
            ValueTargets(old.float().numpy(), returns.float().numpy()),
        )

    def _ask_values(self, rows: Sequence[RowRecord]) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [S] float64 and loss mask [S] of the rows' response tokens, concatenated."""
        keys = [row.key for row in rows]
        prompts = np.asarray([row.prompt_length for row in rows])
        lengths = np.asarray([row.response_length for row in rows])
        ranks = count_ranks(self._workers, "train")
        padding = self._queue.add_padding(-len(keys) % ranks)
        info: dict[str, Any] = {
            "compute_loss": False,
            "temperature": self._config.actor_rollout_ref.rollout.temperature,
            **cut_rows(
                int((prompts + lengths).max()), len(keys), ranks, self._config.critic.forward_max_token_len_per_gpu
            ),
        }
        answer = self._workers.infer_batch(name_rows([*keys, *padding], self._queue.forward_columns, info))
        ray.get(answer.futures)
        data = self._queue.get(keys, ["values", "loss_mask"])
        values = data["values"].values()[find_predictions(prompts, lengths)]
        return values.double(), data["loss_mask"].values().bool()

    @staticmethod
    def _describe(values: torch.Tensor, returns: torch.Tensor, metrics: dict[str, Any]) -> None:
        spread = float(returns.var(unbiased=False))
        metrics["critic/value_mean"] = float(values.mean())
        metrics["critic/return_mean"] = float(returns.mean())
        left = float((returns - values).var(unbiased=False))
        # Undefined where all returns are equal; 0 says that the values explain nothing.
        metrics["critic/explained_variance"] = 1.0 - left / spread if spread > 0 else 0.0

    def update(self, fresh: FreshRows, targets: ValueTargets, metrics: dict[str, Any]) -> None:
        """One pass of optimiser steps over the rows, in mini-batches as large as the actor's unless set otherwise."""
        critic, ranks = self._config.critic, count_ranks(self._workers, "train")
        rows = list(range(len(fresh.rows)))
        size = critic.ppo_mini_batch_size * self._config.actor_rollout_ref.rollout.n
        deal = deal_rows([rows], size, ranks, self._state.rng)
        weights = weigh_rows(
            deal.minibatches,
            [planned.row.loss_tokens for planned in fresh.rows],
            [False] * len(rows),
            aggregation=Aggregation.TOKEN_MEAN,
            scale_factor=1.0,
        )
        keys = [planned.row.key for planned in fresh.rows]
        columns = {OLD_VALUES: targets.old_values, RETURNS: targets.returns}
        self._queue.put_tokens(keys, fresh.lengths, columns, {WEIGHT: weights[:, None]})
        padding = iter(self._queue.add_padding(deal.padding, (OLD_VALUES, RETURNS), {WEIGHT: 1}))
        order = [keys[row] if row >= 0 else next(padding) for row in deal.order(ranks)]
        longest = max(planned.row.prompt_length + planned.row.response_length for planned in fresh.rows)
        info = {
            **cut_rows(longest, deal.size, ranks, critic.ppo_max_token_len_per_gpu),
            "global_batch_size": deal.size,
            "mini_batch_size": deal.size,
            "epochs": critic.ppo_epochs,
            "seed": critic.data_loader_seed,
            "dataloader_kwargs": {"shuffle": False},  # the driver has shuffled
            "temperature": self._config.actor_rollout_ref.rollout.temperature,
        }
        answer = self._workers.train_mini_batch(
            name_rows(order, (*self._queue.forward_columns, *VALUE_COLUMNS), info)
        ).get()
        reduced = reduce_metrics(dict(tu.get(answer, "metrics")))
        metrics["critic/loss"] = float(reduced["value_loss"])
        metrics["critic/clip_fraction"] = float(reduced["clipped"]) / max(1.0, float(reduced["tokens"]))
        metrics["critic/grad_norm"] = float(reduced["grad_norm"])
        metrics["critic/lr"] = float(np.max(reduced["lr"]))

"""PPO's critic on verl's workers: values of a step's episodes, and the critic's own optimiser steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import AggregationType, Metric, reduce_metrics

from spear_training.algorithms import RowTable, value_loss
from spear_training.algorithms.settings import CriticSettings
from spear_training.step.dealing import count_minibatches, deal_rows
from spear_training.verl_plugin.queue import StepQueue, count_ranks, cut_rows, find_predictions, name_rows, nest_flat

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
        padding = self.queue.add_padding(-len(keys) % self._ranks)
        info: dict[str, Any] = {
            "compute_loss": False,
            "temperature": self.config.actor_rollout_ref.rollout.temperature,
            **cut_rows(int(lengths.max()), len(keys), self._ranks, self.config.critic.forward_max_token_len_per_gpu),
        }
        ray.get(self.workers.infer_batch(name_rows([*keys, *padding], self.queue.forward_columns, info)).futures)
        data = self.queue.get(keys, ["values", "loss_mask"])
        values = data["values"].values()[find_predictions(rows.prompt_length, rows.response_length)]
        return rows.add(values=values.double().numpy(), mask=data["loss_mask"].values().bool().numpy())

    def update(self, rows: RowTable, metrics: dict[str, Any]) -> None:
        """One pass of optimiser steps over the rows, in mini-batches as large as the actor's unless set otherwise."""
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

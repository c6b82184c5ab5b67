"""A step's updates, with a table of log-probs for a model and dictionaries for Ray and TransferQueue."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric

from spear_training.algorithms import ReplayBuffer, RowTable, SpearSettings, policy_loss, spear_loss
from spear_training.step.state import SpearState
from spear_training.step.update import Updater, UpdateSizes
from spear_training.verl_plugin.actor import VerlActor, actor_loss
from spear_training.verl_plugin.queue import StepQueue, build_columns, nest_flat
from spear_training.verl_plugin.rollout_worker import TOKENS
from tests.training.verl_plugin.fakes import FakeQueue

VOCABULARY, SCALE, RATE, GAMMA = 13, 6.0, 0.7, 0.3
PAD = 12


def run_minibatches(
    parameters: torch.Tensor,
    shares: np.ndarray,
    micro: int,
    rate: float,
    compute_loss: Callable[[list[str]], tuple[torch.Tensor, dict[str, Metric]]],
) -> dict[str, list[Any]]:
    """One optimiser step for each mini-batch, as verl's workers make them; ``shares`` [ranks, mini-batches, rows]."""
    metrics: dict[str, list[Any]] = {"grad_norm": []}
    for number in range(shares.shape[1]):
        parameters.grad = None
        found: list[dict[str, Metric]] = []
        for share in shares[:, number]:
            kept: dict[str, Metric] = {}
            for start in range(0, len(share), micro):
                loss, counts = compute_loss(share[start : start + micro].tolist())
                (loss / len(shares)).backward()  # FSDP averages gradients over ranks
                for name, value in counts.items():
                    if name in kept:
                        kept[name].append(value)
                    else:
                        kept[name] = value
            found.append(kept)
        for name in found[0]:
            metrics.setdefault(name, []).append(Metric.aggregate_dp([kept[name] for kept in found]))
        assert parameters.grad is not None
        metrics["grad_norm"].append(float(parameters.grad.norm()))
        with torch.no_grad():
            parameters -= rate * parameters.grad
    return metrics


class FakeWorkers:
    """verl's worker group: ranks that share mini-batches, each cut into micro-batches, and plain gradient descent."""

    mesh = "actor"

    def __init__(self, queue: FakeQueue, settings: SpearSettings, ranks: int, micro: int) -> None:
        self.queue, self.settings, self.ranks, self.micro = queue, settings, ranks, micro
        self._dispatch_info: dict[str, list[int]] = {}
        table = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        self.parameters = (0.3 * table).requires_grad_()
        self.reference = 0.5 * table.flip(0)
        """The reference policy's table."""
        self.calls: list[Any] = []
        self.adapters_off = False
        """Whether a pass was asked for without the adapter."""

    def _query_dispatch_info(self, mesh: str) -> list[int]:
        assert mesh == self.mesh
        return list(range(self.ranks))

    def log_probs(self, ids: torch.Tensor) -> torch.Tensor:
        """What the model says at each position of the next token; the last position has none."""
        return torch.roll(self.parameters[ids], -1) - 2.0

    def compute_ref_log_prob(self, meta: Any) -> None:
        assert len(meta.keys) % self.ranks == 0
        for key in meta.keys:
            ids = self.queue.rows[key]["input_ids"]
            self.queue.rows[key]["log_probs"] = (torch.roll(self.reference[ids], -1) - 2.0).float()

    def compute_log_prob(self, meta: Any) -> None:
        assert len(meta.keys) % self.ranks == 0
        if meta.extra_info.get("no_lora_adapter"):
            self.adapters_off = True
            return self.compute_ref_log_prob(meta)
        for key in meta.keys:
            values = self.log_probs(self.queue.rows[key]["input_ids"]).detach().float()
            self.queue.rows[key] |= {"log_probs": values, "entropy": -values}

    def update_actor(self, meta: Any) -> TensorDict:
        self.calls.append(meta)
        info = meta.extra_info
        shares = np.asarray(meta.keys).reshape(self.ranks, -1, info["mini_batch_size"] // self.ranks)
        metrics = run_minibatches(
            self.parameters, shares, self.micro, RATE, lambda keys: self.compute_loss(keys, meta.fields, info)
        )
        if not info["hold_learning_rate"]:
            metrics["lr"] = [RATE]
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": metrics})

    def compute_loss(self, keys: list[str], fields: list[str], info: dict[str, Any]) -> tuple[torch.Tensor, Any]:
        data = self.queue.kv_batch_get(keys=keys, partition_id="train", select_fields=fields)
        steering = {name: info[name] for name in ("gamma", "cov_lower", "cov_upper")}
        tu.assign_non_tensor(data, dp_size=self.ranks, **steering)
        ids = data["input_ids"]
        output = torch.cat([self.log_probs(row) for row in ids.unbind()])
        outputs = {"log_probs": nest_flat(output, ids.offsets().diff().tolist())}
        if info["calculate_entropy"]:
            outputs["entropy"] = nest_flat(output.square(), ids.offsets().diff().tolist())
        return actor_loss(self.settings, outputs, data)


class Step:
    """Rows of one step, rolled out, and everything that updates a policy with them."""

    def __init__(
        self,
        settings: SpearSettings,
        *,
        rows: int = 12,
        minibatch: int = 1000,
        ranks: int = 1,
        micro: int = 1000,
        reference_in_actor: bool = False,
        bypass: bool = False,
        staleness: int = 0,
        **correction: Any,
    ) -> None:
        self.settings, self.queue = settings, FakeQueue()
        self.workers = FakeWorkers(self.queue, settings, ranks, micro)
        self.state = SpearState(settings, seed=1)
        self.metrics: dict[str, Any] = {}
        self.config = OmegaConf.create(
            {
                "actor_rollout_ref": {
                    "actor": {"ppo_epochs": 1, "data_loader_seed": 42, "ppo_max_token_len_per_gpu": 10_000},
                    "rollout": {"temperature": 1.0, "log_prob_max_token_len_per_gpu": 10_000},
                },
                "data": {"max_response_length": SCALE},
                "spear": {"rollout": {"staleness": staleness, "correction": {"bypass_mode": bypass, **correction}}},
            }
        )
        self.keys = StepQueue(SimpleNamespace(pad_token_id=PAD, eos_token_id=2), store=self.queue)
        self.actor = VerlActor(self.workers, self.config, settings, self.keys, reference_in_actor=reference_in_actor)
        self.updater = Updater(settings, self.state, self.actor, UpdateSizes(minibatch, SCALE))
        self.played = self.roll_out(rows)
        self.rows = self.played.drop(*TOKENS)

    def roll_out(self, count: int) -> RowTable:
        """Rows with their tokens, which also lie in the queue."""
        random = np.random.default_rng(count)
        prompts, responses = random.integers(1, 5, size=(2, count))
        masks = [[1, *random.integers(2, size=length - 1)] for length in responses]
        total = int(responses.sum())
        rows = RowTable(
            key=[f"1-{n}_0_0" for n in range(count)],
            trajectory=[f"1-{n}_0" for n in range(count)],
            prompt_length=prompts,
            response_length=responses,
            loss_tokens=list(map(sum, masks)),
            won=[True] * count,
            tool_calls=[0] * count,
            reward=np.arange(count),
            advantage=random.normal(0.3, size=count),
            ids=random.integers(VOCABULARY, size=int(prompts.sum()) + total),
            mask=np.concatenate(masks),
            rollout_log_probs=-2.0 * random.random(total),
        )
        self.keys.put(rows.key.tolist(), build_columns(rows))
        self.keys.take_keys([])  # those of a rollout are not the update's
        return rows

    def collect(self) -> RowTable:
        """The rows with old log-probs."""
        return self.actor.collect(self.rows, self.metrics)

    def remember(self, fresh: RowTable) -> RowTable:
        """The rows of positive advantage as the replay buffer gives them back, with recalibrated advantages."""
        buffer = ReplayBuffer()
        buffer.add(self.actor.read_tokens(fresh.add(origin=[1] * len(fresh))))
        drawn = buffer.draw(None).rows
        return self.actor.write(drawn.add(advantage=0.5 + 0.1 * np.arange(len(drawn))))

    # ---- the specification -------------------------------------------------------------------------------------------
    def specify(
        self, parameters: torch.Tensor, *, fresh: RowTable | None = None, replay: RowTable | None = None
    ) -> torch.Tensor:
        """Gradient of the paper's loss of one mini-batch made of these rows."""
        theta = parameters.detach().clone().requires_grad_()
        parts = [self.lay_out(rows) | {"replay": [flag] * len(rows)}
                 for rows, flag in ((fresh, False), (replay, True)) if rows is not None]  # fmt: skip
        pads = {
            name: pad([row for part in parts for row in part[name]]) for name in ("ids", "old", "advantages", "mask")
        }
        clip = self.settings.clip
        result = spear_loss(
            theta[pads["ids"]] - 2.0,
            pads["old"],
            pads["advantages"],
            pads["mask"],
            torch.tensor([flag for part in parts for flag in part["replay"]]),
            gamma=GAMMA,
            policy=partial(policy_loss, clip_low=clip.low, clip_high=clip.high, dual_clip=clip.dual),
            cov_ratio=self.settings.cov.ratio,
            mode=self.settings.loss.aggregation.value,
            loss_scale_factor=SCALE,
            ref_log_probs=self.workers.reference[pads["ids"]] - 2.0,
            kl_coefficient=self.settings.kl.coefficient,
            entropy=(theta[pads["ids"]] - 2.0).square(),
            entropy_coefficient=self.settings.loss.entropy_coefficient,
        )
        result.loss.backward()
        assert theta.grad is not None
        return theta.grad

    def lay_out(self, rows: RowTable) -> dict[str, list[Any]]:
        """Ids, old log-probs, advantages and masks of the response tokens of each row."""
        prompts = zip(rows.key, rows.prompt_length, strict=True)
        advantages = rows if "token_advantages" in rows else rows.add(token_advantages=rows.spread(rows.advantage))
        return {
            "ids": [self.queue.rows[key]["input_ids"][length:] for key, length in prompts],
            "old": [torch.from_numpy(part).double() for part in rows.split("log_probs")],
            "advantages": [torch.from_numpy(part) for part in advantages.split("token_advantages")],
            "mask": [torch.from_numpy(part) for part in rows.split("mask")],
        }


def pad(rows: list[torch.Tensor]) -> torch.Tensor:
    """Rows as a matrix, zeros on the right."""
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def choose(coupling: str = "joint", **nodes: Any) -> SpearSettings:
    plain = {"sil": {"coupling": coupling}, "cov": {"ratio": 0.0}}
    return SpearSettings.from_mapping(plain | nodes)


LAYOUTS: list[dict[str, int]] = [{}, {"ranks": 2}, {"ranks": 3, "micro": 2}]
"""Of ranks and micro-batches: none may change anything."""

"""A step's updates, with a table of log-probs for a model and dictionaries for Ray and TransferQueue."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric

from spear_training.algorithms import SpearSettings, spear_loss
from spear_training.verl_plugin.batch import RowTokens, build_columns, nest_flat
from spear_training.verl_plugin.loss import actor_loss
from spear_training.verl_plugin.plan import PlannedRow
from spear_training.verl_plugin.queue import StepQueue
from spear_training.verl_plugin.state import SpearState
from spear_training.verl_plugin.update import ActorUpdater, FreshRows, Replay
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

    def __init__(self, queue: FakeQueue, settings: SpearSettings, ranks: int, micro: int) -> None:
        self.queue, self.settings, self.ranks, self.micro = queue, settings, ranks, micro
        self._dispatch_info: dict[str, list[int]] = {}
        table = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        self.parameters = (0.3 * table).requires_grad_()
        self.reference = 0.5 * table.flip(0)
        """The reference policy's table."""
        self.corrected = False
        """Whether rows have weights of rollout correction."""
        self.calls: list[Any] = []

    def _query_dispatch_info(self, mesh: str) -> list[int]:
        assert mesh == "actor"
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
        tu.assign_non_tensor(data, dp_size=self.ranks, cov_lower=info["cov_lower"], cov_upper=info["cov_upper"])
        ids = data["input_ids"]
        output = torch.cat([self.log_probs(row) for row in ids.unbind()])
        log_probs = {"log_probs": nest_flat(output, ids.offsets().diff().tolist())}
        return actor_loss(self.settings, log_probs, data, dp_group=None, corrected=self.corrected)


class Step:
    """Rows of one step, rolled out, and everything that updates a policy with them."""

    def __init__(
        self,
        make: Any,
        monkeypatch: pytest.MonkeyPatch,
        settings: SpearSettings,
        *,
        rows: int = 12,
        minibatch: int = 1000,
        ranks: int = 1,
        micro: int = 1000,
        reference_in_actor: bool = False,
        bypass: bool = False,
        **correction: Any,
    ) -> None:
        self.settings, self.queue = settings, FakeQueue()
        self.queue.install(monkeypatch)
        self.workers = FakeWorkers(self.queue, settings, ranks, micro)
        self.state = SpearState(settings, seed=1)
        self.metrics: dict[str, Any] = {}
        config = OmegaConf.create(
            {
                "actor_rollout_ref": {
                    "actor": {
                        "ppo_mini_batch_size": minibatch,
                        "ppo_epochs": 1,
                        "data_loader_seed": 42,
                        "ppo_max_token_len_per_gpu": 10_000,
                    },
                    "rollout": {"n": 1, "temperature": 1.0, "log_prob_max_token_len_per_gpu": 10_000},
                },
                "data": {"max_response_length": SCALE},
                "algorithm": {"rollout_correction": {"bypass_mode": bypass, **correction}},
            }
        )
        tokenizer = type("Tokenizer", (), {"pad_token_id": PAD, "eos_token_id": 2})
        self.keys = StepQueue(tokenizer)
        self.updater = ActorUpdater(
            self.workers, config, settings, self.state, self.keys, reference_in_actor=reference_in_actor
        )
        self.workers.corrected = self.updater.correction is not None
        self.rows = self.roll_out(make, rows)

    def roll_out(self, make: Any, count: int) -> list[PlannedRow]:
        random = np.random.default_rng(count)
        planned = []
        for n in range(count):
            prompt, response = (random.integers(VOCABULARY, size=random.integers(1, 5)).tolist() for _ in range(2))
            mask = [1, *random.integers(2, size=len(response) - 1).tolist()]
            tokens = RowTokens(prompt, response, mask, (-2.0 * random.random(len(response))).tolist())
            self.queue.kv_batch_put(
                keys=[f"1-{n}_0_0"], partition_id="train", fields=build_columns([tokens]), tags=[{}]
            )
            row = make.row(
                f"1-{n}_0_0", 0, prompt_length=len(prompt), response_length=len(response), loss_tokens=sum(mask)
            )
            episode = make.episode(f"1-{n}", 0, turns=1)
            planned.append(PlannedRow(row, episode, reward=float(n), advantage=float(random.normal())))
        return planned

    def collect(self) -> FreshRows:
        """Old log-probs of the rows."""
        return self.updater.collect_rows(self.rows, self.metrics)

    def remember(self, fresh: FreshRows) -> Replay:
        """The rows of positive advantage as the replay buffer would give them back, with recalibrated advantages."""
        entries = fresh.to_entries(1)[0]
        return Replay(tuple(entries), tuple(0.5 + 0.1 * n for n in range(len(entries))))

    # ---- the specification -------------------------------------------------------------------------------------------
    def specify(self, parameters: torch.Tensor, *parts: tuple[str, Any]) -> torch.Tensor:
        """Gradient of the paper's loss of one mini-batch made of ``parts``."""
        theta = parameters.detach().clone().requires_grad_()
        columns = [column for kind, rows in parts for column in self.lay_out(kind, rows)]
        width = max(len(column["mask"]) for column in columns)

        def pad(name: str) -> torch.Tensor:
            return torch.stack(
                [torch.nn.functional.pad(column[name], (0, width - len(column[name]))) for column in columns]
            )

        clip, cov = self.settings.clip, self.settings.cov
        result = spear_loss(
            theta[pad("ids")] - 2.0,
            pad("old"),
            pad("advantages"),
            pad("mask") > 0,
            torch.tensor([column["replay"] for column in columns]),
            gamma=GAMMA,
            clip_low=clip.low,
            clip_high=clip.high,
            dual_clip=clip.dual,
            cov_ratio=cov.ratio,
            mode=self.settings.loss.aggregation.value,
            loss_scale_factor=SCALE,
            ref_log_probs=self.workers.reference[pad("ids")] - 2.0,
            kl_coefficient=self.settings.kl.coefficient,
        )
        result.loss.backward()
        assert theta.grad is not None
        return theta.grad

    def lay_out(self, kind: str, rows: Any) -> list[dict[str, Any]]:
        if kind == "replay":
            return [
                {
                    "ids": torch.as_tensor(np.asarray(entry.response_ids), dtype=torch.int64),
                    "old": torch.as_tensor(np.asarray(entry.old_log_probs), dtype=torch.float64),
                    "mask": torch.as_tensor(np.asarray(entry.response_mask), dtype=torch.int64),
                    "advantages": torch.full((len(entry.response_ids),), advantage, dtype=torch.float64),
                    "replay": True,
                }
                for entry, advantage in zip(rows.entries, rows.advantages, strict=True)
            ]
        columns, start = [], 0
        for planned, length in zip(rows.rows, rows.lengths, strict=True):
            stored = self.queue.rows[planned.row.key]
            columns.append(
                {
                    "ids": stored["input_ids"][planned.row.prompt_length :],
                    "old": torch.from_numpy(rows.old_log_probs[start : start + length]).double(),
                    "mask": stored["loss_mask"],
                    "advantages": torch.full((length,), planned.advantage, dtype=torch.float64)
                    if rows.advantages is None
                    else torch.from_numpy(rows.advantages[start : start + length]).double(),
                    "replay": False,
                }
            )
            start += length
        return columns


def choose(coupling: str = "sequential", **nodes: Any) -> SpearSettings:
    plain = {"sil": {"coupling": coupling}, "cov": {"ratio": 0.0}}
    return SpearSettings.from_mapping(plain | nodes)


LAYOUTS = [{}, {"ranks": 2}, {"ranks": 3, "micro": 2}]
"""Of ranks and micro-batches: none may change anything."""

"""A step's updates from end to end, with a table of log-probs for a model and dictionaries for Ray and TransferQueue.

What the parameters are after an update is compared with :func:`training.algorithms.spear_loss` on the same rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric

from spear_envs.core.errors import SpearError
from tests.training.verl_plugin.fakes import FakeQueue
from training.algorithms import Estimator, SpearSettings, calibrate_covariance_bounds, spear_loss
from training.verl_plugin.batch import RowTokens, build_columns, nest_flat
from training.verl_plugin.loss import actor_loss
from training.verl_plugin.plan import PlannedRow
from training.verl_plugin.queue import StepQueue
from training.verl_plugin.state import SpearState
from training.verl_plugin.update import ActorUpdater, FreshRows, Replay

VOCABULARY, SCALE, RATE, GAMMA = 13, 6.0, 0.7, 0.3
PAD = 12


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
        metrics: dict[str, list[float]] = {"grad_norm": []}
        for number in range(shares.shape[1]):
            self.parameters.grad = None
            found: list[dict[str, Metric]] = []
            for share in shares[:, number]:
                kept: dict[str, Metric] = {}
                for start in range(0, len(share), self.micro):
                    loss, counts = self.compute_loss(share[start : start + self.micro].tolist(), meta.fields, info)
                    (loss / self.ranks).backward()  # FSDP averages gradients over ranks
                    for name, value in counts.items():
                        if name in kept:
                            kept[name].append(value)
                        else:
                            kept[name] = value
                found.append(kept)
            for name in found[0]:
                metrics.setdefault(name, []).append(Metric.aggregate_dp([kept[name] for kept in found]))
            assert self.parameters.grad is not None
            metrics["grad_norm"].append(float(self.parameters.grad.norm()))
            with torch.no_grad():
                self.parameters -= RATE * self.parameters.grad
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


MODES = ["seq-mean-token-sum-norm", "seq-mean-token-mean", "token-mean"]
TERMS = {
    "KL to a reference": {"kl": {"coefficient": 0.3}},
    "advantages of tokens": {"advantage": {"estimator": "gae"}},
    "both": {"kl": {"coefficient": 0.3}, "advantage": {"estimator": "gae"}},
}
LAYOUTS = [{}, {"ranks": 2}, {"ranks": 3, "micro": 2}]


# ---- log-probs -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_old_log_probs_are_the_actors_own(make: Any, monkeypatch: pytest.MonkeyPatch, layout: dict[str, int]) -> None:
    step = Step(make, monkeypatch, choose(), rows=7, **layout)
    fresh = step.collect()
    assert fresh.rows == tuple(step.rows)
    start = 0
    for planned, length, (prompt, response) in zip(fresh.rows, fresh.lengths, fresh.tokens, strict=True):
        stored = step.queue.rows[planned.row.key]
        assert [*prompt, *response] == stored["input_ids"].tolist() and len(prompt) == planned.row.prompt_length
        expected = step.workers.parameters[torch.as_tensor(response, dtype=torch.int64)] - 2.0
        np.testing.assert_allclose(fresh.old_log_probs[start : start + length], expected.detach(), rtol=1e-6)
        assert fresh.mask[start : start + length].tolist() == (stored["loss_mask"] > 0).tolist()
        start += length
    assert start == len(fresh.old_log_probs) == len(fresh.mask)


def test_entropy_and_agreement_are_those_of_the_policys_tokens(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(make, monkeypatch, choose())
    fresh = step.collect()
    ends = np.cumsum(fresh.lengths)
    sums = [
        -(fresh.old_log_probs * fresh.mask)[end - n : end].sum() for end, n in zip(ends, fresh.lengths, strict=True)
    ]
    assert step.metrics["entropy/seq-mean-token-sum"] == pytest.approx(np.mean(sums), rel=1e-5)
    assert step.metrics["entropy/seq-mean-token-sum-norm"] == pytest.approx(np.mean(sums) / SCALE, rel=1e-5)
    assert step.metrics["entropy/token-mean"] == pytest.approx(-fresh.old_log_probs[fresh.mask].mean(), rel=1e-5)
    rollout = torch.cat([step.queue.rows[row.row.key]["rollout_log_probs"] for row in step.rows]).numpy()
    difference = np.abs(fresh.old_log_probs - rollout)[fresh.mask]
    assert step.metrics["training/rollout_log_probs_diff_max"] == pytest.approx(difference.max(), rel=1e-5)
    assert step.metrics["training/rollout_log_probs_diff_mean"] == pytest.approx(difference.mean(), rel=1e-5)


def test_bypassed_old_log_probs_are_the_rollouts(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(make, monkeypatch, choose(), rows=7, bypass=True)
    fresh = step.collect()
    rollout = torch.cat([step.queue.rows[row.row.key]["rollout_log_probs"] for row in step.rows]).numpy()
    np.testing.assert_array_equal(fresh.old_log_probs, rollout)
    assert not any("log_probs" in step.queue.rows[row.row.key] for row in step.rows)  # nobody asked the actor
    assert step.metrics["entropy/token-mean"] == pytest.approx(-rollout[fresh.mask].mean(), rel=1e-5)
    assert "training/rollout_log_probs_diff_max" not in step.metrics


@pytest.mark.parametrize("coupling", ["sequential", "joint"])
def test_a_step_with_the_rollouts_log_probs_is_the_same_where_they_are_the_actors(
    make: Any, monkeypatch: pytest.MonkeyPatch, coupling: str
) -> None:
    after = []
    for bypass in (False, True):
        step = Step(make, monkeypatch, choose(coupling), bypass=bypass)
        for planned in step.rows:  # an engine that agrees with the trainer, as spear_hf does
            stored = step.queue.rows[planned.row.key]
            where = stored["input_ids"][planned.row.prompt_length :]
            stored["rollout_log_probs"] = (step.workers.parameters.detach()[where] - 2.0).float()
        fresh = step.collect()
        step.updater.update(fresh, step.remember(fresh), GAMMA, step.metrics)
        names = ("loss/on_policy", "loss/sil", "actor/grad_norm", "entropy/token-mean")
        after.append((step.workers.parameters.detach(), [step.metrics.get(name) for name in names]))
    assert torch.equal(after[0][0], after[1][0])
    assert after[0][1] == after[1][1]


# ---- rollout correction ----------------------------------------------------------------------------------------------
class Disagreement:
    """Makes rollout engine and actor of a step differ on each token; knows the loss that follows from it."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.ids, self.masks, self.ratios = [], [], []
        for planned in step.rows:
            stored = step.queue.rows[planned.row.key]
            self.ids.append(stored["input_ids"][planned.row.prompt_length :])
            self.masks.append(stored["loss_mask"] > 0)
            own = (step.workers.parameters.detach()[self.ids[-1]] - 2.0).float()
            stored["rollout_log_probs"] = own - torch.linspace(-0.9, 0.9, 7)[self.ids[-1] % 7]
            self.ratios.append((own - stored["rollout_log_probs"]).exp())

    def specify(self, factors: list[torch.Tensor], kept: list[torch.Tensor]) -> torch.Tensor:
        """Parameters after one step on the rows' mean over kept tokens of -A times the factor."""
        theta = self.step.workers.parameters.detach().clone().requires_grad_()
        total = sum(mask.sum() for mask in kept)
        for planned, ids, factor, mask in zip(self.step.rows, self.ids, factors, kept, strict=True):
            log_probs = theta[ids]
            ratio = (log_probs - log_probs.detach()).exp()
            (-(planned.advantage * ratio * factor)[mask].sum() / total).backward()
        assert theta.grad is not None
        return theta.detach() - RATE * theta.grad


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("threshold", [1.5, "0.6_1.5"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_tokens_weigh_what_the_actor_thinks_of_them_against_the_rollout(
    make: Any, monkeypatch: pytest.MonkeyPatch, level: str, threshold: Any, layout: dict[str, int]
) -> None:
    settings = choose(loss={"aggregation": "token-mean"})
    step = Step(make, monkeypatch, settings, rollout_is=level, rollout_is_threshold=threshold, **layout)
    between = Disagreement(step)
    factors = []
    for ratio, mask in zip(between.ratios, between.masks, strict=True):
        raw = ratio if level == "token" else ratio[mask].prod().expand_as(ratio)
        inside = (raw >= 0.6) & (raw <= 1.5)
        factors.append(raw.clamp(max=1.5) if threshold == 1.5 else torch.where(inside, raw, 0.0))
    assert any(bool((factor != ratio).any()) for factor, ratio in zip(factors, between.ratios, strict=True))
    expected = between.specify(factors, between.masks)
    step.updater.update(step.collect(), Replay.empty(), 0.0, step.metrics)
    torch.testing.assert_close(step.workers.parameters.detach(), expected, rtol=1e-5, atol=1e-6)
    assert step.metrics["rollout_corr/rollout_is_mean"] > 0


def test_rejected_tokens_leave_the_loss_and_what_it_is_divided_by(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = choose(loss={"aggregation": "token-mean"})
    step = Step(make, monkeypatch, settings, rollout_rs="token_k1", rollout_rs_threshold="0.6_1.5")
    between = Disagreement(step)
    # verl holds the bounds against the rollout's probability over the actor's.
    kept = [
        mask & (1 / ratio >= 0.6) & (1 / ratio <= 1.5)
        for ratio, mask in zip(between.ratios, between.masks, strict=True)
    ]
    assert 0 < sum(int(mask.sum()) for mask in kept) < sum(int(mask.sum()) for mask in between.masks)
    assert any(not mask.any() for mask in kept), "a row with nothing left"
    expected = between.specify([torch.ones_like(ratio) for ratio in between.ratios], kept)
    fresh = step.collect()
    assert fresh.mask.tolist() == torch.cat(kept).tolist()
    assert [planned.row.loss_tokens for planned in fresh.rows] == [int(mask.sum()) for mask in kept]
    entries, others = fresh.to_entries(1)
    good = [n for n, planned in enumerate(step.rows) if planned.advantage > 0 and kept[n].any()]
    assert [np.asarray(entry.response_mask).tolist() for entry in entries] == [kept[n].tolist() for n in good]
    assert others == len(step.rows) - len(good)
    step.updater.update(fresh, Replay.empty(), 0.0, step.metrics)
    torch.testing.assert_close(step.workers.parameters.detach(), expected, rtol=1e-5, atol=1e-6)
    assert 0 < step.metrics["rollout_corr/rollout_rs_masked_fraction"] < 1


def test_a_step_without_a_token_both_agree_on_is_told(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(make, monkeypatch, choose(), rollout_is="token", rollout_is_threshold="20_30")
    with pytest.raises(SpearError, match=r"no token of this step .* 20_30.*rollout\.dtype"):
        step.collect()


@pytest.mark.parametrize("coupling", ["sequential", "joint"])
def test_replayed_rows_are_not_corrected(make: Any, monkeypatch: pytest.MonkeyPatch, coupling: str) -> None:
    after = []
    for correction in ({}, {"rollout_is": "token"}):
        step = Step(make, monkeypatch, choose(coupling), **correction)
        fresh = step.collect()
        replay = step.remember(fresh)
        still = replace(fresh, rows=tuple(replace(planned, advantage=0.0) for planned in fresh.rows))
        step.updater.update(still, replay, GAMMA, step.metrics)
        after.append(step.workers.parameters.detach())
    torch.testing.assert_close(after[0], after[1], rtol=1e-6, atol=1e-7)


def test_rows_of_positive_advantage_go_to_the_replay_buffer_as_they_were(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Step(make, monkeypatch, choose())
    fresh = step.collect()
    entries, nonpositive = fresh.to_entries(4)
    good = [planned for planned in step.rows if planned.advantage > 0]
    assert len(entries) == len(good) and nonpositive == len(step.rows) - len(good)
    for entry, planned in zip(entries, good, strict=True):
        stored = step.queue.rows[planned.row.key]
        assert [*entry.prompt_ids, *entry.response_ids] == stored["input_ids"].tolist()
        assert np.asarray(entry.response_mask).tolist() == (stored["loss_mask"] > 0).tolist()
        assert (entry.reward, entry.advantage, entry.step) == (planned.reward, planned.advantage, 4)
        expected = step.workers.parameters[stored["input_ids"][planned.row.prompt_length :]].detach() - 2.0
        np.testing.assert_allclose(entry.old_log_probs, expected, rtol=1e-6)
    assert len({entry.trajectory_id for entry in entries}) == len(entries)


# ---- updates ---------------------------------------------------------------------------------------------------------
def train(step: Step, *, move: float = 0.2) -> tuple[FreshRows, Replay, torch.Tensor]:
    """An update of fresh rows and of rows remembered from a slightly different policy; returns the start parameters.

    With PPO each token of the fresh rows has an advantage of its own.
    """
    replay = step.remember(step.collect())
    with torch.no_grad():
        noise = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        step.workers.parameters += move * noise
    fresh = step.collect()
    if step.settings.advantage.estimator is Estimator.GAE:
        fresh = replace(fresh, advantages=np.random.default_rng(2).normal(size=len(fresh.mask)).astype(np.float32))
    start = step.workers.parameters.detach().clone()
    step.updater.update(fresh, replay, GAMMA, step.metrics)
    return fresh, replay, start


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_joint_coupling_is_one_step_down_the_papers_loss(
    make: Any, monkeypatch: pytest.MonkeyPatch, mode: str, layout: dict[str, int]
) -> None:
    step = Step(make, monkeypatch, choose("joint", loss={"aggregation": mode, "scale_factor": SCALE}), **layout)
    fresh, replay, start = train(step)
    expected = start - RATE * step.specify(start, ("fresh", fresh), ("replay", replay))
    torch.testing.assert_close(step.workers.parameters.detach(), expected, atol=1e-6, rtol=0)
    assert step.metrics["replay/n_sil"] == len(replay.entries) / len(fresh.rows)
    assert step.metrics["actor/optimizer_steps"] == 1


@pytest.mark.parametrize("coupling", ["sequential", "folded"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_sequential_coupling_is_a_step_for_each_term(
    make: Any, monkeypatch: pytest.MonkeyPatch, mode: str, layout: dict[str, int], coupling: str
) -> None:
    step = Step(make, monkeypatch, choose(coupling, loss={"aggregation": mode, "scale_factor": SCALE}), **layout)
    fresh, replay, start = train(step)
    middle = start - RATE * step.specify(start, ("fresh", fresh))
    expected = middle - RATE * step.specify(middle, ("replay", replay))
    torch.testing.assert_close(step.workers.parameters.detach(), expected, atol=1e-6, rtol=0)
    assert (start - middle).abs().max() > 1e-2 and (middle - expected).abs().max() > 1e-3
    assert step.metrics["replay/n_sil"] == 1.0


@pytest.mark.parametrize("coupling", ["sequential", "joint"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("nodes", TERMS.values(), ids=TERMS.keys())
def test_terms_that_not_every_algorithm_has_are_the_papers_too(
    make: Any, monkeypatch: pytest.MonkeyPatch, coupling: str, layout: dict[str, int], nodes: dict[str, Any]
) -> None:
    step = Step(make, monkeypatch, choose(coupling, loss={"scale_factor": SCALE}, **nodes), **layout)
    fresh, replay, start = train(step)
    parts = [("fresh", fresh)], [("replay", replay)]
    expected = start
    for part in [[*parts[0], *parts[1]]] if coupling == "joint" else parts:
        expected = expected - RATE * step.specify(expected, *part)
    torch.testing.assert_close(step.workers.parameters.detach(), expected, atol=1e-6, rtol=0)
    plain = Step(make, monkeypatch, choose(coupling, loss={"scale_factor": SCALE}), **layout)
    train(plain)
    assert (plain.workers.parameters - step.workers.parameters).abs().max() > 1e-3, "the term does nothing"
    if "kl" in nodes:
        assert step.metrics["kl/reference"] > 0
    else:
        assert "kl/reference" not in step.metrics


def test_folded_coupling_shrinks_advantages_of_tokens_too(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for coupling in ("sequential", "folded"):
        step = Step(make, monkeypatch, choose(coupling, **TERMS["advantages of tokens"]))
        train(step)
        found.append(step.workers.parameters.detach())
    torch.testing.assert_close(*found, atol=1e-6, rtol=0)


def test_with_an_adapter_the_reference_is_the_actor_without_it(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for inside in (False, True):
        step = Step(make, monkeypatch, choose(**TERMS["KL to a reference"]), reference_in_actor=inside)
        train(step)
        found.append(step.workers.parameters.detach())
    assert torch.equal(*found)


def test_the_learning_rate_ticks_with_the_last_call_of_a_step(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(make, monkeypatch, choose())
    train(step)
    assert [call.extra_info["hold_learning_rate"] for call in step.workers.calls] == [True, False]
    assert step.metrics["actor/lr"] == RATE
    alone = Step(make, monkeypatch, choose())
    alone.updater.update(alone.collect(), Replay.empty(), GAMMA, alone.metrics)
    assert [call.extra_info["hold_learning_rate"] for call in alone.workers.calls] == [False]
    assert alone.metrics["actor/lr"] == RATE and alone.metrics["replay/n_sil"] == 0


@pytest.mark.parametrize("coupling", ["sequential", "joint", "folded"])
def test_gamma_of_zero_leaves_replay_out(make: Any, monkeypatch: pytest.MonkeyPatch, coupling: str) -> None:
    step = Step(make, monkeypatch, choose(coupling))
    fresh = step.collect()
    start = step.workers.parameters.detach().clone()
    step.updater.update(fresh, step.remember(fresh), 0.0, step.metrics)
    expected = start - RATE * step.specify(start, ("fresh", fresh))
    torch.testing.assert_close(step.workers.parameters.detach(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize(("minibatch", "count"), [(4, 3), (5, 2), (100, 1)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_row_is_trained_on_once_in_minibatches_of_one_size(
    make: Any, monkeypatch: pytest.MonkeyPatch, minibatch: int, count: int, ranks: int
) -> None:
    step = Step(make, monkeypatch, choose(), minibatch=minibatch, ranks=ranks)
    fresh = step.collect()
    step.updater.update(fresh, Replay.empty(), GAMMA, step.metrics)
    (call,) = step.workers.calls
    rows = [key for key in call.keys if not key.startswith("padding")]
    assert sorted(rows) == sorted(planned.row.key for planned in step.rows)
    assert len(call.keys) == count * call.extra_info["mini_batch_size"]
    assert call.extra_info["mini_batch_size"] % ranks == 0
    assert len(set(call.keys)) == len(call.keys)
    assert step.metrics["actor/optimizer_steps"] == count
    assert call.extra_info["dataloader_kwargs"] == {"shuffle": False}


def test_metrics_of_the_loss_are_sums_of_the_mini_batch(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for layout in LAYOUTS:
        step = Step(make, monkeypatch, choose("joint"), **layout)
        train(step)
        names = ("loss/on_policy", "loss/sil", "clip/ppo_fraction", "clip/cov_fraction", "actor/grad_norm")
        found.append([step.metrics[name] for name in names])
    np.testing.assert_allclose(found[1:], [found[0]] * 2, atol=1e-6)
    assert found[0][1] < 0, "self-imitation raises the probability of what paid"


# ---- covariance bounds -----------------------------------------------------------------------------------------------
def test_bounds_are_measured_on_the_first_replayed_rows_and_kept(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(make, monkeypatch, choose(cov={"ratio": 0.5, "lower_top": 1.0, "upper_top": 0.5}))
    replay = step.remember(step.collect())
    step.updater.update(step.collect(), Replay.empty(), GAMMA, step.metrics)
    assert step.state.bounds is None, "nothing was replayed yet"
    columns = step.lay_out("replay", replay)
    width = max(len(column["ids"]) for column in columns)
    ids, mask = (
        torch.stack([torch.nn.functional.pad(column[name], (0, width - len(column[name]))) for column in columns])
        for name in ("ids", "mask")
    )
    expected = calibrate_covariance_bounds(
        step.workers.parameters.detach()[ids] - 2.0,
        torch.tensor(replay.advantages, dtype=torch.float64),
        mask,
        lower_top=1.0,
        upper_top=0.5,
    )
    step.updater.update(step.collect(), replay, GAMMA, step.metrics)
    assert step.state.bounds == pytest.approx(expected, abs=1e-5)
    before = step.state.bounds
    step.updater.update(step.collect(), replay, GAMMA, step.metrics)
    assert step.state.bounds == before


def test_folded_coupling_shrinks_the_bounds_with_the_covariances(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cov = {"ratio": 0.5, "bounds": "fixed", "lower": -1.0, "upper": 1.0}
    for coupling, factor in (("sequential", 1.0), ("folded", GAMMA)):
        step = Step(make, monkeypatch, choose(coupling, cov=cov))
        train(step)
        info = step.workers.calls[-1].extra_info
        assert (info["cov_lower"], info["cov_upper"]) == (-factor, factor)
        assert step.metrics["clip/cov_fraction"] == pytest.approx(0.5, abs=0.05)


# ---- keys ------------------------------------------------------------------------------------------------------------
def test_all_keys_of_a_step_are_given_to_be_cleared(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(make, monkeypatch, choose(), rows=7, ranks=3)
    train(step)
    rollout_keys = [planned.row.key for planned in step.rows]
    keys = step.keys.take_keys(rollout_keys)
    assert sorted(keys) == sorted(step.queue.rows), "and none twice"
    assert any(key.startswith("padding") for key in keys) and any(key.startswith("replay") for key in keys)
    assert step.keys.take_keys(rollout_keys) == rollout_keys, "the next step begins with none"


def test_a_step_without_rows_still_has_a_key(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # verl clears what a step names and fails on nothing.
    step = Step(make, monkeypatch, choose())
    (key,) = step.keys.take_keys([])
    assert key in step.queue.rows

"""A step's updates from end to end: what the parameters are afterwards is what
:func:`spear_training.algorithms.spear_loss` says of the same rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import numpy as np
import torch

from spear_training.algorithms import Estimator, calibrate_covariance_bounds
from spear_training.verl_plugin.update import FreshRows, Replay
from tests.training.verl_plugin.steps import GAMMA, LAYOUTS, RATE, SCALE, VOCABULARY, Step, choose

MODES = ["seq-mean-token-sum-norm", "seq-mean-token-mean", "token-mean"]
TERMS = {
    "KL to a reference": {"kl": {"coefficient": 0.3}},
    "advantages of tokens": {"advantage": {"estimator": "gae"}},
    "both": {"kl": {"coefficient": 0.3}, "advantage": {"estimator": "gae"}},
}


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


def test_replayed_rows_need_no_more_memory_than_those_of_an_on_policy_mini_batch(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = Step(make, monkeypatch, choose())
    replayed = len(probe.remember(probe.collect()).entries)
    minibatch = replayed - 1  # so that they are one mini-batch with a row too many
    step = Step(make, monkeypatch, choose(), minibatch=minibatch, ranks=2)
    train(step)
    own = step.workers.calls[-1].extra_info
    assert own["mini_batch_size"] >= replayed and own["mini_batch_size"] % 4 == 0
    assert own["micro_batch_size_per_gpu"] == own["mini_batch_size"] // 4 <= minibatch / 2


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

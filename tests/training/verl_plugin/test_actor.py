"""A step's updates through verl's actor: afterwards the parameters are where
:func:`spear_training.algorithms.spear_loss` of the same rows moves them.
"""

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import numpy as np
import torch

from spear_training.algorithms import RowTable
from tests.training.verl_plugin.steps import GAMMA, LAYOUTS, RATE, SCALE, VOCABULARY, Step, choose

TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "KL and advantages of tokens": {"kl": {"coefficient": 0.3}, "advantage": {"estimator": "gae"}},
    "an entropy bonus": {"loss": {"scale_factor": SCALE, "entropy_coefficient": 0.1}},
    "token-mean": {"loss": {"scale_factor": SCALE, "aggregation": "token-mean"}},
}


# ---- log-probs -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_old_log_probs_are_the_actors_own(layout: dict[str, int]) -> None:
    step = Step(choose(), rows=7, **layout)
    fresh = step.collect()
    assert fresh.key.tolist() == step.rows.key.tolist()
    assert fresh.mask.tolist() == step.played.mask.tolist()
    for own, ids, prompt in zip(
        fresh.split("log_probs"), step.played.split("ids"), fresh.prompt_length.tolist(), strict=True
    ):
        expected = step.workers.parameters[torch.from_numpy(ids[prompt:]).long()] - 2.0
        np.testing.assert_allclose(own, expected.detach(), rtol=1e-6)
    sums = [-own[on].sum() for own, on in zip(fresh.split("log_probs"), fresh.split("mask"), strict=True)]
    assert step.metrics["entropy/seq-mean-token-sum"] == pytest.approx(np.mean(sums), rel=1e-5)
    assert step.metrics["entropy/seq-mean-token-sum-norm"] == pytest.approx(np.mean(sums) / SCALE, rel=1e-5)
    assert step.metrics["entropy/token-mean"] == pytest.approx(-fresh.log_probs[fresh.mask].mean(), rel=1e-5)
    difference = np.abs(fresh.log_probs - step.played.rollout_log_probs)[fresh.mask]
    assert step.metrics["training/rollout_log_probs_diff_max"] == pytest.approx(difference.max(), rel=1e-5)
    assert step.metrics["training/rollout_log_probs_diff_mean"] == pytest.approx(difference.mean(), rel=1e-5)


def test_bypassed_old_log_probs_are_the_rollouts() -> None:
    step = Step(choose(), rows=7, bypass=True)
    fresh, rollout = step.collect(), step.played.rollout_log_probs
    np.testing.assert_array_equal(fresh.log_probs, rollout)
    assert not any("log_probs" in step.queue.rows[key] for key in step.rows.key), "the actor computes none"
    assert step.metrics["entropy/token-mean"] == pytest.approx(-rollout[fresh.mask].mean(), rel=1e-5)
    assert "training/rollout_log_probs_diff_max" not in step.metrics


def test_ratios_are_measured_where_weights_may_be_old() -> None:
    found = []
    for staleness in (0, 1):
        step = Step(choose(), staleness=staleness)
        step.collect()
        found.append({name: value for name, value in step.metrics.items() if name.startswith("staleness/")})
    assert found[0] == {}
    assert found[1]["staleness/ratio_min"] < found[1]["staleness/ratio_mean"] < found[1]["staleness/ratio_max"]


def test_rows_come_back_from_the_replay_buffer_as_they_were() -> None:
    step = Step(choose())
    fresh = step.collect()
    read = step.actor.read_tokens(fresh.take(fresh.advantage > 0))
    wanted = step.played.take(fresh.advantage > 0)
    assert 0 < len(read) < len(fresh) and "pictures" not in read
    for name in ("key", "ids", "mask", "reward", "advantage"):
        assert getattr(read, name).tolist() == getattr(wanted, name).tolist()
    back = step.remember(fresh)
    assert sorted(back.trajectory) == sorted(wanted.trajectory)
    assert len(set(back.key)) == len(back) and not set(back.key) & set(fresh.key)
    place = {name: number for number, name in enumerate(wanted.trajectory)}
    again = wanted.take([place[name] for name in back.trajectory])
    for key, ids, mask in zip(back.key, again.split("ids"), again.split("mask"), strict=True):
        assert step.queue.rows[key]["input_ids"].tolist() == ids.tolist()
        assert (step.queue.rows[key]["loss_mask"] > 0).tolist() == mask.tolist()


# ---- updates ---------------------------------------------------------------------------------------------------------
def train(step: Step, *, move: float = 0.2) -> tuple[RowTable, RowTable, torch.Tensor]:
    """Update with fresh rows and rows remembered from a slightly different policy; return the start parameters, too.

    With PPO each token of the fresh rows has an advantage of its own. Every third fresh row has none.
    """
    replay = step.remember(step.collect())
    with torch.no_grad():
        noise = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        step.workers.parameters += move * noise
    fresh = step.collect()
    if step.settings.advantage.needs_critic:
        fresh = fresh.add(token_advantages=np.random.default_rng(2).normal(size=len(fresh.mask)))
    fresh = fresh.add(advantage=np.where(np.arange(len(fresh)) % 3 == 0, 0.0, fresh.advantage))
    start = step.workers.parameters.detach().clone()
    step.updater.update(fresh, replay, GAMMA, step.metrics)
    return fresh, replay, start


@pytest.mark.parametrize("coupling", ["sequential", "joint"])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("nodes", TERMS.values(), ids=TERMS.keys())
def test_an_update_goes_down_the_papers_loss(coupling: str, layout: dict[str, int], nodes: dict[str, Any]) -> None:
    step = Step(choose(coupling, **{"loss": {"scale_factor": SCALE}, **nodes}), **layout)
    fresh, replay, expected = train(step)
    together = [{"fresh": fresh, "replay": replay}]
    for parts in together if coupling == "joint" else [{"fresh": fresh}, {"replay": replay}]:
        start, expected = expected, expected - RATE * step.specify(expected, **parts)
        assert (expected - start).abs().max() > 1e-3
    torch.testing.assert_close(step.workers.parameters.detach(), expected, atol=1e-6, rtol=0)
    assert ("kl/reference" in step.metrics) == ("kl" in nodes)
    assert step.metrics["replay/n_sil"] == (len(replay) / len(fresh) if coupling == "joint" else 1.0)
    assert [call.extra_info["hold_learning_rate"] for call in step.workers.calls] == (
        [False] if coupling == "joint" else [True, False]
    )
    assert step.metrics["actor/lr"] == RATE and 0 < step.metrics["replay/ess"] < 1


@pytest.mark.parametrize(
    ("nodes", "skipped"), [({}, True), ({"kl": {"coefficient": 0.3}}, False), ({"cov": {"on_policy": True}}, False)]
)
def test_rows_without_an_advantage_are_computed_only_where_they_matter(nodes: dict[str, Any], skipped: bool) -> None:
    step = Step(choose("joint", **nodes), ranks=2)
    fresh, replay, _ = train(step)
    computed = {key for call in step.workers.calls for key in call.keys}
    silent = fresh.advantage == 0
    assert computed.isdisjoint(fresh.key[silent]) == skipped
    assert computed >= {*fresh.key[~silent], *replay.key}


def test_a_reference_policy_has_the_limit_of_passes_for_log_probs() -> None:
    step = Step(choose(kl={"coefficient": 0.3}))
    workers: Any = step.workers
    ask, limits = workers.compute_ref_log_prob, list[int]()
    workers.compute_ref_log_prob = lambda meta: limits.append(meta.extra_info["max_token_len_per_gpu"]) or ask(meta)
    step.config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu = 5
    step.collect()
    assert limits == [5], "and not that of updates"


def test_with_an_adapter_the_reference_is_the_actor_without_it() -> None:
    found = []
    for inside in (False, True):
        step = Step(choose(kl={"coefficient": 0.3}), reference_in_actor=inside)
        train(step)
        assert step.workers.adapters_off == inside
        found.append(step.workers.parameters.detach())
    assert torch.equal(*found)


@pytest.mark.parametrize("coupling", ["sequential", "joint"])
def test_a_step_with_the_rollouts_log_probs_is_the_same_where_they_are_the_actors(coupling: str) -> None:
    after = []
    for bypass in (False, True):
        step = Step(choose(coupling), bypass=bypass)
        for key, prompt in zip(step.rows.key, step.rows.prompt_length, strict=True):
            stored = step.queue.rows[key]  # an engine that agrees with the trainer, as spear_hf does
            own = step.workers.parameters.detach()[stored["input_ids"][prompt:]] - 2.0
            stored["rollout_log_probs"] = own.float()
        fresh = step.collect()
        step.updater.update(fresh, step.remember(fresh), GAMMA, step.metrics)
        names = ("loss/on_policy", "loss/sil", "actor/grad_norm", "entropy/token-mean")
        after.append((step.workers.parameters.detach(), [step.metrics[name] for name in names]))
    assert torch.equal(after[0][0], after[1][0])
    assert after[0][1] == after[1][1]


def test_ranks_share_each_of_several_mini_batches() -> None:
    found, metrics = [], []
    names = ("loss/on_policy", "loss/sil", "clip/ppo_fraction", "clip/cov_fraction", "actor/grad_norm", "kl/old")
    for layout in LAYOUTS:
        step = Step(choose("joint"), minibatch=4, **layout)
        train(step)
        (call,) = step.workers.calls
        assert step.metrics["actor/optimizer_steps"] == 3 and len(set(call.keys)) == len(call.keys)
        assert len(call.keys) == 3 * call.extra_info["mini_batch_size"], "replayed rows make no further mini-batch"
        assert call.extra_info["dataloader_kwargs"] == {"shuffle": False} and step.metrics["perf/rank_balance"] >= 1.0
        found.append(step.workers.parameters.detach())
        metrics.append([step.metrics[name] for name in names])
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=1e-6, rtol=0)
    np.testing.assert_allclose(metrics[1:], [metrics[0]] * 2, atol=1e-6)


@pytest.mark.parametrize("coupling", ["sequential", "joint"])
def test_replayed_rows_need_no_more_memory_than_those_of_an_on_policy_mini_batch(coupling: str) -> None:
    probe = Step(choose())
    # So that the replayed rows are one mini-batch with a row too many, or what the fresh ones leave no room for.
    minibatch = len(probe.remember(probe.collect())) - 1 if coupling == "sequential" else 12
    step = Step(choose(coupling), minibatch=minibatch, ranks=2)
    train(step)
    own = step.workers.calls[-1].extra_info
    assert own["mini_batch_size"] > minibatch and own["mini_batch_size"] % 4 == 0
    assert own["micro_batch_size_per_gpu"] == own["mini_batch_size"] // 4 <= minibatch / 2


def test_the_workers_get_the_covariance_bounds_once_they_are_measured() -> None:
    step = Step(choose(cov={"ratio": 0.5}))
    fresh = step.collect()
    replay = step.remember(fresh)
    for _ in range(2):
        before = step.state.bounds
        step.updater.update(fresh, replay, GAMMA, step.metrics)
        info = step.workers.calls[-1].extra_info
        given = (info["cov_lower"], info["cov_upper"])
        assert np.isnan(given).all() if before is None else given == before
    assert before is not None


# ---- keys ------------------------------------------------------------------------------------------------------------
def test_all_keys_of_a_step_are_given_to_be_cleared() -> None:
    step = Step(choose("sequential"), rows=7, ranks=3)
    train(step)
    rollout_keys = step.rows.key.tolist()
    keys = step.keys.take_keys(rollout_keys)
    assert sorted(keys) == sorted(step.queue.rows), "and none twice"
    assert any(key.startswith("padding") for key in keys) and any(key.startswith("replay") for key in keys)
    assert step.keys.take_keys(rollout_keys) == rollout_keys, "the next step begins with none"
    (key,) = step.keys.take_keys([])  # verl clears what a step names, and fails on nothing
    assert key in step.queue.rows

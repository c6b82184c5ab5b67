from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_training.algorithms import Aggregation, aggregate_loss, kl_divergence, policy_loss, spear_loss


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_batch(seed: int, rows: int = 6, tokens: int = 7):
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(rows, tokens, generator=generator, dtype=torch.float64) * 3
    old = log_probs + 0.3 * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, tokens, generator=generator) < 0.6
    return log_probs.requires_grad_(True), old, advantages, mask


def test_policy_loss_by_hand() -> None:
    ratios, advantages = [1.1, 1.5, 0.5, 0.7, 1.5, 12.0], [1.0, 1.0, 1.0, -1.0, -1.0, -2.0]
    log_probs = tensor([ratios]).log().requires_grad_(True)
    got = policy_loss(log_probs, torch.zeros(1, 6), tensor([advantages]), torch.ones(1, 6))
    assert got.loss[0].tolist() == pytest.approx([-1.1, -1.28, -0.5, 0.8, 1.5, 20.0])
    assert got.clipped[0].tolist() == [False, True, False, True, False, False]
    assert got.dual_clipped[0].tolist() == [False] * 5 + [True]
    got.loss.sum().backward()
    assert log_probs.grad[0].tolist() == pytest.approx([-1.1, 0.0, -0.5, 0.0, 1.5, 0.0])
    off = policy_loss(log_probs, torch.zeros(1, 6), tensor([advantages]), torch.ones(1, 6), dual_clip=None)
    assert float(off.loss[0, -1].detach()) == pytest.approx(24.0) and not off.dual_clipped.any()


def test_the_log_ratio_is_clamped_with_gradient_zero() -> None:
    log_probs = tensor([[0.0, -50.0]]).requires_grad_(True)
    old = tensor([[-50.0, 0.0]])
    got = policy_loss(log_probs, old, tensor([-1.0]), torch.ones(1, 2), dual_clip=None)
    assert got.ratio[0].tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    got.loss.sum().backward()
    assert log_probs.grad.tolist() == [[0.0, 0.0]]
    free = policy_loss(log_probs, old, tensor([-1.0]), torch.ones(1, 2), dual_clip=None, max_log_ratio=None)
    assert float(free.ratio[0, 0].detach()) == pytest.approx(math.exp(50))


@settings(deadline=None)
@given(st.integers(0, 5000), st.floats(0, 0.5), st.floats(0, 0.5), st.sampled_from([None, 1.1, 10.0]))
def test_gradient_is_zero_where_masked_clipped_or_taken_out(seed, low, high, dual) -> None:
    log_probs, old, advantages, mask = random_batch(seed)
    keep = torch.rand(mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.8
    got = policy_loss(
        log_probs, old, advantages, mask, clip_low=low, clip_high=high, dual_clip=dual, keep=keep, max_log_ratio=None
    )
    got.loss.sum().backward()
    dead = ~mask | ~keep | got.clipped | got.dual_clipped
    assert not log_probs.grad[dead].any()
    live = -(advantages[:, None] * got.ratio)
    assert torch.allclose(log_probs.grad[~dead], live[~dead])
    assert not got.loss[~mask | ~keep].any()
    assert not (got.clipped & ~mask).any() and not (got.dual_clipped & ~mask).any()


def test_what_stands_off_the_mask_does_no_harm() -> None:
    log_probs = tensor([[-1.0, float("inf"), -1e6]]).requires_grad_(True)
    old = tensor([[-1.0, 0.0, 1e6]])
    mask = tensor([[1, 0, 0]])
    reference = tensor([[-1.0, 0.0, 1e6]])
    got = spear_loss(
        log_probs, old, tensor([1.0]), mask, torch.tensor([0]), gamma=1.0, ref_log_probs=reference, kl_coefficient=0.1
    )
    got.loss.backward()
    assert math.isfinite(float(got.loss.detach()))
    assert log_probs.grad[0].tolist() == pytest.approx([-1 / 3, 0.0, 0.0])


def test_policy_loss_refuses() -> None:
    log_probs, old, advantages, mask = random_batch(0)
    with pytest.raises(ValueError, match="above 1"):
        policy_loss(log_probs, old, advantages, mask, dual_clip=1.0)
    with pytest.raises(ValueError, match="advantages must be"):
        policy_loss(log_probs, old, advantages[:2], mask)
    with pytest.raises(ValueError, match="one shape"):
        policy_loss(log_probs, old, advantages, mask[:2])


@given(st.floats(-5, 5), st.floats(-5, 5))
def test_kl_estimate_is_not_negative(a: float, b: float) -> None:
    got = float(kl_divergence(tensor([[a]]), tensor([[b]])))
    assert got == pytest.approx(math.exp(b - a) - (b - a) - 1, abs=1e-9) and got >= -1e-12


LOSS = [[1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0]]
MASK = [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("mode", "options", "want"),
    [
        ("seq-mean-token-sum-norm", {}, 10 / 2 / 4),
        ("seq-mean-token-sum-norm", {"loss_scale_factor": 512}, 10 / 2 / 512),
        ("seq-mean-token-sum-norm", {"num_sequences": 3}, 10 / 3 / 4),
        ("seq-mean-token-sum", {}, 5.0),
        ("seq-mean-token-mean", {}, 2.0),
        ("seq-mean-token-mean", {"num_sequences": 4}, 1.0),
        ("token-mean", {}, 2.0),
        ("token-mean", {"num_tokens": 10}, 1.0),
        ("sum-norm", {"loss_scale_factor": 5}, 2.0),
    ],
)
def test_aggregation_by_hand(mode: str, options: dict, want: float) -> None:
    assert float(aggregate_loss(tensor(LOSS), tensor(MASK), mode=mode, **options)) == pytest.approx(want)


@pytest.mark.parametrize("mode", [member.value for member in Aggregation])
def test_an_empty_batch_gives_zero_with_a_gradient(mode: str) -> None:
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    got = aggregate_loss(loss, torch.zeros(2, 3), mode=mode)
    got.backward()
    assert float(got.detach()) == 0.0 and not loss.grad.any()


@given(st.integers(0, 1000), st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_aggregation_does_not_depend_on_the_micro_batches(seed: int, sizes: list[int]) -> None:
    loss, mask = (x.detach() for x in random_batch(seed, sum(sizes))[0::3])
    for mode in Aggregation:
        counts = {"num_sequences": int((mask.sum(1) > 0).sum()), "num_tokens": int(mask.sum())}
        parts = zip(loss.split(sizes), mask.split(sizes), strict=True)
        total = sum(float(aggregate_loss(a, m, mode=mode, loss_scale_factor=9, **counts)) for a, m in parts)
        whole = float(aggregate_loss(loss, mask, mode=mode, loss_scale_factor=9))
        assert total == pytest.approx(whole, abs=1e-12)


def test_aggregation_refuses() -> None:
    with pytest.raises(ValueError, match="loss_scale_factor"):
        aggregate_loss(tensor(LOSS), tensor(MASK), loss_scale_factor=0)
    with pytest.raises(ValueError, match="num_sequences"):
        aggregate_loss(tensor(LOSS), tensor(MASK), num_sequences=-1)
    with pytest.raises(ValueError):
        aggregate_loss(tensor(LOSS), tensor(MASK), mode="mean")


@settings(deadline=None)
@given(st.integers(0, 2000), st.floats(0, 1))
def test_spear_loss_is_both_terms_each_by_its_own_count(seed: int, gamma: float) -> None:
    log_probs, old, advantages, mask = random_batch(seed)
    replay = torch.arange(6) % 2 == 1
    got = spear_loss(log_probs, old, advantages, mask, replay, gamma=gamma, cov_ratio=0.0, loss_scale_factor=9)
    tokens = policy_loss(log_probs, old, advantages, mask).loss
    fresh, replayed = (aggregate_loss(tokens[r], mask[r], loss_scale_factor=9) for r in (~replay, replay))
    assert float(got.on_policy) == pytest.approx(float(fresh.detach()))
    assert float(got.self_imitation) == pytest.approx(float(replayed.detach()))
    assert float(got.loss.detach()) == pytest.approx(float((fresh + gamma * replayed).detach()))


def test_spear_loss_does_not_depend_on_the_micro_batches() -> None:
    log_probs, old, advantages, mask = random_batch(11)
    replay = torch.tensor([0, 1, 1, 0, 1, 0])
    alive = mask.any(1)
    options = {
        "gamma": 0.5,
        "cov_ratio": 0.0,
        "loss_scale_factor": 9,
        "num_on_policy": int((alive & (replay == 0)).sum()),
        "num_replay": int((alive & (replay == 1)).sum()),
    }
    spear_loss(log_probs, old, advantages, mask, replay, **options).loss.backward()
    whole, log_probs.grad = log_probs.grad.clone(), None
    for rows in ([0], [1, 2], [3, 4, 5]):
        spear_loss(log_probs[rows], old[rows], advantages[rows], mask[rows], replay[rows], **options).loss.backward()
    assert torch.allclose(whole, log_probs.grad)


def test_the_covariance_clip_touches_replayed_rows_alone_unless_told() -> None:
    log_probs, old, advantages, mask = random_batch(5, rows=40, tokens=10)
    replay = torch.arange(40) >= 20
    options = {"gamma": 1.0, "cov_ratio": 0.1, "cov_lower": -9.0, "cov_upper": 9.0}

    def gradient(**more) -> tuple[torch.Tensor, float]:
        log_probs.grad = None
        generator = torch.Generator().manual_seed(0)
        got = spear_loss(log_probs, old, advantages, mask, replay, generator=generator, **{**options, **more})
        got.loss.backward()
        return log_probs.grad.clone(), float(got.cov_fraction)

    plain, none = gradient(cov_ratio=0.0)
    clipped, share = gradient()
    both, _ = gradient(on_policy_cov=(0.1, -9.0, 9.0))
    assert none == 0.0
    taken = (plain != 0) & (clipped == 0)
    budget = math.floor(0.1 * int(mask[20:].sum()))
    assert not taken[:20].any() and int(taken[20:].sum()) == budget
    assert share == pytest.approx(budget / int(mask[20:].sum()))
    assert int(((plain != 0) & (both == 0))[:20].sum()) == math.floor(0.1 * int(mask[:20].sum()))


def test_spear_loss_counts_fractions_and_refuses() -> None:
    log_probs, old = tensor([[0.5, 0.0]]), torch.zeros(1, 2, dtype=torch.float64)
    mask, none = torch.ones(1, 2), torch.zeros(1)
    assert float(spear_loss(log_probs, old, tensor([1.0]), mask, none, gamma=0.0).clip_fraction) == 0.5
    assert float(spear_loss(log_probs * 9, old, tensor([-1.0]), mask, none, gamma=0.0).dual_fraction) == 0.5
    with pytest.raises(ValueError, match="ref_log_probs"):
        spear_loss(log_probs, old, tensor([1.0]), mask, none, gamma=0.0, kl_coefficient=0.1)
    with pytest.raises(ValueError, match="replay must be"):
        spear_loss(log_probs, old, tensor([1.0]), mask, torch.zeros(2), gamma=0.0)


def test_the_kl_term_is_added_in_both_terms() -> None:
    log_probs, mask = tensor([[0.0], [0.0]]), torch.ones(2, 1)
    reference = tensor([[1.0], [1.0]])
    got = spear_loss(
        log_probs,
        log_probs,
        tensor([0.0, 0.0]),
        mask,
        tensor([0, 1]),
        gamma=0.5,
        ref_log_probs=reference,
        kl_coefficient=2.0,
    )
    k3 = math.e - 2
    assert float(got.loss) == pytest.approx(2 * k3 + 0.5 * 2 * k3)

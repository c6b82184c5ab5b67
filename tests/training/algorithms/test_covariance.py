from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_training.algorithms import (
    calibrate_covariance_bounds,
    covariance,
    covariance_clip_mask,
    find_covariance_quantiles,
)


def random_batch(seed: int, rows: int, tokens: int):
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(rows, tokens, generator=generator, dtype=torch.float64) * 3
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, tokens, generator=generator) < 0.7
    return log_probs, advantages, mask


def test_covariance_by_hand() -> None:
    log_probs = torch.tensor([[-1.0, -3.0], [-2.0, -9.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    got = covariance(log_probs, torch.tensor([1.0, 4.0]), mask)
    assert got.tolist() == [[-1.0, 1.0], [0.0, 0.0]]  # means -2 and 2 over the three tokens
    got = covariance(log_probs, torch.tensor([1.0, 4.0]), mask, scope="position")
    assert got.tolist() == [[-0.75, 0.0], [-0.75, 0.0]]


@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 9), st.sampled_from(["batch", "position"]))
def test_covariance_equals_numpy(seed: int, rows: int, tokens: int, scope: str) -> None:
    log_probs, advantages, mask = random_batch(seed, rows, tokens)
    got = covariance(log_probs, advantages, mask, scope=scope).numpy()
    shown = np.ma.array(log_probs.numpy(), mask=~mask.numpy())
    weights = np.ma.array(np.repeat(advantages.numpy()[:, None], tokens, 1), mask=~mask.numpy())
    axis = 0 if scope == "position" else None
    want = (shown - shown.mean(axis=axis)) * (weights - weights.mean(axis=axis))
    assert np.allclose(got, np.ma.filled(want, 0.0))


def test_covariance_of_tokens_that_are_masked_is_zero_whatever_stands_there() -> None:
    log_probs = torch.tensor([[-1.0, float("nan"), -2.0]], requires_grad=True)
    got = covariance(log_probs, torch.tensor([1.0]), torch.tensor([[1, 0, 1]]))
    assert got.tolist() == [[0.0, 0.0, 0.0]] and not got.requires_grad
    assert covariance(log_probs, torch.tensor([1.0]), torch.zeros(1, 3)).tolist() == [[0.0, 0.0, 0.0]]


def test_equal_advantages_clip_nothing() -> None:
    log_probs, _, mask = random_batch(0, 4, 9)
    stays = covariance_clip_mask(log_probs, torch.full((4,), 0.5), mask, ratio=1.0, lower=1e-6, upper=60.0)
    assert stays.all()


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0, 1), st.sampled_from(["batch", "trajectory"]), st.booleans(), st.booleans())
def test_the_clip_takes_its_budget_of_candidates_and_no_more(seed, ratio, budget, floor_one, exclude) -> None:
    log_probs, advantages, mask = random_batch(seed, 5, 12)
    excluded = torch.rand(5, 12, generator=torch.Generator().manual_seed(seed)) < 0.3 if exclude else None
    stays = covariance_clip_mask(
        log_probs,
        advantages,
        mask,
        ratio=ratio,
        lower=-0.1,
        upper=0.5,
        exclude=excluded,
        budget=budget,
        floor_one=floor_one,
        generator=torch.Generator().manual_seed(7),
    )
    cov = covariance(log_probs, advantages, mask)
    candidates = mask & (cov >= -0.1) & (cov <= 0.5)
    if excluded is not None:
        candidates &= ~excluded
    assert not (~stays & ~candidates).any()

    def due(tokens: int, available: int) -> int:
        size = math.floor(ratio * tokens + 1e-9)
        return min(max(size, 1) if floor_one and ratio > 0 else size, available)

    if budget == "batch":
        assert int((~stays).sum()) == due(int(mask.sum()), int(candidates.sum()))
    else:
        want = [due(int(m.sum()), int(c.sum())) for m, c in zip(mask, candidates, strict=True)]
        assert (~stays).sum(1).tolist() == want


def test_budgets_do_not_lose_a_token_to_rounding() -> None:
    log_probs = torch.linspace(-2, -1, 100, dtype=torch.float64)[None].repeat(2, 1)
    stays = covariance_clip_mask(
        log_probs, torch.tensor([1.0, 2.0]), torch.tensor([1, 0])[:, None].repeat(1, 100), ratio=0.29, lower=-9, upper=9
    )
    assert int((~stays).sum()) == 29  # 0.29 * 100 is 28.999999999999996


@pytest.mark.parametrize("budget", ["batch", "trajectory"])
def test_the_choice_is_uniform_and_repeats_with_the_seed(budget: str) -> None:
    log_probs, advantages, mask = random_batch(3, 2, 6)
    options = {"ratio": 0.4, "lower": -9.0, "upper": 9.0, "budget": budget}

    def clip(seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        return ~covariance_clip_mask(log_probs, advantages, mask, generator=generator, **options)

    assert torch.equal(clip(5), clip(5))
    share = sum(clip(seed).double() for seed in range(600)) / 600
    if budget == "batch":
        want = torch.full_like(share, float(clip(0).sum()) / float(mask.sum())) * mask
    else:
        want = clip(0).sum(1, keepdim=True) / mask.sum(1, keepdim=True) * mask
    assert float((share - want).abs().max()) < 0.1


def test_bounds_are_included() -> None:
    log_probs = torch.tensor([[-1.0, -3.0], [-1.0, -3.0]])
    advantages = torch.tensor([1.0, -1.0])  # covariances 1, -1, -1, 1
    stays = covariance_clip_mask(log_probs, advantages, torch.ones(2, 2), ratio=1.0, lower=1.0, upper=1.0)
    assert stays.tolist() == [[False, True], [True, False]]


def test_bad_options_are_refused() -> None:
    log_probs, advantages, mask = random_batch(0, 2, 3)
    for options in ({"ratio": -0.1}, {"ratio": 1.1}, {"ratio": 1.0, "scope": "row"}, {"ratio": 1.0, "budget": "row"}):
        with pytest.raises(ValueError):
            covariance_clip_mask(log_probs, advantages, mask, lower=0, upper=1, **options)
    with pytest.raises(ValueError, match="one shape"):
        covariance(log_probs, advantages, mask[:, :2])
    with pytest.raises(ValueError, match="advantages must be"):
        covariance(log_probs, advantages[:1], mask)


@given(st.integers(0, 1000), st.floats(0.001, 1), st.floats(0.001, 1))
def test_calibrated_bounds_are_means_of_the_largest(seed: int, low: float, high: float) -> None:
    log_probs, advantages, mask = random_batch(seed, 4, 15)
    if not mask.any():
        return
    got = calibrate_covariance_bounds(log_probs, advantages, mask, lower_top=low, upper_top=high)
    values = np.sort(covariance(log_probs, advantages, mask).numpy()[mask.numpy()])[::-1]
    want = [values[: math.ceil(share * values.size - 1e-9)].mean() for share in (low, high)]
    assert got == pytest.approx(want)


def test_calibration_needs_tokens_and_shares() -> None:
    log_probs, advantages, mask = random_batch(0, 2, 3)
    with pytest.raises(ValueError, match="no valid token"):
        calibrate_covariance_bounds(log_probs, advantages, mask & False)
    with pytest.raises(ValueError, match="must lie in"):
        calibrate_covariance_bounds(log_probs, advantages, mask, lower_top=0.0)


@pytest.mark.parametrize("measure", [calibrate_covariance_bounds, find_covariance_quantiles])
def test_a_tiny_share_is_the_largest_covariance(measure) -> None:
    log_probs, advantages, mask = random_batch(0, 2, 6)
    largest = float(covariance(log_probs, advantages, mask)[mask].max())
    assert measure(log_probs, advantages, mask, lower_top=1.0, upper_top=1e-12)[1] == pytest.approx(largest)

"""Policy losses, entropies, and the covariance clip."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_training.algorithms import (
    POLICY_LOSSES,
    BoundsMode,
    CovarianceClip,
    PolicyLoss,
    SettingsError,
    SpearSettings,
    bind_policy_loss,
    cispo_loss,
    covariance,
    covariance_clip_mask,
    gspo_loss,
    kl_cov_loss,
    kl_divergence,
    policy_loss,
    sequence_entropy,
    token_entropy,
)
from tests.training.algorithms.batches import random_batch, tensor


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


# ---- the others of the registry --------------------------------------------------------------------------------------
CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None, "max_log_ratio": 20.0}


def test_gspo_by_hand() -> None:
    # Two tokens of log ratio 0.1 and 0.3: the sequence's ratio is e^0.2 in both; a third is off the mask.
    log_probs = tensor([[0.1, 0.3, 9.0]]).requires_grad_(True)
    mask = tensor([[1, 1, 0]])
    got = gspo_loss(log_probs, torch.zeros(1, 3), tensor([2.0]), mask, clip_low=0.2, clip_high=0.28)
    assert got.loss[0].tolist() == pytest.approx([-2 * math.exp(0.2)] * 2 + [0.0])
    got.loss.sum().backward()
    assert log_probs.grad[0].tolist() == pytest.approx([-2 * math.exp(0.2)] * 2 + [0.0])
    narrow = gspo_loss(log_probs, torch.zeros(1, 3), tensor([2.0]), mask, clip_low=3e-4, clip_high=4e-4)
    assert narrow.loss[0].tolist() == pytest.approx([-2 * 1.0004] * 2 + [0.0])
    assert narrow.clipped[0].tolist() == [True, True, False]


def test_cispo_by_hand() -> None:
    log_probs = tensor([[math.log(0.5), math.log(0.9)]]).requires_grad_(True)
    old = tensor([[math.log(0.25), math.log(0.9)]])
    got = cispo_loss(log_probs, old, tensor([2.0]), torch.ones(1, 2), clip_low=0.2, clip_high=0.28)
    assert got.loss[0].tolist() == pytest.approx([-1.28 * 2 * math.log(0.5), -2 * math.log(0.9)])
    got.loss.sum().backward()
    assert log_probs.grad[0].tolist() == pytest.approx([-2.56, -2.0]), "a clipped token keeps its gradient"
    assert got.clipped[0].tolist() == [True, False]


def test_kl_cov_by_hand() -> None:
    # Covariances with means -1 and 1: (0 - -1)(2 - 1) = 1 is the largest; that token alone pays |log r| = 0.5.
    log_probs, old = tensor([[0.0], [-2.0]]).requires_grad_(True), tensor([[-0.5], [-2.0]])
    got = kl_cov_loss(log_probs, old, tensor([2.0, 0.0]), torch.ones(2, 1), share=0.5, coefficient=3.0)
    assert got.loss.flatten().tolist() == pytest.approx([-2 * math.exp(0.5) + 1.5, 0.0])
    got.loss.sum().backward()
    assert log_probs.grad.flatten().tolist() == pytest.approx([-2 * math.exp(0.5) + 3.0, 0.0])


@pytest.mark.parametrize("name", ["vanilla", "gspo", "cispo", "kl_cov"])
@pytest.mark.parametrize("seed", range(5))
def test_policy_losses_are_verls_under_its_names(name: str, seed: int) -> None:
    core = pytest.importorskip("verl.trainer.ppo.core_algos", reason="needs the extra 'train'")
    from verl.trainer.config import AlgoConfig  # noqa: F401 - verl's configuration registers its losses
    from verl.workers.config import ActorConfig, PolicyLossConfig

    log_probs, old, advantages, mask = random_batch(seed)
    mask = mask | (torch.arange(7) == 0)
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=0.2,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=10.0,
        policy_loss=PolicyLossConfig(loss_mode=name, kl_cov_ratio=0.1, ppo_kl_coef=1.0),
    )
    spread = advantages[:, None].expand_as(log_probs)
    theirs = log_probs.detach().clone().requires_grad_(True)
    mode = "seq-mean-token-mean" if name == "gspo" else "token-mean"
    core.get_policy_loss_fn(name)(old, theirs, spread, mask.double(), mode, config)[0].backward()
    options = {"share": 0.1} if name == "kl_cov" else {}
    got = POLICY_LOSSES.find(name)(
        log_probs, old, advantages, mask, **{**CLIP, "dual_clip": 10.0 if name == "vanilla" else None}, **options
    )
    if name == "gspo":
        (got.loss.sum(1) / mask.sum(1)).mean().backward()
    else:
        (got.loss.sum() / mask.sum()).backward()
    assert torch.allclose(log_probs.grad, theirs.grad, atol=1e-12)


def half(log_probs, old_log_probs, advantages, mask, *, factor=0.5, **clip):
    return -factor * torch.exp(log_probs - old_log_probs) * advantages[:, None]


def broken(log_probs, old_log_probs, advantages, mask, **clip):
    return log_probs.sum()


def test_a_loss_of_ones_own_gives_token_losses_and_no_more() -> None:
    log_probs, old, advantages, mask = random_batch(3)
    chosen = {"policy": f"{__name__}:half", "policy_options": {"factor": 2.0}}
    got = bind_policy_loss(SpearSettings.from_mapping({"loss": chosen}))(log_probs, old, advantages, mask)
    assert isinstance(got, PolicyLoss)
    ratio = torch.exp(log_probs - old)
    assert torch.allclose(got.loss, torch.where(mask, -2.0 * ratio * advantages[:, None], 0.0))
    assert torch.allclose(got.ratio, torch.where(mask, ratio.detach(), 1.0))
    wrong = SpearSettings.from_mapping({"loss": {"policy": f"{__name__}:broken"}})
    with pytest.raises(SettingsError, match="must give token losses"):
        bind_policy_loss(wrong)(log_probs, old, advantages, mask)


def test_token_entropy_by_hand() -> None:
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [5.0, -math.inf, -math.inf, -math.inf]]], requires_grad=True)
    got = token_entropy(logits)
    assert got[0].tolist() == pytest.approx([math.log(4), 0.0])
    got.sum().backward()
    assert torch.isfinite(logits.grad).all()


@given(st.integers(0, 1000), st.floats(-50, 50))
def test_token_entropy_is_bounded_and_ignores_a_shift(seed: int, shift: float) -> None:
    logits = 5 * torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    got = token_entropy(logits)
    assert bool((got >= 0).all()) and float(got.max()) <= math.log(6) + 1e-9
    assert torch.allclose(got, token_entropy(logits + shift))
    want = torch.distributions.Categorical(logits=logits).entropy()
    assert torch.allclose(got, want)


def test_sequence_entropy_by_hand() -> None:
    entropy, mask = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0], [9.0, 9.0, 9.0]]), torch.zeros(3, 3)
    mask[0, :2] = mask[1, 0] = 1
    assert float(sequence_entropy(entropy, mask)) == pytest.approx(6 / 2 / 3)
    assert float(sequence_entropy(entropy, mask, loss_scale_factor=1)) == pytest.approx(3.0)
    assert float(sequence_entropy(entropy, mask, loss_scale_factor=2, num_sequences=3)) == pytest.approx(1.0)
    assert float(sequence_entropy(entropy, mask * 0)) == 0.0


@given(st.integers(0, 1000), st.integers(1, 5), st.integers(1, 9), st.sampled_from(["batch", "position"]))
def test_covariance_equals_numpy(seed: int, rows: int, tokens: int, scope: str) -> None:
    log_probs, _, advantages, mask = random_batch(seed, rows, tokens)
    got = covariance(log_probs, advantages, mask, scope=scope).numpy()
    shown = np.ma.array(log_probs.detach().numpy(), mask=~mask.numpy())
    weights = np.ma.array(np.repeat(advantages.numpy()[:, None], tokens, 1), mask=~mask.numpy())
    axis = 0 if scope == "position" else None
    want = (shown - shown.mean(axis=axis)) * (weights - weights.mean(axis=axis))
    assert np.allclose(got, np.ma.filled(want, 0.0))


@settings(deadline=None)
@given(st.integers(0, 1000), st.floats(0, 1), st.sampled_from(["batch", "trajectory"]), st.booleans(), st.booleans())
def test_the_clip_takes_its_budget_of_candidates_and_no_more(seed, ratio, budget, floor_one, exclude) -> None:
    log_probs, _, advantages, mask = random_batch(seed, 5, 12)
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
    log_probs, _, advantages, mask = random_batch(3, 2, 6)
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


@given(st.integers(0, 1000), st.floats(0.001, 1), st.floats(0.001, 1), st.sampled_from(["batch", "position"]))
def test_calibrated_bounds_are_means_of_the_largest(seed: int, low: float, high: float, scope: str) -> None:
    log_probs, _, advantages, mask = random_batch(seed, 4, 15)
    if not mask.any():
        return
    clip = CovarianceClip(bounds=BoundsMode.PERCENTILE, scope=scope, lower_top=low, upper_top=high)
    got = clip.measure(log_probs, advantages, mask)
    values = np.sort(covariance(log_probs, advantages, mask, scope=scope).numpy()[mask.numpy()])[::-1]
    want = [values[: math.ceil(share * values.size - 1e-9)].mean() for share in (low, high)]
    assert got == pytest.approx(want)


def test_covariance_by_hand() -> None:
    log_probs = torch.tensor([[-1.0, -3.0], [-2.0, -9.0]])
    mask = torch.tensor([[1, 1], [1, 0]])
    got = covariance(log_probs, torch.tensor([1.0, 4.0]), mask)
    assert got.tolist() == [[-1.0, 1.0], [0.0, 0.0]]  # means -2 and 2 over the three tokens
    got = covariance(log_probs, torch.tensor([1.0, 4.0]), mask, scope="position")
    assert got.tolist() == [[-0.75, 0.0], [-0.75, 0.0]]

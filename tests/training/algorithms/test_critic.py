from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.algorithms import gae_advantages, value_loss


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def naive_gae(rewards, values, mask, gamma, lam):
    """The textbook recursion on the policy's tokens alone, each row by itself."""
    advantages, returns = [], []
    for reward_row, value_row, mask_row in zip(rewards, values, mask, strict=True):
        own = [t for t, on in enumerate(mask_row) if on]
        row, back, ahead = [0.0] * len(mask_row), [0.0] * len(mask_row), 0.0
        for at, t in reversed(list(enumerate(own))):
            following = value_row[own[at + 1]] if at + 1 < len(own) else 0.0
            ahead = reward_row[t] + gamma * following - value_row[t] + gamma * lam * ahead
            row[t], back[t] = ahead, ahead + value_row[t]
        advantages.append(row)
        returns.append(back)
    return advantages, returns


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 8), st.integers(0, 10_000), st.floats(0.5, 1), st.floats(0.5, 1))
def test_gae_equals_a_plain_loop(rows: int, tokens: int, seed: int, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, tokens, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, tokens, generator=generator) < 0.6
    got = gae_advantages(rewards, values, mask, gamma=gamma, lam=lam, whiten=False)
    want = naive_gae(rewards.tolist(), values.tolist(), mask.tolist(), gamma, lam)
    for a, b in zip(got, want, strict=True):
        assert torch.allclose(a, tensor(b), atol=1e-10)


def test_gae_by_hand_steps_over_observations() -> None:
    advantages, returns = gae_advantages(
        tensor([[0.0, 5.0, 1.0]]), tensor([[0.5, 9.0, 0.25]]), tensor([[1, 0, 1]]), whiten=False
    )
    assert advantages.tolist() == [[0.5, 0.0, 0.75]]
    assert returns.tolist() == [[1.0, 0.0, 1.0]]


def test_whitened_advantages_have_mean_zero_and_variance_one() -> None:
    rewards, values = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    mask = torch.ones(3, 5)
    mask[1, 2:] = 0
    got, _ = gae_advantages(rewards, values, mask)
    assert float(got[mask > 0].mean()) == pytest.approx(0.0, abs=1e-9)
    assert float(got[mask > 0].var()) == pytest.approx(1.0, abs=1e-6)
    assert not got[mask == 0].any()


def test_gae_of_nothing_is_zero_not_nan() -> None:
    zeros = torch.zeros(2, 3)
    for mask in (zeros, torch.tensor([[1, 0, 0], [0, 0, 0]])):
        advantages, _ = gae_advantages(zeros + 1, zeros, mask)
        assert not advantages.any()
    assert gae_advantages(zeros[:, :0], zeros[:, :0], zeros[:, :0])[0].shape == (2, 0)
    with pytest.raises(ValueError, match="one shape"):
        gae_advantages(zeros, zeros, zeros[:1])


def test_value_loss_by_hand() -> None:
    values, old, returns = tensor([[1.0, 0.0, 7.0]]), tensor([[0.0, 0.0, 0.0]]), tensor([[2.0, 1.0, 0.0]])
    mask = tensor([[1, 1, 0]])
    assert value_loss(values, old, returns, mask, clip=0.5).tolist() == [[0.5 * 1.5**2, 0.5, 0.0]]
    assert value_loss(values, old, returns, mask, clip=None).tolist() == [[0.5, 0.5, 0.0]]

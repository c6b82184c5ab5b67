from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_training.algorithms import episode_advantages, gae_advantages, value_loss, whiten_advantages


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


# ---- episodes of several rows ----------------------------------------------------------------------------------------
@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=1, max_size=5), st.integers(0, 10_000))
def test_the_cut_of_an_episode_into_rows_changes_nothing(shapes: list[list[int]], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = [length for episode in shapes for length in episode]
    owners = [number for number, episode in enumerate(shapes) for _ in episode]
    values = torch.randn(sum(lengths), generator=generator, dtype=torch.float64)
    mask = torch.rand(sum(lengths), generator=generator) < 0.7
    rewards = torch.randn(len(shapes), generator=generator, dtype=torch.float64).tolist()
    options = {"gamma": 0.97, "lam": 0.9}
    advantages, returns = episode_advantages(values, mask, lengths, owners, rewards, **options)
    # The same tokens as one row an episode, which is what the layout `conversation` gives.
    whole = episode_advantages(values, mask, [sum(e) for e in shapes], range(len(shapes)), rewards, **options)
    assert torch.equal(advantages, whole[0]) and torch.equal(returns, whole[1])
    # And by the plain loop, with the reward on the policy's last token.
    start = 0
    for episode, reward in zip(shapes, rewards, strict=True):
        part = slice(start, start := start + sum(episode))
        own = mask[part].nonzero().flatten().tolist()
        paid = [reward if own and t == own[-1] else 0.0 for t in range(sum(episode))]
        want = naive_gae([paid], [values[part].tolist()], [mask[part].tolist()], 0.97, 0.9)
        assert torch.allclose(advantages[part], tensor(want[0][0]), atol=1e-10)
        assert torch.allclose(returns[part], tensor(want[1][0]), atol=1e-10)


def test_rows_of_episodes_may_be_interleaved() -> None:
    values = tensor([0.1, 0.2, 0.3, 0.4])
    mixed = episode_advantages(values, torch.ones(4), [1, 2, 1], [0, 1, 0], [1.0, -1.0], gamma=1.0, lam=0.5)[0]
    apart = episode_advantages(values[[0, 3, 1, 2]], torch.ones(4), [2, 2], [0, 1], [1.0, -1.0], gamma=1.0, lam=0.5)[0]
    assert torch.allclose(mixed[[0, 3, 1, 2]], apart)


def test_rows_that_do_not_fit_are_told() -> None:
    assert episode_advantages(tensor([]), tensor([]), [], [], [])[0].shape == (0,)
    assert not episode_advantages(tensor([1.0]), tensor([0.0]), [1], [0], [3.0])[0].any()
    with pytest.raises(ValueError, match="do not describe the same rows"):
        episode_advantages(tensor([1.0]), tensor([1.0]), [2], [0], [3.0])


def test_whitening_leaves_the_order_and_the_masked_alone() -> None:
    values, mask = tensor([3.0, 9.0, -1.0, 5.0]), tensor([1, 0, 1, 1])
    got = whiten_advantages(values, mask)
    assert got[1] == 0 and got[[2, 0, 3]].diff().gt(0).all()
    assert float(got[mask > 0].mean()) == pytest.approx(0) and float(got[mask > 0].var()) == pytest.approx(1)

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spear_training.algorithms import sequence_entropy, token_entropy


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


def test_half_precision_is_kept_outside() -> None:
    assert token_entropy(torch.zeros(1, 1, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16


def test_sequence_entropy_by_hand() -> None:
    entropy, mask = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0], [9.0, 9.0, 9.0]]), torch.zeros(3, 3)
    mask[0, :2] = mask[1, 0] = 1
    assert float(sequence_entropy(entropy, mask)) == pytest.approx(6 / 2 / 3)
    assert float(sequence_entropy(entropy, mask, loss_scale_factor=1)) == pytest.approx(3.0)
    assert float(sequence_entropy(entropy, mask, loss_scale_factor=2, num_sequences=3)) == pytest.approx(1.0)
    assert float(sequence_entropy(entropy, mask * 0)) == 0.0

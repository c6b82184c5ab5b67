"""Rows without padding: every attention a training may take gives the same, also where ranks share a sequence."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch

from spear_training.verl_plugin import attention
from spear_training.verl_plugin.attention import attend_rows
from tests.training.verl_plugin.real_engine import run_alone

BOUNDS = torch.tensor([0, 8, 9, 14], dtype=torch.int32)
HEADS, KEY_HEADS, WIDTH = 4, 2, 8


def make_parts(device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    length = int(BOUNDS[-1]) if device == "cpu" else 14
    return [
        torch.randn(1, heads, length, WIDTH, device=device, dtype=dtype, requires_grad=True)
        for heads in (HEADS, KEY_HEADS, KEY_HEADS)
    ]


def attend_by_mask(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int | None) -> torch.Tensor:
    """The definition: softmax over what a token may see of its own row."""
    place = torch.arange(int(BOUNDS[-1]))
    row = torch.bucketize(place, BOUNDS[1:], right=True)
    distance = place[:, None] - place
    seen = (distance >= 0) & (row[:, None] == row) & (distance < (window or 99))
    key, value = (part.repeat_interleave(HEADS // KEY_HEADS, dim=1) for part in (key, value))
    scores = (query @ key.transpose(2, 3)) * 0.3
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ value).transpose(1, 2)


def emulate_kernel(query: Any, key: Any, value: Any, window: tuple[int, int], scale: float) -> torch.Tensor:
    """torch's kernel as its documentation has it, for [T, heads, width] on a CPU."""
    assert window[1] == 0 and query.shape[1:] == (HEADS, WIDTH)
    parts = (part.transpose(0, 1)[None] for part in (query, key, value))
    scaled = [part * (0.3 if number == 0 else 1) for number, part in enumerate(parts)]
    assert scale == 0.3
    rows = attend_by_mask(scaled[0] / 0.3, scaled[1], scaled[2], None if window[0] < 0 else window[0] + 1)
    return rows[0]


def kernel_of_2_11(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):  # type: ignore[no-untyped-def]
    assert key.shape[1] == value.shape[1] == HEADS, "it gets as many key heads as heads"
    assert cu_q.dtype == cu_k.dtype == torch.int32 and max_q == max_k == 8
    return emulate_kernel(query, key[:, :: HEADS // KEY_HEADS], value[:, :: HEADS // KEY_HEADS], window_size, scale)


def kernel_of_2_13(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):  # type: ignore[no-untyped-def]
    assert enable_gqa and key.shape[1] == KEY_HEADS
    return emulate_kernel(query, key, value, window_size, scale)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kernel", [None, kernel_of_2_11, kernel_of_2_13])
def test_each_row_sees_itself_alone(monkeypatch: pytest.MonkeyPatch, kernel: Any, window: int | None) -> None:
    if kernel is not None:
        monkeypatch.setattr(attention, "varlen_attn", kernel)
        monkeypatch.setattr(attention, "_has_kernel", lambda query: True)
    parts, others = make_parts(), make_parts()
    found, _ = attend_rows(torch.nn.Module(), *parts, None, cu_seq_lens_q=BOUNDS, sliding_window=window, scaling=0.3)  # type: ignore[arg-type]
    wanted = attend_by_mask(*others, window)  # type: ignore[call-arg]
    torch.testing.assert_close(found, wanted)
    weights = torch.randn_like(wanted)
    for rows in (found, wanted):
        (rows * weights).sum().backward()
    for part, other in zip(parts, others, strict=True):
        torch.testing.assert_close(part.grad, other.grad)


@pytest.mark.parametrize("window", [None, 3])
def test_in_bfloat16_on_a_cpu_few_lengths_are_computed_and_the_rows_are_the_same(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    lengths: list[int] = []

    def attend(query: torch.Tensor, *parts: torch.Tensor, **options: Any) -> torch.Tensor:
        lengths.append(query.shape[2])
        return torch.nn.functional.scaled_dot_product_attention(query, *parts, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", attend)
    parts = [part.detach().bfloat16().requires_grad_() for part in make_parts()]
    others = [part.detach().float().requires_grad_() for part in parts]
    found, _ = attend_rows(torch.nn.Module(), *parts, None, cu_seq_lens_q=BOUNDS, sliding_window=window, scaling=0.3)  # type: ignore[arg-type]
    wanted = attend_by_mask(*others, window)  # type: ignore[call-arg]
    assert found.dtype is torch.bfloat16 and lengths == [attention.PADDED] * 3
    torch.testing.assert_close(found.float(), wanted, atol=0.02, rtol=0.02)
    weights = torch.randn_like(wanted)
    for rows in (found, wanted):
        (rows * weights).sum().backward()
    for part, other in zip(parts, others, strict=True):
        torch.testing.assert_close(part.grad.float(), other.grad, atol=0.05, rtol=0.05)  # type: ignore[union-attr]


def test_torch_takes_the_call_of_its_kernel_and_gives_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """With tensors that have a shape and no numbers: the kernel itself runs on a GPU alone."""
    monkeypatch.setattr(attention, "_has_kernel", lambda query: True)
    parts = make_parts("meta", torch.bfloat16)
    bounds = torch.zeros(4, dtype=torch.int32, device="meta")
    rows, _ = attend_rows(torch.nn.Module(), *parts, None, cu_seq_lens_q=bounds, max_length_q=8, scaling=0.3)  # type: ignore[arg-type]
    assert rows.shape == (1, 14, HEADS, WIDTH) and rows.dtype is torch.bfloat16
    rows.sum().backward()
    assert [part.grad.shape for part in parts] == [part.shape for part in parts]  # type: ignore[union-attr]


def test_torch_s_kernel_is_for_half_precision_on_a_gpu() -> None:
    query = make_parts(dtype=torch.bfloat16)[0]
    assert not attention._has_kernel(query)
    if torch.cuda.is_available():
        assert attention._has_kernel(query.cuda()) and not attention._has_kernel(query.float().cuda())


@pytest.mark.slow
def test_ranks_that_share_a_sequence_take_the_same_step() -> None:
    """One rank, two, and four: by rows, by sequences and by both; and flash-attention (emulated) the same."""
    found = run_alone("ranks")
    whole = found.pop("sdpa 1x1")
    assert len(found) == 6
    for name, (norm, weights, entropy) in found.items():
        if name == "alone 1x2":
            assert abs(entropy - whole[2]) > 0.01, "attention within each part: what is refused"
        else:
            assert (norm, weights, entropy) == pytest.approx(whole, rel=2e-5), name

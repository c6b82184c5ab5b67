"""Attention over rows without padding, ranks that share a sequence, and rows with pictures."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from spear_agents.engines.hf import HFModel
from spear_agents.engines.vision import pack_pictures
from spear_training.algorithms import RowTable, SpearSettings, weigh_rows
from spear_training.verl_plugin import attention
from spear_training.verl_plugin.actor import STEERING
from spear_training.verl_plugin.attention import PACKED, attend_at_once, attend_rows, has_kernel
from spear_training.verl_plugin.queue import PICTURES, StepQueue, add_vision_inputs, build_columns, nest_flat
from tests.training.test_warmstart import show
from tests.training.verl_plugin.engines import ask, open_engine, run_engine
from tests.training.verl_plugin.fakes import FakeQueue
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
def test_each_row_sees_itself_alone(kernel: Any, window: int | None) -> None:
    parts, others = make_parts(), make_parts()
    if kernel is not None:
        found = attend_at_once(*parts, BOUNDS, 8, window, 0.3, kernel)  # type: ignore[call-arg, arg-type]
    else:
        found, _ = attend_rows(
            torch.nn.Module(), *parts, None, cu_seq_lens_q=BOUNDS, sliding_window=window, scaling=0.3
        )  # type: ignore[call-arg, arg-type, misc]
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


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_one_length_are_attended_at_once_and_are_what_they_are_alone(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, window: int | None
) -> None:
    calls: list[int] = []

    def attend(query: torch.Tensor, *parts: torch.Tensor, **options: Any) -> torch.Tensor:
        calls.append(len(query))
        return torch.nn.functional.scaled_dot_product_attention(query, *parts, **options)

    monkeypatch.setattr(attention, "scaled_dot_product_attention", attend)
    lengths = [7, 4, 7, 7, 1, 4, 7]
    torch.manual_seed(0)
    parts = [torch.randn(1, heads, sum(lengths), WIDTH, dtype=dtype) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    for part in parts:
        part.requires_grad_()
    options: Any = {"attention_mask": None, "sliding_window": window, "scaling": 0.3}
    bounds = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    found, _ = attend_rows(torch.nn.Module(), *parts, cu_seq_lens_q=bounds, **options)
    assert calls == [4, 2, 1]
    weights = torch.randn_like(found)
    (found * weights).sum().backward()
    start = 0
    for length in lengths:
        here = slice(start, start + length)
        row = [part.detach()[:, :, here].clone().requires_grad_() for part in parts]
        bounds = torch.tensor([0, length], dtype=torch.int32)
        alone, _ = attend_rows(torch.nn.Module(), *row, cu_seq_lens_q=bounds, **options)
        (alone * weights[:, here]).sum().backward()
        assert torch.equal(found[:, here], alone)
        for part, own in zip(parts, row, strict=True):
            assert part.grad is not None and torch.equal(part.grad[:, :, here], own.grad)  # type: ignore[arg-type]
        start += length


def test_torch_takes_the_call_of_its_kernel_and_gives_gradients() -> None:
    """With tensors that have a shape and no numbers: the kernel itself runs on a GPU alone."""
    parts = make_parts("meta", torch.bfloat16)
    assert not has_kernel(make_parts(dtype=torch.bfloat16)[0])
    bounds = torch.zeros(4, dtype=torch.int32, device="meta")
    rows = attend_at_once(*parts, bounds, 8, None, 0.3)  # type: ignore[call-arg, arg-type]
    assert rows.shape == (1, 14, HEADS, WIDTH) and rows.dtype is torch.bfloat16
    rows.sum().backward()
    assert [part.grad.shape for part in parts] == [part.shape for part in parts]  # type: ignore[union-attr]


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


ROWS, PADDING = 11, 1
VOCABULARY = 13
"""Sizes of the rows that :mod:`.real_engine` trains on."""


def make_rows(settings: SpearSettings) -> RowTable:
    """Rows with their weights, and padding after them."""
    dice = np.random.default_rng(1)
    prompts, responses = (np.append(dice.integers(2, 6, ROWS), [1] * PADDING) for _ in range(2))
    first = np.cumsum(responses) - responses
    mask = dice.integers(0, 2, int(responses.sum())) > 0
    mask[first], mask[first[ROWS:]] = True, False
    tokens = np.add.reduceat(mask, first)
    replayed = np.arange(ROWS + PADDING) % 3 == 0
    return RowTable(
        prompt_length=prompts,
        response_length=responses,
        loss_tokens=tokens,
        ids=dice.integers(1, VOCABULARY, int((prompts + responses).sum())),
        mask=mask,
        log_probs=-dice.random(len(mask)) - 1.5,
        advantage=np.where(replayed, dice.random(ROWS + PADDING), dice.normal(size=ROWS + PADDING)),
        replayed=replayed,
        weight=weigh_rows(tokens, replayed, mode=settings.loss.aggregation.value, loss_scale_factor=8.0),
        seed=dice.integers(2**20, size=ROWS + PADDING),
    )


def take(rows: RowTable, members: Sequence[int], ranks: int) -> TensorDict:
    """The columns of some rows as a worker gets them."""
    part = rows.take(members)
    batch = build_columns(part)
    batch["old_log_probs"] = nest_flat(torch.from_numpy(part.log_probs).double(), part.response_length)
    batch[STEERING] = torch.from_numpy(np.stack([part.advantage, part.weight, part.replayed, part.seed], 1))
    tu.assign_non_tensor(batch, gamma=0.4, cov_lower=-1.0, cov_upper=1.0, dp_size=ranks)
    return batch


@pytest.fixture
def model(tiny_vision_policy: Path) -> HFModel:
    return HFModel(tiny_vision_policy)


def sample_rows(model: HFModel) -> RowTable:
    requests = show(model, range(3), lengthen=True)
    answers = model.generate_batch(requests)
    packed = [pack_pictures(request.images) for request in requests]
    return RowTable(
        prompt_length=[len(request.prompt_ids) for request in requests],
        response_length=[len(answer.token_ids) for answer in answers],
        ids=[n for pair in zip(requests, answers, strict=True) for n in (*pair[0].prompt_ids, *pair[1].token_ids)],
        mask=[True for answer in answers for _ in answer.token_ids],
        rollout_log_probs=[value for answer in answers for value in answer.log_probs],
        picture_bytes=list(map(len, packed)),
        pictures=np.concatenate(packed),
    )


def forward(model: HFModel, rows: RowTable, *, packed: bool = True) -> torch.Tensor:
    """Log-probs of all response tokens [sum of R], through the engine's own two methods around the model."""
    network: Any = model.model
    network.set_attn_implementation(PACKED if packed else "sdpa")
    batch = ask(build_columns(rows), packed=packed)
    values = run_engine(open_engine(network, model.path), network, batch)["log_probs"]
    parts = values.values().split(values.offsets().diff().tolist())
    return torch.cat([part[prompt - 1 : -1] for part, prompt in zip(parts, rows.prompt_length, strict=True)])


@pytest.mark.parametrize("packed", [True, False])
def test_rows_give_the_log_probs_of_the_rollout_and_a_gradient_in_the_vision_tower(
    model: HFModel, packed: bool
) -> None:
    rows = sample_rows(model)
    found = forward(model, rows, packed=packed)
    assert found.detach().numpy() == pytest.approx(rows.rollout_log_probs, abs=1e-4)
    patches = model.model.model.visual.patch_embed.proj.weight
    (gradient,) = torch.autograd.grad(found.sum(), [patches])
    assert float(gradient.norm()) > 1e-6


def test_the_place_of_a_picture_takes_no_probability(model: HFModel) -> None:
    assert model.reader is not None
    rows = sample_rows(model)
    plain = forward(model, rows)
    with torch.no_grad():  # logits that would be the largest of many positions
        model.model.lm_head.weight[model.reader.image_token_id] = 50 * torch.randn(model.model.lm_head.in_features)
    assert torch.equal(forward(model, rows), plain)


def test_a_padding_row_without_pictures_goes_with_the_others(model: HFModel) -> None:
    rows, store = sample_rows(model), FakeQueue()
    (key,) = StepQueue(SimpleNamespace(pad_token_id=0), vision=True, store=store).add_padding(1)
    made = {name: values.numpy() for name, values in store.rows[key].items()}
    padding = RowTable(
        prompt_length=[1],
        response_length=[1],
        ids=made["input_ids"],
        mask=made["loss_mask"],
        rollout_log_probs=[0.0],
        picture_bytes=[len(made[PICTURES])],
        pictures=made[PICTURES],
    )
    mixed = forward(model, RowTable.join([rows, padding]).take([0, 1, 3, 2]))
    first = int(rows.response_length[:2].sum())
    kept = torch.cat([mixed[:first], mixed[first + 1 :]])
    assert torch.allclose(kept, forward(model, rows), atol=1e-5)


def test_positions_are_of_text_and_of_the_three_axes(model: HFModel) -> None:
    assert model.reader is not None
    rows = sample_rows(model)
    batch = add_vision_inputs(build_columns(rows), model.reader)
    assert PICTURES not in batch.keys()  # noqa: SIM118
    positions, ids = batch["position_ids"], batch["input_ids"]
    assert positions.dim() == 3
    for number, row in enumerate(positions.values().split(ids.offsets().diff().tolist(), dim=1)):
        assert row.shape[0] == 4
        assert row[0].tolist() == list(range(row.shape[1]))
        prompt = rows.split("ids")[number][: rows.prompt_length[number]]
        places = torch.from_numpy(prompt) == model.reader.image_token_id
        height, width = row[2, : len(places)][places], row[3, : len(places)][places]
        assert len(set(height.tolist())) == len(set(width.tolist())) == 10  # 288 pixels: 20x20 patches, merged by 2
        assert row[1:, -1].unique().numel() == 1  # text goes on alike in all three
    inputs = [entry for entry in batch["multi_modal_inputs"]]
    assert len(inputs) == len(rows)

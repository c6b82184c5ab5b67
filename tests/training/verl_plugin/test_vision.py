"""Pictures on their way to the trainer: the rows of a step give the gradient that the model's own pass gives."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch

from spear_agents.engines.hf import HFModel
from spear_agents.engines.vision import pack_pictures
from spear_training.algorithms import RowTable
from spear_training.verl_plugin.attention import PACKED
from spear_training.verl_plugin.queue import PICTURES, StepQueue, add_vision_inputs, build_columns
from tests.training.test_warmstart_vision import show
from tests.training.verl_plugin.engines import ask, open_engine, run_engine


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


def forward(model: HFModel, rows: RowTable, *, packed: bool = True, favour: int | None = None) -> torch.Tensor:
    """Log-probs of all response tokens [sum of R], through the engine's own two methods around the model."""
    network: Any = model.model
    network.set_attn_implementation(PACKED if packed else "sdpa")
    engine = open_engine(network, model.path)
    if favour is not None:
        make_logits, column = engine._head._make_logits, torch.arange(network.lm_head.out_features) == favour
        engine._head._make_logits = lambda hidden: make_logits(hidden) + 100.0 * column
    batch = ask(build_columns(rows), packed=packed)
    values = run_engine(engine, network, batch)["log_probs"]
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


def test_what_no_response_may_hold_takes_no_probability(model: HFModel) -> None:
    assert model.reader is not None
    rows = sample_rows(model)
    plain = forward(model, rows)
    assert torch.equal(forward(model, rows, favour=model.reader.image_token_id), plain)


def test_a_padding_row_without_pictures_goes_with_the_others(model: HFModel) -> None:
    rows = sample_rows(model)
    padding = StepQueue(SimpleNamespace(pad_token_id=0), vision=True)._make_padding(1)
    mixed = forward(model, RowTable.join([rows, padding]).take([0, 1, 3, 2]))
    plain = forward(model, rows)
    first = int(rows.response_length[:2].sum())
    kept = torch.cat([mixed[:first], mixed[first + 1 :]])
    assert torch.allclose(kept, plain, atol=1e-5)


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
        assert len(set(height.tolist())) == len(set(width.tolist())) == 3  # 96 pixels: 6x6 patches, merged by 2
        assert row[1:, -1].unique().numel() == 1  # text goes on alike in all three
    inputs = [entry for entry in batch["multi_modal_inputs"]]
    assert len(inputs) == len(rows)

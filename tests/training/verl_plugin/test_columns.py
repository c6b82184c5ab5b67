"""Columns of a batch, the loss that reads them, and the critic."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from spear_training.algorithms import RowTable, SpearSettings, aggregate_loss, value_loss
from spear_training.step.update import measure_loss
from spear_training.verl_plugin.actor import STEERING, VerlCritic, actor_loss, critic_loss
from spear_training.verl_plugin.queue import (
    FORWARD_COLUMNS,
    PICTURES,
    build_columns,
    find_predictions,
    nest_flat,
    pad_rows,
)
from tests.training.step.batches import CASES, GAMMA, Batch, draw_batch, find_bounds
from tests.training.verl_plugin.steps import LAYOUTS, RATE, FakeWorkers, Step


def unnest(column: torch.Tensor) -> list[list[float]]:
    return [part.tolist() for part in column.unbind()]


def make_rows(**more: Any) -> RowTable:
    """Two rows: two tokens of prompt and three of response, and one of each."""
    return RowTable(prompt_length=[2, 1], response_length=[3, 1], ids=[5, 6, 7, 8, 9, 1, 2], mask=[1, 0, 1, 1], **more)


def test_columns_hold_prompt_and_response_without_padding() -> None:
    columns = build_columns(make_rows(rollout_log_probs=[-0.5, 0.0, -0.25, -1.0]))
    assert set(columns.keys()) == {*FORWARD_COLUMNS, "rollout_log_probs"}
    assert columns.batch_size == torch.Size([2])
    assert unnest(columns["input_ids"]) == [[5, 6, 7, 8, 9], [1, 2]]
    assert unnest(columns["position_ids"]) == [[0, 1, 2, 3, 4], [0, 1]]
    assert unnest(columns["loss_mask"]) == [[1, 0, 1], [1]]
    assert unnest(columns["rollout_log_probs"]) == [[-0.5, 0.0, -0.25], [-1.0]]
    assert {columns[name].dtype for name in FORWARD_COLUMNS} == {torch.int64}
    assert columns["rollout_log_probs"].dtype is torch.float32
    assert all(columns[name].layout is torch.jagged for name in columns.keys())  # noqa: SIM118


def test_what_the_rows_lack_or_have_besides_is_seen() -> None:
    assert set(build_columns(make_rows()).keys()) == set(FORWARD_COLUMNS), "a replayed row has no rollout"
    columns = build_columns(make_rows(picture_bytes=[1, 2], pictures=[9, 7, 8]))
    assert unnest(columns[PICTURES]) == [[9], [7, 8]] and columns[PICTURES].dtype is torch.uint8
    empty = build_columns(make_rows().take([]))
    assert empty.batch_size == torch.Size([0]) and not empty["input_ids"].values().numel()


def test_nest_flat_cuts_a_vector_into_rows_without_a_copy() -> None:
    values = torch.arange(6.0)
    nested = nest_flat(values, [1, 0, 3, 2])
    assert unnest(nested) == [[0.0], [], [1.0, 2.0, 3.0], [4.0, 5.0]]
    assert nested.values().data_ptr() == values.data_ptr()


@pytest.mark.parametrize("lengths", [[2, 3, 4], [4], [0, 3, 0], [0, 0]])
def test_a_padded_column_is_as_wide_as_its_longest_row(lengths: list[int]) -> None:
    padded = pad_rows(torch.ones(sum(lengths)), lengths)
    assert padded.shape == (len(lengths), max(lengths))
    assert padded.sum(1).tolist() == lengths


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=6))
def test_predictions_stand_one_to_the_left_of_the_response(sizes: list[tuple[int, int]]) -> None:
    expected, start = [], 0
    for prompt, response in sizes:
        expected += [start + prompt + k - 1 for k in range(response)]
        start += prompt + response
    prompts, lengths = np.asarray(sizes).T
    assert find_predictions(prompts, lengths).tolist() == expected


def lay_out(batch: Batch, settings: SpearSettings, *, ranks: int) -> tuple[dict[str, Tensor], TensorDict]:
    """The mini-batch in verl's columns: log-probs stand one to the left of their tokens, as a model's do."""
    lengths = [int(row.nonzero().max()) + 1 if row.any() else 1 for row in batch.mask]
    prompts = [2 + n % 3 for n in range(len(lengths))]
    totals = [prompt + length for prompt, length in zip(prompts, lengths, strict=True)]

    def flatten(values: Tensor) -> Tensor:
        return torch.cat([values[n, :length] for n, length in enumerate(lengths)])

    def frame(n: int, prompt: int) -> list[Tensor]:
        """What the model says of a row; of places that predict no response it says anything."""
        before, after = (torch.full((size,), 99.0, dtype=torch.float64) for size in (prompt - 1, 1))
        return [before, batch.log_probs[n, : lengths[n]], after]

    rows = RowTable(
        prompt_length=prompts, response_length=lengths, ids=np.ones(sum(totals)), mask=flatten(batch.mask).numpy()
    )
    data = build_columns(rows)
    for name, values in batch.columns(settings).items():
        if name != "loss_mask":
            data[name] = nest_flat(
                flatten(values if values.dim() == 2 else values[:, None].expand_as(batch.mask)), lengths
            )
    data[STEERING] = batch.steering(settings)
    lower, upper = find_bounds(settings) or (float("nan"), float("nan"))
    tu.assign_non_tensor(data, gamma=GAMMA, cov_lower=lower, cov_upper=upper, dp_size=ranks)
    flat = torch.cat([part for n, prompt in enumerate(prompts) for part in frame(n, prompt)]).requires_grad_()
    return {"log_probs": nest_flat(flat, totals), "flat": flat}, data


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_verls_loss_function_reads_the_columns_as_the_paper_means_them(name: str, ranks: int) -> None:
    settings, batch = CASES[name], draw_batch(10)
    output, data = lay_out(batch, settings, ranks=ranks)
    loss, metrics = actor_loss(settings, output, data)
    expected, wanted = batch.specify(settings)
    # FSDP averages over ranks, so every rank's share is multiplied by their number.
    assert loss.item() == pytest.approx(ranks * expected.loss.item(), abs=1e-6)
    loss.backward()
    gradient: Any = output["flat"].grad
    assert float(gradient.sum()) == pytest.approx(ranks * float(wanted.sum()), abs=1e-6)
    assert gradient.norm() == pytest.approx(ranks * float(wanted.norm()), abs=1e-6)
    # verl averages a sum over ranks too: counts are read as shares of each other, losses as they are.
    scale = {"on_policy": ranks, "self_imitation": ranks}
    sums = {name: value * scale.get(name, 1) for name, value in measure_loss(expected).items()}
    assert {name: metric.aggregate() for name, metric in metrics.items()} == pytest.approx(sums, abs=1e-6)


LIMIT = 10_000
"""Tokens of a micro-batch."""


# ---- the critic ------------------------------------------------------------------------------------------------------
class FakeCritics(FakeWorkers):
    """verl's critic worker group: the value of a token is its entry in a table that plain gradient descent changes."""

    mesh = "train"

    def find_values(self, ids: Tensor) -> Tensor:
        """The value of the next token's state stands at each position; that of the first token nowhere."""
        return torch.roll(self.parameters[ids], -1)

    def infer_batch(self, meta: Any) -> Any:
        assert len(meta.keys) % self.ranks == 0 and meta.extra_info["max_token_len_per_gpu"] == LIMIT
        for key in meta.keys:
            self.queue.rows[key]["values"] = self.find_values(self.queue.rows[key]["input_ids"]).detach()
        return SimpleNamespace(futures=[])

    def train_mini_batch(self, meta: Any) -> Any:
        assert meta.extra_info["max_token_len_per_gpu"] == LIMIT
        meta.extra_info["hold_learning_rate"] = False
        answer = self.update_actor(meta)
        return SimpleNamespace(get=lambda: answer)

    def compute_loss(self, keys: list[str], fields: list[str], info: dict[str, Any]) -> tuple[Tensor, Any]:
        data: TensorDict = self.queue.kv_batch_get(keys=keys, partition_id="train", select_fields=fields)
        tu.assign_non_tensor(data, dp_size=self.ranks)
        ids = data["input_ids"]
        values = nest_flat(torch.cat([self.find_values(row) for row in ids.unbind()]), ids.offsets().diff().tolist())
        return critic_loss(self.settings.critic, {"values": values}, data, dp_group=None)


@pytest.mark.parametrize("clip", [0.1, None])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_critic_takes_a_step_down_the_clipped_value_loss(
    monkeypatch: pytest.MonkeyPatch, layout: dict[str, int], clip: float | None
) -> None:
    monkeypatch.setattr("ray.get", lambda futures: futures)
    settings = SpearSettings.from_mapping({"advantage": {"estimator": "gae"}, "critic": {"clip": clip}})
    step = Step(settings, **layout)
    workers = FakeCritics(step.queue, settings, step.workers.ranks, step.workers.micro)
    sizes = {"ppo_mini_batch_size": 100, "ppo_epochs": 1, "data_loader_seed": 42, "ppo_max_token_len_per_gpu": LIMIT}
    more = {"critic": sizes | {"forward_max_token_len_per_gpu": LIMIT}, "trainer": {"balance_batch": True}}
    config = OmegaConf.merge(step.config, more, {"actor_rollout_ref": {"rollout": {"n": 1}}})
    critic, metrics = VerlCritic(workers, config, np.random.default_rng(1), step.keys), dict[str, Any]()

    rows = critic.value(step.rows)
    parts = zip(step.played.split("ids"), step.played.prompt_length, strict=True)
    responses = torch.from_numpy(np.concatenate([ids[prompt:] for ids, prompt in parts])).long()
    assert rows.key.tolist() == step.rows.key.tolist() and rows.mask.tolist() == step.played.mask.tolist()
    np.testing.assert_allclose(rows.values, workers.parameters.detach()[responses], atol=1e-7)

    # Half of the old values are far from the present ones, so that the clip decides some of the losses.
    rows = rows.add(
        values=rows.values + np.resize([0.0, 0.3], len(rows.values)),
        returns=rows.values + np.random.default_rng(2).normal(size=len(rows.values)),
    )
    theta = workers.parameters.detach().clone().requires_grad_()
    mask, old, returns = (torch.from_numpy(part)[None] for part in (rows.mask, rows.values, rows.returns))
    losses = value_loss(theta[responses][None], old, returns, mask, clip=clip)
    loss = aggregate_loss(losses, mask, mode="token-mean")
    loss.backward()
    assert theta.grad is not None
    critic.update(rows, metrics)
    torch.testing.assert_close(workers.parameters.detach(), theta.detach() - RATE * theta.grad, atol=1e-6, rtol=0)
    assert metrics["critic/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert (metrics["critic/clip_fraction"] > 0) == (clip is not None)
    assert metrics["critic/lr"] == RATE and metrics["critic/grad_norm"] > 0
    (call,) = workers.calls
    assert sorted(key for key in call.keys if not key.startswith("padding")) == sorted(rows.key)

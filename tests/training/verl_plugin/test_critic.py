"""PPO's critic with a table of values for a model: its loss, the advantages it gives, its optimiser steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import numpy as np
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from spear_training.algorithms import SpearSettings, aggregate_loss, gae_advantages, value_loss
from spear_training.verl_plugin import critic
from spear_training.verl_plugin.batch import RowTokens, build_columns, nest_flat
from spear_training.verl_plugin.critic import CriticUpdater, ValueTargets, critic_loss
from spear_training.verl_plugin.plan import PlannedRow
from spear_training.verl_plugin.queue import StepQueue
from spear_training.verl_plugin.state import SpearState
from spear_training.verl_plugin.update import FreshRows
from tests.training.verl_plugin.fakes import FakeQueue
from tests.training.verl_plugin.steps import run_minibatches

VOCABULARY, RATE = 9, 0.5
EPISODES = ((2, 1.1), (3, -0.9), (1, 0.7))
"""Turns and reward of each episode."""


class FakeCritics:
    """verl's critic worker group: what a token is worth stands in a table, which plain gradient descent changes."""

    def __init__(self, queue: FakeQueue, settings: SpearSettings, ranks: int, micro: int) -> None:
        self.queue, self.settings, self.ranks, self.micro = queue, settings, ranks, micro
        self._dispatch_info: dict[str, list[int]] = {}
        table = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        self.parameters = (0.5 * table).requires_grad_()
        self.calls: list[Any] = []

    def _query_dispatch_info(self, mesh: str) -> list[int]:
        assert mesh == "train"
        return list(range(self.ranks))

    def say_values(self, ids: torch.Tensor) -> torch.Tensor:
        """The value of the next token's state stands at each position; that of the first token nowhere."""
        return torch.roll(self.parameters[ids], -1)

    def infer_batch(self, meta: Any) -> Any:
        assert len(meta.keys) % self.ranks == 0
        for key in meta.keys:
            self.queue.rows[key]["values"] = self.say_values(self.queue.rows[key]["input_ids"]).detach()
        return SimpleNamespace(futures=[])

    def train_mini_batch(self, meta: Any) -> Any:
        self.calls.append(meta)
        size = meta.extra_info["mini_batch_size"] // self.ranks
        shares = np.asarray(meta.keys).reshape(self.ranks, -1, size)
        metrics = run_minibatches(
            self.parameters, shares, self.micro, RATE, lambda keys: self.compute_loss(keys, meta.fields)
        )
        metrics["lr"] = [RATE]
        answer = tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": metrics})
        return SimpleNamespace(get=lambda: answer)

    def compute_loss(self, keys: list[str], fields: list[str]) -> tuple[torch.Tensor, Any]:
        data: TensorDict = self.queue.kv_batch_get(keys=keys, partition_id="train", select_fields=fields)
        tu.assign_non_tensor(data, dp_size=self.ranks)
        ids = data["input_ids"]
        output = torch.cat([self.say_values(row) for row in ids.unbind()])
        values = nest_flat(output, ids.offsets().diff().tolist())
        return critic_loss(self.settings.critic, {"values": values}, data, dp_group=None)


class Step:
    """Episodes of one step; row 1 of the second episode is not trained on."""

    def __init__(
        self,
        make: Any,
        monkeypatch: pytest.MonkeyPatch,
        settings: SpearSettings,
        *,
        ranks: int = 1,
        micro: int = 1000,
        minibatch: int = 1000,
    ) -> None:
        self.settings, self.queue = settings, FakeQueue()
        self.queue.install(monkeypatch)
        monkeypatch.setattr(critic.ray, "get", lambda futures: futures)
        self.workers = FakeCritics(self.queue, settings, ranks, micro)
        self.metrics: dict[str, Any] = {}
        config = OmegaConf.create(
            {
                "actor_rollout_ref": {"rollout": {"n": 1, "temperature": 1.0}},
                "critic": {
                    "ppo_mini_batch_size": minibatch,
                    "ppo_epochs": 1,
                    "data_loader_seed": 42,
                    "ppo_max_token_len_per_gpu": 10_000,
                    "forward_max_token_len_per_gpu": 10_000,
                },
            }
        )
        self.keys = StepQueue(type("Tokenizer", (), {"pad_token_id": 0, "eos_token_id": 1}))
        self.updater = CriticUpdater(self.workers, config, settings, SpearState(settings, seed=1), self.keys)
        self.tokens: dict[str, tuple[list[int], list[int]]] = {}
        self.fresh = self.roll_out(make)

    def roll_out(self, make: Any) -> FreshRows:
        random, planned = np.random.default_rng(3), []
        for number, (turns, reward) in enumerate(EPISODES):
            edits = []
            for turn in range(turns):
                prompt, response = (random.integers(VOCABULARY, size=random.integers(1, 5)).tolist() for _ in range(2))
                mask = [*random.integers(2, size=len(response) - 1).tolist(), 1]
                key = f"1-{number}_0_{turn}"
                self.tokens[key] = response, mask
                columns = build_columns([RowTokens(prompt, response, mask, [0.0] * len(response))])
                self.queue.kv_batch_put(keys=[key], partition_id="train", fields=columns, tags=[{}])
                lengths = {"prompt_length": len(prompt), "response_length": len(response), "loss_tokens": sum(mask)}
                edits.append(lengths)
            episode = make.episode(f"1-{number}", 0, turns=turns, rows=edits)
            planned += [PlannedRow(row, episode, reward=reward, advantage=0.0) for row in episode.rows]
        del planned[3]
        masks = [np.asarray(self.tokens[row.row.key][1], dtype=bool) for row in planned]
        lengths = tuple(len(mask) for mask in masks)
        flat = np.concatenate(masks)
        return FreshRows(tuple(planned), lengths, flat, np.zeros(len(flat), np.float32), ())

    def specify_advantages(self) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        """Advantages and returns of each row, an episode at a time as one conversation."""
        found = {}
        for number, (turns, reward) in enumerate(EPISODES):
            keys = [f"1-{number}_0_{turn}" for turn in range(turns)]
            ids = torch.tensor([token for key in keys for token in self.tokens[key][0]])
            mask = torch.tensor([[on for key in keys for on in self.tokens[key][1]]])
            paid = torch.zeros(mask.shape, dtype=torch.float64)
            paid[0, -1] = reward  # every response ends with a token of the policy's
            options = self.settings.critic
            advantages, returns = gae_advantages(
                paid,
                self.workers.parameters.detach()[ids][None],
                mask,
                gamma=options.gamma,
                lam=options.lam,
                whiten=False,
            )
            sizes = [len(self.tokens[key][0]) for key in keys]
            found |= dict(zip(keys, zip(advantages[0].split(sizes), returns[0].split(sizes), strict=True), strict=True))
        return found


def choose(**nodes: Any) -> SpearSettings:
    return SpearSettings.from_mapping({"advantage": {"estimator": "gae"}, **nodes})


LAYOUTS = [{}, {"ranks": 2}, {"ranks": 3, "micro": 1}]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_advantages_run_through_the_turns_of_an_episode(
    make: Any, monkeypatch: pytest.MonkeyPatch, layout: dict[str, int]
) -> None:
    settings = choose(critic={"gamma": 0.97, "lam": 0.9, "whiten": False})
    step = Step(make, monkeypatch, settings, **layout)
    wanted = step.specify_advantages()
    fresh, targets = step.updater.estimate(step.fresh, step.metrics)
    keys = [planned.row.key for planned in fresh.rows]
    assert fresh.advantages is not None and "1-1_0_1" not in keys, "and the row that is left out is seen all the same"
    expected = [torch.cat([wanted[key][part] for key in keys]) for part in (0, 1)]
    np.testing.assert_allclose(fresh.advantages, expected[0], atol=1e-6)
    np.testing.assert_allclose(targets.returns, expected[1], atol=1e-6)
    for planned in fresh.rows:
        own = np.asarray(step.tokens[planned.row.key][1], dtype=bool)
        assert planned.advantage == pytest.approx(float(wanted[planned.row.key][0][own].mean()), abs=1e-6)


def test_whitening_is_of_the_loss_alone(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = Step(make, monkeypatch, choose(critic={"whiten": False}))
    plain, _ = raw.updater.estimate(raw.fresh, {})
    step = Step(make, monkeypatch, choose())
    white, _ = step.updater.estimate(step.fresh, step.metrics)
    assert white.advantages is not None and plain.advantages is not None
    on = step.fresh.mask
    assert white.advantages[on].mean() == pytest.approx(0, abs=1e-6)
    assert white.advantages[on].std(ddof=1) == pytest.approx(1, abs=1e-5) and not white.advantages[~on].any()
    assert [row.advantage for row in white.rows] == [row.advantage for row in plain.rows], "what gates the buffer"
    order = np.argsort(plain.advantages[on], kind="stable")
    assert (np.diff(white.advantages[on][order]) >= -1e-6).all()


def test_the_first_values_explain_nothing_and_right_ones_all(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(make, monkeypatch, choose())
    with torch.no_grad():
        step.workers.parameters.zero_()
    fresh, targets = step.updater.estimate(step.fresh, step.metrics)
    # With gamma = lambda = 1 and values of 0, every token of an episode is worth its reward.
    rewards = [planned.reward for planned, n in zip(fresh.rows, fresh.lengths, strict=True) for _ in range(n)]
    np.testing.assert_allclose(targets.returns[fresh.mask], np.asarray(rewards)[fresh.mask], atol=1e-6)
    assert step.metrics["critic/explained_variance"] == 0 and step.metrics["critic/value_mean"] == 0
    assert [row.advantage for row in fresh.rows] == pytest.approx([row.reward for row in fresh.rows], abs=1e-6)
    metrics: dict[str, float] = {}
    returns = torch.tensor([1.0, 2.0, 4.0])
    step.updater._describe(returns.clone(), returns, metrics)
    assert metrics["critic/explained_variance"] == pytest.approx(1)
    step.updater._describe(returns.clone(), torch.ones(3), metrics)
    assert metrics["critic/explained_variance"] == 0


@pytest.mark.parametrize("clip", [0.1, None])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_critic_takes_a_step_down_the_clipped_value_loss(
    make: Any, monkeypatch: pytest.MonkeyPatch, layout: dict[str, int], clip: float | None
) -> None:
    step = Step(make, monkeypatch, choose(critic={"clip": clip}), **layout)
    fresh, targets = step.updater.estimate(step.fresh, step.metrics)
    # Half of the old values far away from the present ones, so that the clip decides about some of them.
    moved = ValueTargets(targets.old_values + np.resize([0.0, 0.3], len(targets.old_values)), targets.returns)
    theta = step.workers.parameters.detach().clone().requires_grad_()
    ids = torch.tensor([token for planned in fresh.rows for token in step.tokens[planned.row.key][0]])
    mask = torch.from_numpy(fresh.mask)[None]
    values = theta[ids][None]
    old, returns = (torch.from_numpy(part).double()[None] for part in (moved.old_values, moved.returns))
    loss = aggregate_loss(value_loss(values, old, returns, mask, clip=clip), mask, mode="token-mean")
    loss.backward()
    assert theta.grad is not None
    step.updater.update(fresh, moved, step.metrics)
    expected = theta.detach() - RATE * theta.grad
    torch.testing.assert_close(step.workers.parameters.detach(), expected, atol=1e-6, rtol=0)
    assert step.metrics["critic/loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert (step.metrics["critic/clip_fraction"] > 0) == (clip is not None)
    assert step.metrics["critic/lr"] == RATE and step.metrics["critic/grad_norm"] > 0


@pytest.mark.parametrize(("minibatch", "count"), [(2, 2), (100, 1)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_row_is_learned_from_once(
    make: Any, monkeypatch: pytest.MonkeyPatch, minibatch: int, count: int, ranks: int
) -> None:
    step = Step(make, monkeypatch, choose(), minibatch=minibatch, ranks=ranks)
    step.updater.update(*step.updater.estimate(step.fresh, step.metrics), step.metrics)
    (call,) = step.workers.calls
    rows = [key for key in call.keys if not key.startswith("padding")]
    assert sorted(rows) == sorted(planned.row.key for planned in step.fresh.rows)
    assert len(call.keys) == count * call.extra_info["mini_batch_size"]
    assert call.extra_info["mini_batch_size"] % ranks == 0
    assert set(step.keys.take_keys([])) == {*rows, *(key for key in step.queue.rows if key.startswith("padding"))}

"""The loss of an update, the critic, and golden cases where the folder that holds them is at hand."""

import importlib.util
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_training.algorithms import (
    Aggregation,
    BoundsMode,
    CovarianceClip,
    SpearLoss,
    aggregate_loss,
    covariance,
    episode_advantages,
    gae_advantages,
    policy_loss,
    spear_loss,
    value_loss,
    weigh_rows,
)
from tests.training.algorithms.batches import random_batch, tensor


def test_what_stands_off_the_mask_does_no_harm() -> None:
    log_probs = tensor([[-1.0, float("inf"), -1e6]]).requires_grad_(True)
    old = tensor([[-1.0, 0.0, 1e6]])
    mask = tensor([[1, 0, 0]])
    reference = tensor([[-1.0, 0.0, 1e6]])
    got = spear_loss(
        log_probs, old, tensor([1.0]), mask, torch.tensor([0]), gamma=1.0, ref_log_probs=reference, kl_coefficient=0.1
    )
    got.loss.backward()
    assert math.isfinite(float(got.loss.detach()))
    assert log_probs.grad[0].tolist() == pytest.approx([-1 / 3, 0.0, 0.0])


LOSS = [[1.0, 2.0, 3.0, 4.0], [2.0, 2.0, 0.0, 0.0], [5.0, 5.0, 5.0, 5.0]]
MASK = [[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("mode", "options", "want"),
    [
        ("seq-mean-token-sum-norm", {}, 10 / 2 / 4),
        ("seq-mean-token-sum-norm", {"loss_scale_factor": 512}, 10 / 2 / 512),
        ("seq-mean-token-sum-norm", {"num_sequences": 3}, 10 / 3 / 4),
        ("seq-mean-token-sum", {}, 5.0),
        ("seq-mean-token-mean", {}, 2.0),
        ("seq-mean-token-mean", {"num_sequences": 4}, 1.0),
        ("token-mean", {}, 2.0),
        ("token-mean", {"num_tokens": 10}, 1.0),
        ("sum-norm", {"loss_scale_factor": 5}, 2.0),
    ],
)
def test_aggregation_by_hand(mode: str, options: dict, want: float) -> None:
    assert float(aggregate_loss(tensor(LOSS), tensor(MASK), mode=mode, **options)) == pytest.approx(want)


@pytest.mark.parametrize("mode", [member.value for member in Aggregation])
def test_an_empty_batch_gives_zero_with_a_gradient(mode: str) -> None:
    loss = torch.full((2, 3), float("nan"), requires_grad=True)
    got = aggregate_loss(loss, torch.zeros(2, 3), mode=mode)
    got.backward()
    assert float(got.detach()) == 0.0 and not loss.grad.any()


@given(st.integers(0, 1000), st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_aggregation_does_not_depend_on_the_micro_batches(seed: int, sizes: list[int]) -> None:
    loss, mask = (x.detach() for x in random_batch(seed, sum(sizes))[0::3])
    for mode in Aggregation:
        counts = {"num_sequences": int((mask.sum(1) > 0).sum()), "num_tokens": int(mask.sum())}
        parts = zip(loss.split(sizes), mask.split(sizes), strict=True)
        total = sum(float(aggregate_loss(a, m, mode=mode, loss_scale_factor=9, **counts)) for a, m in parts)
        whole = float(aggregate_loss(loss, mask, mode=mode, loss_scale_factor=9))
        assert total == pytest.approx(whole, abs=1e-12)


@settings(deadline=None)
@given(st.integers(0, 2000), st.floats(0, 1))
def test_spear_loss_is_both_terms_each_by_its_own_count(seed: int, gamma: float) -> None:
    log_probs, old, advantages, mask = random_batch(seed)
    replay = torch.arange(6) % 2 == 1
    got = spear_loss(log_probs, old, advantages, mask, replay, gamma=gamma, cov_ratio=0.0, loss_scale_factor=9)
    tokens = policy_loss(log_probs, old, advantages, mask).loss
    fresh, replayed = (aggregate_loss(tokens[r], mask[r], loss_scale_factor=9) for r in (~replay, replay))
    assert float(got.on_policy) == pytest.approx(float(fresh.detach()))
    assert float(got.self_imitation) == pytest.approx(float(replayed.detach()))
    assert float(got.loss.detach()) == pytest.approx(float((fresh + gamma * replayed).detach()))


@pytest.mark.parametrize("mode", [mode.value for mode in Aggregation])
def test_spear_loss_does_not_depend_on_the_micro_batches(mode: str) -> None:
    log_probs, old, advantages, mask = random_batch(11)
    replay = torch.tensor([0, 1, 1, 0, 1, 0])
    options = {"gamma": 0.5, "cov_ratio": 0.0, "mode": mode, "loss_scale_factor": 9}
    whole = spear_loss(log_probs, old, advantages, mask, replay, **options)
    whole.loss.backward()
    gradient, log_probs.grad = log_probs.grad.clone(), None
    made = weigh_rows(mask.sum(1).numpy(), replay.numpy(), mode=mode, loss_scale_factor=9)
    weights, tokens = torch.from_numpy(made), 0
    for rows in ([0], [1, 2], [3, 4, 5]):
        part = [tensor[rows] for tensor in (log_probs, old, advantages, mask, replay)]
        got = spear_loss(*part, gamma=0.5, cov_ratio=0.0, weights=weights[rows])
        got.loss.backward()
        tokens += int(got.tokens)
    assert torch.allclose(gradient, log_probs.grad)
    assert tokens == int(whole.tokens) == int(mask.sum())


@pytest.mark.parametrize("mode", [mode.value for mode in Aggregation])
@given(st.integers(0, 2000))
def test_weighed_rows_sum_to_the_aggregated_loss_of_either_term(mode: str, seed: int) -> None:
    log_probs, _, _, mask = random_batch(seed)
    loss, replay = log_probs.detach(), torch.arange(6) % 3 == 1
    made = weigh_rows(mask.sum(1).numpy(), replay.numpy(), mode=mode, loss_scale_factor=7.0)
    for rows in (replay, ~replay):
        want = aggregate_loss(loss[rows], mask[rows], mode=mode, loss_scale_factor=7.0)
        sums = torch.where(mask, loss, 0.0).sum(1)
        assert float(torch.from_numpy(made)[rows] @ sums[rows]) == pytest.approx(float(want), abs=1e-12)


def test_the_covariance_clip_touches_replayed_rows_alone_unless_told() -> None:
    log_probs, old, advantages, mask = random_batch(5, rows=40, tokens=10)
    replay = torch.arange(40) >= 20
    wide = CovarianceClip(0.1, -9.0, 9.0)

    def gradient(**more) -> tuple[torch.Tensor, float]:
        log_probs.grad = None
        generator = torch.Generator().manual_seed(0)
        got = spear_loss(log_probs, old, advantages, mask, replay, gamma=1.0, generator=generator, **more)
        got.loss.backward()
        return log_probs.grad.clone(), float(got.cov_fraction)

    plain, none = gradient(cov_ratio=0.0)
    clipped, share = gradient(cov=wide)
    both, same = gradient(cov=wide, on_policy_cov=wide)
    assert none == 0.0 and same == share, "what is taken out of on-policy rows is not counted as replayed"
    taken = (plain != 0) & (clipped == 0)
    budget = math.floor(0.1 * int(mask[20:].sum()))
    assert not taken[:20].any() and int(taken[20:].sum()) == budget
    assert share == pytest.approx(budget / int(mask[20:].sum()))
    assert int(((plain != 0) & (both == 0))[:20].sum()) == math.floor(0.1 * int(mask[:20].sum()))


@pytest.mark.parametrize("sharpness", [1.0, 0.8, 0.6, 0.3])
@pytest.mark.parametrize("scope", ["batch", "position"])
@pytest.mark.parametrize("ratio", [0.02, 0.1])
def test_measured_bounds_let_lambda_bind_however_sharp_a_policy_is(sharpness: float, scope: str, ratio: float) -> None:
    generator = torch.Generator().manual_seed(3)
    log_probs = -4 * sharpness * torch.rand(64, 100, generator=generator, dtype=torch.float64) ** 4
    advantages = torch.rand(64, generator=generator, dtype=torch.float64) + 0.1
    mask, replay = torch.ones(64, 100), torch.ones(64)
    clip = CovarianceClip(ratio, None, None, scope=scope, bounds=BoundsMode.RUNNING)

    def run(seed: int) -> SpearLoss:
        draw = torch.Generator().manual_seed(seed)
        return spear_loss(log_probs, log_probs, advantages, mask, replay, gamma=1.0, cov=clip, generator=draw)

    assert float(run(0).cov_fraction) == pytest.approx(ratio, abs=1e-3)
    lower, upper = run(0).bounds
    cov = covariance(log_probs, advantages, mask, scope=scope)
    assert int(((cov >= lower) & (cov <= upper)).sum()) == pytest.approx(0.2 * 6400, abs=3), "a choice among ten"


def test_what_is_counted_beside_the_loss_by_hand() -> None:
    ratios = tensor([[2.0, 1.0], [3.0, 1.0]])
    got = spear_loss(
        ratios.log(), torch.zeros(2, 2), tensor([1.0, 1.0]), torch.ones(2, 2), tensor([0, 1]), gamma=1.0, cov_ratio=0.0
    )
    assert float(got.kl_old) == pytest.approx(2.0 - 1.0 - math.log(2.0))
    assert (float(got.replay_ratio), float(got.replay_ratio_squared)) == pytest.approx((4.0, 10.0))
    assert (int(got.tokens), int(got.replay_tokens), int(got.clipped)) == (4, 2, 2)


def test_spear_loss_counts_fractions_and_refuses() -> None:
    log_probs, old = tensor([[0.5, 0.0]]), torch.zeros(1, 2, dtype=torch.float64)
    mask, none = torch.ones(1, 2), torch.zeros(1)
    assert float(spear_loss(log_probs, old, tensor([1.0]), mask, none, gamma=0.0).clip_fraction) == 0.5
    assert float(spear_loss(log_probs * 9, old, tensor([-1.0]), mask, none, gamma=0.0).dual_fraction) == 0.5
    with pytest.raises(ValueError, match="ref_log_probs"):
        spear_loss(log_probs, old, tensor([1.0]), mask, none, gamma=0.0, kl_coefficient=0.1)
    with pytest.raises(ValueError, match="replay must be"):
        spear_loss(log_probs, old, tensor([1.0]), mask, torch.zeros(2), gamma=0.0)


def test_the_kl_term_is_added_in_both_terms() -> None:
    log_probs, mask = tensor([[0.0], [0.0]]), torch.ones(2, 1)
    reference = tensor([[1.0], [1.0]])
    got = spear_loss(
        log_probs,
        log_probs,
        tensor([0.0, 0.0]),
        mask,
        tensor([0, 1]),
        gamma=0.5,
        ref_log_probs=reference,
        kl_coefficient=2.0,
    )
    k3 = math.e - 2
    assert float(got.loss) == pytest.approx(2 * k3 + 0.5 * 2 * k3)


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


def test_rows_that_do_not_fit_are_told() -> None:
    assert episode_advantages(tensor([]), tensor([]), [], [], [])[0].shape == (0,)
    assert not episode_advantages(tensor([1.0]), tensor([0.0]), [1], [0], [3.0])[0].any()
    with pytest.raises(ValueError, match="do not describe the same rows"):
        episode_advantages(tensor([1.0]), tensor([1.0]), [2], [0], [3.0])


FOLDER = Path(__file__).resolve().parents[3].parent / "shared" / "golden" / "spear"


def _load_checker() -> Any:
    path = list(sys.path)
    spec = importlib.util.spec_from_file_location("golden_spear_check", FOLDER / "check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = path
    # The cases were recorded against 0.1.0, whose package had another name.
    module.NAMES = {name: re.sub(r"^training\.", "spear_training.", place) for name, place in module.NAMES.items()}
    module.NAMES["load_preset"] = "tests.training.presets.rows:load_preset"
    return module


def _find_rows() -> Iterator[Any]:
    if not (FOLDER / "check.py").is_file():
        yield pytest.param(
            None, None, None, marks=pytest.mark.skip(reason="the golden cases are not here"), id="absent"
        )
        return
    checker = _load_checker()
    for path in sorted(FOLDER.glob("*.json")):
        case = json.loads(path.read_text(encoding="utf-8"))
        run = checker.RUNNERS.get(case["kind"]) or getattr(checker, case["kind"], None)
        for number, row in enumerate(case.get("rows", []) if run else []):
            yield pytest.param((checker, run), row, case["tolerance"], id=f"{path.stem}-{number}")


@pytest.mark.parametrize(("runner", "row", "tolerance"), list(_find_rows()))
def test_golden_row_holds(runner: Any, row: dict[str, Any], tolerance: float) -> None:
    checker, run = runner
    if row["in"] == {"name": "alfworld", "flavour": "paper"}:
        # All 140 games: the 128 of the table would weigh the subtasks differently.
        row = {**row, "out": {**row["out"], "val_data_size": -1}}
    got = run(row["in"], want=row["out"], tol=tolerance)
    if got is not None:
        checker.close(got, row["out"], tolerance)

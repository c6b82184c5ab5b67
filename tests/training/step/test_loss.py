"""The executable specification of an update: settings and columns give ``spear_training.algorithms.spear_loss``."""

import pytest
import torch

from spear_training.algorithms import kl_divergence
from spear_training.step.update import compute_loss, measure_loss
from tests.training.step.batches import BOUNDS, CASES, GAMMA, NO_COV, choose, draw_batch


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_are_those_of_the_paper(name: str, seed: int) -> None:
    settings, batch = CASES[name], draw_batch(seed)
    (found, gradient), (expected, wanted) = batch.compute(settings), batch.specify(settings)
    assert found.loss.item() == pytest.approx(expected.loss.item(), abs=1e-9)
    torch.testing.assert_close(gradient, wanted, atol=1e-9, rtol=0)
    assert gradient.abs().max() > 1e-3
    counts, others = measure_loss(found), measure_loss(expected)
    assert counts == pytest.approx(others, abs=1e-9)
    assert found.bounds == pytest.approx(expected.bounds, abs=1e-9)


def test_the_cases_above_reach_every_clip() -> None:
    found = draw_batch(0).compute(CASES["narrow clips"])[0]
    assert found.clipped > 0 and found.dual_clipped > 0
    for name in ("covariance clip of a tenth", "running bounds", "percentile bounds"):
        assert draw_batch(0).compute(CASES[name])[0].covariance_clipped > 0
    found, plain = (draw_batch(0).compute(CASES[name])[1] for name in ("on-policy clip alone", "covariance clip off"))
    assert ((found == 0) & (plain != 0)).any()


def test_every_option_of_the_loss_decides_something() -> None:
    # A case that gives what another gives proves nothing about its option.
    found = {name: tuple(draw_batch(0).compute(settings)[1].flatten().tolist()) for name, settings in CASES.items()}
    assert len(set(found.values())) == len(found)


def test_the_divergence_is_counted_and_needs_a_reference() -> None:
    settings, batch = CASES["KL to a reference"], draw_batch(3)
    expected = kl_divergence(batch.log_probs, batch.ref_log_probs)[batch.mask].sum()
    assert float(batch.compute(settings)[0].kl) == pytest.approx(float(expected))
    assert float(batch.compute(CASES["covariance clip off"])[0].kl) == 0.0
    columns = batch.columns(CASES["covariance clip off"])
    with pytest.raises(ValueError, match="ref_log_probs"):
        compute_loss(settings, batch.log_probs, batch.steering(settings), columns, gamma=GAMMA, bounds=BOUNDS)


def test_an_entropy_bonus_is_aggregated_like_the_loss_and_weighs_gamma_on_replayed_rows() -> None:
    batch, plain = draw_batch(3), CASES["covariance clip off"]
    settings = plain.override({"loss": {"entropy_coefficient": 0.01}})
    entropy = batch.log_probs.square().requires_grad_()
    columns, steering = batch.columns(plain), batch.steering(plain)
    shared = {"gamma": GAMMA, "bounds": BOUNDS}
    without = compute_loss(plain, batch.log_probs, steering, columns, **shared)
    with_bonus = compute_loss(settings, batch.log_probs, steering, columns | {"entropy": entropy}, **shared)
    weights = steering[:, 1] * torch.where(batch.replay, GAMMA, 1.0)
    bonus = 0.01 * ((entropy * batch.mask).sum(1) * weights).sum()
    assert (without.loss - with_bonus.loss).item() == pytest.approx(bonus.item()) and bonus > 0
    with_bonus.loss.backward()
    torch.testing.assert_close(entropy.grad, -0.01 * weights[:, None] * batch.mask, atol=1e-9, rtol=0)
    with pytest.raises(ValueError, match="entropy"):
        compute_loss(settings, batch.log_probs, steering, columns, **shared)


def test_weights_of_rollout_correction_are_factors_of_the_policys_loss_alone() -> None:
    settings, batch = CASES["KL to a reference"], draw_batch(3)
    columns, steering = batch.columns(settings), batch.steering(settings)

    def loss(factor: float) -> float:
        weighed = columns | {"rollout_weights": torch.full_like(batch.log_probs, factor)}
        return float(compute_loss(settings, batch.log_probs, steering, weighed, gamma=GAMMA, bounds=BOUNDS).loss)

    whole, _ = batch.compute(settings)
    assert loss(1.0) == pytest.approx(whole.loss.item())
    assert loss(3.0) - loss(2.0) == pytest.approx(loss(2.0) - loss(1.0)) and loss(2.0) != pytest.approx(loss(1.0))
    assert loss(0.0) > 0, "the divergence stays"


@pytest.mark.parametrize("mode", ["seq-mean-token-sum-norm", "token-mean", "seq-mean-token-mean", "sum-norm"])
@pytest.mark.parametrize("size", [1, 2, 5, 12])
def test_micro_batches_add_up_to_the_minibatch(mode: str, size: int) -> None:
    settings, batch = choose(cov=NO_COV, loss={"aggregation": mode}), draw_batch(6)
    whole, gradient = batch.compute(settings)
    parts = [batch.compute(settings, slice(start, start + size)) for start in range(0, 12, size)]
    assert sum(found.loss.item() for found, _ in parts) == pytest.approx(whole.loss.item(), abs=1e-12)
    torch.testing.assert_close(torch.cat([part for _, part in parts]), gradient, atol=1e-12, rtol=0)
    sums = [measure_loss(found) for found, _ in parts]
    assert {name: sum(part[name] for part in sums) for name in sums[0]} == pytest.approx(measure_loss(whole))


def test_the_covariance_choice_follows_from_the_seeds_of_the_rows() -> None:
    batch, settings = draw_batch(8), CASES["covariance clip of a tenth"]
    before = torch.get_rng_state()
    first, second = batch.compute(settings)[1], batch.compute(settings)[1]
    torch.testing.assert_close(first, second, atol=0, rtol=0)
    others = []
    for _ in range(4):
        batch.seeds = batch.seeds + 1
        others.append(batch.compute(settings)[1])
    assert any(not torch.equal(first, other) for other in others)
    assert torch.equal(before, torch.get_rng_state()), "the global stream belongs to others"

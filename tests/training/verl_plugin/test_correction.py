"""Where rollout engine and actor disagree: what tokens weigh, which leave the loss; replayed rows have no part."""

from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import numpy as np
import torch

from spear_envs.core.errors import SpearError
from tests.training.verl_plugin.steps import GAMMA, LAYOUTS, RATE, Step, choose


class Disagreement:
    """Makes rollout engine and actor of a step differ on each token; knows the loss that follows from it."""

    def __init__(self, step: Step) -> None:
        self.step = step
        self.ids, self.masks, self.ratios = [], [], []
        for key, prompt in zip(step.rows.key, step.rows.prompt_length, strict=True):
            stored = step.queue.rows[key]
            self.ids.append(stored["input_ids"][prompt:])
            self.masks.append(stored["loss_mask"] > 0)
            own = (step.workers.parameters.detach()[self.ids[-1]] - 2.0).float()
            stored["rollout_log_probs"] = own - torch.linspace(-0.9, 0.9, 7)[self.ids[-1] % 7]
            self.ratios.append((own - stored["rollout_log_probs"]).exp())

    def specify(self, factors: list[torch.Tensor], kept: list[torch.Tensor]) -> torch.Tensor:
        """Parameters after one step on the rows' mean over kept tokens of -A times the factor."""
        theta = self.step.workers.parameters.detach().clone().requires_grad_()
        total = sum(mask.sum() for mask in kept)
        for advantage, ids, factor, mask in zip(self.step.rows.advantage, self.ids, factors, kept, strict=True):
            log_probs = theta[ids]
            ratio = (log_probs - log_probs.detach()).exp()
            (-(advantage * ratio * factor)[mask].sum() / total).backward()
        assert theta.grad is not None
        return theta.detach() - RATE * theta.grad


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("threshold", [1.5, "0.6_1.5"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_tokens_weigh_what_the_actor_thinks_of_them_against_the_rollout(
    level: str, threshold: Any, layout: dict[str, Any]
) -> None:
    settings = choose(loss={"aggregation": "token-mean"})
    step = Step(settings, rollout_is=level, rollout_is_threshold=threshold, **layout)
    between = Disagreement(step)
    factors = []
    for ratio, mask in zip(between.ratios, between.masks, strict=True):
        raw = ratio if level == "token" else ratio[mask].prod().expand_as(ratio)
        inside = (raw >= 0.6) & (raw <= 1.5)
        factors.append(raw.clamp(max=1.5) if threshold == 1.5 else torch.where(inside, raw, 0.0))
    assert any(bool((factor != ratio).any()) for factor, ratio in zip(factors, between.ratios, strict=True))
    expected = between.specify(factors, between.masks)
    step.updater.update(step.collect(), None, 0.0, step.metrics)
    torch.testing.assert_close(step.workers.parameters.detach(), expected, rtol=1e-5, atol=1e-6)
    assert step.metrics["rollout_corr/rollout_is_mean"] > 0


def test_rejected_tokens_leave_the_loss_and_what_it_is_divided_by() -> None:
    settings = choose(loss={"aggregation": "token-mean"})
    step = Step(settings, rollout_rs="token_k1", rollout_rs_threshold="0.6_1.5")
    between = Disagreement(step)
    # verl holds the bounds against the rollout's probability over the actor's.
    kept = [
        mask & (1 / ratio >= 0.6) & (1 / ratio <= 1.5)
        for ratio, mask in zip(between.ratios, between.masks, strict=True)
    ]
    assert 0 < sum(int(mask.sum()) for mask in kept) < sum(int(mask.sum()) for mask in between.masks)
    assert any(not mask.any() for mask in kept), "a row with nothing left"
    expected = between.specify([torch.ones_like(ratio) for ratio in between.ratios], kept)
    fresh = step.collect()
    assert fresh.mask.tolist() == torch.cat(kept).tolist()
    assert fresh.loss_tokens.tolist() == [int(mask.sum()) for mask in kept]
    good = {
        name: kept[n].tolist() for n, name in enumerate(fresh.trajectory) if fresh.advantage[n] > 0 and kept[n].any()
    }
    drawn = step.remember(fresh)
    assert dict(zip(drawn.trajectory, map(np.ndarray.tolist, drawn.split("mask")), strict=True)) == good
    step.updater.update(fresh, None, 0.0, step.metrics)
    torch.testing.assert_close(step.workers.parameters.detach(), expected, rtol=1e-5, atol=1e-6)
    assert 0 < step.metrics["rollout_corr/rollout_rs_masked_fraction"] < 1


def test_a_step_without_a_token_both_agree_on_is_told() -> None:
    step = Step(choose(), rollout_is="token", rollout_is_threshold="20_30")
    with pytest.raises(SpearError, match=r"no token of this step .* 20_30.*rollout\.dtype"):
        step.collect()


@pytest.mark.parametrize("coupling", ["sequential", "joint"])
def test_replayed_rows_are_not_corrected(coupling: str) -> None:
    after = []
    corrections: tuple[dict[str, Any], ...] = ({}, {"rollout_is": "token"})
    for correction in corrections:
        step = Step(choose(coupling), **correction)
        fresh = step.collect()
        replay = step.remember(fresh)
        step.updater.update(fresh.add(advantage=np.zeros(len(fresh))), replay, GAMMA, step.metrics)
        after.append(step.workers.parameters.detach())
    torch.testing.assert_close(after[0], after[1], rtol=1e-6, atol=1e-7)

from __future__ import annotations

import pytest

from spear_training.algorithms import GAMMA, MU, SettingsError, SpearSettings

ENTROPY, SUCCESS, NEW = "entropy/token-mean", "success/all", "anchors/new"


def test_gamma_lets_go_where_the_entropy_is_spent() -> None:
    follow = GAMMA.find("entropy")
    weights = [follow(100, 10, {ENTROPY: entropy}, low=0.2, high=0.6) for entropy in (0.1, 0.2, 0.3, 0.6, 2.0)]
    assert weights == pytest.approx([0.0, 0.0, 0.25, 1.0, 1.0])
    assert follow(5, 10, {ENTROPY: 1.0}) == pytest.approx(0.5), "the warm-up stays"
    assert follow(100, 10, {}) == 1.0, "the first step knows no entropy"


def test_gamma_grows_and_mu_fades_with_success() -> None:
    for success, gamma in ((0.0, 0.0), (0.1, 0.25), (0.4, 1.0), (0.9, 1.0)):
        assert GAMMA.find("success")(3, 10, {SUCCESS: success}, target=0.4) == pytest.approx(gamma)
        assert MU.find("success")(3, 10, {SUCCESS: success}, target=0.4) == pytest.approx(1.0 - gamma)
    assert (GAMMA.find("success")(1, 10, {}), MU.find("success")(1, 10, {})) == (0.0, 1.0)


def test_mu_pays_for_tools_while_they_lead_to_new_states() -> None:
    weights = [MU.find("novelty")(9, 10, {NEW: share}, target=0.5) for share in (0.0, 0.25, 0.5, 1.0)]
    assert weights == pytest.approx([0.0, 0.5, 1.0, 1.0])
    assert MU.find("novelty")(1, 10, {}) == 1.0


def every_other(t, steps, metrics, start=0):
    return float((t + start) % 2)


def test_a_schedule_of_ones_own_is_a_function_of_the_step() -> None:
    name = f"{__name__}:every_other"
    settings = SpearSettings.from_mapping({"sil": {"gamma": name}, "reward": {"mu": name, "mu_options": {"start": 1}}})
    assert [settings.sil.weight(t) for t in (1, 2)] == [1.0, 0.0]
    assert [settings.reward.weight(t) for t in (1, 2)] == [0.0, 1.0]


def give(t, steps, metrics, answer=None):
    return answer


@pytest.mark.parametrize("answer", [-0.1, float("nan"), float("inf"), "much", None, True])
def test_a_weight_that_is_none_is_told(answer: object) -> None:
    chosen = {"gamma": f"{__name__}:give", "gamma_options": {"answer": answer}}
    with pytest.raises(SettingsError, match=r"spear\.sil\.gamma=.*:give gave .*: a weight is a finite number"):
        SpearSettings.from_mapping({"sil": chosen}).sil.weight(3)


def test_constants_may_have_another_value() -> None:
    settings = SpearSettings.from_mapping({"sil": {"gamma": "constant", "gamma_options": {"value": 0.3}}})
    assert settings.sil.weight(7) == 0.3

from __future__ import annotations

import dataclasses
import json

import pytest

from spear_envs.core.errors import SpearError
from spear_training.algorithms import (
    BoundsMode,
    Coupling,
    CovarianceSettings,
    SettingsError,
    SilSettings,
    SpearSettings,
    VoidFilter,
    cosine_decay,
    cosine_warmup,
)


def test_a_mapping_round_trips_through_json() -> None:
    settings = SpearSettings.from_mapping(
        {"sil": {"coupling": "sequential", "warmup_steps": 30}, "replay": {"max_age": None}}
    )
    assert settings.sil.coupling is Coupling.SEQUENTIAL
    assert settings.replay.max_age is None
    assert SpearSettings.from_mapping(json.loads(json.dumps(settings.to_mapping()))) == settings
    assert SpearSettings.from_mapping(None) == SpearSettings.from_mapping({}) == SpearSettings()


def test_settings_are_frozen_and_overridden_by_copies() -> None:
    settings = SpearSettings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.sil.enabled = False  # type: ignore[misc]
    changed = settings.override({"cov": {"ratio": 0}})
    assert (changed.cov.ratio, settings.cov.ratio) == (0.0, 0.02)
    assert changed.override({"cov": {"ratio": 0.02}}) == settings


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"cov": {"ration": 1}}, r"spear\.cov\.ration is not a setting; did you mean spear\.cov\.ratio\?"),
        ({"sill": {}}, r"did you mean spear\.sil\?"),
        ({"warmup_step": 5}, r"did you mean spear\.sil\.warmup_steps\?"),
        ({"zzzqqq": 1}, r"there are sil, reward"),
        ({"sil": 3}, r"spear\.sil: .*it is 3"),
        ({"sil": {"coupling": "joined"}}, "'joined'.*'joint'"),
        ({"sil": {"enabled": 3}}, "true or false"),
        ({"sil": {"warmup_steps": 1.5}}, "integer"),
        ({"sil": {"trigger_ratio": 0}}, "greater than 0"),
        ({"cov": {"ratio": "much"}}, "must be a number"),
        ({"cov": {"ratio": True}}, "must be a number"),
        ({"cov": {"ratio": 1.5}}, "less than or equal to 1"),
        ({"cov": {"ratio": None}}, "number"),
        ({"clip": {"dual": 1}}, "greater than 1"),
        ({"clip": {"low": float("nan")}}, "finite"),
        ({"replay": {"capacity": 0}}, "greater than or equal to 1"),
        ({"filter": {"groups": 0}}, "greater than 0"),
        ({"cov": {"bounds": "fixed", "lower": 1}}, r"needs spear\.cov\.lower and spear\.cov\.upper"),
        ({"cov": {"bounds": "fixed", "lower": 3, "upper": 1}}, "must not exceed"),
        ({"cov": {"lower_top": 0.0001}}, "must not exceed"),
        ({"reward": {"success": -1}}, "must exceed"),
        ({"advantage": {"estimator": "rloo", "normalize_std": True}}, "has no effect"),
        ({"advantage": {"estimator": "gae", "normalize_std": True}}, "has no effect"),
        ({"critic": {"clip": 0}}, "greater than 0"),
        ({"advantage": {"estimator": "gigpoo"}}, r"estimator cannot be 'gigpoo'; did you mean gigpo\?"),
        ({"advantage": {"estimator": "nowhere.mine:f"}}, "cannot be imported .*PYTHONPATH"),
        ({"advantage": {"estimator": "math:sqr"}}, r"math has no function 'sqr'; did you mean sqrt\?"),
        ({"advantage": {"estimator": "math:pi"}}, "has no function 'pi'"),
        ({"loss": {"policy_options": {"clip_low": 1}}}, "policy=vanilla has no option 'clip_low'"),
        ({"loss": {"policy": "nonsense"}}, r"spear\.loss\.policy cannot be 'nonsense'; choose vanilla, gspo"),
        ({"sil": {"gamma": "cosin"}}, "did you mean cosine"),
        (
            {"sil": {"gamma": "success", "gamma_options": {"goal": 1}}},
            "gamma=success has no option 'goal'; it has target",
        ),
        ({"reward": {"mu_options": {"x": 1}}}, "mu=cosine has no option 'x'; it has none"),
        ({"loss": {"policy": "gspo", "policy_options": {"share": 0.1}}}, "policy=gspo has no option 'share'"),
        ({"advantage": {"estimator": "math:sqrt"}}, r"math:sqrt\(x, /\) has the wrong arguments"),
        ({"reward": {"mu": "entropy"}}, r"spear\.reward\.mu cannot be 'entropy'"),
        ({"filter": {"custom": ["mine"]}}, r"spear\.filter\.custom cannot be 'mine'"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(mapping, message: str) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        SpearSettings.from_mapping(mapping)
    assert isinstance(caught.value, SpearError) and "\n" not in str(caught.value)


def test_direct_construction_is_checked_too() -> None:
    with pytest.raises(SettingsError, match=r"spear\.sil\.warmup_steps"):
        SilSettings(warmup_steps=-1)
    fixed = CovarianceSettings(bounds="fixed", lower=1, upper=40)  # type: ignore[arg-type]
    assert fixed.bounds is BoundsMode.FIXED and fixed.lower == 1.0


def test_yaml_words_mean_what_they_say() -> None:
    got = SpearSettings.from_mapping({"filter": {"void": False, "overlong": "off"}, "reward": {"mu": None}})
    assert (got.filter.void, got.filter.overlong, got.reward.mu) == (VoidFilter.OFF, False, "none")


def test_weights_follow_their_schedules() -> None:
    settings = SpearSettings.from_mapping({"sil": {"warmup_steps": 10}, "reward": {"decay_steps": 10}})
    assert settings.sil.weight(3) == cosine_warmup(3, 10)
    assert settings.reward.weight(3) == cosine_decay(3, 10)
    off = settings.override({"sil": {"enabled": False}, "reward": {"mu": "none"}})
    assert (off.sil.weight(3), off.reward.weight(3)) == (0.0, 0.0)
    flat = settings.override({"sil": {"gamma": "constant"}, "reward": {"mu": "constant"}})
    assert (flat.sil.weight(3), flat.reward.weight(3)) == (1.0, 1.0)
    assert settings.override({"reward": {"decay_steps": 0}}).reward.weight(1) == 0.0


def test_every_setting_has_a_path() -> None:
    paths = list(SpearSettings.keys())
    mapping = SpearSettings().to_mapping()
    assert paths == [f"spear.{node}.{key}" for node, values in mapping.items() for key in values]

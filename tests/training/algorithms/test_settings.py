"""Settings, names that stand for functions, schedules, and reward terms."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spear_envs.core.rewards import Constant, CosineDecay, make_schedule
from spear_training.algorithms import (
    ESTIMATORS,
    GAMMA,
    MU,
    POLICY_LOSSES,
    Coupling,
    Registry,
    SettingsError,
    SpearSettings,
    VoidFilter,
    compose_reward,
    cosine_decay,
    cosine_warmup,
    tool_call_reward,
)


def test_names_that_are_known_without_torch_are_those_of_our_functions() -> None:
    for registry in (ESTIMATORS, POLICY_LOSSES):
        assert sorted(registry.own) == sorted(registry.names)
    for name in ESTIMATORS.own:
        needs = SpearSettings.from_mapping({"advantage": {"estimator": name}}).advantage.needs_critic
        assert needs == getattr(ESTIMATORS.find(name), "critic", False)


def test_a_mapping_round_trips_through_json() -> None:
    settings = SpearSettings.from_mapping({"sil": {"coupling": "sequential"}, "replay": {"max_age": None}})
    assert settings.sil.coupling is Coupling.SEQUENTIAL and settings.replay.max_age is None
    assert SpearSettings.from_mapping(json.loads(json.dumps(settings.to_mapping()))) == settings
    assert SpearSettings.from_mapping(None) == SpearSettings.from_mapping({}) == SpearSettings()
    words = SpearSettings.from_mapping({"filter": {"void": False, "overlong": "off"}, "reward": {"mu": None}})
    assert (words.filter.void, words.filter.overlong, words.reward.mu) == (VoidFilter.OFF, False, "none")


def test_settings_are_frozen_and_overridden_by_copies() -> None:
    settings = SpearSettings()
    with pytest.raises(dataclasses.FrozenInstanceError):
        settings.sil.enabled = False  # type: ignore[misc]
    changed = settings.override({"cov": {"ratio": 0}})
    assert (changed.cov.ratio, settings.cov.ratio) == (0.0, 0.02)
    assert changed.override({"cov": {"ratio": 0.02}}) == settings


@pytest.mark.parametrize(
    ("mapping", "word"),
    [
        ({"cov": {"ration": 1}}, "cov.ratio"),
        ({"sill": {}}, "sil"),
        ({"warmup_step": 5}, "sil.warmup_steps"),
        ({"zzzqqq": 1}, "reward"),
        ({"sil": 3}, "sil"),
        ({"sil": {"coupling": "joined"}}, "joint"),
        ({"sil": {"enabled": 3}}, "true"),
        ({"sil": {"warmup_steps": 1.5}}, "integer"),
        ({"cov": {"ratio": "much"}}, "number"),
        ({"cov": {"ratio": True}}, "number"),
        ({"cov": {"ratio": None}}, "number"),
        ({"clip": {"low": float("nan")}}, "finite"),
        ({"cov": {"bounds": "fixed", "lower": 1}}, "needs"),
        ({"cov": {"bounds": "fixed", "lower": 3, "upper": 1}}, "exceed"),
        ({"cov": {"lower_top": 0.0001}}, "exceed"),
        ({"cov": {"on_policy_lower": 9}}, "exceed"),
        ({"reward": {"success": -1}}, "exceed"),
        ({"advantage": {"estimator": "rloo", "normalize_std": True}}, "effect"),
        ({"advantage": {"estimator": "gae", "normalize_std": True}}, "effect"),
        ({"advantage": {"estimator": "math:sqrt"}}, "arguments"),
        ({"loss": {"policy_options": {"clip_low": 1}}}, "clip_low"),
        ({"loss": {"policy": "nonsense"}}, "vanilla"),
        ({"sil": {"gamma": "success", "gamma_options": {"goal": 1}}}, "target"),
        ({"reward": {"mu_options": {"x": 1}}}, "none"),
        ({"reward": {"mu": "entropy"}}, "entropy"),
        ({"filter": {"custom": ["mine"]}}, "filter.custom"),
        ({"sil": {"min_rows": 9000}}, "replay.capacity"),
        ({"sil": {"min_rows": 80}, "replay": {"capacity": 100, "power_of_two": True}}, "replay.power_of_two"),
        ({"replay": {"max_age": 0}}, "replay.max_age"),
    ],
)
def test_a_mistake_is_named_in_one_line(mapping, word: str) -> None:
    with pytest.raises(SettingsError) as caught:
        SpearSettings.from_mapping(mapping)
    assert word in str(caught.value) and "\n" not in str(caught.value)


# ---- registries ------------------------------------------------------------------------------------------------------
def swallow(rows, *, factor=1.0, **rest):
    if rows == "boom":
        raise KeyError("tau")
    return factor


@pytest.fixture
def registry() -> Registry:
    made: Registry = Registry("some.thing")
    made.register("mean")(lambda: 1.0)
    made.register("median")(lambda: 2.0)
    return made


def test_a_name_stands_for_its_function(registry: Registry) -> None:
    assert registry.names == ["mean", "median"]
    assert (registry.find("mean")(), registry.find("median")()) == (1.0, 2.0)
    assert registry.find("math:sqrt")(4) == 2.0, "a function of a user needs no registration"
    assert registry.call(f"{__name__}:swallow", "fine", factor=3.0) == 3.0
    for name in ("mean", "a:b"):
        with pytest.raises(ValueError, match="taken"):
            registry.register(name)


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("mediann", "median"),
        ("zzz", "choose mean"),
        (3, "3"),
        ("no_such_module:f", "PYTHONPATH"),
        ("torn_module:f", "SyntaxError"),
        ("loud_module:f", "two lines"),
        ("ended_module:f", "ends the program"),
        ("math:sqr", "sqrt"),
        (":f", "ValueError"),
        ("math:pi", "pi"),
    ],
)
def test_a_missing_function_is_named_with_the_nearest(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, word: str
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torn_module.py").write_text("def f(:\n")
    (tmp_path / "ended_module.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "loud_module.py").write_text("raise RuntimeError('two\\nlines')\n")
    with pytest.raises(SettingsError) as caught:
        registry.find(name)
    message = str(caught.value)
    assert word in message and "some.thing" in message and "\n" not in message
    assert ("PYTHONPATH" in message) == (word == "PYTHONPATH")


def test_options_are_named_by_the_function_and_its_errors_by_their_place(registry: Registry) -> None:
    name = f"{__name__}:swallow"
    registry.check(name, "rows", clip=0.2, options={"factor": 2.0})
    for options in ({"facter": 2.0}, {"clip": 1}):
        with pytest.raises(SettingsError, match="factor"):
            registry.check(name, "rows", clip=0.2, options=options)
    with pytest.raises(SettingsError, match="rows"):
        registry.check(name)
    with pytest.raises(SettingsError, match=r"KeyError: 'tau' .*test_settings\.py, line \d+"):
        registry.call(name, "boom")


# ---- schedules -------------------------------------------------------------------------------------------------------
ENTROPY, SUCCESS, NEW = "entropy/token-mean", "success/all", "anchors/new"


def test_weights_follow_their_schedules() -> None:
    settings = SpearSettings.from_mapping({"sil": {"warmup_steps": 10}, "reward": {"decay_steps": 10}})
    assert (settings.sil.weight(3), settings.reward.weight(3)) == (cosine_warmup(3, 10), cosine_decay(3, 10))
    off = settings.override({"sil": {"enabled": False}, "reward": {"mu": "none"}})
    assert (off.sil.weight(3), off.reward.weight(3)) == (0.0, 0.0)
    flat = settings.override(
        {"sil": {"gamma": "constant", "gamma_options": {"value": 0.3}}, "reward": {"mu": "constant"}}
    )
    assert (flat.sil.weight(3), flat.reward.weight(3)) == (0.3, 1.0)


def test_gamma_stops_where_the_entropy_is_spent() -> None:
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


def give(t, steps, metrics, answer=None):
    return answer


def test_a_users_schedule_is_a_function_of_the_step() -> None:
    name = f"{__name__}:every_other"
    settings = SpearSettings.from_mapping({"sil": {"gamma": name}, "reward": {"mu": name, "mu_options": {"start": 1}}})
    assert [settings.sil.weight(t) for t in (1, 2)] == [1.0, 0.0]
    assert [settings.reward.weight(t) for t in (1, 2)] == [0.0, 1.0]
    for answer in (-0.1, float("nan"), float("inf"), "much", None, True):
        chosen = {"gamma": f"{__name__}:give", "gamma_options": {"answer": answer}}
        with pytest.raises(SettingsError, match="finite"):
            SpearSettings.from_mapping({"sil": chosen}).sil.weight(3)


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_cosines_mirror_each_other_and_are_monotone(t: int, period: int) -> None:
    assert cosine_warmup(t, period) + cosine_decay(t, period) == pytest.approx(1.0)
    assert 0.0 <= cosine_warmup(t, period) <= cosine_warmup(t + 1, period) <= 1.0


def test_cosines_by_hand() -> None:
    assert [cosine_warmup(t, 100) for t in (0, 50, 100, 150)] == pytest.approx([0.0, 0.5, 1.0, 1.0])
    assert (cosine_warmup(3, 0), cosine_decay(3, 0), cosine_warmup(0, -1), cosine_decay(0, -1)) == (1.0, 0.0, 1.0, 0.0)
    for schedule in (cosine_warmup, cosine_decay):
        with pytest.raises(ValueError, match="0 or more"):
            schedule(-1, 10)


# ---- rewards ---------------------------------------------------------------------------------------------------------
def test_tool_call_reward_by_hand() -> None:
    assert [tool_call_reward(n) for n in (0, 1, 3, 10, 25)] == pytest.approx([0.0, 0.1, 0.3, 1.0, 1.0])
    assert tool_call_reward(2, shape="any_if_correct", correct=True) == 1.0
    assert tool_call_reward(0, shape="any_if_correct", correct=True) == 0.0
    assert tool_call_reward(2, shape="any_if_correct", correct=False) == pytest.approx(0.2)
    for calls, options in ((-1, {}), (1, {"shape": "cubic"}), (1, {"shape": "any_if_correct"})):
        with pytest.raises(ValueError):
            tool_call_reward(calls, **options)


def test_compose_reward_weighs_only_the_tool_call_term() -> None:
    terms = {"outcome": -1.0, "tool_call": 0.3, "format": 0.1, "native_return": 99.0}
    assert compose_reward(terms, 0.5) == pytest.approx(-0.75)
    with pytest.raises(ValueError, match="tool_call"):
        compose_reward({"outcome": 1.0}, 1.0)


def test_make_schedule_reads_names_and_numbers() -> None:
    assert make_schedule("none") == Constant(0.0)
    assert make_schedule("constant") == make_schedule(1) == Constant()
    assert make_schedule("constant:0.5")(7) == make_schedule(0.5)(1) == 0.5
    assert make_schedule("cosine:200") == CosineDecay(200)
    assert make_schedule(CosineDecay(3))(1) == cosine_decay(1, 3)
    for spec in ("linear", "cosine", "cosine:0", "cosine:x", "constant:x", "none:1", None, True):
        with pytest.raises(ValueError, match="cosine"):
            make_schedule(spec)


def test_the_algorithms_import_nothing_heavy() -> None:
    heavy = {"ray", "verl", "vllm", "transformers", "tensordict", "spear_agents"}
    code = f"import sys, spear_training.algorithms; sys.exit({heavy} & set(sys.modules) or None)"
    subprocess.run([sys.executable, "-c", code], check=True)

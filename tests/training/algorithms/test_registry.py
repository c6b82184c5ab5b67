from __future__ import annotations

import pytest

from spear_training.algorithms import Registry, SettingsError


@pytest.fixture
def registry() -> Registry:
    made: Registry = Registry("spear.some.thing")

    @made.register("mean")
    def average() -> float:
        return 1.0

    @made.register("median")
    def middle() -> float:
        return 2.0

    return made


def test_a_name_stands_for_its_function(registry: Registry) -> None:
    assert registry.names == ["mean", "median"]
    assert (registry.find("mean")(), registry.find("median")()) == (1.0, 2.0)
    assert registry.find("math:sqrt")(4) == 2.0, "a function of somebody's own needs no registration"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mediann", r"^spear\.some\.thing cannot be 'mediann'; did you mean median\? .*package\.module:function$"),
        ("zzz", "choose mean, median"),
        (3, "cannot be 3"),
        ("no_such_module:f", r"no_such_module:f cannot be imported \(No module named 'no_such_module'\).*PYTHONPATH"),
        ("math:cube", "cannot be imported"),
        (":f", "cannot be imported"),
        ("math:", "cannot be imported"),
        ("math:pi", "is no function but float"),
    ],
)
def test_what_is_not_there_is_told_with_the_nearest(registry: Registry, name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        registry.find(name)


@pytest.mark.parametrize("name", ["mean", "a:b"])
def test_a_name_is_given_once(registry: Registry, name: str) -> None:
    with pytest.raises(ValueError, match="taken"):
        registry.register(name)

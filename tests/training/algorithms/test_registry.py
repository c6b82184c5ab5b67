from __future__ import annotations

from pathlib import Path

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
        (
            "no_such_module:f",
            r"cannot be imported \(ModuleNotFoundError: No module named 'no_such_module'\): start.*PYTHONPATH",
        ),
        ("math:sqr", r"math has no function 'sqr'; did you mean sqrt\?$"),
        (":f", r"cannot be imported \(ValueError: Empty module name\)$"),
        ("math:", "math has no function ''"),
        ("math:pi", "math has no function 'pi'"),
    ],
)
def test_what_is_not_there_is_told_with_the_nearest(registry: Registry, name: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        registry.find(name)


@pytest.mark.parametrize("name", ["mean", "a:b"])
def test_a_name_is_given_once(registry: Registry, name: str) -> None:
    with pytest.raises(ValueError, match="taken"):
        registry.register(name)


def swallow(rows, *, factor=1.0, **rest):
    if rows == "boom":
        raise KeyError("tau")
    return factor


def test_an_option_must_be_named_by_the_function(registry: Registry) -> None:
    name = f"{__name__}:swallow"
    registry.check(name, "rows", clip=0.2, options={"factor": 2.0})
    for options in ({"facter": 2.0}, {"clip": 1}):
        with pytest.raises(SettingsError, match=r"has no option '\w+'; it has factor"):
            registry.check(name, "rows", clip=0.2, options=options)
    with pytest.raises(SettingsError, match="has the wrong arguments: missing a required argument: 'rows'"):
        registry.check(name)


def test_what_a_users_function_raises_is_told_with_its_place(registry: Registry) -> None:
    assert registry.call(f"{__name__}:swallow", "fine", factor=3.0) == 3.0
    with pytest.raises(
        SettingsError, match=r"swallow raised KeyError: 'tau' \(.*test_registry\.py, line \d+, in swallow\)"
    ):
        registry.call(f"{__name__}:swallow", "boom")


def test_a_broken_module_is_told_in_one_line(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "torn_module.py").write_text("def f(:\n")
    (tmp_path / "loud_module.py").write_text("raise RuntimeError('two\\nlines')\n")
    for name, message in (("torn_module:f", "SyntaxError"), ("loud_module:f", "RuntimeError: two lines")):
        with pytest.raises(SettingsError, match=rf"cannot be imported \({message}") as caught:
            registry.find(name)
        assert "\n" not in str(caught.value) and "PYTHONPATH" not in str(caught.value)

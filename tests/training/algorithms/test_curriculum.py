"""Which tasks are drawn: each in turn, or those whose groups still differ."""

from __future__ import annotations

import numpy as np
import pytest

from spear_training.algorithms import SettingsError, SpearSettings
from spear_training.algorithms.curriculum import CurriculumSettings, TaskSource


def open_source(bands: list[object], choice: str = "thompson", group: int = 8) -> TaskSource:
    return TaskSource(bands, CurriculumSettings.from_mapping({"choice": choice}), group)


def test_uniform_tasks_come_once_before_any_comes_again() -> None:
    source, rng = open_source(["a"] * 16, "uniform"), np.random.default_rng(0)
    drawn = np.concatenate([source.draw(6, rng) for _ in range(8)])
    assert [sorted(drawn[at : at + 16].tolist()) for at in (0, 16, 32)] == [list(range(16))] * 3


def test_thompson_sampling_draws_what_still_differs() -> None:
    """Of 16 tasks four are won half of the time, the others never or always: they must soon be most of the draws."""
    source, rng = open_source(list(range(16))), np.random.default_rng(1)
    rate = np.asarray([0.0] * 6 + [0.5] * 4 + [1.0] * 6)
    drawn = []
    for _ in range(60):
        tasks = source.draw(4, rng)
        assert len(set(tasks.tolist())) == 4
        source.tell(tasks, rng.binomial(8, rate[tasks]), 8)
        drawn.append(np.isin(tasks, range(6, 10)).mean())
    assert np.mean(drawn[:3]) < 0.6 < 0.9 < np.mean(drawn[-20:])
    expected, differing = source.estimate()
    assert source.known.all() and np.abs(expected - rate)[6:10].max() < 0.25
    assert differing[6:10].min() > 0.9 > differing[:6].max()


def test_tasks_of_one_difficulty_tell_of_each_other() -> None:
    source, rng = open_source(["hard"] * 6 + ["other"] * 10), np.random.default_rng(1)
    for _ in range(10):
        source.tell(np.asarray([0]), np.asarray([0]), 8)
    counts = np.bincount(np.concatenate([source.draw(4, rng) for _ in range(200)]), minlength=16)
    assert counts[1:6].mean() < 0.5 * counts[6:].mean(), "never played, but of a kind that is never won"


def test_counts_fade_and_groups_may_have_fewer_episodes() -> None:
    source = open_source(["a", "b"])
    source.tell(np.asarray([0, 1]), np.asarray([8, 1]), [8, 2])
    source.tell(np.asarray([0]), np.asarray([0]), 8)
    state = source.state_dict()
    assert state["wins"] == pytest.approx([0.9 * 8, 1]) and state["losses"] == pytest.approx([8, 1])


def test_settings_are_checked() -> None:
    assert SpearSettings.from_mapping({"curriculum": {"choice": "thompson"}}).curriculum.forget == 0.9
    with pytest.raises(SettingsError, match=r"spear\.curriculum\.choice: .*Did you mean 'thompson'"):
        SpearSettings.from_mapping({"curriculum": {"choice": "tompson"}})
    with pytest.raises(SettingsError, match=r"spear\.curriculum\.forget: .*greater than 0"):
        SpearSettings.from_mapping({"curriculum": {"forget": 0.0}})

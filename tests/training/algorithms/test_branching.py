"""The archive of earlier episodes: which groups begin where, and what it learns of how they went."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from spear_training.algorithms import SettingsError, SpearSettings
from spear_training.algorithms.branching import Archive, BranchSettings


def open_archive(**settings: Any) -> Archive[int, str]:
    return Archive(BranchSettings.from_mapping({"share": 0.5, **settings}))


def remember(archive: Archive[int, str], task: int, anchors: list[int], *, won: bool) -> None:
    """States are the names as texts."""
    archive.remember(task, anchors, [str(anchor) for anchor in anchors], won=won)


def test_a_reverse_curriculum_walks_back_as_groups_win() -> None:
    archive, rng = open_archive(), np.random.default_rng(0)
    assert archive.draw(2, rng) == [], "nothing is known yet"
    remember(archive, 3, [10, 11, 12], won=True)
    for back, wins in ((1, 1), (1, 4), (2, 8), (3, 8)):
        (begun,) = archive.draw(2, rng)
        assert (begun.episode, begun.task, begun.turn, begun.state) == (0, 3, 3 - back, str(13 - back))
        archive.tell(begun.episode, wins, 8)
    assert archive.draw(2, rng) == [], "it won from the start: nothing is left to learn"


def test_a_group_that_was_not_played_tells_nothing() -> None:
    archive = open_archive()
    remember(archive, 3, [10, 11], won=True)
    archive.tell(0, 0, 0)
    archive.tell(7, 8, 8)
    assert archive.draw(2, np.random.default_rng(0))[0].turn == 1


def test_a_near_miss_begins_where_wins_of_its_task_passed() -> None:
    archive, rng = open_archive(mode="near_miss", share=1.0), np.random.default_rng(0)
    remember(archive, 4, [20], won=True)
    remember(archive, 3, [10, 12, 20, 21], won=False)
    assert archive.draw(1, rng)[0].state == "20", "half-way, while nobody has won"
    archive.remember(3, [10, 11, 12, 13], [], won=True)
    assert {archive.draw(1, rng)[0].state for _ in range(20)} == {"12"}, "no group begins in a win"
    archive.tell(1, 8, 8)
    assert archive.draw(1, rng)[0].state == "12"


def test_an_episode_without_a_turn_is_not_begun_in() -> None:
    for mode, won in (("success", True), ("near_miss", False)):
        archive = open_archive(mode=mode)
        archive.remember(3, [], [], won=won)
        assert archive.draw(2, np.random.default_rng(0)) == []


@pytest.mark.parametrize(("share", "groups", "branched"), [(0.5, 4, 2), (0.3, 4, 1), (1.0, 3, 3), (0.0, 4, 0)])
def test_a_share_of_the_groups_branches(share: float, groups: int, branched: int) -> None:
    archive = open_archive(share=share)
    for task in range(3):
        remember(archive, task, [1, 2], won=True)
    assert len(archive.draw(groups, np.random.default_rng(0))) == branched
    assert len(archive) == (3 if share else 0)


def test_old_episodes_leave_and_those_of_no_use_are_not_kept() -> None:
    archive = open_archive(capacity=2)
    for task in range(3):
        remember(archive, task, [1], won=True)
        remember(archive, task, [1], won=False)
    assert [one["task"] for one in archive.state_dict()["episodes"]] == [1, 2]
    settings = BranchSettings.from_mapping({"share": 0.5, "mode": "near_miss"})
    assert settings.keeps(won=True) and settings.keeps(won=False)
    assert settings.begins_in(won=False) and not settings.begins_in(won=True)
    assert not BranchSettings().keeps(won=True) and not BranchSettings().begins_in(won=True)


def test_a_saved_archive_goes_on_exactly() -> None:
    whole, rng = open_archive(target=0.25), np.random.default_rng(3)
    for task in range(5):
        remember(whole, task, list(range(10 * task, 10 * task + 4)), won=True)
    for begun in [one for _ in range(4) for one in whole.draw(4, rng)]:
        whole.tell(begun.episode, 2, 4)
    resumed = open_archive(target=0.25)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    again = np.random.default_rng()
    again.bit_generator.state = rng.bit_generator.state
    for _ in range(6):
        drawn = whole.draw(4, rng)
        assert resumed.draw(4, again) == drawn
        for archive in (whole, resumed):
            for begun in drawn:
                archive.tell(begun.episode, 1, 4)
            remember(archive, 9, [90, 91], won=True)


def test_its_settings_are_a_node_of_the_algorithm_s() -> None:
    made = SpearSettings.from_mapping({"branch": {"share": 0.25, "mode": "near_miss"}})
    assert made.branch.share == 0.25 and SpearSettings().branch.share == 0
    with pytest.raises(SettingsError, match=r"spear\.branch\.mode: .*'success'.*'wins'"):
        SpearSettings.from_mapping({"branch": {"mode": "wins"}})

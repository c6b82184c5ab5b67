"""The replay buffer, the archive of earlier episodes, and the curriculum of tasks."""

import io
import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spear_training.algorithms import (
    BaselineBuffer,
    ReplayBuffer,
    ReplayEntry,
    StateMismatchError,
)
from spear_training.algorithms.curriculum import Archive, BranchSettings, CurriculumSettings, TaskSource
from spear_training.algorithms.replay import tabulate_entries


def entry(name="t", *, reward=1.0, advantage=1.0, step=1, mask=(1, 1, 0), calls=0, first=100) -> ReplayEntry:
    n = len(mask)
    return ReplayEntry(
        prompt_ids=[5, 6],
        response_ids=np.arange(n) + first,
        response_mask=list(mask),
        old_log_probs=-np.arange(1, n + 1, dtype=np.float32),
        reward=reward,
        advantage=advantage,
        step=step,
        trajectory_id=name,
        tool_calls=calls,
    )


def baseline(*values: float) -> BaselineBuffer:
    buffer = BaselineBuffer(100)
    buffer.extend(values)
    return buffer


def names(draw) -> list:
    return [row.trajectory_id for row in draw.entries]


def test_eligible_rows_alone_may_count_towards_the_trigger() -> None:
    """As in the authors' code: rows with a reward above P50, and more than the multiple of the capacity."""
    level = baseline(0.0, 1.0, 2.0)  # P50 is 1
    buffer = ReplayBuffer(2, trigger_ratio=1.5, trigger="eligible")
    buffer.add([entry(f"low {n}", reward=1.0) for n in range(9)] + [entry(f"high {n}", reward=1.1) for n in range(3)])
    assert not buffer.is_ready(level), "three are not more than 1.5 times two"
    assert ReplayBuffer(2, trigger_ratio=1.5).is_ready(level) is False
    buffer.add([entry("high 3", reward=3.0)])
    assert buffer.is_ready(level) and not buffer.is_ready(baseline(5.0))
    assert {name.split()[0] for name in names(buffer.draw(level))} == {"high"}
    assert not buffer.is_ready(level), "the draw has emptied it"


def test_an_entry_comes_back_as_it_went_in() -> None:
    buffer = ReplayBuffer(1)
    given_entry = entry("x", reward=0.3, calls=2, step=7)
    buffer.add([given_entry])
    (got,) = buffer.draw(None).entries
    assert got.prompt_ids.tolist() == [5, 6] and got.prompt_ids.dtype == np.int32
    assert got.response_ids.tolist() == [100, 101, 102] and got.response_ids.dtype == np.int32
    assert got.response_mask.tolist() == [1, 1, 0]
    assert got.old_log_probs.tolist() == [-1.0, -2.0, 0.0] and got.old_log_probs.dtype == np.float32
    assert (got.reward, got.advantage, got.step, got.trajectory_id, got.tool_calls) == (0.3, 1.0, 7, "x", 2)
    got.response_ids[0] = 1  # an array of its own, to be written to


def test_add_keeps_what_may_be_replayed_and_says_why_the_rest_was_dropped() -> None:
    buffer = ReplayBuffer(10, require_tool_call=True)
    rows = [
        entry("good", calls=1),
        entry("zero", advantage=0.0, calls=1),
        entry("negative", advantage=-1.0, calls=1),
        entry("masked", mask=(0, 0), calls=1),
        entry("toolless"),
    ]
    gate = buffer.check(tabulate_entries(rows))
    assert gate.open.tolist() == [True, False, False, False, False]
    assert (gate.nonpositive, gate.other) == (2, 2)
    assert len(buffer) == 0, "to look is not to take"
    assert buffer.add(rows) == len(buffer) == 1


def test_a_bad_row_is_refused_and_leaves_the_buffer_alone() -> None:
    buffer = ReplayBuffer(10)
    bad = [
        (ReplayEntry([1], [1, 2], [1], [0.0], 1.0, 1.0, 1, "x"), "one length"),
        (ReplayEntry([1.5], [1], [1], [0.0], 1.0, 1.0, 1, "x"), "token ids"),
        (ReplayEntry([2**31], [1], [1], [0.0], 1.0, 1.0, 1, "x"), "32 bits"),
        (ReplayEntry([1], [1], [1], [float("nan")], 1.0, 1.0, 1, "x"), "not finite"),
        (ReplayEntry([1], [1], [1], [0.0], float("inf"), 1.0, 1, "x"), "not finite"),
    ]
    for row, message in bad:
        with pytest.raises(ValueError, match=message):
            buffer.add([entry(), row])
    assert len(buffer) == 0
    assert buffer.add([ReplayEntry([], [1, 2], [0, 1], [float("nan"), 0.0], 1.0, 1.0, 1, "x")]) == 1


def test_draw_gates_strictly_recalibrates_and_empties() -> None:
    buffer = ReplayBuffer(10)
    buffer.add([entry("low", reward=0.5), entry("equal", reward=1.0), entry("high", reward=1.5)])
    draw = buffer.draw(baseline(1.0))
    assert (names(draw), draw.advantages.tolist()) == (["high"], [0.5])
    assert (draw.considered, draw.eligible, draw.drawn, draw.discarded) == (3, 1, 1, 2)
    assert draw.mean_age(4) == 3.0
    assert len(buffer) == 0 and buffer.nbytes == 0


def test_draw_from_an_empty_baseline_keeps_the_buffer() -> None:
    buffer = ReplayBuffer(10)
    buffer.add([entry()])
    with pytest.raises(ValueError, match="empty"):
        buffer.draw(BaselineBuffer(3))
    assert len(buffer) == 1
    assert buffer.draw(BaselineBuffer(0)).advantages.tolist() == [1.0]  # capacity 0: no recalibration


def test_trajectories_stay_together() -> None:
    buffer = ReplayBuffer(2, unit="trajectory", seed=3)
    buffer.add([entry(f"t{i}", step=1) for i in range(5) for _ in range(i + 1)])
    buffer.add([entry("t0", step=2)])  # the same name in another step is another trajectory
    assert len(buffer) == 6 and buffer.is_ready()
    draw = buffer.draw(baseline(0.0))
    picked = {(row.step, row.trajectory_id) for row in draw.entries}
    assert len(picked) == draw.drawn == 2
    assert len(draw.entries) == sum(1 if step == 2 else int(name[1]) + 1 for step, name in picked)
    assert (draw.considered, draw.eligible) == (6, 6)


@pytest.mark.parametrize(("held", "drawn"), [(1, 1), (3, 2), (5, 4), (9, 8), (30, 8)])
def test_power_of_two(held: int, drawn: int) -> None:
    buffer = ReplayBuffer(10, power_of_two=True)
    buffer.add([entry(str(i)) for i in range(held)])
    assert len(buffer.draw(None).entries) == drawn


def test_draw_is_uniform() -> None:
    buffer, hits = ReplayBuffer(2, seed=1), dict.fromkeys("abcd", 0)
    for _ in range(800):
        buffer.add([entry(name) for name in "abcd"])
        for name in names(buffer.draw(None)):
            hits[name] += 1
    assert all(abs(count / 800 - 0.5) < 0.06 for count in hits.values()), hits


@settings(deadline=None)
@given(st.data())
def test_any_history_keeps_the_rules(data) -> None:
    """Sizes stay bounded, draws are fresh, distinct, eligible and repeat after a restored state."""
    capacity = data.draw(st.integers(1, 6))
    unit = data.draw(st.sampled_from(["sample", "trajectory"]))
    options = {"unit": unit, "max_age": data.draw(st.sampled_from([None, 1, 3]))}
    buffer, level = ReplayBuffer(capacity, seed=data.draw(st.integers(0, 99)), **options), baseline(0.25)
    serial = 0
    for step in range(1, data.draw(st.integers(2, 8))):
        buffer.evict(step)
        if buffer.is_ready():
            twin, file = ReplayBuffer(capacity, seed=1234, **options), io.BytesIO()
            torch.save(buffer.state_dict(), file)
            file.seek(0)
            twin.load_state_dict(torch.load(file))
            assert (len(twin), twin.nbytes) == (len(buffer), buffer.nbytes)
            draw, again = buffer.draw(level), twin.draw(level)
            for row, other in zip(draw.entries, again.entries, strict=True):
                assert np.array_equal(row.response_ids, other.response_ids)
                assert np.array_equal(row.old_log_probs, other.old_log_probs)
            assert len({row.response_ids[0] for row in draw.entries}) == len(draw.entries)
            assert draw.drawn == min(draw.eligible, capacity)
            assert all(
                a == row.reward - 0.25 > 0 for a, row in zip(draw.advantages.tolist(), draw.entries, strict=True)
            )
            assert all(options["max_age"] is None or step - row.step <= options["max_age"] for row in draw.entries)
            assert len(buffer) == len(twin) == 0
        batch = data.draw(st.lists(st.tuples(st.sampled_from([-1.0, 0.25, 0.5, 1.0]), st.integers(0, 3)), max_size=7))
        rows = [entry(f"t{name}", reward=reward, step=step, first=(serial := serial + 9)) for reward, name in batch]
        assert buffer.add(rows) == len(rows)
        assert len(buffer) <= capacity - 1 + len(rows)


def test_state_of_an_empty_buffer_and_of_another_config() -> None:
    buffer = ReplayBuffer(3)
    buffer.load_state_dict(ReplayBuffer(3).state_dict())
    assert len(buffer) == 0
    with pytest.raises(StateMismatchError, match=r"replay\.capacity=4.*this run 3"):
        buffer.load_state_dict(ReplayBuffer(4).state_dict())
    with pytest.raises(StateMismatchError, match=r"replay\.unit=trajectory"):
        buffer.load_state_dict(ReplayBuffer(3, unit="trajectory").state_dict())


def test_a_token_costs_at_most_8_2_bytes() -> None:
    ids = np.arange(6000)
    buffer = ReplayBuffer(4)
    buffer.add([ReplayEntry(ids[:0], ids, np.ones(6000), np.zeros(6000), 1.0, 1.0, 1, str(i)) for i in range(4)])
    assert buffer.nbytes <= 8.2 * 4 * 6000


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
        archive.update(begun.episode, wins, 8)
    assert archive.draw(2, rng) == [], "it won from the start: nothing is left to learn"


def test_a_near_miss_begins_where_wins_of_its_task_passed() -> None:
    archive, rng = open_archive(mode="near_miss", share=1.0), np.random.default_rng(0)
    remember(archive, 4, [20], won=True)
    remember(archive, 3, [10, 12, 20, 21], won=False)
    assert archive.draw(1, rng)[0].state == "20", "half-way, while nobody has won"
    archive.remember(3, [10, 11, 12, 13], [], won=True)
    assert {archive.draw(1, rng)[0].state for _ in range(20)} == {"12"}, "no group begins in a win"
    archive.update(1, 8, 8)
    assert archive.draw(1, rng)[0].state == "12"


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
        whole.update(begun.episode, 2, 4)
    resumed = open_archive(target=0.25)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    again = np.random.default_rng()
    again.bit_generator.state = rng.bit_generator.state
    for _ in range(6):
        drawn = whole.draw(4, rng)
        assert resumed.draw(4, again) == drawn
        for archive in (whole, resumed):
            for begun in drawn:
                archive.update(begun.episode, 1, 4)
            remember(archive, 9, [90, 91], won=True)


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
        source.update(tasks, rng.binomial(8, rate[tasks]), 8)
        drawn.append(np.isin(tasks, range(6, 10)).mean())
    assert np.mean(drawn[:3]) < 0.6 < 0.9 < np.mean(drawn[-20:])
    expected, differing = source.estimate()
    assert source.known.all() and np.abs(expected - rate)[6:10].max() < 0.25
    assert differing[6:10].min() > 0.9 > differing[:6].max()


def test_tasks_of_one_difficulty_tell_of_each_other() -> None:
    source, rng = open_source(["hard"] * 6 + ["other"] * 10), np.random.default_rng(1)
    for _ in range(10):
        source.update(np.asarray([0]), np.asarray([0]), 8)
    counts = np.bincount(np.concatenate([source.draw(4, rng) for _ in range(200)]), minlength=16)
    assert counts[1:6].mean() < 0.5 * counts[6:].mean(), "never played, but of a kind that is never won"


def test_counts_fade_and_groups_may_have_fewer_episodes() -> None:
    source = open_source(["a", "b"])
    source.update(np.asarray([0, 1]), np.asarray([8, 1]), [8, 2])
    source.update(np.asarray([0]), np.asarray([0]), 8)
    state = source.state_dict()
    assert state["wins"] == pytest.approx([0.9 * 8, 1]) and state["losses"] == pytest.approx([8, 1])

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs the extra 'train'")

import torch

from spear_envs.core.errors import SpearError
from spear_training.algorithms import (
    SpearSettings,
    compose_reward,
    gigpo_advantages,
    group_advantages,
    rloo_advantages,
    tool_call_reward,
)
from spear_training.verl_plugin.plan import EpisodeReward, UpdatePlan, plan_update, reward_episode

LIMIT = 8


def choose(**nodes: Any) -> SpearSettings:
    """Settings without filters unless given, so that a test sees one thing at a time."""
    plain = {"groups": 1.0, "overlong": False, "void": "off", "repetition": False}
    return SpearSettings.from_mapping(nodes | {"filter": plain | nodes.get("filter", {})})


def plan(records: list[Any], settings: SpearSettings | None = None, *, mu: float = 0.0) -> UpdatePlan:
    return plan_update(records, settings or choose(), mu=mu, max_response_length=LIMIT)


def find_keys(made: UpdatePlan) -> set[str]:
    return {planned.row.key for planned in made.rows}


# ---- rewards ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("won", [True, False])
@pytest.mark.parametrize(
    ("format_mode", "expected"),
    [("bonus", 0.1), ("penalty_per_turn", -0.1 * 2), ("none", 0.0)],
)
def test_format_is_paid_by_the_mode(make: Any, won: bool, format_mode: str, expected: float) -> None:
    record = make.episode("g", 0, won=won, turns=5, well_formed_turns=3)
    reward = reward_episode(record, choose(reward={"format": format_mode}).reward, mu=0.0)
    assert reward.format == pytest.approx(expected)
    assert reward.outcome == (1.0 if won else -1.0)
    assert reward.total == pytest.approx(reward.outcome + expected)


@pytest.mark.parametrize("mu", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("shape", ["linear", "any_if_correct"])
@pytest.mark.parametrize(("count", "calls"), [("valid", 3), ("steps", 7)])
@pytest.mark.parametrize("won", [True, False])
def test_tool_calls_are_paid_by_count_and_shape(
    make: Any, mu: float, shape: str, count: str, calls: int, won: bool
) -> None:
    record = make.episode("g", 0, won=won, turns=7, tool_calls=3)
    settings = choose(reward={"tool_count": count, "tool_shape": shape})
    reward = reward_episode(record, settings.reward, mu)
    assert reward.tool_call == tool_call_reward(calls, shape=shape, correct=won)
    terms = {"outcome": reward.outcome, "tool_call": reward.tool_call, "format": reward.format}
    assert reward.total == compose_reward(terms, mu)
    assert reward.total == pytest.approx(reward.outcome + mu * reward.tool_call + 0.1)


def test_the_scale_of_the_outcome_is_the_trainers_own(make: Any) -> None:
    settings = choose(reward={"success": 10, "failure": 0, "format": "none"}).reward
    assert reward_episode(make.episode("g", 0, won=True), settings, 0.0).total == 10.0
    assert reward_episode(make.episode("g", 0, won=False), settings, 0.0).total == 0.0


@pytest.mark.parametrize("won", [True, False])
def test_the_score_of_a_user_s_function_is_the_outcome_itself(make: Any, won: bool) -> None:
    settings = choose(reward={"success": 10, "format": "none"}).reward
    record = make.episode("g", 0, won=won, terms={"outcome": float(won), "custom": 0.25})
    assert reward_episode(record, settings, 0.0).total == 0.25


def test_an_episode_that_could_not_begin_has_no_terms(make: Any) -> None:
    record = make.episode("g", 0, turns=0, terms={}, fault="bug", stop="fault")
    reward = reward_episode(record, choose().reward, 1.0)
    assert reward == EpisodeReward(outcome=-1.0, tool_call=0.0, format=0.0, total=-1.0)


# ---- faults ----------------------------------------------------------------------------------------------------------
def test_a_fault_enters_no_statistic_and_no_row(make: Any) -> None:
    good = [make.episode("g", 0, won=True), make.episode("g", 1), make.episode("g", 2)]
    broken = make.episode("g", 3, won=True, fault="timeout", stop="fault", terms={"outcome": 1.0, "format": 0.1})
    without, with_fault = plan(good), plan([*good, broken])
    assert with_fault.rows == without.rows
    assert with_fault.baselines == without.baselines == pytest.approx((-1 / 3 + 0.1,))
    assert with_fault.total_rows == without.total_rows == 6
    assert len(with_fault.rewards) == 4, "one reward an episode, in their order"


def test_a_group_of_faults_alone_is_no_group(make: Any) -> None:
    records = [make.episode("a", n, fault="bug", stop="fault") for n in range(2)]
    records += [make.episode("b", 0, won=True), make.episode("b", 1)]
    made = plan(records, choose(filter={"groups": 0.5}))
    assert made.baselines == pytest.approx((0.1,))
    assert {planned.episode.group for planned in made.rows} == {"b"}
    assert made.masked["low_variance"] == 0, "no group of mere faults takes the place of one to keep"


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gigpo"])
def test_a_step_of_faults_alone_has_no_rows(make: Any, estimator: str) -> None:
    records = [make.episode(group, n, fault="bug", stop="fault") for group in "ab" for n in range(2)]
    made = plan(records, choose(advantage={"estimator": estimator}))
    assert made.rows == () and made.baselines == () and made.total_rows == 0
    assert made.masked == {"overlong": 0, "void": 0, "repetition": 0, "low_variance": 0}
    assert len(made.rewards) == 4


def test_a_step_without_episodes_has_an_empty_plan() -> None:
    made = plan([])
    assert (made.rewards, made.rows, made.baselines, made.total_rows) == ((), (), (), 0)


def test_episodes_without_a_turn_count_but_have_no_rows(make: Any) -> None:
    records = [make.episode("g", 0, turns=0, stop="context_limit"), make.episode("g", 1, won=True)]
    made = plan(records)
    assert find_keys(made) == {"g_1_0", "g_1_1"}
    assert made.baselines == pytest.approx((0.1,))
    # Without that member the group has one whose rows are trained on, and nothing to compare it with.
    assert {planned.advantage for planned in made.rows} == {0.0}


# ---- filters ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "filters", "change"),
    [
        ("overlong", {"overlong": True}, {"response_length": LIMIT, "finished": False}),
        ("overlong", {"overlong": True}, {"response_length": LIMIT + 1, "finished": True}),
        ("void", {"void": "turn"}, {"void": True}),
        ("repetition", {"repetition": True}, {"repetitive": True}),
    ],
)
def test_a_masked_row_is_not_trained_on_but_counts_in_the_mean(
    make: Any, name: str, filters: dict[str, Any], change: dict[str, Any]
) -> None:
    records = [make.episode("g", 0, won=True, rows=[change]), make.episode("g", 1)]
    made, unfiltered = plan(records, choose(filter=filters)), plan(records)
    assert find_keys(made) == {"g_0_1", "g_1_0", "g_1_1"}
    assert made.masked[name] == 1 and sum(made.masked.values()) == 1
    assert made.baselines == unfiltered.baselines
    assert {p.row.key: p.advantage for p in unfiltered.rows if p.row.key != "g_0_0"} == {
        p.row.key: p.advantage for p in made.rows
    }


def test_at_the_limit_a_finished_response_stays(make: Any) -> None:
    records = [make.episode("g", 0, won=True, rows=[{"response_length": LIMIT}]), make.episode("g", 1)]
    assert len(plan(records, choose(filter={"overlong": True})).rows) == 4


def test_a_void_turn_may_take_out_its_whole_trajectory(make: Any) -> None:
    records = [make.episode("g", 0, won=True, rows=[{"void": True}]), make.episode("g", 1)]
    made = plan(records, choose(filter={"void": "trajectory"}))
    assert find_keys(made) == {"g_1_0", "g_1_1"}
    assert made.masked["void"] == 2
    assert made.baselines == pytest.approx((0.1,)), "the mean still knows the episode that won"


def test_a_row_without_a_loss_token_is_not_trained_on(make: Any) -> None:
    records = [make.episode("g", 0, won=True, rows=[{"loss_tokens": 0}]), make.episode("g", 1)]
    assert find_keys(plan(records)) == {"g_0_1", "g_1_0", "g_1_1"}


def test_excluded_from_the_baseline_is_what_is_not_trained_on(make: Any) -> None:
    records = [
        make.episode("g", 0, won=True, rows=[{"void": True}, {"void": True}]),
        make.episode("g", 1, won=True, rows=[{"void": True}]),
        make.episode("g", 2),
    ]
    counted = plan(records, choose(filter={"void": "turn"}))
    excluded = plan(records, choose(filter={"void": "turn", "exclude_from_baseline": True}))
    assert counted.baselines == pytest.approx((1 / 3 + 0.1,))
    assert excluded.baselines == pytest.approx((0.1,))
    # The turn that is left of the second episode is trained on either way.
    assert find_keys(counted) == find_keys(excluded) == {"g_1_1", "g_2_0", "g_2_1"}
    assert {p.row.key: p.advantage for p in excluded.rows} == pytest.approx(
        {"g_1_1": 1.0, "g_2_0": -1.0, "g_2_1": -1.0}
    )


def test_everything_excluded_leaves_no_baseline(make: Any) -> None:
    records = [make.episode("g", n, won=n == 0, rows=[{"void": True}, {"void": True}]) for n in range(2)]
    made = plan(records, choose(filter={"void": "turn", "exclude_from_baseline": True}))
    assert made.rows == () and made.baselines == ()


# ---- groups ----------------------------------------------------------------------------------------------------------
def test_groups_of_little_variance_go_out_by_id_not_by_place(make: Any) -> None:
    split = [make.episode("split", n, won=n == 0) for n in range(2)]
    same = [make.episode("same", n) for n in range(2)]
    mixed = [split[0], same[0], same[1], split[1]]
    made = plan(mixed, choose(filter={"groups": 0.5}))
    assert {planned.episode.group for planned in made.rows} == {"split"}
    assert made.masked["low_variance"] == 4
    assert made.baselines == pytest.approx((0.1,)), "only kept groups extend the baseline buffer"


@pytest.mark.parametrize("ratio", [0.25, 0.5, 0.75, 1.0])
def test_the_share_of_kept_groups_is_as_set(make: Any, ratio: float) -> None:
    records = [make.episode(f"g{g}", n, won=n < g) for g in range(1, 5) for n in range(8)]
    made = plan(records, choose(filter={"groups": ratio}))
    assert len({planned.episode.group for planned in made.rows}) == len(made.baselines) == math.floor(4 * ratio)


def test_baselines_count_each_episode_once_however_long_it_was(make: Any) -> None:
    records = [make.episode("g", 0, won=True, turns=1), make.episode("g", 1, turns=9)]
    for weight in ("trajectory", "row"):
        assert plan(records, choose(advantage={"weight": weight})).baselines == pytest.approx((0.1,))


# ---- advantages ------------------------------------------------------------------------------------------------------
def draw_records(make: Any) -> list[Any]:
    """Three groups of unlike episodes with shared anchors, their members apart from each other, one of them a fault."""
    random = torch.Generator().manual_seed(0)
    records = []
    for sample in range(4):
        for group in "abc":
            turns = int(torch.randint(1, 6, (1,), generator=random))
            rows = [
                {"anchor": f"s{int(torch.randint(3, (1,), generator=random))}", "step_reward": -0.1 * turn}
                for turn in range(turns)
            ]
            won = bool(torch.rand(1, generator=random) < 0.5)
            fault = {"fault": "bug", "stop": "fault"} if (group, sample) == ("b", 2) else {}
            records.append(make.episode(group, sample, won=won, turns=turns, tool_calls=turns, rows=rows, **fault))
    return records


@pytest.mark.parametrize("weight", ["trajectory", "row"])
@pytest.mark.parametrize(
    ("estimator", "normalize"), [("grpo", False), ("grpo", True), ("rloo", False), ("gigpo", False), ("gigpo", True)]
)
def test_advantages_are_those_of_the_algorithms(make: Any, estimator: str, normalize: bool, weight: str) -> None:
    records = draw_records(make)
    settings = choose(
        advantage={"estimator": estimator, "normalize_std": normalize, "weight": weight, "step_weight": 0.7}
    )
    made = plan(records, settings, mu=0.5)
    pairs = [(n, row) for n, record in enumerate(records) for row in record.rows]
    rewards = torch.tensor([made.rewards[n].total for n, _ in pairs], dtype=torch.float64)
    groups, trajectories = [records[n].group for n, _ in pairs], [records[n].trajectory_id for n, _ in pairs]
    valid = [records[n].fault is None for n, _ in pairs]
    if estimator == "grpo":
        expected = group_advantages(
            rewards, groups, trajectory_ids=trajectories, normalize_std=normalize, weight=weight, valid=valid
        )
    elif estimator == "rloo":
        expected = rloo_advantages(rewards, groups, trajectory_ids=trajectories, valid=valid)
    else:
        expected = gigpo_advantages(
            rewards,
            torch.tensor([row.step_reward for _, row in pairs], dtype=torch.float64),
            groups,
            trajectories,
            [row.anchor for _, row in pairs],
            gamma=settings.advantage.gamma,
            step_weight=0.7,
            normalize_std=normalize,
            weight=weight,
            valid=valid,
        ).total
    wanted = {row.key: value for (_, row), value, ok in zip(pairs, expected.tolist(), valid, strict=True) if ok}
    assert {planned.row.key: planned.advantage for planned in made.rows} == pytest.approx(wanted, abs=1e-12)
    assert {planned.row.key: planned.reward for planned in made.rows} == {
        row.key: made.rewards[n].total for n, row in pairs if records[n].fault is None
    }


def test_the_order_of_episodes_does_not_matter(make: Any) -> None:
    records = draw_records(make)
    settings = choose(advantage={"estimator": "gigpo"})
    there, back = plan(records, settings), plan(records[::-1], settings)
    assert {p.row.key: p.advantage for p in there.rows} == pytest.approx({p.row.key: p.advantage for p in back.rows})
    assert sorted(there.baselines) == pytest.approx(sorted(back.baselines))


@pytest.mark.parametrize(("singleton", "expected"), [("zero", 0.0), ("raw", 1.1)])
def test_a_lone_member_gets_what_the_settings_say(make: Any, singleton: str, expected: float) -> None:
    made = plan([make.episode("g", 0, won=True)], choose(advantage={"singleton": singleton}))
    assert [planned.advantage for planned in made.rows] == pytest.approx([expected] * 2)


def test_equal_rewards_give_advantages_of_exactly_zero(make: Any) -> None:
    # Rounding noise would pass for a positive advantage and enter the replay buffer.
    records = [make.episode("g", n, tool_calls=3, turns=n + 1) for n in range(7)]
    made = plan(records, mu=1 / 3)
    assert {planned.advantage for planned in made.rows} == {0.0}


def test_the_records_are_left_as_they_were(make: Any) -> None:
    records = draw_records(make)
    copies = [replace(record) for record in records]
    plan(records, choose(filter={"void": "trajectory", "overlong": True}))
    assert records == copies


def test_an_estimator_that_nobody_plans_with_is_told(make: Any) -> None:
    settings = choose()
    object.__setattr__(settings.advantage, "estimator", "gigpoo")  # one that was added to the choices alone
    with pytest.raises(SpearError, match=r"^no rows .* spear\.advantage\.estimator=gigpoo; did you mean gigpo\?$"):
        plan([make.episode("g", 0), make.episode("g", 1)], settings)

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from spear_training.algorithms import (
    SettingsError,
    SpearSettings,
    compose_reward,
    estimate,
    gigpo_advantages,
    group_advantages,
    rloo_advantages,
    tool_call_reward,
)
from spear_training.algorithms.filters import filter_rows
from spear_training.step.plan import StepPlan, find_differing_groups, plan_rows, reward_episode
from tests.training.episodes import Episode, make_episode, play, without_rows

LIMIT = 8


def choose(**nodes: Any) -> SpearSettings:
    """Settings without filters unless given, so that a test sees one thing at a time."""
    plain = {"groups": 1.0, "overlong": False, "void": "off", "repetition": False, "unreadable": False}
    return SpearSettings.from_mapping(nodes | {"filter": plain | nodes.get("filter", {})})


def plan(episodes: list[Episode], settings: SpearSettings | None = None, *, mu: float = 0.0, **more: Any) -> StepPlan:
    return plan_rows(play(episodes), settings or choose(), mu=mu, max_response_length=LIMIT, **more)


def find_keys(made: StepPlan) -> set[str]:
    return set(made.rows.key[made.rows.kept])


def find_groups(made: StepPlan) -> set[str]:
    return set(made.rows.group[made.rows.kept])


def find_advantages(made: StepPlan, settings: SpearSettings | None = None) -> dict[str, float]:
    """Of the rows that are trained on."""
    found = estimate(made.rows, settings or choose())
    kept = made.rows.kept
    return dict(zip(made.rows.key[kept], found[kept].tolist(), strict=True))


# ---- rewards ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mu", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("shape", ["linear", "any_if_correct"])
@pytest.mark.parametrize(("count", "calls"), [("valid", 3), ("steps", 7)])
@pytest.mark.parametrize("won", [True, False])
def test_tool_calls_are_paid_by_count_and_shape(mu: float, shape: str, count: str, calls: int, won: bool) -> None:
    record = make_episode("g", 0, won=won, turns=7, tool_calls=3).record
    settings = choose(reward={"tool_count": count, "tool_shape": shape})
    reward = reward_episode(record, settings.reward, mu)
    tool_call = tool_call_reward(calls, shape=shape, correct=won)
    assert reward.terms == {"outcome": 1.0 if won else -1.0, "tool_call": tool_call, "format": 0.1}
    assert reward.total == compose_reward(reward.terms, mu)
    assert reward.total == pytest.approx((1 if won else -1) + mu * tool_call + 0.1)


def test_the_environments_own_terms_are_taken_where_they_are_asked_for() -> None:
    terms = {"outcome": 0.7, "tool_call": 0.2, "format": 0.1}
    record = make_episode("g", 0, won=False, turns=7, tool_calls=7, terms=terms).record
    reward = reward_episode(record, choose(reward={"tool_count": "environment"}).reward, 1.0)
    assert reward.total == pytest.approx(0.7 + 0.2 + 0.1), "a graded outcome stays graded, distinct calls distinct"
    scaled = reward_episode(record, choose(reward={"success": 10, "failure": 0, "format": "none"}).reward, 0.0)
    assert scaled.total == pytest.approx(8.5)


# ---- faults ----------------------------------------------------------------------------------------------------------
def test_a_fault_enters_no_statistic_and_no_row() -> None:
    good = [make_episode("g", 0, won=True), make_episode("g", 1), make_episode("g", 2)]
    broken = make_episode("g", 3, won=True, fault="timeout", stop="fault", terms={"outcome": 1.0, "format": 0.1})
    without, with_fault = plan(good), plan([*good, broken])
    assert with_fault.rows.key.tolist() == without.rows.key.tolist()
    assert with_fault.baselines == without.baselines == pytest.approx((-1 / 3 + 0.1,))
    assert with_fault.total_rows == without.total_rows == 6
    assert len(with_fault.rewards) == 4, "one reward an episode, in their order"


def test_a_group_of_faults_alone_is_no_group() -> None:
    episodes = [make_episode("a", n, fault="bug", stop="fault") for n in range(2)]
    episodes += [make_episode("b", 0, won=True), make_episode("b", 1), make_episode("c", 0), make_episode("c", 1)]
    made = plan(episodes, choose(filter={"groups": 0.75}))
    assert made.baselines == pytest.approx((0.1,))
    assert find_groups(made) == {"b"}, "one of two is kept; with the faults it would be two of three"
    assert made.masked["low_variance"] == 4


@pytest.mark.parametrize("estimator", ["grpo", "rloo", "gigpo"])
def test_a_step_of_faults_alone_has_no_rows(estimator: str) -> None:
    episodes = [make_episode(group, n, fault="bug", stop="fault") for group in "ab" for n in range(2)]
    made = plan(episodes, choose(advantage={"estimator": estimator}))
    assert not len(made.rows) and made.baselines == () and made.total_rows == 0
    assert made.masked == dict.fromkeys(("overlong", "void", "repetition", "unreadable", "low_variance"), 0)
    assert len(made.rewards) == 4


def test_an_episode_without_a_row_counts_in_no_mean() -> None:
    begun = [make_episode("g", 1, won=True), make_episode("g", 2)]
    made = plan([without_rows(make_episode("g", 0, stop="context_limit")), *begun])
    assert find_keys(made) == {"g_1_0", "g_1_1", "g_2_0", "g_2_1"}
    assert made.baselines == plan(begun).baselines == pytest.approx((0.1,))
    assert find_advantages(made) == find_advantages(plan(begun))


# ---- filters ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "filters", "change"),
    [
        ("overlong", {"overlong": True}, {"response_length": LIMIT, "finished": False}),
        ("overlong", {"overlong": True}, {"response_length": LIMIT + 1, "finished": True}),
        ("void", {"void": "turn"}, {"void": True}),
        ("repetition", {"repetition": True}, {"repetitive": True}),
        ("unreadable", {"unreadable": True}, {"unreadable": True}),
        ("void", {"void": "incomplete"}, {"incomplete": True}),
    ],
)
def test_a_masked_row_is_not_trained_on_but_counts_in_the_mean(
    name: str, filters: dict[str, Any], change: dict[str, Any]
) -> None:
    episodes = [make_episode("g", 0, won=True, rows=[change]), make_episode("g", 1)]
    made, unfiltered = plan(episodes, choose(filter=filters)), plan(episodes)
    assert find_keys(made) == {"g_0_1", "g_1_0", "g_1_1"}
    assert made.masked[name] == 1 and sum(made.masked.values()) == 1
    assert made.baselines == unfiltered.baselines
    others = {key: advantage for key, advantage in find_advantages(unfiltered).items() if key != "g_0_0"}
    assert find_advantages(made) == others


@pytest.mark.parametrize(
    ("filters", "change", "left"),
    [
        ({"overlong": True}, {"response_length": LIMIT}, {"g_0_0", "g_0_1", "g_1_0", "g_1_1"}),
        ({}, {"loss_tokens": 0}, {"g_0_1", "g_1_0", "g_1_1"}),
        ({"void": "trajectory"}, {"void": True}, {"g_1_0", "g_1_1"}),
    ],
)
def test_rows_that_are_left_in_the_loss(filters: dict[str, Any], change: dict[str, Any], left: set[str]) -> None:
    made = plan([make_episode("g", 0, won=True, rows=[change]), make_episode("g", 1)], choose(filter=filters))
    assert find_keys(made) == left
    assert made.baselines == pytest.approx((0.1,)), "the mean still knows the episode that won"


def test_an_episode_that_outgrew_the_context_is_overlong_however_short_its_rows_are() -> None:
    episodes = [make_episode("g", 0, stop="context_limit"), make_episode("g", 1, won=True)]
    made = plan(episodes, choose(filter={"overlong": True}))
    assert find_keys(made) == {"g_1_0", "g_1_1"} and made.masked["overlong"] == 2
    assert made.baselines == plan(episodes).baselines, "its failure still counts in the mean"


def flag_even_turns(rows: Any, settings: Any) -> Any:
    assert len(rows.reward) == len(rows)
    return rows.turn % 2 == 0


def give_numbers(rows: Any, settings: Any) -> Any:
    return rows.reward


def test_a_later_row_is_overlong_at_the_room_that_its_prompt_left() -> None:
    rows = play([make_episode("g", n, won=n > 0) for n in range(3)]).rows.add(
        prompt_length=np.asarray([4, 9, 9, 4, 9, 9]),
        response_length=np.asarray([3, 3, 3, 8, 2, 4]),
        finished=np.asarray([False, False, True, False, False, True]),
    )
    settings = choose(filter={"overlong": True})
    found = filter_rows(rows, settings, LIMIT, longest=12)["overlong"]
    assert found.tolist() == [False, True, False, True, False, True]
    assert filter_rows(rows, settings, LIMIT)["overlong"].tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize("estimator", ["gigpo", "stepwise"])
@pytest.mark.parametrize("failure", [-1.0, -0.1, 0.3])
def test_lost_episodes_of_any_length_earn_the_same(estimator: str, failure: float) -> None:
    settings = choose(advantage={"estimator": estimator, "normalize_std": False}, reward={"failure": failure})
    made = plan([make_episode("g", n, won=False, turns=n + 2) for n in range(2)], settings)
    assert not np.any(np.asarray(estimate(made.rows, settings)))


def test_a_branched_episode_is_paid_for_the_turns_before_its_snapshot() -> None:
    whole = make_episode("g", 0, won=True, turns=10).record
    settings = choose(reward={"tool_count": "steps"}).reward
    branched = replace(whole, turns=1, began=9)
    assert reward_episode(branched, settings, 1.0) == reward_episode(whole, settings, 1.0)


def test_a_filter_of_ones_own_is_named_in_the_settings() -> None:
    name = f"{__name__}:flag_even_turns"
    episodes = [make_episode("g", 0, won=True), make_episode("g", 1)]
    made = plan(episodes, choose(filter={"custom": [name]}))
    assert find_keys(made) == {"g_0_1", "g_1_1"} and made.masked[name] == 2
    numbers = choose(filter={"custom": [f"{__name__}:give_numbers"]})
    with pytest.raises(SettingsError, match=r"gave float64 \[4\] for 4 rows: give true or false"):
        plan(episodes, numbers)
    assert plan([make_episode("g", 0, fault="backend")], numbers).total_rows == 0, "an empty list has no type"


def test_excluded_from_the_baseline_is_what_is_not_trained_on() -> None:
    episodes = [
        make_episode("g", 0, won=True, rows=[{"void": True}, {"void": True}]),
        make_episode("g", 1, won=True, rows=[{"void": True}]),
        make_episode("g", 2),
    ]
    counted = plan(episodes, choose(filter={"void": "turn"}))
    excluded = plan(episodes, choose(filter={"void": "turn", "exclude_from_baseline": True}))
    assert counted.baselines == pytest.approx((1 / 3 + 0.1,))
    assert excluded.baselines == pytest.approx((0.1,))
    # The turn that is left of the second episode is trained on either way.
    assert find_keys(counted) == find_keys(excluded) == {"g_1_1", "g_2_0", "g_2_1"}
    assert find_advantages(excluded) == pytest.approx({"g_1_1": 1.0, "g_2_0": -1.0, "g_2_1": -1.0})


# ---- groups ----------------------------------------------------------------------------------------------------------
def test_groups_of_little_variance_go_out_by_id_not_by_place() -> None:
    split = [make_episode("split", n, won=n == 0) for n in range(2)]
    same = [make_episode("same", n) for n in range(2)]
    mixed = [split[0], same[0], same[1], split[1]]
    made = plan(mixed, choose(filter={"groups": 0.5}))
    assert find_groups(made) == {"split"}
    assert made.masked["low_variance"] == 4
    assert made.baselines == pytest.approx((0.1,)), "only kept groups extend the baseline buffer"


# ---- advantages ------------------------------------------------------------------------------------------------------
def draw_episodes() -> list[Any]:
    """Three groups of unlike episodes with shared anchors, their members apart from each other, one of them a fault."""
    random = torch.Generator().manual_seed(0)
    episodes = []
    for sample in range(4):
        for group in "abc":
            turns = int(torch.randint(1, 6, (1,), generator=random))
            rows = [
                {"anchor": f"s{int(torch.randint(3, (1,), generator=random))}", "step_reward": -0.1 * turn}
                for turn in range(turns)
            ]
            won = bool(torch.rand(1, generator=random) < 0.5)
            fault = {"fault": "bug", "stop": "fault"} if (group, sample) == ("b", 2) else {}
            episodes.append(make_episode(group, sample, won=won, turns=turns, tool_calls=turns, rows=rows, **fault))
    return episodes


@pytest.mark.parametrize("weight", ["trajectory", "row"])
@pytest.mark.parametrize(
    ("estimator", "normalize"), [("grpo", False), ("grpo", True), ("rloo", False), ("gigpo", False), ("gigpo", True)]
)
def test_advantages_are_those_of_the_algorithms(estimator: str, normalize: bool, weight: str) -> None:
    episodes = draw_episodes()
    settings = choose(
        advantage={
            "estimator": estimator,
            "normalize_std": normalize,
            "weight": weight,
            "step_weight": 0.7,
            "step_reward": "environment",
        }
    )
    made = plan(episodes, settings, mu=0.5)
    pairs = [(n, row) for n, episode in enumerate(episodes) for row in range(len(episode.rows))]
    keys = [f"{episodes[n].record.trajectory}_{row}" for n, row in pairs]
    rewards = torch.tensor([made.rewards[n].total for n, _ in pairs], dtype=torch.float64)
    groups = [episodes[n].record.group for n, _ in pairs]
    trajectories = [episodes[n].record.trajectory for n, _ in pairs]
    valid = [episodes[n].record.fault is None for n, _ in pairs]
    if estimator == "grpo":
        expected = group_advantages(
            rewards, groups, trajectory_ids=trajectories, normalize_std=normalize, weight=weight, valid=valid
        )
    elif estimator == "rloo":
        units = None if weight == "row" else trajectories
        expected = rloo_advantages(rewards, groups, trajectory_ids=units, valid=valid)
    else:
        expected = gigpo_advantages(
            rewards,
            torch.tensor([episodes[n].rows[row]["step_reward"] for n, row in pairs], dtype=torch.float64),
            groups,
            trajectories,
            [episodes[n].rows[row]["anchor"] for n, row in pairs],
            gamma=settings.advantage.gamma,
            step_weight=0.7,
            normalize_std=normalize,
            weight=weight,
            valid=valid,
        ).total
    wanted = {key: value for key, value, ok in zip(keys, expected.tolist(), valid, strict=True) if ok}
    assert find_advantages(made, settings) == pytest.approx(wanted, abs=1e-12)
    assert dict(zip(made.rows.key, made.rows.reward, strict=True)) == {
        key: made.rewards[n].total for key, (n, _), ok in zip(keys, pairs, valid, strict=True) if ok
    }


# ---- penalties of rows, and rewards of steps -------------------------------------------------------------------------
AUTHORS = {"reward": {"success": 10.0, "failure": 0.0, "format": "penalty_per_row"}, "advantage": {"weight": "row"}}


def fail_with(sample: int, malformed: int, turns: int = 50) -> Episode:
    """A lost episode whose first turns are malformed."""
    rows = [{"malformed": int(turn < malformed)} for turn in range(turns)]
    return make_episode("g", sample, turns=turns, rows=rows, well_formed_turns=turns - malformed)


def test_the_authors_penalty_is_of_the_malformed_turns_row_alone() -> None:
    """Eight lost episodes of 50 turns with 0, 3, ... 21 malformed ones: 84 of 400 rows cost 0.1, on average 0.021."""
    episodes = [fail_with(sample, 3 * sample) for sample in range(8)]
    made = plan(episodes, choose(**AUTHORS, filter={"groups": 0.75}))
    found = estimate(made.rows, choose(**AUTHORS))
    malformed = made.rows.malformed == 1
    assert set(found[~malformed].round(12)) == {0.021} and set(found[malformed].round(12)) == {-0.079}
    assert made.baselines == pytest.approx((-0.021,))
    assert made.equal_groups == 0.0 and made.same_outcome == 1.0
    assert [reward.total for reward in made.rewards] == pytest.approx([-0.1 * 3 * n / 50 for n in range(8)])
    by_trajectory = choose(**AUTHORS | {"reward": AUTHORS["reward"] | {"format": "penalty_per_turn"}})
    found = estimate(plan(episodes, by_trajectory).rows, by_trajectory)
    assert found[0] == pytest.approx(1.05) and found[-1] == pytest.approx(-1.05), "of the whole trajectory"


def test_a_penalty_of_rows_does_not_choose_groups() -> None:
    """Of two groups the one with a win stays, whatever the malformed turns of the other cost."""
    lost = [fail_with(sample, 50 * sample) for sample in range(2)]  # penalties 0 and 0.1 on average
    other = [make_episode("h", n, won=n == 0, terms={"outcome": 0.05 * n, "format": 0.0}) for n in range(2)]
    settings = choose(reward={"success": 1.0, "format": "penalty_per_row"}, filter={"groups": 0.5})
    assert find_groups(plan([*lost, *other], settings)) == {"h"}
    by_trajectory = choose(reward={"success": 1.0, "format": "penalty_per_turn"}, filter={"groups": 0.5})
    assert find_groups(plan([*lost, *other], by_trajectory)) == {"g"}


def test_a_users_score_is_paid_to_steps_as_it_is() -> None:
    """Two episodes of score 0, one of them longer: the state in which both began is worth the same."""
    terms = {"outcome": -1.0, "format": 0.0, "custom": 0.0}
    episodes = [
        make_episode("g", n, turns=turns, terms=terms, rows=[{"anchor": "a"}]) for n, turns in enumerate((2, 6))
    ]
    settings = choose(reward={"format": "none"}, advantage={"estimator": "gigpo", "gamma": 0.9})
    assert estimate(plan(episodes, settings).rows, settings) == pytest.approx(0.0)


def test_an_episode_counts_once_also_where_its_rows_have_penalties() -> None:
    settings = choose(reward={"format": "penalty_per_row"}, advantage={"weight": "trajectory"})
    made = plan([fail_with(0, 1, turns=1), fail_with(1, 0, turns=9)], settings)
    found = estimate(made.rows, settings)
    assert made.baselines == pytest.approx((-1.05,)), "the mean of two episodes"
    assert found[0] == pytest.approx(-0.05) and found[1:] == pytest.approx(0.05)


def test_a_conversation_is_one_row_with_the_penalty_of_all_its_turns() -> None:
    long = make_episode("g", 0, turns=5, rows=[{"malformed": 3}], well_formed_turns=2)
    settings = choose(reward={"format": "penalty_per_row"})
    assert plan([replace(long, rows=long.rows[:1])], settings).rewards[0].total == pytest.approx(-1.3)


@pytest.mark.parametrize(
    ("reward", "expected"),
    [({"success": 1.0, "failure": -1.0}, 1.0), ({"success": 10.0, "failure": 0.0}, 5.0)],
    ids=["paper", "authors"],
)
def test_both_terms_of_gigpo_have_the_scale_of_the_outcome(reward: dict[str, float], expected: float) -> None:
    """Four of eight episodes of one turn win: half the distance of win and loss, in either term."""
    episodes = [make_episode("g", n, won=n < 4, turns=1, rows=[{"anchor": "s"}]) for n in range(8)]
    for weight in (0.0, 1.0):
        nodes = {"estimator": "gigpo", "step_weight": weight, "gamma": 0.95}
        settings = choose(reward=reward | {"format": "none"}, advantage=nodes)
        assert estimate(plan(episodes, settings).rows, settings)[:4] == pytest.approx((1.0 + weight) * expected)


def test_a_steps_reward_is_the_outcome_discounted_or_the_environments_own() -> None:
    turns = [{"anchor": anchor, "step_reward": paid} for anchor, paid in (("a", 0.1), ("b", 0.2), ("b", 0.7))]
    episodes = [make_episode("g", 0, won=True, turns=3, rows=turns), make_episode("g", 1, turns=1, rows=turns[:1])]
    for source, first in (("outcome", 2 * 0.5**2), ("environment", 0.2 * 0.5 + 0.7 * 0.25)):
        nodes = {"estimator": "gigpo", "gamma": 0.5, "step_reward": source}
        settings = choose(reward={"format": "none"}, advantage=nodes)
        found = estimate(plan(episodes, settings).rows, settings)
        assert found[0] == pytest.approx(1.0 + first / 2), "half of what the two differ by at their first state"
        assert found[-1] == pytest.approx(-1.0 - first / 2)


def test_a_malformed_step_loses_its_own_penalty_and_no_earlier_one() -> None:
    bad = [{"anchor": "a"}, {"anchor": "b", "malformed": 1}]
    episodes = [make_episode("g", n, turns=2, rows=bad if n else [{"anchor": "a"}, {"anchor": "b"}]) for n in (0, 1)]
    settings = choose(**AUTHORS | {"advantage": {"weight": "row", "estimator": "gigpo", "gamma": 0.95}})
    found = estimate(plan(episodes, settings).rows, settings)
    assert found == pytest.approx([0.025, 0.025 + 0.05, 0.025, -0.075 - 0.05])


def test_with_a_critic_a_penalty_stays_in_its_row() -> None:
    settings = choose(
        **AUTHORS | {"advantage": {"estimator": "gae", "weight": "row"}}, critic={"gamma": 0.9, "lam": 0.5}
    )
    episodes = [make_episode("g", 0, won=True, turns=2, rows=[{}, {"malformed": 1}])]
    rows = plan(episodes, settings).rows.add(values=[0.0] * 6, mask=[True] * 6)
    found = estimate(rows, settings)
    assert found == pytest.approx([10 * 0.45**k - (0.1 * 0.45**k if k < 3 else 0.0) for k in (5, 4, 3, 2, 1, 0)])


# ---- dynamic sampling ------------------------------------------------------------------------------------------------
def test_groups_differ_by_what_they_earn_in_all() -> None:
    same = [make_episode("same", n, won=True) for n in range(2)]
    tools = [make_episode("tools", n, tool_calls=n) for n in range(2)]
    fault = [make_episode("fault", 0, won=True), make_episode("fault", 1, fault="bug")]
    won = [make_episode("won", n, won=n == 0) for n in range(2)]
    records = [episode.record for episode in [*same, *tools, *fault, *won]]
    assert find_differing_groups(records, choose().reward, mu=0.0) == ["won"]
    assert find_differing_groups(records, choose().reward, mu=1.0) == ["tools", "won"]


def test_groups_that_were_not_chosen_are_not_trained_on_and_leave_no_mean() -> None:
    episodes = [make_episode(group, n, won=n == 0) for group in "ab" for n in range(2)]
    made = plan(episodes, chosen=["b"])
    assert find_groups(made) == {"b"} and len(made.baselines) == 1
    assert plan(episodes, chosen=[]).baselines == ()

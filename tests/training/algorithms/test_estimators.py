from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spear_training.algorithms import RowTable, SettingsError, SpearSettings, estimate
from spear_training.algorithms.estimators import average_tokens


def choose(**values: Any) -> SpearSettings:
    return SpearSettings.from_mapping({"advantage": values})


def make_rows(*rows: dict[str, Any]) -> RowTable:
    """Rows of turns given as (tokens up to the end of the response, reward)."""
    turns = [turn for row in rows for turn in row["turns"]]
    return RowTable(
        key=[f"k{n}" for n in range(len(rows))],
        group=[row["group"] for row in rows],
        trajectory=[row["trajectory"] for row in rows],
        turn=[row.get("turn", 0) for row in rows],
        prompt_length=[1] * len(rows),
        response_length=[row["turns"][-1][0] for row in rows],
        reward=[row["reward"] for row in rows],
        turns=[len(row["turns"]) for row in rows],
        turn_end=[end for end, _ in turns],
        turn_reward=[reward for _, reward in turns],
    )


def test_stepwise_credit_by_hand() -> None:
    # Two conversations of two turns; episode advantages are +1 and -1. With gamma 1/2 the returns are 1 + 2/2 = 2 and
    # 2 of the first, 0 and 0 of the second: from their means, +1 and +1, -1 and -1.
    rows = make_rows(
        {"group": "g", "trajectory": "a", "reward": 1.0, "turns": [(2, 1.0), (5, 2.0)]},
        {"group": "g", "trajectory": "b", "reward": -1.0, "turns": [(1, 0.0), (3, 0.0)]},
    )
    found = estimate(rows, choose(estimator="stepwise", gamma=0.5, step_weight=1.0))
    assert found.tolist() == pytest.approx([2.0] * 5 + [-2.0] * 3)
    uneven = rows.add(turn_reward=[3.0, 0.0, 0.0, 1.0])
    # Returns 3 and 0 against 1/2 and 1: first turns +-1.25, second turns -+0.5.
    found = estimate(uneven, choose(estimator="stepwise", gamma=0.5, step_weight=2.0))
    first, second = [1 + 2.5] * 2 + [1 - 1.0] * 3, [-1 - 2.5] * 1 + [-1 + 1.0] * 2
    assert found.tolist() == pytest.approx(first + second)


def test_stepwise_credit_is_the_same_in_either_layout() -> None:
    whole = make_rows(
        {"group": "g", "trajectory": "a", "reward": 1.0, "turns": [(2, 0.3), (5, -0.2), (6, 1.0)]},
        {"group": "g", "trajectory": "b", "reward": -1.0, "turns": [(1, 0.0), (3, 0.4)]},
    )
    parts = make_rows(
        *(
            {"group": "g", "trajectory": name, "reward": reward, "turn": n, "turns": [(size, paid)]}
            for name, reward, turns in (
                ("b", -1.0, [(1, 0.0), (2, 0.4)]),
                ("a", 1.0, [(2, 0.3), (3, -0.2), (1, 1.0)]),
            )
            for n, (size, paid) in enumerate(turns)
        )
    )
    settings = choose(estimator="stepwise", gamma=0.9)
    one, other = estimate(whole, settings), estimate(parts, settings)
    assert one.tolist() == pytest.approx([*other[3:], *other[:3]])


def leave_one_out(rows, settings):
    return [reward - (rows.reward.sum() - reward) / (len(rows) - 1) for reward in rows.reward]


def by_token(rows, settings):
    return np.arange(rows.response_length.sum())


def too_many(rows, settings):
    return np.zeros(len(rows) + 5)


def not_finite(rows, settings):
    return np.full(len(rows), np.nan)


def test_an_estimator_of_ones_own_is_named_by_its_module() -> None:
    rows = make_rows(
        {"group": "g", "trajectory": "a", "reward": 3.0, "turns": [(2, 0.0)]},
        {"group": "g", "trajectory": "b", "reward": 1.0, "turns": [(1, 0.0)]},
    )
    assert estimate(rows, choose(estimator=f"{__name__}:leave_one_out")).tolist() == [2.0, -2.0]
    assert estimate(rows, choose(estimator=f"{__name__}:by_token")).tolist() == [0.0, 1.0, 2.0]
    for name, message in (("too_many", r"\[7\] advantages for 2 rows with 3"), ("not_finite", "not finite")):
        with pytest.raises(SettingsError, match=message):
            estimate(rows, choose(estimator=f"{__name__}:{name}"))


def test_tokens_are_averaged_over_the_loss_tokens() -> None:
    rows = make_rows(
        {"group": "g", "trajectory": "a", "reward": 0.0, "turns": [(3, 0.0)]},
        {"group": "g", "trajectory": "b", "reward": 0.0, "turns": [(2, 0.0)]},
    )
    values, mask = np.asarray([1.0, 9.0, 3.0, 5.0, 5.0]), np.asarray([1, 0, 1, 0, 0], dtype=bool)
    assert average_tokens(values, mask, rows).tolist() == [2.0, 0.0]


def test_only_ppo_has_a_critic() -> None:
    assert choose(estimator="gae").advantage.needs_critic
    assert not any(choose(estimator=name).advantage.needs_critic for name in ("grpo", "rloo", "gigpo", "stepwise"))

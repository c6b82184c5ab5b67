"""verl's settings of rollout correction: which make sense, and which change anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hydra", reason="needs the extra 'train'")

from spear_envs.core.errors import SpearError
from spear_training.launch import compose_config
from spear_training.rollout_correction import (
    REJECTIONS,
    RolloutCorrection,
    describe_staleness,
    resolve_correction,
)

NODE = "algorithm.rollout_correction"


def read(**values: Any) -> RolloutCorrection | None:
    return RolloutCorrection.from_node({"bypass_mode": False, "loss_type": "ppo_clip", **values})


@pytest.mark.parametrize(
    "values",
    [
        {"rollout_is": "token"},
        {"rollout_is": "sequence", "rollout_is_threshold": "5"},
        {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0", "rollout_is_batch_normalize": True},
        {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.99_1.01"},
        {"rollout_rs": "token_k1,seq_max_k3", "rollout_rs_threshold": "0.5_2.0,0.1"},
        {"rollout_rs": "token_k2, token_k3", "rollout_rs_threshold": 0.1},
    ],
)
def test_what_makes_sense_is_taken(values: dict[str, Any]) -> None:
    made = read(**values)
    assert made is not None and {name: getattr(made, name) for name in values} == values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rollout_is": "tokens"}, "must be null, token or sequence, not 'tokens'"),
        ({"rollout_is": "token", "rollout_is_threshold": "2_1"}, "a number above 0 or LOWER_UPPER"),
        ({"rollout_is": "token", "rollout_is_threshold": 0}, "a number above 0"),
        ({"rollout_is": "token", "rollout_is_threshold": "many"}, "not 'many'"),
        (
            {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 1},
            "='seq_max_k1' is unknown: take some of token_k1",
        ),
        ({"rollout_rs": "token_k1"}, "needs algorithm.rollout_correction.rollout_rs_threshold"),
        ({"rollout_rs": "token_k3", "rollout_rs_threshold": "0.1_0.2"}, "must be a number above 0, not '0.1_0.2'"),
        ({"rollout_rs": "token_k1,token_k2", "rollout_rs_threshold": "1,2,3"}, "one for each of token_k1,token_k2"),
        ({"rollout_is": "token", "bypass_mode": True}, "bypass_mode=true leaves out"),
    ],
)
def test_what_makes_none_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SpearError, match=message):
        read(**values)


def test_rejections_are_verls() -> None:
    pytest.importorskip("verl", reason="needs the extra 'train'")
    from verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS

    assert set(REJECTIONS) == SUPPORTED_ROLLOUT_RS_OPTIONS


@pytest.mark.parametrize(
    ("overrides", "level", "told"),
    [
        (["spear.rollout.staleness=0"], None, ""),
        (
            ["spear.rollout.staleness=2"],
            "token",
            "2 versions old; corrected by weights of each token, cut at 2.0",
        ),
        (
            [f"{NODE}.rollout_is=sequence", "spear.rollout.staleness=1"],
            "sequence",
            "weights of each sequence, cut at 2.0",
        ),
        ([f"{NODE}.bypass_mode=true", "spear.rollout.staleness=1"], None, "clipped ratio to the policy that played"),
        (
            [f"{NODE}.rollout_rs=token_k1", f"{NODE}.rollout_rs_threshold=2", "spear.rollout.staleness=1"],
            None,
            "corrected by rejection by token_k1",
        ),
    ],
)
def test_old_weights_are_corrected_for_unless_something_is_chosen(
    overrides: list[str], level: str | None, told: str
) -> None:
    config = compose_config(["preset=demo", *overrides], Path("x"), check=False)
    resolve_correction(config)
    assert config.algorithm.rollout_correction.rollout_is == level
    assert told in describe_staleness(config)

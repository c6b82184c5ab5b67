"""verl's ``algorithm.rollout_correction``: corrects differences in log-probs of rollout engine and trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, open_dict
from pydantic.dataclasses import dataclass

from spear_envs.core.errors import SpearError
from spear_training.algorithms.records import STRICT, Record

LEVELS = ("token", "sequence")
REJECTIONS = (
    *("token_k1", "token_k2", "token_k3"),
    *("seq_sum_k1", "seq_sum_k2", "seq_sum_k3"),
    *("seq_mean_k1", "seq_mean_k2", "seq_mean_k3"),
    *("seq_max_k2", "seq_max_k3"),
)
"""Quantities with a threshold: a divergence of a token, or its sum, mean or maximum over a row."""
_NODE = "algorithm.rollout_correction"


@dataclass(frozen=True, config=STRICT)
class RolloutCorrection(Record, path=_NODE):
    """Importance weights and rejections of sampled tokens, r = pi_trainer / pi_rollout; names and meanings are verl's.

    Attributes:
        rollout_is: the weight of a token is its own r ("token") or the product of its row's ("sequence"); None: no
            weights.
        rollout_is_threshold: a number truncates weights (truncated importance sampling); "LOWER_UPPER" zeroes those
            outside (masked importance sampling, IcePop).
        rollout_is_batch_normalize: divide the weights by their mean over the step.
        rollout_rs: rejections, of :data:`REJECTIONS`, by commas; None: none. Rejected tokens leave the loss and its
            denominator.
        rollout_rs_threshold: one for all rejections or one for each, by commas; of r, "LOWER_UPPER" or the upper one,
            for k1; the maximum divergence for k2 and k3.
    """

    rollout_is: str | None = None
    rollout_is_threshold: str | float = 2.0
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: str | float | None = None

    def check(self) -> None:
        if self.rollout_is is not None and self.rollout_is not in LEVELS:
            raise SpearError(f"{_NODE}.rollout_is must be null, {' or '.join(LEVELS)}, not {self.rollout_is!r}")
        _check_bounds("rollout_is_threshold", self.rollout_is_threshold)
        if self.rollout_rs is None:
            return
        named = list(dict.fromkeys(name.strip() for name in str(self.rollout_rs).split(",")))
        for name in named:
            if name not in REJECTIONS:
                raise SpearError(f"{_NODE}.rollout_rs={name!r} is unknown: take some of {', '.join(REJECTIONS)}")
        if self.rollout_rs_threshold is None:
            raise SpearError(f"{_NODE}.rollout_rs={self.rollout_rs} needs {_NODE}.rollout_rs_threshold")
        bounds = str(self.rollout_rs_threshold).split(",")
        if len(bounds) not in (1, len(named)):
            raise SpearError(f"{_NODE}.rollout_rs_threshold must be one threshold, or one each of {self.rollout_rs}")
        for name, bound in zip(named, bounds * len(named) if len(bounds) == 1 else bounds, strict=True):
            _check_bounds("rollout_rs_threshold", bound, both=name.endswith("k1"))

    @classmethod
    def from_node(cls, node: Mapping[str, Any]) -> RolloutCorrection | None:
        """Read verl's node, which has other keys too; None if it changes nothing.

        Raises SpearError for an invalid value, or weights without the trainer's own log-probs.
        """
        made = cls(**{name: node[name] for name in cls.__dataclass_fields__ if name in node})
        if made.rollout_is is None and made.rollout_rs is None:
            return None
        if node.get("bypass_mode"):
            raise SpearError(f"{_NODE}.rollout_is and rollout_rs have no effect with {_NODE}.bypass_mode=true")
        return made


def resolve_correction(config: DictConfig) -> None:
    """Set truncated weights of tokens if old weights may have written the episodes and nothing is set.

    ``bypass_mode`` counts as set: there the loss's own clipped ratio is to the policy that played.
    """
    node = config.algorithm.rollout_correction
    if config.spear.rollout.staleness > 0 and not (node.bypass_mode or node.rollout_is or node.rollout_rs):
        with open_dict(config):
            node.rollout_is = LEVELS[0]


def describe_staleness(config: DictConfig) -> str:
    """One line on episodes played ahead, and on the correction for their old weights."""
    node, ahead = config.algorithm.rollout_correction, config.spear.rollout.staleness
    cut = f"weights of each {node.rollout_is}, cut at {node.rollout_is_threshold}" if node.rollout_is else None
    rejected = f"rejection by {node.rollout_rs}" if node.rollout_rs else None
    chosen = ["the clipped ratio to the policy that played"] if node.bypass_mode else [cut, rejected]
    how = " and ".join(filter(None, chosen))
    plural = "s" if ahead > 1 else ""
    return (
        f"episodes start up to {ahead} step{plural} ahead, by weights up to {ahead} version{plural} old; "
        f"corrected by {how}"
    )


def _check_bounds(key: str, given: str | float, *, both: bool = True) -> None:
    parts = str(given).strip().split("_") if both else [str(given)]
    try:
        bounds = [float(part) for part in parts]
    except ValueError:
        bounds = []
    if len(bounds) not in (1, 2) or not 0 < bounds[0] <= bounds[-1] < float("inf"):
        form = "a number above 0 or LOWER_UPPER, as 0.5_2.0" if both else "a number above 0"
        raise SpearError(f"{_NODE}.{key} must be {form}, not {given!r}")

"""Closed sets of choices that settings and functions share."""

from __future__ import annotations

from enum import Enum


class Coupling(str, Enum):
    """Combination of the self-imitation term and the on-policy term."""

    SEQUENTIAL = "sequential"
    """Replay mini-batches are separate optimiser steps after the on-policy ones, as in the authors' code."""
    JOINT = "joint"
    """Replayed rows are dealt into the on-policy mini-batches, with one loss for both (``eq:grpo_sal``)."""


class FormatMode(str, Enum):
    """Reward of well-formed responses."""

    BONUS = "bonus"
    """+0.1 for a trajectory with all turns well-formed (``eq:formatreward``)."""
    PENALTY_PER_TURN = "penalty_per_turn"
    """-0.1 for each malformed turn, on the whole trajectory."""
    PENALTY_PER_ROW = "penalty_per_row"
    """-0.1 for each malformed turn, on the row of that turn alone, as in the authors' agent code."""
    NONE = "none"
    """No format term."""


class ToolCount(str, Enum):
    """Definition of a tool call."""

    VALID = "valid"
    """Turns whose call was valid and executed (``eq:actionreward``)."""
    STEPS = "steps"
    """Every step of the environment, as in the authors' agent code."""
    ENVIRONMENT = "environment"
    """The environment's own term, chosen by its keyword ``tool_reward``: ``distinct`` counts turns that led to
    something new."""


class ToolShape(str, Enum):
    """Reward of tool calls."""

    LINEAR = "linear"
    """min(1, 0.1 n) (``eq:actionreward``)."""
    ANY_IF_CORRECT = "any_if_correct"
    """1 for any call when the trajectory is correct, else linear."""


class ReplayUnit(str, Enum):
    """Unit of the capacity of the replay buffer."""

    SAMPLE = "sample"
    """Rows: a turn, or a trajectory that is one row."""
    TRAJECTORY = "trajectory"
    """Trajectories; their rows stay together."""


class BoundsMode(str, Enum):
    """Origin of the covariance bounds."""

    RUNNING = "running"
    """Quantiles of the covariances of replayed tokens: the wider of those of the batch and of the replays so far."""
    PERCENTILE = "percentile"
    """Means of the largest covariances at the first replay, then frozen (``sec:implementation_detail_appdx``)."""
    FIXED = "fixed"
    """Given as ``lower`` and ``upper`` (``tab:hyperparams_value``)."""


class CovarianceScope(str, Enum):
    """Tokens in the means of the covariance."""

    BATCH = "batch"
    """All valid tokens of the batch."""
    POSITION = "position"
    """Valid tokens at the same position t (``eq:covariance`` read literally)."""


class ClipBudget(str, Enum):
    """Total of which the number of clipped tokens is a share."""

    BATCH = "batch"
    """A share of all valid tokens of the batch."""
    TRAJECTORY = "trajectory"
    """A share of the valid tokens of each sequence (``eq:clipuniform``)."""


class GroupWeight(str, Enum):
    """Unit of a group mean."""

    TRAJECTORY = "trajectory"
    """Each trajectory once, regardless of its rows."""
    ROW = "row"
    """Each row, so that long trajectories weigh more."""


class StepReward(str, Enum):
    """Rewards of single turns, from which GiGPO and ``stepwise`` take their returns."""

    OUTCOME = "outcome"
    """Pay of the outcome above a lost episode, in the last turn: on the scale of the episode's advantage."""
    ENVIRONMENT = "environment"
    """The benchmark's own reward of each turn, on its own scale."""


class Trigger(str, Enum):
    """Rows that count towards the size at which the replay buffer is drawn from."""

    STORED = "stored"
    """All of the buffer; at least ``trigger_ratio`` times the capacity (``alg:sal``)."""
    ELIGIBLE = "eligible"
    """Rows with a reward above P50; more than that number, as in the authors' code."""


class Singleton(str, Enum):
    """Advantage in a group with one valid member."""

    ZERO = "zero"
    """0, without a comparison."""
    RAW = "raw"
    """The reward itself."""


class Aggregation(str, Enum):
    """Aggregation of token losses. B: non-empty sequences of the mini-batch, L: a constant length."""

    SEQ_MEAN_TOKEN_SUM_NORM = "seq-mean-token-sum-norm"
    """Sum / (B L); does not depend on the cut into micro-batches (``sec:botdetails``)."""
    SEQ_MEAN_TOKEN_SUM = "seq-mean-token-sum"
    """Sum / B."""
    SEQ_MEAN_TOKEN_MEAN = "seq-mean-token-mean"
    """Mean over the tokens of a sequence, then over sequences."""
    TOKEN_MEAN = "token-mean"
    """Sum / number of valid tokens."""
    SUM_NORM = "sum-norm"
    """Sum / L, as in the authors' code: its scale grows with the number of rows."""


class VoidFilter(str, Enum):
    """Rows removed from the loss for a void turn."""

    TRAJECTORY = "trajectory"
    """All rows of the trajectory (``sec:botdetails``)."""
    TURN = "turn"
    """The void turn alone."""
    INCOMPLETE = "incomplete"
    """A row without a whole ``<action>`` after its thoughts, as in the authors' agent code, whatever was played."""
    OFF = "off"
    """None."""

"""Closed sets of choices that settings and functions share."""

from __future__ import annotations

from enum import Enum


class Coupling(str, Enum):
    """How the self-imitation term meets the on-policy term."""

    SEQUENTIAL = "sequential"
    """Replay mini-batches are optimiser steps of their own, after the on-policy ones, as in the authors' code."""
    JOINT = "joint"
    """Replayed rows are dealt into the on-policy mini-batches; one loss reads both (``eq:grpo_sal``)."""


class FormatMode(str, Enum):
    """How well-formed responses are paid."""

    BONUS = "bonus"
    """+0.1 for a trajectory whose every turn is well formed (``eq:formatreward``)."""
    PENALTY_PER_TURN = "penalty_per_turn"
    """-0.1 on each malformed turn, as in the authors' agent code."""
    NONE = "none"
    """No format term."""


class ToolCount(str, Enum):
    """What counts as a tool call."""

    VALID = "valid"
    """Turns whose call was valid and executed (``eq:actionreward``)."""
    STEPS = "steps"
    """Every step of the environment, as in the authors' agent code."""
    ENVIRONMENT = "environment"
    """What the environment's own term counts, which its keyword ``tool_reward`` chooses: with ``distinct`` calls of
    turns that led to something new."""


class ToolShape(str, Enum):
    """How tool calls turn into a reward."""

    LINEAR = "linear"
    """min(1, 0.1 n) (``eq:actionreward``)."""
    ANY_IF_CORRECT = "any_if_correct"
    """1 for any call when the trajectory is correct, else linear."""


class ReplayUnit(str, Enum):
    """What the capacity of the replay buffer counts."""

    SAMPLE = "sample"
    """Rows: a turn, or a whole trajectory where it is one row."""
    TRAJECTORY = "trajectory"
    """Trajectories; their rows stay together."""


class BoundsMode(str, Enum):
    """Where the covariance bounds come from."""

    RUNNING = "running"
    """Quantiles of the covariances of replayed tokens: those of the batch and of the replays so far, the wider ones."""
    PERCENTILE = "percentile"
    """Means of the largest covariances at the first replay, then frozen (``sec:implementation_detail_appdx``)."""
    FIXED = "fixed"
    """Given as ``lower`` and ``upper`` (``tab:hyperparams_value``)."""


class CovarianceScope(str, Enum):
    """Over which tokens the means of the covariance run."""

    BATCH = "batch"
    """All valid tokens of the batch."""
    POSITION = "position"
    """Valid tokens at the same position t (``eq:covariance`` read literally)."""


class ClipBudget(str, Enum):
    """Of what the number of clipped tokens is a share."""

    BATCH = "batch"
    """Of all valid tokens of the batch."""
    TRAJECTORY = "trajectory"
    """Of the valid tokens of each sequence (``eq:clipuniform``)."""


class GroupWeight(str, Enum):
    """What counts once in a group mean."""

    TRAJECTORY = "trajectory"
    """Each trajectory, however many rows it has."""
    ROW = "row"
    """Each row, so that long trajectories weigh more."""


class Singleton(str, Enum):
    """Advantage in a group that has one valid member only."""

    ZERO = "zero"
    """0: there is nothing to compare with."""
    RAW = "raw"
    """The reward itself."""


class Aggregation(str, Enum):
    """How token losses become one number. B: non-empty sequences of the mini-batch, L: a constant length."""

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
    """Which rows a void turn takes out of the loss."""

    TRAJECTORY = "trajectory"
    """All rows of the trajectory (``sec:botdetails``)."""
    TURN = "turn"
    """The void turn alone."""
    OFF = "off"
    """None."""

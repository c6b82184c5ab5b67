"""The SPEAR paper as pure functions over tensors, two buffers and one record of settings; no verl, no Ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spear_envs.core.rewards import (
        compose_reward,
        cosine_decay,
        cosine_warmup,
        tool_call_reward,
    )
    from spear_training.algorithms.advantages import (
        GigpoAdvantages,
        GroupStatistics,
        discounted_returns,
        gigpo_advantages,
        group_advantages,
        group_statistics,
        rloo_advantages,
    )
    from spear_training.algorithms.choices import (
        Aggregation,
        BoundsMode,
        ClipBudget,
        Coupling,
        CovarianceScope,
        FormatMode,
        GroupWeight,
        ReplayUnit,
        Singleton,
        StepReward,
        ToolCount,
        ToolShape,
        Trigger,
        VoidFilter,
    )
    from spear_training.algorithms.clipping import (
        calibrate_covariance_bounds,
        covariance,
        covariance_clip_mask,
        find_covariance_quantiles,
    )
    from spear_training.algorithms.critic import (
        episode_advantages,
        gae_advantages,
        value_loss,
        whiten_advantages,
    )
    from spear_training.algorithms.estimators import (
        average_tokens,
        estimate,
        needs_critic,
    )
    from spear_training.algorithms.filters import (
        filter_rows,
        keep_high_variance_groups,
        overlong_mask,
        void_turn_mask,
    )
    from spear_training.algorithms.losses import (
        PolicyLoss,
        bind_policy_loss,
        cispo_loss,
        gspo_loss,
        kl_cov_loss,
        kl_divergence,
        policy_loss,
    )
    from spear_training.algorithms.objective import (
        CovarianceClip,
        SpearLoss,
        aggregate_loss,
        sequence_entropy,
        spear_loss,
        token_entropy,
        weigh_rows,
    )
    from spear_training.algorithms.registry import (
        ESTIMATORS,
        FILTERS,
        GAMMA,
        MU,
        POLICY_LOSSES,
        Registry,
        follow_entropy,
        follow_novelty,
        follow_success,
    )
    from spear_training.algorithms.replay import (
        BaselineBuffer,
        ReplayBuffer,
        ReplayDraw,
        ReplayEntry,
        ReplayGate,
        recalibrate_advantages,
    )
    from spear_training.algorithms.responses import has_repetition, is_incomplete, is_unreadable
    from spear_training.algorithms.rows import (
        COLUMNS,
        RowTable,
        Span,
    )
    from spear_training.algorithms.schema import (
        SettingsError,
        StateMismatchError,
    )
    from spear_training.algorithms.settings import (
        AdvantageSettings,
        BaselineSettings,
        ClipSettings,
        CovarianceSettings,
        CriticSettings,
        FilterSettings,
        KlSettings,
        LossSettings,
        ReplaySettings,
        RewardSettings,
        SamplingSettings,
        SilSettings,
        SpearSettings,
    )

__all__ = [
    "COLUMNS",
    "ESTIMATORS",
    "FILTERS",
    "GAMMA",
    "MU",
    "POLICY_LOSSES",
    "AdvantageSettings",
    "Aggregation",
    "BaselineBuffer",
    "BaselineSettings",
    "BoundsMode",
    "ClipBudget",
    "ClipSettings",
    "Coupling",
    "CovarianceClip",
    "CovarianceScope",
    "CovarianceSettings",
    "CriticSettings",
    "FilterSettings",
    "FormatMode",
    "GigpoAdvantages",
    "GroupStatistics",
    "GroupWeight",
    "KlSettings",
    "LossSettings",
    "PolicyLoss",
    "Registry",
    "ReplayBuffer",
    "ReplayDraw",
    "ReplayEntry",
    "ReplayGate",
    "ReplaySettings",
    "ReplayUnit",
    "RewardSettings",
    "RowTable",
    "SamplingSettings",
    "SettingsError",
    "SilSettings",
    "Singleton",
    "Span",
    "SpearLoss",
    "SpearSettings",
    "StateMismatchError",
    "StepReward",
    "ToolCount",
    "ToolShape",
    "Trigger",
    "VoidFilter",
    "aggregate_loss",
    "average_tokens",
    "bind_policy_loss",
    "calibrate_covariance_bounds",
    "cispo_loss",
    "compose_reward",
    "cosine_decay",
    "cosine_warmup",
    "covariance",
    "covariance_clip_mask",
    "discounted_returns",
    "episode_advantages",
    "estimate",
    "filter_rows",
    "find_covariance_quantiles",
    "follow_entropy",
    "follow_novelty",
    "follow_success",
    "gae_advantages",
    "gigpo_advantages",
    "group_advantages",
    "group_statistics",
    "gspo_loss",
    "has_repetition",
    "is_incomplete",
    "is_unreadable",
    "keep_high_variance_groups",
    "kl_cov_loss",
    "kl_divergence",
    "needs_critic",
    "overlong_mask",
    "policy_loss",
    "recalibrate_advantages",
    "rloo_advantages",
    "sequence_entropy",
    "spear_loss",
    "token_entropy",
    "tool_call_reward",
    "value_loss",
    "void_turn_mask",
    "weigh_rows",
    "whiten_advantages",
]

_HOMES = (
    "spear_envs.core.rewards",
    *(f"{__name__}.{home}" for home in ("choices", "registry", "responses", "rows", "schema", "settings")),
    *(
        f"{__name__}.{home}"
        for home in ("advantages", "clipping", "critic", "estimators", "filters", "losses", "objective", "replay")
    ),
)
"""Modules of the names above: first those without torch, which takes a second to import."""


def __getattr__(name: str) -> Any:
    if not name.startswith("_"):
        for home in _HOMES:
            module = import_module(home)
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

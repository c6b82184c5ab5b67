"""The SPEAR paper as pure functions over tensors, two buffers and one record of settings; no verl, no Ray."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spear_envs.core.rewards import (
        compose_reward as compose_reward,
    )
    from spear_envs.core.rewards import (
        cosine_decay as cosine_decay,
    )
    from spear_envs.core.rewards import (
        cosine_warmup as cosine_warmup,
    )
    from spear_envs.core.rewards import (
        tool_call_reward as tool_call_reward,
    )
    from spear_training.algorithms.advantages import (
        GigpoAdvantages as GigpoAdvantages,
    )
    from spear_training.algorithms.advantages import (
        GroupStatistics as GroupStatistics,
    )
    from spear_training.algorithms.advantages import (
        discounted_returns as discounted_returns,
    )
    from spear_training.algorithms.advantages import (
        gigpo_advantages as gigpo_advantages,
    )
    from spear_training.algorithms.advantages import (
        group_advantages as group_advantages,
    )
    from spear_training.algorithms.advantages import (
        group_statistics as group_statistics,
    )
    from spear_training.algorithms.advantages import (
        rloo_advantages as rloo_advantages,
    )
    from spear_training.algorithms.choices import (
        Aggregation as Aggregation,
    )
    from spear_training.algorithms.choices import (
        BoundsMode as BoundsMode,
    )
    from spear_training.algorithms.choices import (
        ClipBudget as ClipBudget,
    )
    from spear_training.algorithms.choices import (
        Coupling as Coupling,
    )
    from spear_training.algorithms.choices import (
        CovarianceScope as CovarianceScope,
    )
    from spear_training.algorithms.choices import (
        FormatMode as FormatMode,
    )
    from spear_training.algorithms.choices import (
        GroupWeight as GroupWeight,
    )
    from spear_training.algorithms.choices import (
        ReplayUnit as ReplayUnit,
    )
    from spear_training.algorithms.choices import (
        Singleton as Singleton,
    )
    from spear_training.algorithms.choices import (
        StepReward as StepReward,
    )
    from spear_training.algorithms.choices import (
        ToolCount as ToolCount,
    )
    from spear_training.algorithms.choices import (
        ToolShape as ToolShape,
    )
    from spear_training.algorithms.choices import (
        Trigger as Trigger,
    )
    from spear_training.algorithms.choices import (
        VoidFilter as VoidFilter,
    )
    from spear_training.algorithms.clipping import (
        calibrate_covariance_bounds as calibrate_covariance_bounds,
    )
    from spear_training.algorithms.clipping import (
        covariance as covariance,
    )
    from spear_training.algorithms.clipping import (
        covariance_clip_mask as covariance_clip_mask,
    )
    from spear_training.algorithms.clipping import (
        find_covariance_quantiles as find_covariance_quantiles,
    )
    from spear_training.algorithms.critic import (
        episode_advantages as episode_advantages,
    )
    from spear_training.algorithms.critic import (
        gae_advantages as gae_advantages,
    )
    from spear_training.algorithms.critic import (
        value_loss as value_loss,
    )
    from spear_training.algorithms.critic import (
        whiten_advantages as whiten_advantages,
    )
    from spear_training.algorithms.estimators import (
        average_tokens as average_tokens,
    )
    from spear_training.algorithms.estimators import (
        estimate as estimate,
    )
    from spear_training.algorithms.estimators import (
        needs_critic as needs_critic,
    )
    from spear_training.algorithms.filters import (
        filter_rows as filter_rows,
    )
    from spear_training.algorithms.filters import (
        has_repetition as has_repetition,
    )
    from spear_training.algorithms.filters import (
        is_incomplete as is_incomplete,
    )
    from spear_training.algorithms.filters import (
        is_unreadable as is_unreadable,
    )
    from spear_training.algorithms.filters import (
        keep_high_variance_groups as keep_high_variance_groups,
    )
    from spear_training.algorithms.filters import (
        overlong_mask as overlong_mask,
    )
    from spear_training.algorithms.filters import (
        void_turn_mask as void_turn_mask,
    )
    from spear_training.algorithms.losses import (
        PolicyLoss as PolicyLoss,
    )
    from spear_training.algorithms.losses import (
        bind_policy_loss as bind_policy_loss,
    )
    from spear_training.algorithms.losses import (
        cispo_loss as cispo_loss,
    )
    from spear_training.algorithms.losses import (
        gspo_loss as gspo_loss,
    )
    from spear_training.algorithms.losses import (
        kl_cov_loss as kl_cov_loss,
    )
    from spear_training.algorithms.losses import (
        kl_divergence as kl_divergence,
    )
    from spear_training.algorithms.losses import (
        policy_loss as policy_loss,
    )
    from spear_training.algorithms.objective import (
        CovarianceClip as CovarianceClip,
    )
    from spear_training.algorithms.objective import (
        SpearLoss as SpearLoss,
    )
    from spear_training.algorithms.objective import (
        aggregate_loss as aggregate_loss,
    )
    from spear_training.algorithms.objective import (
        sequence_entropy as sequence_entropy,
    )
    from spear_training.algorithms.objective import (
        spear_loss as spear_loss,
    )
    from spear_training.algorithms.objective import (
        token_entropy as token_entropy,
    )
    from spear_training.algorithms.objective import (
        weigh_rows as weigh_rows,
    )
    from spear_training.algorithms.registry import (
        ESTIMATORS as ESTIMATORS,
    )
    from spear_training.algorithms.registry import (
        FILTERS as FILTERS,
    )
    from spear_training.algorithms.registry import (
        GAMMA as GAMMA,
    )
    from spear_training.algorithms.registry import (
        MU as MU,
    )
    from spear_training.algorithms.registry import (
        POLICY_LOSSES as POLICY_LOSSES,
    )
    from spear_training.algorithms.registry import (
        Registry as Registry,
    )
    from spear_training.algorithms.registry import (
        follow_entropy as follow_entropy,
    )
    from spear_training.algorithms.registry import (
        follow_novelty as follow_novelty,
    )
    from spear_training.algorithms.registry import (
        follow_success as follow_success,
    )
    from spear_training.algorithms.replay import (
        BaselineBuffer as BaselineBuffer,
    )
    from spear_training.algorithms.replay import (
        ReplayBuffer as ReplayBuffer,
    )
    from spear_training.algorithms.replay import (
        ReplayDraw as ReplayDraw,
    )
    from spear_training.algorithms.replay import (
        ReplayEntry as ReplayEntry,
    )
    from spear_training.algorithms.replay import (
        ReplayGate as ReplayGate,
    )
    from spear_training.algorithms.replay import (
        recalibrate_advantages as recalibrate_advantages,
    )
    from spear_training.algorithms.rows import (
        COLUMNS as COLUMNS,
    )
    from spear_training.algorithms.rows import (
        RowTable as RowTable,
    )
    from spear_training.algorithms.rows import (
        Span as Span,
    )
    from spear_training.algorithms.schema import (
        SettingsError as SettingsError,
    )
    from spear_training.algorithms.schema import (
        StateMismatchError as StateMismatchError,
    )
    from spear_training.algorithms.settings import (
        AdvantageSettings as AdvantageSettings,
    )
    from spear_training.algorithms.settings import (
        BaselineSettings as BaselineSettings,
    )
    from spear_training.algorithms.settings import (
        ClipSettings as ClipSettings,
    )
    from spear_training.algorithms.settings import (
        CovarianceSettings as CovarianceSettings,
    )
    from spear_training.algorithms.settings import (
        CriticSettings as CriticSettings,
    )
    from spear_training.algorithms.settings import (
        FilterSettings as FilterSettings,
    )
    from spear_training.algorithms.settings import (
        KlSettings as KlSettings,
    )
    from spear_training.algorithms.settings import (
        LossSettings as LossSettings,
    )
    from spear_training.algorithms.settings import (
        ReplaySettings as ReplaySettings,
    )
    from spear_training.algorithms.settings import (
        RewardSettings as RewardSettings,
    )
    from spear_training.algorithms.settings import (
        SamplingSettings as SamplingSettings,
    )
    from spear_training.algorithms.settings import (
        SilSettings as SilSettings,
    )
    from spear_training.algorithms.settings import (
        SpearSettings as SpearSettings,
    )

_HOMES = (
    "spear_envs.core.rewards",
    *(f"{__name__}.{home}" for home in ("choices", "registry", "schema", "settings", "rows")),
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

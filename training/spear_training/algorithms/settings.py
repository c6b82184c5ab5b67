"""Settings of SPEAR: the ``spear:`` node of a training configuration.

Defaults are the library's own choices; the presets of the paper and of the authors' code override them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from pydantic.dataclasses import dataclass

from spear_training.algorithms.branching import BranchSettings
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
    ToolCount,
    ToolShape,
    VoidFilter,
)
from spear_training.algorithms.curriculum import CurriculumSettings
from spear_training.algorithms.errors import SettingsError
from spear_training.algorithms.records import STRICT, Record, number
from spear_training.algorithms.registry import ESTIMATORS, FILTERS, GAMMA, MU, POLICY_LOSSES, Registry

Metrics = Mapping[str, float]
NO_METRICS: Metrics = {}


@dataclass(frozen=True, config=STRICT)
class SilSettings(Record, path="spear.sil"):
    """Self-imitation from replayed rows."""

    enabled: bool = True
    coupling: Coupling = Coupling.JOINT
    gamma: str = "cosine"
    """Schedule of the weight: one of those in :mod:`~spear_training.algorithms.schedules`, or ``module:function``."""
    gamma_options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the schedule."""
    warmup_steps: int = number(200, at_least=0)
    trigger_ratio: float = number(1.0, above=0)
    """Replay starts when the buffer holds this multiple of its capacity."""
    always_add: bool = True
    """Whether a step with replay also adds its own rows."""

    def check(self) -> None:
        GAMMA.check(self.gamma, 1, self.warmup_steps, NO_METRICS, options=self.gamma_options)

    def weight(self, t: int, metrics: Metrics = NO_METRICS) -> float:
        """gamma at global step ``t`` from 1 (``eq:gamma``), by the last step's metrics; 0 without self-imitation."""
        if not self.enabled:
            return 0.0
        return _weigh(GAMMA, self.gamma, t, self.warmup_steps, metrics, self.gamma_options)


@dataclass(frozen=True, config=STRICT)
class RewardSettings(Record, path="spear.reward"):
    """Composition of a trajectory's reward (``eq:rewardtotal``)."""

    success: float = 1.0
    failure: float = -1.0
    format: FormatMode = FormatMode.BONUS
    tool_count: ToolCount = ToolCount.VALID
    tool_shape: ToolShape = ToolShape.LINEAR
    mu: str = "cosine"
    """Schedule of the weight: one of those in :mod:`~spear_training.algorithms.schedules`, or ``module:function``."""
    mu_options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the schedule."""
    decay_steps: int = number(200, at_least=0)

    def check(self) -> None:
        MU.check(self.mu, 1, self.decay_steps, NO_METRICS, options=self.mu_options)
        if self.success <= self.failure:
            raise SettingsError(
                f"spear.reward.success ({self.success}) must exceed spear.reward.failure ({self.failure})"
            )

    def weight(self, t: int, metrics: Metrics = NO_METRICS) -> float:
        """mu at global step ``t``, which starts at 1 (``eq:mudecay``); ``metrics`` are those of the previous step."""
        return _weigh(MU, self.mu, t, self.decay_steps, metrics, self.mu_options)


@dataclass(frozen=True, config=STRICT)
class BaselineSettings(Record, path="spear.baseline"):
    """Buffer D_R of group means, from which replayed advantages are recalibrated (``eq:recalibrateadv``)."""

    capacity: int = number(10240, at_least=0)
    """Number of groups; 0 switches recalibration off."""


@dataclass(frozen=True, config=STRICT)
class ReplaySettings(Record, path="spear.replay"):
    """Replay buffer D (``alg:sal``)."""

    capacity: int = number(2048, at_least=1)
    unit: ReplayUnit = ReplayUnit.SAMPLE
    max_age: int | None = number(5, at_least=0)
    """Steps after which an entry is dropped; ``null`` keeps entries forever."""
    require_tool_call: bool = False
    power_of_two: bool = False
    """Draw the largest power of two of entries, as the authors' code does."""


@dataclass(frozen=True, config=STRICT)
class CovarianceSettings(Record, path="spear.cov"):
    """Covariance clipping (``eq:clipuniform``); of replayed rows unless ``on_policy`` is set."""

    ratio: float = number(0.02, at_least=0, at_most=1)
    """lambda; 0 switches the clip off."""
    bounds: BoundsMode = BoundsMode.RUNNING
    lower: float | None = None
    upper: float | None = None
    lower_top: float = number(0.2, above=0, at_most=1)
    """Share of largest covariances above the lower bound (running), or whose mean it is (percentile)."""
    upper_top: float = number(0.0002, above=0, at_most=1)
    momentum: float = number(0.5, at_least=0, at_most=1)
    """Weight of the earlier bounds at each replay, if they are running."""
    scope: CovarianceScope = CovarianceScope.BATCH
    budget: ClipBudget = ClipBudget.BATCH
    floor_one: bool = False
    """Clip at least one token if there is a candidate, even if the budget is smaller."""
    on_policy: bool = False
    on_policy_ratio: float = number(0.0002, at_least=0, at_most=1)
    on_policy_lower: float = 1.0
    on_policy_upper: float = 5.0

    def check(self) -> None:
        if self.bounds is BoundsMode.FIXED:
            if self.lower is None or self.upper is None:
                raise SettingsError("spear.cov.bounds=fixed needs spear.cov.lower and spear.cov.upper")
            _check_order("spear.cov.lower", self.lower, "spear.cov.upper", self.upper)
        _check_order("spear.cov.upper_top", self.upper_top, "spear.cov.lower_top", self.lower_top)
        _check_order(
            "spear.cov.on_policy_lower", self.on_policy_lower, "spear.cov.on_policy_upper", self.on_policy_upper
        )


@dataclass(frozen=True, config=STRICT)
class ClipSettings(Record, path="spear.clip"):
    """Clipping of the policy ratio (``eq:silvanilladetail``)."""

    low: float = number(0.2, at_least=0, at_most=1)
    high: float = number(0.28, at_least=0)
    dual: float | None = number(10.0, above=1)
    """C: cap of the loss at -C A for negative A; ``null`` switches it off."""
    max_log_ratio: float | None = number(20.0, above=0)


@dataclass(frozen=True, config=STRICT)
class KlSettings(Record, path="spear.kl"):
    """KL divergence to the reference policy (``eq:kl``)."""

    coefficient: float = number(0.0, at_least=0)


@dataclass(frozen=True, config=STRICT)
class AdvantageSettings(Record, path="spear.advantage"):
    """Advantage estimation of on-policy rows."""

    estimator: str = "grpo"
    """One of those in :mod:`~spear_training.algorithms.estimators`, or ``module:function``."""
    normalize_std: bool = False
    weight: GroupWeight = GroupWeight.TRAJECTORY
    singleton: Singleton = Singleton.ZERO
    step_weight: float = number(1.0, at_least=0)
    """GiGPO and stepwise: weight of the step-level advantage."""
    gamma: float = number(0.95, at_least=0, at_most=1)
    """GiGPO and stepwise: discount of step returns."""

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator reads a critic's values."""
        return bool(getattr(ESTIMATORS.find(self.estimator), "critic", False))

    def check(self) -> None:
        ESTIMATORS.check(self.estimator, "rows", "settings")
        if self.estimator in ("rloo", "gae") and self.normalize_std:
            raise SettingsError(
                f"spear.advantage.normalize_std has no effect with estimator {self.estimator}: set it to false"
            )


@dataclass(frozen=True, config=STRICT)
class CriticSettings(Record, path="spear.critic"):
    """PPO's critic, if the estimator needs one (``sec:ppogrpo``); its optimiser is verl's ``critic.optim``."""

    gamma: float = number(1.0, at_least=0, at_most=1)
    """Discount from one token of the policy to the next."""
    lam: float = number(1.0, at_least=0, at_most=1)
    """lambda of the estimator: 1 compares the full return with the value, 0 one step."""
    whiten: bool = True
    """Shift and scale the advantages of a step to mean 0 and variance 1 over its loss tokens."""
    clip: float | None = number(0.5, above=0)
    """Largest change of a value that still has a gradient; ``null`` switches the clip off."""
    warmup: int = number(0, at_least=0)
    """Initial steps in which only the critic learns."""


@dataclass(frozen=True, config=STRICT)
class LossSettings(Record, path="spear.loss"):
    """Policy loss of tokens and its aggregation."""

    policy: str = "vanilla"
    """One of those in :mod:`~spear_training.algorithms.losses`, or ``module:function``."""
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the policy loss besides those of ``spear.clip``."""

    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_SUM_NORM
    scale_factor: float | None = number(None, above=0)
    """L of the -norm modes; ``null``: the maximum response length."""

    def check(self) -> None:
        clip = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None, "max_log_ratio": None}
        tensors = ("log_probs", "old_log_probs", "advantages", "mask")
        POLICY_LOSSES.check(self.policy, *tensors, options=self.policy_options, **clip)


@dataclass(frozen=True, config=STRICT)
class FilterSettings(Record, path="spear.filter"):
    """Filters of Dr.BoT (``sec:botdetails``)."""

    groups: float = number(0.75, above=0, at_most=1)
    """Share of groups of largest reward deviation that is kept; 1 keeps all."""
    overlong: bool = True
    void: VoidFilter = VoidFilter.TRAJECTORY
    repetition: bool = True
    exclude_from_baseline: bool = False
    """Whether filtered rows are also left out of group means."""
    custom: tuple[str, ...] = ()
    """Further filters of rows, each as ``module:function``."""

    def check(self) -> None:
        for name in self.custom:
            FILTERS.check(name, "rows", "settings")


@dataclass(frozen=True, config=STRICT)
class SamplingSettings(Record, path="spear.sampling"):
    """Dynamic sampling (DAPO): more tasks are drawn while too many groups have equal rewards."""

    enabled: bool = False
    max_rounds: int = number(3, at_least=1)
    """Maximum batches of tasks in a step, which then trains on the groups that differ."""


@dataclass(frozen=True, config=STRICT)
class SpearSettings(Record, path="spear"):
    """All settings of SPEAR. Immutable: :func:`dataclasses.replace` and :meth:`override` make changed copies."""

    sil: SilSettings = field(default_factory=SilSettings)
    reward: RewardSettings = field(default_factory=RewardSettings)
    baseline: BaselineSettings = field(default_factory=BaselineSettings)
    replay: ReplaySettings = field(default_factory=ReplaySettings)
    cov: CovarianceSettings = field(default_factory=CovarianceSettings)
    clip: ClipSettings = field(default_factory=ClipSettings)
    kl: KlSettings = field(default_factory=KlSettings)
    advantage: AdvantageSettings = field(default_factory=AdvantageSettings)
    loss: LossSettings = field(default_factory=LossSettings)
    critic: CriticSettings = field(default_factory=CriticSettings)
    filter: FilterSettings = field(default_factory=FilterSettings)
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    curriculum: CurriculumSettings = field(default_factory=CurriculumSettings)
    branch: BranchSettings = field(default_factory=BranchSettings)

    def override(self, mapping: Mapping[str, Any]) -> SpearSettings:
        """A copy with the settings of a nested mapping. Raises SettingsError like :meth:`from_mapping`."""
        merged: dict[str, Any] = self.to_mapping()
        for node, values in mapping.items():
            merged[node] = {**merged[node], **values} if node in merged and isinstance(values, Mapping) else values
        return SpearSettings.from_mapping(merged)


def _weigh(
    registry: Registry[Any], name: str, t: int, steps: int, metrics: Metrics, options: Mapping[str, Any]
) -> float:
    """Ask a schedule. Raises SettingsError unless its weight is a finite number of 0 or more."""
    value = registry.call(name, t, steps, metrics, **options)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise SettingsError(f"{registry.setting}={name} gave {value!r}: a weight is a finite number of 0 or more")
    return float(value)


def _check_order(low_name: str, low: float, high_name: str, high: float) -> None:
    if low > high:
        raise SettingsError(f"{low_name} ({low}) must not exceed {high_name} ({high})")

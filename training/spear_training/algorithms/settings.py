"""Settings of SPEAR: the nodes of a training configuration that the algorithm reads.

Defaults are the library's own choices; the presets of the paper and of the authors' code override them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import field
from typing import Any

from pydantic.dataclasses import dataclass

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
from spear_training.algorithms.curriculum import BranchSettings, CurriculumSettings
from spear_training.algorithms.registry import ESTIMATORS, FILTERS, GAMMA, MU, POLICY_LOSSES, Metrics, Registry
from spear_training.algorithms.schema import STRICT, Record, SettingsError, is_number, number

NO_METRICS: Metrics = {}


@dataclass(frozen=True, config=STRICT)
class SilSettings(Record, path="sil"):
    """Self-imitation from replayed rows."""

    enabled: bool = True
    """Whether rows are replayed."""
    coupling: Coupling = Coupling.JOINT
    """joint: one loss reads new and replayed rows; sequential: an update each."""
    gamma: str = "cosine"
    """Schedule of the weight: cosine, constant, none, entropy, success, or ``module:function``."""
    gamma_options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the schedule."""
    warmup_steps: int = number(200, at_least=0)
    """Steps in which the weight rises."""
    trigger_ratio: float = number(1.0, above=0)
    """Replay starts when the buffer holds this multiple of its capacity."""
    trigger: Trigger = Trigger.STORED
    """Rows that count for it: all of the buffer (stored), or those above P50 (eligible)."""
    min_rows: int = number(1, at_least=1)
    """Fewest rows of a draw that are trained on; a smaller draw is left out."""
    always_add: bool = True
    """Whether a step with replay also adds its own rows."""

    def check(self) -> None:
        GAMMA.check(self.gamma, 1, self.warmup_steps, NO_METRICS, options=self.gamma_options)
        _check_first(GAMMA, self.gamma, self.warmup_steps, self.gamma_options)

    def weight(self, t: int, metrics: Metrics = NO_METRICS) -> float:
        """Return the gamma at global step ``t`` from 1 (``eq:gamma``), by the last step's metrics; 0 without
        self-imitation.
        """
        if not self.enabled:
            return 0.0
        return _weigh(GAMMA, self.gamma, t, self.warmup_steps, metrics, self.gamma_options)


@dataclass(frozen=True, config=STRICT)
class RewardSettings(Record, path="reward"):
    """Composition of a trajectory's reward (``eq:rewardtotal``)."""

    success: float = 1.0
    """Reward of a won episode."""
    failure: float = -1.0
    """Reward of a lost one."""
    format: FormatMode = FormatMode.BONUS
    """Reward of well-formed turns."""
    tool_count: ToolCount = ToolCount.VALID
    """Messages that count as a tool call."""
    tool_shape: ToolShape = ToolShape.LINEAR
    """How the reward grows with the calls."""
    mu: str = "cosine"
    """Schedule of the weight: cosine, constant, none, success, novelty, or ``module:function``."""
    mu_options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the schedule."""
    decay_steps: int = number(200, at_least=0)
    """Steps in which the tool-call reward fades."""
    function: str | None = None
    """Your own outcome instead of the environment's: FILE.py:FUNCTION, called as verl calls one."""
    function_options: Mapping[str, Any] = field(default_factory=dict)
    """Its keywords besides verl's four."""

    def check(self) -> None:
        MU.check(self.mu, 1, self.decay_steps, NO_METRICS, options=self.mu_options)
        _check_first(MU, self.mu, self.decay_steps, self.mu_options)
        if self.success <= self.failure:
            raise SettingsError(f"reward.success ({self.success}) must exceed reward.failure ({self.failure})")

    def weight(self, t: int, metrics: Metrics = NO_METRICS) -> float:
        """Return the mu at global step ``t``, which starts at 1 (``eq:mudecay``); ``metrics`` are those of the previous
        step.
        """
        return _weigh(MU, self.mu, t, self.decay_steps, metrics, self.mu_options)


@dataclass(frozen=True, config=STRICT)
class BaselineSettings(Record, path="baseline"):
    """Buffer D_R of group means, from which replayed advantages are recalibrated (``eq:recalibrateadv``)."""

    capacity: int = number(10240, at_least=0)
    """Number of groups; 0 switches recalibration off."""


@dataclass(frozen=True, config=STRICT)
class ReplaySettings(Record, path="replay"):
    """Replay buffer D (``alg:sal``)."""

    capacity: int = number(2048, at_least=1)
    """Entries (see ``unit``) at which the buffer is drawn from and emptied."""
    unit: ReplayUnit = ReplayUnit.SAMPLE
    """An entry: a row (sample), or all rows of an episode (trajectory)."""
    max_age: int | None = number(5, at_least=1)
    """Steps after which an entry is dropped; ``null`` keeps entries forever."""
    require_tool_call: bool = False
    """Whether only episodes with a tool call enter."""
    power_of_two: bool = False
    """Draw the largest power of two of entries, as the authors' code does."""


@dataclass(frozen=True, config=STRICT)
class CovarianceSettings(Record, path="cov"):
    """Covariance clipping (``eq:clipuniform``); of replayed rows unless ``on_policy`` is set."""

    ratio: float = number(0.02, at_least=0, at_most=1)
    """lambda; 0 switches the clip off."""
    bounds: BoundsMode = BoundsMode.RUNNING
    """Where the bounds come from: fixed, percentile or running."""
    lower: float | None = None
    """omega_lb with fixed bounds: smallest covariance of a candidate."""
    upper: float | None = None
    """omega_ub with fixed bounds."""
    lower_top: float = number(0.2, above=0, at_most=1)
    """Share of largest covariances above the lower bound (running), or whose mean it is (percentile)."""
    upper_top: float = number(0.0002, above=0, at_most=1)
    """The same for the upper bound."""
    momentum: float = number(0.5, at_least=0, at_most=1)
    """Weight of the earlier bounds at each replay, if they are running."""
    scope: CovarianceScope = CovarianceScope.BATCH
    """Tokens over which means of a covariance are taken."""
    budget: ClipBudget = ClipBudget.BATCH
    """Tokens of which lambda is a share."""
    floor_one: bool = False
    """Clip at least one token if there is a candidate, even if the budget is smaller."""
    on_policy: bool = False
    """Whether rows of the step are clipped, too."""
    on_policy_ratio: float = number(0.0002, at_least=0, at_most=1)
    """lambda of these."""
    on_policy_lower: float = 1.0
    """Their lower bound."""
    on_policy_upper: float = 5.0
    """Their upper bound."""

    def check(self) -> None:
        if self.bounds is BoundsMode.FIXED:
            if self.lower is None or self.upper is None:
                raise SettingsError("cov.bounds=fixed needs cov.lower and cov.upper")
            _check_order("cov.lower", self.lower, "cov.upper", self.upper)
        _check_order("cov.upper_top", self.upper_top, "cov.lower_top", self.lower_top)
        _check_order("cov.on_policy_lower", self.on_policy_lower, "cov.on_policy_upper", self.on_policy_upper)


@dataclass(frozen=True, config=STRICT)
class ClipSettings(Record, path="clip"):
    """Clipping of the policy ratio (``eq:silvanilladetail``)."""

    low: float = number(0.2, at_least=0, at_most=1)
    """Lower range of the ratio: from 1 - low."""
    high: float = number(0.28, at_least=0)
    """Upper range: to 1 + high."""
    dual: float | None = number(10.0, above=1)
    """C: cap of the loss at -C A for negative A; ``null`` switches it off."""
    max_log_ratio: float | None = number(20.0, above=0)
    """Largest size of the ratio's logarithm; ``null`` does not limit it."""


@dataclass(frozen=True, config=STRICT)
class KlSettings(Record, path="kl"):
    """KL divergence to the reference policy (``eq:kl``)."""

    coefficient: float = number(0.0, at_least=0)
    """beta: weight of the KL term (k3) in the loss; 0 needs no reference policy."""


@dataclass(frozen=True, config=STRICT)
class AdvantageSettings(Record, path="advantage"):
    """Advantage estimation of on-policy rows."""

    estimator: str = "grpo"
    """grpo, rloo, gigpo, stepwise, gae (with a critic), or ``module:function``."""
    normalize_std: bool = False
    """Whether advantages are divided by the deviation of their group."""
    weight: GroupWeight = GroupWeight.TRAJECTORY
    """Unit that counts once in the mean of a group: a trajectory or a row."""
    singleton: Singleton = Singleton.ZERO
    """Advantage in a group of one: zero, or its raw reward."""
    step_weight: float = number(1.0, at_least=0)
    """GiGPO and stepwise: weight of the step-level advantage."""
    step_reward: StepReward = StepReward.OUTCOME
    """GiGPO and stepwise: reward of a turn, from the outcome (paid at the end) or the environment's own."""
    gamma: float = number(0.95, at_least=0, at_most=1)
    """GiGPO and stepwise: discount of step returns."""

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator reads a critic's values."""
        if self.estimator in ESTIMATORS.own:  # known without torch
            return self.estimator == "gae"
        return bool(getattr(ESTIMATORS.find(self.estimator), "critic", False))

    def check(self) -> None:
        ESTIMATORS.check(self.estimator, "rows", "settings")
        if self.estimator in ("rloo", "gae") and self.normalize_std:
            raise SettingsError(
                f"advantage.normalize_std has no effect with estimator {self.estimator}: set it to false"
            )


@dataclass(frozen=True, config=STRICT)
class CriticSettings(Record, path="critic"):
    """PPO's critic, if the estimator needs one (``sec:ppogrpo``)."""

    lr: float = number(1e-5, at_least=0)
    """Highest learning rate."""
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
class LossSettings(Record, path="loss"):
    """Policy loss of tokens and its aggregation."""

    policy: str = "vanilla"
    """vanilla, gspo, cispo, kl_cov, or ``module:function``."""
    policy_options: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of the policy loss besides those of ``clip``."""

    aggregation: Aggregation = Aggregation.SEQ_MEAN_TOKEN_SUM_NORM
    """How the losses of tokens become one number."""
    scale_factor: float | None = number(None, above=0)
    """L of the -norm modes; ``null``: the maximum response length."""
    entropy_coefficient: float = number(0.0, at_least=0)
    """Weight of the entropy bonus, aggregated as the policy loss."""

    def check(self) -> None:
        clip = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None, "max_log_ratio": None}
        tensors = ("log_probs", "old_log_probs", "advantages", "mask")
        POLICY_LOSSES.check(self.policy, *tensors, options=self.policy_options, **clip)
        share = self.policy_options.get("share", 1.0)
        if self.policy == "kl_cov" and not 0 < share <= 1:
            raise SettingsError(f"loss.policy=kl_cov: its option share must be above 0 and at most 1, not {share!r}")


@dataclass(frozen=True, config=STRICT)
class FilterSettings(Record, path="filter"):
    """Filters of Dr.BoT (``sec:botdetails``)."""

    groups: float = number(0.75, above=0, at_most=1)
    """Share of groups of largest reward deviation that is kept; 1 keeps all."""
    overlong: bool = True
    """Whether rows that were cut at their longest length leave the loss."""
    void: VoidFilter = VoidFilter.TRAJECTORY
    """Rows that leave the loss for a turn without an action: nothing, the turn, the trajectory; or incomplete rows."""
    repetition: bool = True
    """Whether rows that repeat themselves leave the loss."""
    unreadable: bool = True
    """Whether rows with characters that no text encodes leave the loss."""
    exclude_from_baseline: bool = False
    """Whether filtered rows are also left out of group means."""
    custom: tuple[str, ...] = ()
    """Further filters of rows, each as ``module:function``."""

    def check(self) -> None:
        for name in self.custom:
            FILTERS.check(name, "rows", "settings")


@dataclass(frozen=True, config=STRICT)
class SamplingSettings(Record, path="sampling"):
    """Dynamic sampling (DAPO): more tasks are drawn while too many groups have equal rewards."""

    enabled: bool = False
    """Whether more tasks are drawn."""
    max_rounds: int = number(3, at_least=1)
    """Maximum batches of tasks in a step, which then trains on the groups that differ."""


@dataclass(frozen=True, config=STRICT)
class SpearSettings(Record, path=""):
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

    def check(self) -> None:
        least, most, what = self.sil.min_rows, self.replay.capacity, f"replay.capacity={self.replay.capacity}"
        if self.replay.power_of_two:
            most = 1 << (most.bit_length() - 1)
            what = f"the {most} rows of a draw by replay.power_of_two from {what}"
        if self.sil.enabled and self.replay.unit is ReplayUnit.SAMPLE and least > most:
            raise SettingsError(f"sil.min_rows={least} exceeds {what}: nothing would be replayed")

    def override(self, mapping: Mapping[str, Any]) -> SpearSettings:
        """Return a copy with the settings of a nested mapping. Raises SettingsError like :meth:`from_mapping`."""
        merged: dict[str, Any] = self.to_mapping()
        for node, values in mapping.items():
            merged[node] = {**merged[node], **values} if node in merged and isinstance(values, Mapping) else values
        return SpearSettings.from_mapping(merged)


def _weigh(
    registry: Registry[Any], name: str, t: int, steps: int, metrics: Metrics, options: Mapping[str, Any]
) -> float:
    """Ask a schedule. Raises SettingsError unless its weight is a finite number of 0 or more."""
    value = registry.call(name, t, steps, metrics, **options)
    if not is_number(value) or not 0 <= value <= sys.float_info.max:
        raise SettingsError(f"{registry.setting}={name} gave {value!r}: a weight is a finite number of 0 or more")
    return float(value)


def _check_first(registry: Registry[Any], name: str, steps: int, options: Mapping[str, Any]) -> None:
    """Raise SettingsError unless our own schedule ``name`` has a weight at the first step; a user's is called later."""
    if name in registry.names:
        _weigh(registry, name, 1, steps, NO_METRICS, options)


def _check_order(low_name: str, low: float, high_name: str, high: float) -> None:
    if low > high:
        raise SettingsError(f"{low_name} ({low}) must not exceed {high_name} ({high})")

"""Covariance-based clipping: tokens with a large covariance of log-prob and advantage leave the loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spear_training.algorithms.choices import ClipBudget, CovarianceScope

SMALL = 1e-6
"""Smaller covariances are rounding errors of equal advantages or equal log-probs."""


def covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor, *, scope: str = "batch") -> Tensor:
    """Return the token covariance (log pi - mean)(A - mean) (``eq:covariance``); no gradient flows through it.

    Args:
        log_probs: [B, T] float, under the current policy.
        advantages: [B] or [B, T].
        mask: [B, T], on for loss tokens.
        scope: means over all valid tokens (``"batch"``) or over the valid tokens of the same position (``"position"``).

    Returns:
        [B, T], 0 off the mask.

    Raises:
        ValueError: shapes or scope do not fit.
    """
    on = check_tokens(log_probs, mask)
    # The covariance chooses tokens. It is not a term of the loss, so nothing is differentiated through it.
    values = log_probs.detach()
    weights = expand_advantages(advantages, log_probs).detach()
    if CovarianceScope(scope) is CovarianceScope.BATCH:
        count, mean = on.sum().clamp(min=1), lambda x: torch.where(on, x, 0.0).sum() / count
    else:
        count, mean = on.sum(0).clamp(min=1), lambda x: torch.where(on, x, 0.0).sum(0) / count
    return torch.where(on, (values - mean(values)) * (weights - mean(weights)), 0.0)


def covariance_clip_mask(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    ratio: float,
    lower: float,
    upper: float,
    exclude: Tensor | None = None,
    scope: str = "batch",
    budget: str = "batch",
    floor_one: bool = False,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Return the mask M of ``eq:regularizationmask``: floor(ratio N) candidates, drawn uniformly, are removed.

    Candidates are valid tokens with ``lower <= covariance <= upper`` (``eq:clipuniform``), bounds included.

    Args:
        log_probs: [B, T] float; advantages: [B] or [B, T]; mask: [B, T].
        ratio: lambda, the maximum share of the N valid tokens to remove.
        exclude: [B, T], on for tokens that are not candidates, such as those silenced by the ratio clip.
        scope: of the means, as in :func:`covariance`.
        budget: N counts the valid tokens of the batch (``"batch"``) or of each sequence (``"trajectory"``).
        floor_one: raise a budget of 0 to 1, as the authors' code does.
        generator: source of the uniform draw; None: torch's default one.

    Returns:
        bool [B, T], True where the token stays in the loss.

    Raises:
        ValueError: shapes, ratio or choices do not fit.
    """
    if not 0.0 <= ratio <= 1.0:
        raise ValueError(f"ratio must be in 0 to 1, not {ratio}")
    on = check_tokens(log_probs, mask)
    stays = torch.ones_like(on)
    if ratio == 0.0:
        return stays
    cov = covariance(log_probs, advantages, mask, scope=scope)
    candidates = on & (cov >= lower) & (cov <= upper)
    if exclude is not None:
        # A token that another clip has silenced has no gradient to remove: it would use up the budget for nothing.
        candidates &= ~(exclude > 0)
    rows, columns = candidates.nonzero(as_tuple=True)
    # One shuffle serves both budgets: the first k of a shuffled list are a uniform choice, and so are its first k of
    # each row.
    device = generator.device if generator is not None else rows.device
    shuffle = torch.randperm(rows.numel(), generator=generator, device=device).to(rows.device)
    rows, columns = rows[shuffle], columns[shuffle]
    if ClipBudget(budget) is ClipBudget.BATCH:
        size = int(_count_budget(on.sum(), ratio, floor_one))
        rows, columns = rows[:size], columns[:size]
    else:
        by_row = torch.argsort(rows, stable=True)
        rows, columns = rows[by_row], columns[by_row]
        each = torch.bincount(rows, minlength=on.shape[0])
        # Place of each candidate within its row, whose candidates are next to each other after the sort.
        rank = torch.arange(rows.numel(), device=rows.device) - (each.cumsum(0) - each)[rows]
        taken = rank < _count_budget(on.sum(1), ratio, floor_one)[rows]
        rows, columns = rows[taken], columns[taken]
    stays[rows, columns] = False
    return stays


def _count_budget(tokens: Tensor, ratio: float, floor_one: bool) -> Tensor:
    # The small term rounds 0.29 * 100 = 28.999999999999996 to 29.
    size = torch.floor(tokens.to(torch.float64) * ratio + 1e-9).to(torch.int64)
    return size.clamp(min=1) if floor_one else size


def calibrate_covariance_bounds(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    scope: str = "batch",
    lower_top: float = 0.02,
    upper_top: float = 0.0002,
) -> tuple[float, float]:
    """Return the bounds of :func:`covariance_clip_mask` from the first training step
    (``sec:implementation_detail_appdx``).

    Each bound is the mean of the ceil(share n) largest covariances of the n valid tokens.

    Args:
        log_probs: [B, T] float; advantages: [B] or [B, T]; mask: [B, T].
        scope: of the means, as in :func:`covariance`.
        lower_top, upper_top: shares for the lower and the upper bound.

    Raises:
        ValueError: no valid token, or a share outside (0, 1].
    """
    if not (0.0 < lower_top <= 1.0 and 0.0 < upper_top <= 1.0):
        raise ValueError(f"lower_top and upper_top must lie in (0, 1], not {lower_top} and {upper_top}")
    tops = _rank_largest(covariance(log_probs, advantages, mask, scope=scope)[mask > 0], lower_top, upper_top)
    return float(tops[0].mean()), float(tops[1].mean())


def find_covariance_quantiles(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    scope: str = "batch",
    lower_top: float = 0.2,
    upper_top: float = 0.0002,
) -> tuple[float, float]:
    """Return bounds around the (``lower_top`` - ``upper_top``) share of tokens with large covariances.

    Each is the ceil(share n)-th largest covariance of the n valid tokens. Only positive covariances are candidates, so
    both bounds are at least a small positive number.

    Args:
        log_probs: [B, T] float; advantages: [B] or [B, T]; mask: [B, T].
        scope: of the means, as in :func:`covariance`.
        lower_top, upper_top: shares in (0, 1].

    Raises:
        ValueError: no valid token.
    """
    tops = _rank_largest(covariance(log_probs, advantages, mask, scope=scope)[mask > 0], lower_top, upper_top)
    return max(float(tops[0][-1]), SMALL), max(float(tops[1][-1]), SMALL)


def _rank_largest(values: Tensor, *shares: float) -> list[Tensor]:
    """Return the ceil(share n) largest of n values in descending order, float64, for each share; at least one."""
    if not values.numel():
        raise ValueError("no valid token to measure covariance bounds on")
    # As in _count_budget, a small term keeps 0.07 * 100 = 7.000000000000001 from rounding up to 8.
    sizes = [max(1, math.ceil(share * values.numel() - 1e-9)) for share in shares]
    largest = torch.topk(values.double(), max(sizes)).values
    return [largest[:size] for size in sizes]


def check_tokens(values: Tensor, mask: Tensor, name: str = "log_probs") -> Tensor:
    """Return the mask as bool [B, T]. Raises ValueError unless ``values`` and the mask have this shape."""
    if values.dim() != 2 or values.shape != mask.shape:
        raise ValueError(
            f"{name} and mask must have one shape [B, T], not {tuple(values.shape)} and {tuple(mask.shape)}"
        )
    return mask > 0


def expand_advantages(advantages: Tensor, values: Tensor) -> Tensor:
    """Expand advantages [B] or [B, T] to [B, T]. Raises ValueError for other shapes."""
    if advantages.shape == values.shape:
        return advantages
    if advantages.shape != values.shape[:1]:
        raise ValueError(f"advantages must be [B] or [B, T] for {tuple(values.shape)}, not {tuple(advantages.shape)}")
    return advantages[:, None].expand_as(values)

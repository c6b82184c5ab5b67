"""Small batches of random numbers, in float64."""

import torch


def tensor(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def random_batch(seed: int, rows: int = 6, tokens: int = 7):
    """Log-probs with a gradient, old log-probs, advantages of rows, and a mask of about 60 %."""
    generator = torch.Generator().manual_seed(seed)
    log_probs = -torch.rand(rows, tokens, generator=generator, dtype=torch.float64) * 3
    old = log_probs + 0.3 * torch.randn(rows, tokens, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, tokens, generator=generator) < 0.6
    return log_probs.requires_grad_(True), old, advantages, mask

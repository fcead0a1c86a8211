"""Numbers that are drawn, the same every time."""

import torch


def normal(*shape, seed=0, dtype=torch.float32):
    """Normally distributed ones."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def normal_doubles(*shape, seed=0):
    """The same in float64."""
    return normal(*shape, seed=seed, dtype=torch.float64)

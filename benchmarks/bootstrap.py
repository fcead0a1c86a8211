"""How certain a number over seeds is: standard errors and intervals by resampling the seeds."""

import math
from typing import Any

import torch
from torch import Tensor

RESAMPLES = 1000
DOUBLE = torch.float64
Row = dict[str, Any]


def summary(errors: Tensor) -> Row:
    """Root mean square and 99th percentile of errors [seeds, queries]; standard errors by a bootstrap over seeds."""
    drawn = resampled(len(errors), 200)
    percentiles = torch.stack([errors[seeds].quantile(0.99) for seeds in drawn])
    squares = errors.square().mean(1)
    return {
        "rms": float(squares.mean().sqrt()),
        "rms_error": float(squares[drawn].mean(1).sqrt().std()),
        "q99": float(errors.quantile(0.99)),
        "q99_error": float(percentiles.std()),
    }


def resampled(seeds: int, times: int, draw: int = 0) -> Tensor:
    return torch.randint(seeds, (times, seeds), generator=torch.Generator().manual_seed(draw))


def slope(found: dict[int, Tensor]) -> Row:
    """Slope of log root mean square against log size; 95 % interval by a bootstrap over the seeds of every size."""
    x = torch.tensor([math.log(size) for size in found], dtype=DOUBLE)
    weights = (x - x.mean()) / (x - x.mean()).square().sum()
    squares = [errors.square().mean(1) for errors in found.values()]
    drawn = [s[resampled(len(s), RESAMPLES, place)].mean(1) for place, s in enumerate(squares)]
    slopes = torch.stack(drawn, 1).log() / 2 @ weights
    low, high = slopes.quantile(torch.tensor([0.025, 0.975], dtype=DOUBLE)).tolist()
    fitted = float(torch.stack([s.mean() for s in squares]).log() / 2 @ weights)
    return {"from": min(found), "to": max(found), "slope": fitted, "low": low, "high": high}

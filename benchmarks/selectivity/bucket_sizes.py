"""How evenly keys fall into trained buckets: keys of the training texts, of others, of one text, of one place in texts.

Paper: Saap (2025), section 3 and Figure 2. The deviation here is the standard deviation of a head's bucket sizes over
their mean: 0 if all C buckets have the same number of keys, and √((C - 1) / m) for m keys that are spread over them
evenly at random. The paper does not say how it scales its own.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.algorithms.draws import uniforms
from kvsketch.evaluation.results.rows import Row

DRAWS = 10  # samples of every kind, and ranges of positions
KINDS = ("training texts", "other texts", "one other text", "a tenth of positions")


def deviation(buckets: Int64[Tensor, "h m"], count: int) -> Float[Tensor, " h"]:
    """The standard deviation of each head's bucket sizes over their mean."""
    sizes = bucket_sizes(buckets, count)
    return sizes.std(1, correction=0) / sizes.mean(1)


def even_deviation(keys: int, count: int) -> float:
    """The deviation of so many keys spread evenly at random over the buckets, but for chance."""
    return math.sqrt((count - 1) / keys)


def distance(buckets: Int64[Tensor, "h m"], others: Int64[Tensor, "h n"], count: int) -> Float[Tensor, " h"]:
    """How far each head's bucket shares are from those of other keys: half the sum of their differences."""
    here, there = (bucket_sizes(x, count) / x.shape[1] for x in (buckets, others))
    return (here - there).abs().sum(1) / 2


def bucket_sizes(buckets: Int64[Tensor, "h m"], count: int) -> Float[Tensor, "h c"]:
    """Keys in every bucket of every head."""
    sizes = torch.zeros(len(buckets), count, dtype=torch.float64)
    return sizes.scatter_add_(1, buckets, torch.ones_like(buckets, dtype=torch.float64))


def deviations(training: Sequence[Tensor], others: Sequence[Tensor], count: int, draws: int = DRAWS) -> Row:
    """For every kind of sample, each draw's deviations and its distances from all training keys, by head.

    Each text is given as the buckets of its keys, [h n]. All samples have one size, the largest that every kind allows.
    """
    whole = torch.cat(list(training), 1)
    pools = pools_of(training, others, draws)
    size = min(pool.shape[1] for drawn in pools.values() for pool in drawn)
    kinds = Row()
    for number, (kind, drawn) in enumerate(pools.items()):
        samples = [_sample(pool, size, number, draw) for draw, pool in enumerate(drawn)]
        kinds[kind] = {
            "deviations": [deviation(sample, count).tolist() for sample in samples],
            "distances": [distance(sample, whole, count).tolist() for sample in samples],
        }
    return {"keys": size, "kinds": kinds}


def pools_of(training: Sequence[Tensor], others: Sequence[Tensor], draws: int) -> dict[str, list[Tensor]]:
    """The keys' buckets that each draw of each kind is sampled from."""
    shortest = min(text.shape[1] for text in others)
    bounds = [shortest * i // draws for i in range(draws + 1)]
    pools = (
        [torch.cat(list(training), 1)] * draws,
        [torch.cat(list(others), 1)] * draws,
        [others[draw % len(others)] for draw in range(draws)],
        [torch.cat([text[:, start:stop] for text in others], 1) for start, stop in pairwise(bounds)],
    )
    return dict(zip(KINDS, pools, strict=True))


def _sample(pool: Tensor, size: int, kind: int, draw: int) -> Tensor:
    """`size` of a pool's keys, drawn at random without replacement."""
    return pool[:, uniforms(kind, draw, torch.arange(pool.shape[1])).argsort()[:size]]

"""Locality-sensitive hashing, for one head: which keys a query looks at when random directions decide.

What Saap compares with (its appendix B): KDEformer (Zandieh, Han, Daliri, Karbasi 2023), Reformer (Kitaev, Kaiser,
Levskaya 2020) and MagicPIG (Chen et al. 2024). Directions come in as an argument.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

MOST_BITS = 62  # that a bucket's number can have


def signs(x: Float[Tensor, "n d"], directions: Float[Tensor, "r d"]) -> Bool[Tensor, "n r"]:
    """On which side of every direction's plane each vector lies."""
    return x @ directions.T > 0


def number_of(bits: Bool[Tensor, "*n r"]) -> Int64[Tensor, "*n"]:
    """B(x), the bucket's number: bit i counts 2^i. Saap, Equation 2."""
    return (bits.long() << torch.arange(bits.shape[-1], device=bits.device)).sum(-1)


def gray_rank(bits: Bool[Tensor, "*n r"]) -> Int64[Tensor, "*n"]:
    """The rank of the bits among the Gray codes, of which each differs from the next by one bit.

    Bit i of the rank is the parity of all bits from i on.
    """
    from_here_on = bits.long().flip(-1).cumsum(-1).flip(-1)
    return number_of(from_here_on % 2 == 1)


def equal_bins(
    order_of_keys: Int64[Tensor, " n"], order_of_queries: Int64[Tensor, " q"], bins: int
) -> Bool[Tensor, "q n"]:
    """Which keys each query sees: sorted keys are cut into bins of equally many, and a query falls into one of them."""
    count = len(order_of_keys)
    sorted_keys = order_of_keys.sort(stable=True)
    bin_of_place = torch.arange(count) * bins // count
    bin_of_key = torch.empty_like(bin_of_place).scatter_(0, sorted_keys.indices, bin_of_place)
    place = torch.searchsorted(sorted_keys.values, order_of_queries).clamp_max(count - 1)
    return bin_of_place[place][:, None] == bin_of_key


def kdeformer(
    queries: Float[Tensor, "q d"], keys: Float[Tensor, "n d"], directions: Float[Tensor, "r d"], bins: int
) -> Bool[Tensor, "q n"]:
    """Keys in the order of their signs' Gray codes, in equal bins; a query visits the bin that it falls into."""
    if len(directions) > MOST_BITS:
        raise ValueError(f"a bucket's number has at most {MOST_BITS} bits, got {len(directions)} directions")
    keys_at, queries_at = (gray_rank(signs(x, directions)) for x in (keys, queries))
    return equal_bins(keys_at, queries_at, bins)


def reformer(
    queries: Float[Tensor, "q d"], keys: Float[Tensor, "n d"], directions: Float[Tensor, "c d"], bins: int
) -> Bool[Tensor, "q n"]:
    """Keys in the order of the number of the direction they are nearest to, in equal bins. Saap, Equation 3.

    The order of directions means nothing; a bin may hold the keys of several directions, or a part of one direction's.
    """
    keys_at, queries_at = ((x @ directions.T).argmax(1) for x in (keys, queries))
    return equal_bins(keys_at, queries_at, bins)


def magicpig(
    queries: Float[Tensor, "q d"], keys: Float[Tensor, "n d"], directions: Float[Tensor, "t r d"], least: int = 2
) -> Bool[Tensor, "q n"]:
    """Keys that share a bucket with the query in at least two of t tables of r bits each."""
    together = torch.zeros(len(queries), len(keys), dtype=torch.int64)
    for table in directions:
        together += number_of(signs(queries, table))[:, None] == number_of(signs(keys, table))
    return together >= least

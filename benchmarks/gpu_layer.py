"""The layer that `gpu.py` times: its entries, forms of a step, and the definition that answers are compared with."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_machine import Machine
from kvsketch.attention import WeightedTokens, merge, weighted_attention
from kvsketch.kernels.gpu import attention
from kvsketch.kernels.sources import Entries, Segments

HEADS, GROUP, WIDTH = 8, 4, 128
SCALE = WIDTH**-0.5
COPIES = 8  # caches that take turns: together larger than a processor's cache


def entries(on: Machine, count: int, dtype: torch.dtype, weighted: bool = False) -> WeightedTokens:
    keys, values = (on.random(1, HEADS, count, WIDTH).to(dtype) for _ in range(2))
    return WeightedTokens(keys, values, on.random(1, HEADS, count) if weighted else None)


def copies_of(on: Machine, count: int) -> int:
    """How many caches take turns, such that they take 16 GiB at most."""
    return min(COPIES if on.device.type == "cuda" else 2, max(2, (1 << 34) // (count * HEADS * WIDTH * 4)))


def ours(query: Tensor, *held: WeightedTokens, runs: Segments | None = None) -> Any:
    """A step as in a model, which describes anew what each step reads; `runs` are those of the first part."""
    parts = [Entries(tokens, segments=None if place else runs) for place, tokens in enumerate(held)]
    return attention.attend(query, parts, held[0].keys.shape[1], SCALE)


def stock(query: Tensor, tokens: WeightedTokens) -> Tensor:
    return F.scaled_dot_product_attention(query, tokens.keys, tokens.values, scale=SCALE, enable_gqa=True)


def allowed(dtype: torch.dtype) -> float:
    """How far an answer may be from the definition: the error that its own rounding causes."""
    return 2 * torch.finfo(dtype).eps + 1e-5


def held_against(
    found: Any, query: Tensor, parts: Sequence[Entries], most: float, visible: Tensor | None = None
) -> None:
    """Raise an error if the answer of any head is farther than `most` from the definition in float64."""
    for head in range(query.shape[1] // GROUP):
        mine = slice(head * GROUP, (head + 1) * GROUP)
        right = merge(
            *(
                weighted_attention(
                    query[:, mine].double(), in_float64(part.tokens, here), SCALE,
                    visible=visible if part.segments is None else part.segments.mask(part.tokens.count)[:, here],
                )
                for part in parts
                for here in places_of(head, part)
            )
        )  # fmt: skip
        error = float((found.out[:, mine].double() - right.out).norm() / right.out.norm())
        assert error < most, f"head {head}: an error of {error:.1e}, and {most:.1e} may be"
        off = float((found.lse[:, mine].double() - right.lse).abs().max())
        assert off < 1e-3, f"head {head}: the logarithm of the denominator is off by {off:.1e}"


def in_float64(tokens: WeightedTokens, heads: slice) -> WeightedTokens:
    parts = (tokens.keys, tokens.values, tokens.log_mass, tokens.log_value)
    return WeightedTokens(*(None if x is None else x[:, heads].double() for x in parts))


def places_of(head: int, part: Entries) -> list[slice]:
    """Where a head's entries are in a part: nowhere, or in one place."""
    lanes = range(HEADS) if part.lanes is None else part.lanes.tolist()
    return [slice(place, place + 1) for place, lane in enumerate(lanes) if lane == head]

"""Attention over segments whose rows are copied side by side first: what is not read costs nothing.

Every query of every KV head of every row of the batch is a lane of its own (l = b·h·q), with the queries of its group.
Lanes are worked off so many at a time that the copies stay small: fresh memory costs more than the copying.
"""

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens, log_mass_of
from kvsketch.kernels.indexed_attention.segments import Segments
from kvsketch.kernels.weighted_attention import weighted_attention

COPIED_AT_ONCE = 1 << 20  # numbers of keys


def attend(
    query: Float[Tensor, "b hg q d"],
    keys: Float[Tensor, "b h n d"],
    values: Float[Tensor, "b h n e"],
    segments: Segments,
    scale: float,
    *,
    softcap: float | None = None,
) -> Partial:
    """Attention of every query over the rows of its segments."""
    rows, heads, _, width = keys.shape
    queries = query.shape[2]
    begin, length = segments.begin.flatten(0, 2), segments.length.flatten(0, 2)
    (flat_keys, first_key), (flat_values, first_value) = (_one_after_another(x, queries) for x in (keys, values))
    asking = query.unflatten(1, (heads, -1)).transpose(2, 3).flatten(0, 2)[:, :, None]  # [l, g, 1, d]
    totals = length.sum(1)
    most = int(totals.max())
    step = max(1, COPIED_AT_ONCE // max(1, most * width))
    parts = list[Partial]()
    for start in range(0, len(totals), step):
        some = slice(start, start + step)
        index, there = rows_of(begin[some], length[some])
        tokens = WeightedTokens(
            _copied(flat_keys, index + first_key[some, None]),
            _copied(flat_values, index + first_value[some, None]),
            None if bool(there.all()) else log_mass_of(there),
        )
        parts.append(weighted_attention(asking[some], tokens, scale, softcap=softcap))
    out = torch.cat([part.out for part in parts])  # [l, g, 1, e]
    lse = torch.cat([part.lse for part in parts])
    shape = (rows, heads, queries, -1)
    return Partial(
        out[:, :, 0].unflatten(0, shape[:3]).transpose(2, 3).flatten(1, 2).contiguous(),
        lse[:, :, 0].unflatten(0, shape[:3]).transpose(2, 3).flatten(1, 2).contiguous(),
    )


def rows_of(
    begin: Int64[Tensor, "l s"], length: Int64[Tensor, "l s"]
) -> tuple[Int64[Tensor, "l m"], Bool[Tensor, "l m"]]:
    """The numbers of every lane's rows side by side, as many places as the longest lane has, and which are used."""
    ends = length.cumsum(1)
    places = torch.arange(int(ends[:, -1].max()), device=begin.device).expand(len(begin), -1).contiguous()
    there = places < ends[:, -1:]
    segment = torch.searchsorted(ends, places, right=True).clamp_max(begin.shape[1] - 1)
    rows = (begin - (ends - length)).gather(1, segment) + places
    return torch.where(there, rows, 0), there


def _one_after_another(x: Float[Tensor, "b h n d"], queries: int) -> tuple[Float[Tensor, "r d"], Int64[Tensor, " l"]]:
    """All rows of the memory that `x` is a view of, and the first of every lane; `x` itself is not copied."""
    width, strides = x.shape[3], x.stride()
    if strides[2:] != (width, 1) or strides[0] % width or strides[1] % width:
        x = x.contiguous()
        strides = x.stride()
    row, head = (torch.arange(x.shape[i], device=x.device) * (strides[i] // width) for i in range(2))
    first = (row[:, None] + head).flatten()
    flat = x.as_strided((int(first[-1]) + x.shape[2], width), (width, 1))
    return flat, first.repeat_interleave(queries)


def _copied(flat: Float[Tensor, "r d"], index: Int64[Tensor, "l m"]) -> Float[Tensor, "l 1 m d"]:
    return flat.index_select(0, index.flatten()).view(*index.shape, flat.shape[1])[:, None]

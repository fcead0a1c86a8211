"""Attention over segments whose rows are copied side by side first: what is not read costs nothing.

Every query of every KV head of every row of the batch is a lane of its own (l = b·h·q), with the queries of its group.
A lane's rows are cut into parts (p) that are attended to by themselves and merged, so that all cores have work; so many
parts are worked off at a time that their copies stay in the cores' caches.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens, log_mass_of, merge
from kvsketch.kernels.indexed_attention.segments import Segments
from kvsketch.kernels.weighted_attention import weighted_attention

PART = 2048  # rows
COPIED_AT_ONCE = 1 << 19  # numbers of keys


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
    index, there = rows_of(segments.begin.flatten(0, 2), segments.length.flatten(0, 2))
    parts = max(1, -(-index.shape[1] // PART))
    size = -(-index.shape[1] // parts)
    index, there = (F.pad(x, (0, parts * size - x.shape[1])).unflatten(1, (parts, size)) for x in (index, there))
    (flat_keys, first_key), (flat_values, first_value) = (_one_after_another(x, queries) for x in (keys, values))
    key_index, value_index = ((index + first[:, None, None]).flatten(0, 1) for first in (first_key, first_value))
    log_mass = log_mass_of(there.flatten(0, 1))
    asking = query.unflatten(1, (heads, -1)).transpose(2, 3).flatten(0, 2)[:, :, None]  # [l, g, 1, d]
    asking = asking.repeat_interleave(parts, 0)
    found = list[Partial]()
    step = max(1, COPIED_AT_ONCE // max(1, size * width))
    for start in range(0, len(asking), step):
        some = slice(start, start + step)
        copies = (_copied(flat_keys, key_index[some]), _copied(flat_values, value_index[some]))
        tokens = WeightedTokens(*copies, None if log_mass is None else log_mass[some])
        found.append(weighted_attention(asking[some], tokens, scale, softcap=softcap))
    out = torch.cat([part.out for part in found]).unflatten(0, (-1, parts))[:, :, :, 0]  # [l, p, g, e]
    lse = torch.cat([part.lse for part in found]).unflatten(0, (-1, parts))[..., 0]
    whole = merge(*(Partial(out[:, part, :, None], lse[:, part, :, None]) for part in range(parts)))
    shape = (rows, heads, queries)
    return Partial(
        whole.out[:, :, 0].unflatten(0, shape).transpose(2, 3).flatten(1, 2).contiguous(),
        whole.lse[:, :, 0].unflatten(0, shape).transpose(2, 3).flatten(1, 2).contiguous(),
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
    steps = [stride // width for stride in strides[:2]]
    row, head = (torch.arange(size, device=x.device) * step for size, step in zip(x.shape[:2], steps, strict=True))
    first = (row[:, None] + head).flatten()
    last = sum((size - 1) * step for size, step in zip(x.shape[:2], steps, strict=True))  # no need to ask a device
    flat = x.as_strided((last + x.shape[2], width), (width, 1))
    return flat, first.repeat_interleave(queries)


def _copied(flat: Float[Tensor, "r d"], index: Int64[Tensor, "l m"]) -> Float[Tensor, "l 1 m d"]:
    return flat.index_select(0, index.flatten()).view(*index.shape, flat.shape[1])[:, None]

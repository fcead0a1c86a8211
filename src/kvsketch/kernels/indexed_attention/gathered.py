"""Attention over segments whose rows are copied side by side first: what is not read costs nothing.

Every query of every KV head of every row of the batch is a lane of its own (l = b·h·q), with the queries of its group.
Lanes are worked off in bundles whose copies stay in the cores' caches, the longest first, since shorter ones of a
bundle are filled up. A lane's rows are cut into parts (p) that are attended to by themselves and merged, so that all
cores have work.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.attention import NO_MASS, Partial, WeightedTokens, merge
from kvsketch.kernels.indexed_attention.segments import Segments
from kvsketch.kernels.weighted_attention import fused, reference

PART = 2048  # rows at most
COPIED_AT_ONCE = 1 << 19  # numbers of keys, for each thread


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
    rows, heads, count, width = keys.shape
    queries = query.shape[2]
    counts, lanes = segments.rows.flatten().sort(descending=True)
    longest_first: list[int] = counts.tolist()
    parts = 1 << (max(1, -(-longest_first[0] // PART)) - 1).bit_length()
    sizes = [max(1, -(-many // parts)) for many in longest_first]  # of a lane's parts
    bundles = [*_bundles(sizes, parts * width)]
    begin, length = (x.flatten(0, 2)[lanes] for x in (segments.begin, segments.length))
    index, there = rows_of(begin, length, sizes[0] * parts)
    index.clamp_(max=count - 1)
    bias = torch.zeros(there.shape, device=there.device).masked_fill(~there, NO_MASS)
    # The queries of a group are those of one head here: they see the same rows.
    asking = query.unflatten(1, (heads, -1)).transpose(2, 3).flatten(0, 2)[lanes]  # [l, g, d]
    asking = asking.repeat_interleave(parts, 0)[:, None]
    kept = torch.is_grad_enabled() and query.requires_grad  # a backward pass needs all copies
    room = 0 if kept else max((stop - start) * parts * sizes[start] for start, stop in bundles)
    of_keys, of_values = (_Copies(x, index, lanes // queries, room) for x in (keys, values))
    found, alive = list[Partial](), list[Tensor]()
    for start, stop in bundles:
        size = sizes[start]
        some = (slice(start, stop), slice(parts * size))
        copies = of_keys.of(some, size), of_values.of(some, size)
        now, weights = asking[start * parts : stop * parts], bias[some].reshape(-1, 1, size)
        if fused.can_run(query, softcap):
            found.append(fused.softmax_attention(now, *copies, scale, bias=weights[:, None]))
        else:
            found.append(reference.attend(now, WeightedTokens(*copies, weights), scale, softcap=softcap))
        alive.append(there[some][:, ::size])
    out = torch.cat([part.out for part in found]).unflatten(0, (-1, parts))[:, :, 0]  # [l, p, g, e]
    lse = torch.cat([part.lse for part in found]).unflatten(0, (-1, parts))[:, :, 0]
    lse = lse.masked_fill(~torch.cat(alive)[..., None], NO_MASS)  # where nothing was there the fused kernel says 0
    whole = merge(*(Partial(out[:, part, :, None], lse[:, part, :, None]) for part in range(parts)))
    back = lanes.argsort()
    out, lse = (x[back, :, 0].unflatten(0, (rows, heads, queries)) for x in (whole.out, whole.lse))
    return Partial(out.transpose(2, 3).flatten(1, 2), lse.transpose(2, 3).flatten(1, 2))


def _bundles(sizes: Sequence[int], numbers: int) -> Iterator[tuple[int, int]]:
    """Bounds of the lanes that are copied together."""
    most, start = COPIED_AT_ONCE * torch.get_num_threads(), 0
    while start < len(sizes):
        stop = min(len(sizes), start + max(1, most // (sizes[start] * numbers)))
        yield start, stop
        start = stop


def rows_of(
    begin: Int64[Tensor, "l s"], length: Int64[Tensor, "l s"], count: int
) -> tuple[Int64[Tensor, "l {count}"], Bool[Tensor, "l {count}"]]:
    """The numbers of every lane's rows side by side in `count` places, and which of these are used."""
    ends = length.cumsum(1)
    last = ends[:, -1:]
    # By how much a row's number is more than its place: the same for all rows of a segment. Unused places begin at 0.
    more = torch.cat([begin - (ends - length), -last], 1)
    times = torch.cat([length, count - last], 1)
    places = torch.arange(count, device=begin.device)
    index = more.flatten().repeat_interleave(times.flatten(), output_size=len(begin) * count).view(-1, count)
    return index.add_(places), places < last


class _Copies:
    """Rows side by side, in one place again and again: fresh memory costs more than copying does."""

    def __init__(
        self, x: Float[Tensor, "b h n d"], index: Int64[Tensor, "l m"], heads: Int64[Tensor, " l"], room: int
    ) -> None:
        """`index` has rows of the KV heads (b·h) of the lanes; without `room` every copy has its own place."""
        width, strides = x.shape[3], x.stride()
        if strides[2:] != (width, 1) or strides[0] % width or strides[1] % width:
            x = x.contiguous()
            strides = x.stride()
        steps = [stride // width for stride in strides[:2]]
        last = sum((size - 1) * step for size, step in zip(x.shape[:2], steps, strict=True))  # no need to ask a device
        self.memory = x.as_strided((last + x.shape[2], width), (width, 1))  # all rows that `x` is a view of
        first = heads // x.shape[1] * steps[0] + heads % x.shape[1] * steps[1]
        self.index = index + first[:, None]
        self.room = x.new_empty(room, width) if room else None

    def of(self, some: tuple[slice, slice], size: int) -> Float[Tensor, "lp 1 {size} d"]:
        """Those of some lanes and places, parts of so many rows one behind the other."""
        index = self.index[some].flatten()
        room = None if self.room is None else self.room[: len(index)]
        copied = torch.index_select(self.memory, 0, index, out=room)
        return copied.view(-1, 1, size, copied.shape[1])

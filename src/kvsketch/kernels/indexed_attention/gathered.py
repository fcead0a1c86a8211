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
COPIED_AT_ONCE = 1 << 19  # numbers, for each thread


def attend(
    query: Float[Tensor, "b hg q d"],
    rows: Float[Tensor, "b h n de"],
    segments: Segments,
    scale: float,
    *,
    softcap: float | None = None,
) -> Partial:
    """Attention of every query over the rows of its segments."""
    lanes = (*rows.shape[:2], query.shape[2])
    counts, order = segments.rows.flatten().sort(descending=True)
    longest_first: list[int] = counts.tolist()
    parts = 1 << (max(1, -(-longest_first[0] // PART)) - 1).bit_length()
    sizes = [max(1, -(-many // parts)) for many in longest_first]  # of a lane's parts
    bundles = [*_bundles(sizes, parts * rows.shape[3])]
    begin, length = (x.flatten(0, 2)[order] for x in (segments.begin, segments.length))
    index, there = rows_of(begin, length, sizes[0] * parts)
    index.clamp_(max=rows.shape[2] - 1)
    memory, first = _memory(rows)
    index += first.flatten()[order // lanes[2], None]
    bias = torch.zeros(there.shape, device=there.device).masked_fill(~there, NO_MASS)
    # The queries of a group are those of one head here: they see the same rows.
    asking = query.unflatten(1, (lanes[1], -1)).transpose(2, 3).flatten(0, 2)[order]  # [l, g, d]
    asking = asking.repeat_interleave(parts, 0)[:, None]
    room = None
    if not (torch.is_grad_enabled() and query.requires_grad):  # a backward pass would need all copies
        # Rows are copied to one place again and again: fresh memory costs more than copying does.
        most = max((stop - start) * parts * sizes[start] for start, stop in bundles)
        room = rows.new_empty(most, rows.shape[3])
    found, alive = list[Partial](), list[Tensor]()
    for start, stop in bundles:
        size = sizes[start]
        some = (slice(start, stop), slice(parts * size))
        now = index[some].flatten()
        copied = torch.index_select(memory, 0, now, out=None if room is None else room[: len(now)])
        keys, values = copied.view(-1, 1, size, rows.shape[3]).tensor_split([query.shape[3]], dim=3)
        tokens = WeightedTokens(keys, values, bias[some].reshape(-1, 1, size))
        found.append(_answer(asking[start * parts : stop * parts], tokens, scale, softcap))
        alive.append(there[some][:, ::size])
    out = torch.cat([part.out for part in found]).unflatten(0, (-1, parts))  # [l, p, 1, g, e]
    lse = torch.cat([part.lse for part in found]).unflatten(0, (-1, parts))
    lse = lse.masked_fill(~torch.cat(alive)[..., None, None], NO_MASS)  # the fused kernel says 0 where nothing is
    whole = merge(*(Partial(*of_part) for of_part in zip(out.unbind(1), lse.unbind(1), strict=True)))
    back = order.argsort()
    out, lse = (x[back, 0].unflatten(0, lanes).transpose(2, 3).flatten(1, 2) for x in (whole.out, whole.lse))
    return Partial(out, lse)


def _answer(query: Tensor, tokens: WeightedTokens, scale: float, softcap: float | None) -> Partial:
    """As `weighted_attention`, which asks every time whether some head holds nothing."""
    if tokens.log_mass is not None and fused.can_run(query, softcap):
        return fused.softmax_attention(query, tokens.keys, tokens.values, scale, bias=tokens.log_mass[:, None])
    return reference.attend(query, tokens, scale, softcap=softcap)


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


def _memory(x: Float[Tensor, "b h n d"]) -> tuple[Float[Tensor, "r d"], Int64[Tensor, "b h"]]:
    """All rows of the memory that `x` is a view of, and where those of each head begin; `x` itself is not copied."""
    width, strides = x.shape[3], x.stride()
    if strides[2:] != (width, 1) or strides[0] % width or strides[1] % width:
        x = x.contiguous()
        strides = x.stride()
    steps = [stride // width for stride in strides[:2]]
    row, head = (torch.arange(size, device=x.device) * step for size, step in zip(x.shape[:2], steps, strict=True))
    last = sum((size - 1) * step for size, step in zip(x.shape[:2], steps, strict=True))  # no need to ask a device
    return x.as_strided((last + x.shape[2], width), (width, 1)), row[:, None] + head

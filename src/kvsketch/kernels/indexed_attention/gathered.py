"""Attention over segments whose rows are copied side by side first: what is not read costs nothing.

Every query of every KV head of every row of the batch is a lane of its own (l = b·h·q), with the queries of its group.
A lane's rows are cut into parts (p) that are attended to by themselves and merged, so that all cores have work. Lanes
are worked off in bundles whose copies stay in the cores' caches, the longest first: shorter ones of a bundle are filled
up.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.attention import NO_MASS, Partial, WeightedTokens, merge
from kvsketch.kernels.indexed_attention.segments import Segments
from kvsketch.kernels.weighted_attention import fused, reference

PART = 2048  # rows at most
COPIED_AT_ONCE = 1 << 20  # numbers, for each thread


def attend(
    query: Float[Tensor, "b hg q d"],
    pairs: Float[Tensor, "b h n de"],
    segments: Segments,
    scale: float,
    *,
    softcap: float | None = None,
) -> Partial:
    """Attention of every query over the rows of its segments."""
    lanes, width = (*pairs.shape[:2], query.shape[2]), pairs.shape[3]
    counts, order = segments.rows.flatten().sort(descending=True)
    longest_first: list[int] = counts.tolist()
    # A power of two, so that any usual number of threads has equally much to do.
    parts = 1 << (max(1, -(-longest_first[0] // PART)) - 1).bit_length()
    sizes = [max(1, -(-many // parts)) for many in longest_first]  # of a lane's parts
    bundles = [*_bundles(sizes, parts, width)]
    begin, length = (x.flatten(0, 2)[order] for x in (segments.begin, segments.length))
    index, there = rows_of(begin, length, sizes[0] * parts)
    index.clamp_(max=pairs.shape[2] - 1)  # places that are not used count on beyond the rows
    memory, first = _memory(pairs)
    index += first.flatten()[order // lanes[2], None]
    # The queries of a group are those of one head here: they see the same rows.
    asking = query.unflatten(1, (lanes[1], -1)).transpose(2, 3).flatten(0, 2)[order]  # [l, g, d]
    room = None
    if not torch.is_grad_enabled() or not (query.requires_grad or pairs.requires_grad):
        # Copied to one place again and again: fresh memory costs more than copying. A backward pass needs all copies.
        room = pairs.new_empty(
            max((one.stop - one.start) * (p.stop - p.start) * sizes[one.start] for one, p in bundles), width
        )
    found, alive = list[Partial](), list[Tensor]()
    for some, of_each in bundles:
        size, many = sizes[some.start], of_each.stop - of_each.start
        places = slice(of_each.start * size, of_each.stop * size)
        now = index[some, places].flatten()
        copied = torch.index_select(memory, 0, now, out=None if room is None else room[: len(now)])
        keys, values = copied.view(-1, 1, size, width).tensor_split([query.shape[3]], dim=3)
        asked = asking[some].repeat_interleave(many, 0)[:, None]
        present = there[some, places].reshape(-1, size)
        found.append(_answer(asked, keys, values, present, scale, softcap))
        alive.append(present[:, 0])
    out = torch.cat([part.out for part in found]).unflatten(0, (-1, parts))  # [l, p, 1, g, e]
    lse = torch.cat([part.lse for part in found])
    lse = lse.masked_fill(~torch.cat(alive)[:, None, None], NO_MASS).unflatten(0, (-1, parts))
    whole = merge(*(Partial(*of_part) for of_part in zip(out.unbind(1), lse.unbind(1), strict=True)))
    back = order.argsort()
    out, lse = (x[back, 0].unflatten(0, lanes).transpose(2, 3).flatten(1, 2) for x in (whole.out, whole.lse))
    return Partial(out, lse)


def _answer(
    query: Float[Tensor, "l 1 g d"],
    keys: Float[Tensor, "l 1 m d"],
    values: Float[Tensor, "l 1 m e"],
    there: Bool[Tensor, "l m"],
    scale: float,
    softcap: float | None,
) -> Partial:
    """Attention over what is there. Where nothing is, the fused kernel says 0."""
    if not fused.can_run(query, keys, softcap):
        return reference.attend(
            query, WeightedTokens(keys, values), scale, visible=there[:, None, None], softcap=softcap
        )
    bias = torch.zeros(there.shape, device=there.device).masked_fill_(~there, NO_MASS)
    return fused.softmax_attention(query, keys, values, scale, bias=bias[:, None, None])


def _bundles(sizes: Sequence[int], parts: int, width: int) -> Iterator[tuple[slice, slice]]:
    """Lanes that are copied together, and which of their parts: all of them, or of a long lane some at a time."""
    most, start = COPIED_AT_ONCE * torch.get_num_threads() // width, 0
    while start < len(sizes):
        at_once = max(1, most // sizes[start])  # parts
        stop = min(len(sizes), start + max(1, at_once // parts))
        for part in range(0, parts, at_once):
            yield slice(start, stop), slice(part, min(part + at_once, parts))
        start = stop


def rows_of(
    begin: Int64[Tensor, "l s"], length: Int64[Tensor, "l s"], count: int
) -> tuple[Int64[Tensor, "l {count}"], Bool[Tensor, "l {count}"]]:
    """The numbers of every lane's rows side by side in `count` places, which hold them, and which places are used."""
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

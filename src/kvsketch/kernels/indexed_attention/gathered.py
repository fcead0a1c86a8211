"""Attention over segments whose rows are first copied side by side: rows that are not read cost nothing.

Here every query of every KV head of every row of the batch is a lane (l = b·h·q), with the queries of its group. A
lane's rows are cut into parts (p) that are attended to separately and then merged, so that all cores have work. Lanes
are processed in bundles whose copies stay in the cores' caches, the longest lanes first; the shorter lanes of a bundle
are padded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.attention import NO_MASS, Partial, WeightedTokens, log_of, merge
from kvsketch.kernels.indexed_attention import reference as masked
from kvsketch.kernels.sources import Segments
from kvsketch.kernels.weighted_attention import fused, reference

FEW_QUERIES = 8  # each gets a copy of its rows; more queries than that share a pass over all rows
PART = 2048  # rows at most
COPIED_AT_ONCE = 1 << 20  # numbers, for each thread


def indexed_attention(
    query: Float[Tensor, "b hg q d"],
    pairs: Float[Tensor, "b h n de"],
    segments: Segments,
    scale: float,
    *,
    softcap: float | None = None,
) -> Partial:
    """Attention of every query over the rows of its segments, which the queries of a group share.

    A pair is a key, as wide as a query, followed by its value: what is read together lies together.
    """
    form = attend if query.shape[2] <= FEW_QUERIES else masked.attend
    return form(query, pairs, segments, scale, softcap=softcap)


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
    counts, order = segments.length.sum(-1).flatten().sort(descending=True)
    longest_first: list[int] = counts.tolist()
    # A power of two, so that any usual number of threads can share the work equally.
    parts = 1 << (max(1, -(-longest_first[0] // PART)) - 1).bit_length()
    bundles = [*_bundles(longest_first, parts, width)]
    begin, length = (x.flatten(0, 2)[order] for x in (segments.begin, segments.length))
    index, there = rows_of(begin, length, bundles[0].size * parts)
    index.clamp_(max=pairs.shape[2] - 1)  # the numbers in unused places run past the last row
    memory, first = _memory(pairs)
    index += first.flatten()[order // lanes[2], None]
    bias = log_of(there)
    # Here the queries of a group are queries of one head: they see the same rows.
    asking = query.unflatten(1, (lanes[1], -1)).transpose(2, 3).flatten(0, 2)[order]
    asking = asking[:, None].repeat(1, parts, 1, 1)  # [l, p, g, d]
    room = None
    if not torch.is_grad_enabled() or not (query.requires_grad or pairs.requires_grad):
        # All bundles are copied to one place: fresh memory costs more than copying. A backward pass needs all copies.
        room = pairs.new_empty(max(one.rows for one in bundles), width)
    found, begins = list[Partial](), list[int]()
    for one in bundles:
        here = one.lanes, one.places
        now = index[here].flatten()
        copied = torch.index_select(memory, 0, now, out=None if room is None else room[: len(now)])
        keys, values = copied.view(-1, 1, one.size, width).tensor_split([query.shape[3]], dim=3)
        asked = asking[one.lanes, one.parts].flatten(0, 1)[:, None]
        found.append(_answer(asked, keys, values, bias[here].reshape(-1, one.size), scale, softcap))
        begins += one.begins
    whole = _merged_parts(found, begins, counts, parts)
    back = order.argsort()
    return Partial(*(x[back, 0].unflatten(0, lanes).transpose(2, 3).flatten(1, 2) for x in (whole.out, whole.lse)))


def _merged_parts(found: Sequence[Partial], begins: list[int], counts: Int64[Tensor, " l"], parts: int) -> Partial:
    """The answers of whole lanes, merged from those of their parts; some parts begin after the end of their lane."""
    out, lse = (
        torch.cat(each).unflatten(0, (-1, parts)) for each in zip(*((x.out, x.lse) for x in found), strict=True)
    )
    alive = torch.tensor(begins, device=lse.device).view(-1, parts) < counts[:, None]
    lse = lse.masked_fill(~alive[..., None, None], NO_MASS)  # the fused kernel returns 0 for empty parts
    return merge(*(Partial(*of_part) for of_part in zip(out.unbind(1), lse.unbind(1), strict=True)))


def _answer(
    query: Float[Tensor, "l 1 g d"],
    keys: Float[Tensor, "l 1 m d"],
    values: Float[Tensor, "l 1 m e"],
    bias: Float[Tensor, "l m"],
    scale: float,
    softcap: float | None,
) -> Partial:
    """Attention over the places whose bias is 0."""
    if fused.can_run(query, softcap):
        return fused.softmax_attention(query, keys, values, scale, bias=bias[:, None, None])
    visible = (bias == 0.0)[:, None, None]
    return reference.attend(query, WeightedTokens(keys, values), scale, visible=visible, softcap=softcap)


@dataclass(frozen=True)
class _Bundle:
    """Lanes whose rows are copied together, `size` rows to a part: all their parts, or some parts of one long lane."""

    lanes: slice
    parts: slice
    size: int

    @property
    def places(self) -> slice:
        """The places of these parts' rows."""
        return slice(self.parts.start * self.size, self.parts.stop * self.size)

    @property
    def begins(self) -> list[int]:
        """Where each part begins in its lane."""
        of_lane = [part * self.size for part in range(self.parts.start, self.parts.stop)]
        return of_lane * (self.lanes.stop - self.lanes.start)

    @property
    def rows(self) -> int:
        """How many rows are copied."""
        return len(self.begins) * self.size


def _bundles(counts: Sequence[int], parts: int, width: int) -> Iterator[_Bundle]:
    """Bundles of all lanes in order; `counts` has the number of rows of each lane, the longest first."""
    most, start = COPIED_AT_ONCE * torch.get_num_threads() // width, 0
    while start < len(counts):
        size = max(1, -(-counts[start] // parts))
        at_once = max(1, most // size)  # parts
        stop = min(len(counts), start + max(1, at_once // parts))
        for part in range(0, parts, at_once):
            yield _Bundle(slice(start, stop), slice(part, min(part + at_once, parts)), size)
        start = stop


def rows_of(
    begin: Int64[Tensor, "l s"], length: Int64[Tensor, "l s"], count: int
) -> tuple[Int64[Tensor, "l {count}"], Bool[Tensor, "l {count}"]]:
    """The numbers of every lane's rows, side by side in `count` places (enough for all), and which places are used."""
    ends = length.cumsum(1)
    last = ends[:, -1:]
    # What is added to a place to get its row's number: the same for all rows of a segment. Unused places count from 0.
    more = torch.cat([begin - (ends - length), -last], 1)
    times = torch.cat([length, count - last], 1)
    places = torch.arange(count, device=begin.device)
    index = more.flatten().repeat_interleave(times.flatten(), output_size=len(begin) * count).view(-1, count)
    return index.add_(places), places < last


def _memory(x: Float[Tensor, "b h n d"]) -> tuple[Float[Tensor, "r d"], Int64[Tensor, "b h"]]:
    """All rows of the memory that `x` is a view of, and where each head's rows begin; copied only if it must be."""
    width, strides = x.shape[3], x.stride()
    if strides[2:] != (width, 1) or strides[0] % width or strides[1] % width:
        x = x.contiguous()
        strides = x.stride()
    steps = [stride // width for stride in strides[:2]]
    row, head = (torch.arange(size, device=x.device) * step for size, step in zip(x.shape[:2], steps, strict=True))
    last = sum((size - 1) * step for size, step in zip(x.shape[:2], steps, strict=True))  # no device is asked
    return x.as_strided((last + x.shape[2], width), (width, 1)), row[:, None] + head

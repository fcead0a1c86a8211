"""A step of Saap as its paper describes it, to be timed beside ours: one program per bucket, and then a merge.

As far as the paper says (section 4 and its appendix): split-K with one program per visited bucket, and one more for the
whole window. Keys and values stay in the order of the text, and a bucket is a list of places from which rows are
gathered; then a second kernel merges. It exists only here, for a fair "so many times the paper" on the same GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 64  # rows per iteration


@triton.jit
def of_bucket(
    query, keys, values, window_keys, window_values, places, edges, visited, sums, tops,  # pointers
    count, window, scale,
    PROBES: tl.constexpr, BUCKETS: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Attention over the window or one bucket that a head visits: a program for each."""
    head, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    rows, widths = tl.arange(0, 16), tl.arange(0, WIDTH)
    asked = tl.load(
        query + (head * GROUP + rows)[:, None] * WIDTH + widths[None, :], mask=(rows < GROUP)[:, None], other=0.0
    )
    start, stop = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64) + window
    if number > 0:
        bucket = tl.load(visited + head * PROBES + number - 1)
        start = tl.load(edges + head * (BUCKETS + 1) + bucket)
        stop = tl.load(edges + head * (BUCKETS + 1) + bucket + 1)
    own_keys = window_keys + head * window * WIDTH if number == 0 else keys + head * count * WIDTH
    own_values = window_values + head * window * WIDTH if number == 0 else values + head * count * WIDTH
    top = tl.full([16], float("-inf"), tl.float32)
    mass = tl.zeros([16], tl.float32)
    found = tl.zeros([16, WIDTH], tl.float32)
    for begin in tl.range(start, stop, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        there = at < stop
        if number > 0:
            at = tl.load(places + head * count + at, mask=there, other=0).to(tl.int64)
        key = tl.load(own_keys + at[:, None] * WIDTH + widths[None, :], mask=there[:, None], other=0.0)
        value = tl.load(own_values + at[:, None] * WIDTH + widths[None, :], mask=there[:, None], other=0.0)
        logits = tl.dot(asked, tl.trans(key)) * (scale * 1.4426950408889634)
        logits = tl.where(there[None, :], logits, float("-inf"))
        higher = tl.maximum(top, tl.max(logits, 1))
        weights = tl.exp2(logits - higher[:, None])
        lost = tl.exp2(top - higher)
        mass = mass * lost + tl.sum(weights, 1)
        found = found * lost[:, None] + tl.dot(weights.to(value.dtype), value)
        top = higher
    own = (head * (PROBES + 1) + number) * GROUP + rows
    tl.store(tops + 2 * own, top, mask=rows < GROUP)
    tl.store(tops + 2 * own + 1, mass, mask=rows < GROUP)
    tl.store(sums + own[:, None] * WIDTH + widths[None, :], found, mask=(rows < GROUP)[:, None])


@triton.jit
def merged(sums, tops, out, PARTS: tl.constexpr, PART_BLOCK: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr):
    """The answer of a query, merged from those of its buckets and the window."""
    head, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    parts, widths = tl.arange(0, PART_BLOCK), tl.arange(0, WIDTH)
    own = (head * PARTS + parts) * GROUP + number
    top = tl.load(tops + 2 * own, mask=parts < PARTS, other=float("-inf"))
    mass = tl.load(tops + 2 * own + 1, mask=parts < PARTS, other=0.0)
    shares = tl.exp2(top - tl.max(top, 0))
    found = tl.load(sums + own[:, None] * WIDTH + widths[None, :], mask=(parts < PARTS)[:, None], other=0.0)
    answer = tl.sum(found * shares[:, None], 0) / tl.sum(mass * shares, 0)
    tl.store(out + (head * GROUP + number) * WIDTH + widths, answer.to(out.dtype.element_ty))


def attend(
    query: Tensor, keys: Tensor, values: Tensor, window: tuple[Tensor, Tensor], places: Tensor, edges: Tensor,
    visited: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """Attention of one query of each head over the buckets that its group visits, and a window."""
    _, heads, count, width = keys.shape
    group, probes = query.shape[1] // heads, visited.shape[1]
    out = torch.empty_like(query)
    sums = torch.empty(heads, probes + 1, group, width, dtype=torch.float32, device=query.device)
    tops = torch.empty(heads, probes + 1, group, 2, dtype=torch.float32, device=query.device)
    of_bucket[(heads, probes + 1)](
        *(query, keys, values, *window, places, edges, visited, sums, tops),
        *(count, window[0].shape[2], scale),
        PROBES=probes, BUCKETS=edges.shape[1] - 1, GROUP=group, WIDTH=width, BLOCK=BLOCK, num_warps=4, num_stages=3,
    )  # fmt: skip
    merged[(heads, group)](
        sums, tops, out, PARTS=probes + 1, PART_BLOCK=triton.next_power_of_2(probes + 1), GROUP=group, WIDTH=width
    )
    return out

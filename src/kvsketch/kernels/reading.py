"""All that a query reads, in one call: entries of several kinds, of some heads or all, whole or in runs."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import NO_MASS, Partial
from kvsketch.kernels import few_queries
from kvsketch.kernels.indexed_attention import indexed_attention
from kvsketch.kernels.merging import merge_into
from kvsketch.kernels.sources import Entries, Source
from kvsketch.kernels.weighted_attention import weighted_attention


def read(
    query: Float[Tensor, "b hg q d"],
    sources: Sequence[Source],
    heads: int,
    scale: float,
    *,
    softcap: float | None = None,
    lse: bool = True,
) -> Partial:
    """Attention over all sources (at least one) together. `lse=False`: see `weighted_attention`."""
    parts = [part for source in sources for part in source]
    found = few_queries.attend(query, parts, heads, scale, softcap)
    if found is not None:
        return found
    there = [tuple(part.chosen() for part in source) for source in sources]
    answers = [
        _of_all(query, source[0], scale, softcap, lse or len(there) > 1)
        if source[0].lanes is None
        else _of_some(query, source, heads, scale, softcap)
        for source in there
    ]
    return merge_into(*answers)


def _of_all(query: Tensor, part: Entries, scale: float, softcap: float | None, lse: bool) -> Partial:
    """Attention over entries of all lanes; the lanes may come as KV heads of one row."""
    tokens = part.tokens
    asking = (query if len(query) == len(tokens.keys) else query.flatten(0, 1)[None]).to(tokens.keys.dtype)
    if part.segments is None:
        found = weighted_attention(asking, tokens, scale, softcap=softcap, lse=lse)
    else:
        assert part.pairs is not None, "what is read in runs lies together"
        found = indexed_attention(asking, part.pairs, part.segments, scale, softcap=softcap)
    out = found.out.reshape(*query.shape[:3], found.out.shape[3]).to(query.dtype)
    return Partial(out, found.lse.reshape(query.shape[:3]))


def _of_some(query: Tensor, source: Source, heads: int, scale: float, softcap: float | None) -> Partial:
    """Attention over parts that have entries of some lanes each; lanes without entries see nothing."""
    rows, _, queries, _ = query.shape
    by_lane = query.unflatten(1, (heads, -1)).flatten(0, 1)  # [b·h, g, q, d]
    group = by_lane.shape[1]
    found: list[Partial] = []  # not list[Partial](): that cannot be compiled
    lanes: list[Tensor] = []
    for part in source:
        assert part.lanes is not None, "entries of some lanes"
        found.append(_of_all(by_lane[part.lanes].flatten(0, 1)[None], part, scale, softcap, lse=True))
        lanes.append(part.lanes)
    numbers = torch.cat(lanes)
    missing = rows * heads - len(numbers)
    if missing:
        out = found[0].out.new_zeros(1, missing * group, queries, found[0].out.shape[3])
        found.append(Partial(out, out.new_full(out.shape[:3], NO_MASS, dtype=torch.float32)))
        there = torch.zeros(rows * heads, dtype=torch.bool, device=numbers.device).index_fill_(0, numbers, True)
        numbers = torch.cat([numbers, (~there).nonzero()[:, 0]])
    order = (numbers.argsort()[:, None] * group + torch.arange(group, device=numbers.device)).flatten()
    out, lse = (
        torch.cat(each, 1).index_select(1, order).reshape(rows, heads * group, *each[0].shape[2:])
        for each in zip(*((part.out, part.lse) for part in found), strict=True)
    )
    return Partial(out, lse)

"""Answers of some lanes each: joined in the order of the batch, and completed with what is still to be read."""

from collections.abc import Sequence
from itertools import zip_longest

import torch
from jaxtyping import Int64
from torch import Tensor

from kvsketch.attention import NO_MASS, Partial, WeightedTokens
from kvsketch.caches.core.query import Answer, Query
from kvsketch.kernels.merging import merge_into
from kvsketch.kernels.reading import read
from kvsketch.kernels.sources import Source


def complete(answer: Answer, query: Query, heads: int, *, lse: bool = True) -> Answer:
    """The answer once all that is still to be read has been read, in one call."""
    if not answer.unread:
        return answer
    lse = lse or answer.attended is not None
    part = read(query.queries, answer.unread, heads, query.scale, softcap=query.softcap, lse=lse)
    attended = part if answer.attended is None else merge_into(part, answer.attended)
    return Answer(attended, answer.estimated, answer.read)


def side_by_side(answers: Sequence[Answer]) -> tuple[Source, ...]:
    """What is still to be read for these answers, each of some lanes, put together kind by kind."""
    if len(answers) == 1:
        return answers[0].unread
    kinds = zip_longest(*(answer.unread for answer in answers), fillvalue=())
    return tuple(tuple(part for source in kind for part in source) for kind in kinds)


def in_one_row(tokens: WeightedTokens) -> WeightedTokens:
    """The lanes of all rows as KV heads of one row."""
    rows, heads = tokens.keys.shape[:2]

    def flat(x: Tensor) -> Tensor:
        return x.expand(rows, heads, *x.shape[2:]).flatten(0, 1)[None]

    log_mass, log_value = (None if x is None else flat(x) for x in (tokens.log_mass, tokens.log_value))
    return WeightedTokens(flat(tokens.keys), flat(tokens.values), log_mass, log_value)


def in_rows(answer: Answer, rows: int) -> Answer:
    """The answer of lanes that came as KV heads of one row, divided into the rows that they belong to."""
    if rows == 1:
        return answer

    def split(x: Tensor) -> Tensor:
        return x.unflatten(1, (rows, -1))[0]

    def of_rows(part: Partial | None) -> Partial | None:
        return None if part is None else Partial(split(part.out), split(part.lse))

    read = None if answer.read is None else split(answer.read)
    return Answer(of_rows(answer.attended), of_rows(answer.estimated), read)


def joined(found: Sequence[tuple[int, Answer]], query: Query, heads: int, order: Int64[Tensor, " l"]) -> Answer:
    """The answers of several bundles, each with its number of lanes, as one; `order`: where in these each lane is."""
    group, queries = query.queries.shape[1] // heads, query.queries.shape[2]

    def missing(count: int, like: Partial) -> Partial:
        out = query.queries.new_zeros(1, count * group, queries, like.out.shape[3])
        return Partial(out, out.new_full(out.shape[:3], NO_MASS, dtype=torch.float32))

    def together(parts: list[tuple[int, Partial | None]]) -> Partial | None:
        like = next((part for _, part in parts if part is not None), None)
        if like is None:
            return None
        there = [missing(count, like) if part is None else part for count, part in parts]
        of_queries = (order[:, None] * group + torch.arange(group, device=order.device)).flatten()
        out, lse = (torch.cat(each, 1) for each in zip(*((part.out, part.lse) for part in there), strict=True))
        return Partial(out.index_select(1, of_queries), lse.index_select(1, of_queries))

    def read_by(count: int, answer: Answer) -> Tensor:
        none = torch.zeros(count, queries, dtype=torch.int64, device=order.device)
        return none if answer.read is None else answer.read[0]

    attended = together([(count, answer.attended) for count, answer in found])
    estimated = together([(count, answer.estimated) for count, answer in found])
    if all(answer.read is None for _, answer in found):
        return Answer(attended, estimated)
    read = torch.cat([read_by(count, answer) for count, answer in found])
    return Answer(attended, estimated, read.index_select(0, order)[None])

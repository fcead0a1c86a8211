"""Weighted attention in C: entries of several kinds in one call, read where they lie. `native/attention.c` says how.

For few queries: decode steps, and blocks of a few tokens. For more, `native/prompt.py` multiplies matrices.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens
from kvsketch.kernels import native
from kvsketch.kernels.sources import Entries, Segments

MOST_QUERIES = 32  # rows of a group's queries together
NOTED = "c"  # under this name parts carry their description


def attend(
    query: Float[Tensor, "b hg q d"], parts: Sequence[Entries], heads: int, scale: float, softcap: float | None = None
) -> Partial | None:
    """Attention over all parts together.

    None where C does not do it: many queries, another device, numbers that do not lie side by side, a wanted gradient.
    """
    if not can_attend(query, parts, heads):
        return None
    (rows, query_heads, count, _), value_width = query.shape, parts[0].noted[NOTED].widths[1]
    out = query.new_empty(rows, query_heads, count, value_width)
    lse = native.room(rows, query_heads, count)
    shape, sources = shape_of(query, heads, value_width, scale, softcap), sources_of(parts)
    failed = _function()(
        ctypes.byref(shape),
        sources,
        len(parts),
        query.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        native.threads(),
    )
    return None if failed else Partial(out, lse)


def can_attend(query: Float[Tensor, "b hg q d"], parts: Sequence[Entries], heads: int) -> bool:
    """Whether C does it; if so, each part has a note of how it is read."""
    if not 0 < query.shape[2] * (query.shape[1] // heads) <= MOST_QUERIES or query.stride(3) != 1:
        return False
    if native.library_for(query) is None or not all(map(_can_read, parts)):
        return False
    widths, lanes = (query.shape[3], parts[0].noted[NOTED].widths[1]), len(query) * heads
    for part in parts:  # torch says what is wrong where these do not fit
        there = part.tokens.keys.shape[:2].numel()
        if part.noted[NOTED].widths != widths or there != (lanes if part.lanes is None else len(part.lanes)):
            return False
    return True


class Shape(ctypes.Structure):
    """`struct shape` in `attention.c`, which fills in what is 0 here."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "heads", "group", "queries", "key_width", "value_width")),
        *((name, ctypes.c_int64) for name in ("width", "whole_value_width", "query_row", "query_head", "query_step")),
        ("kind", ctypes.c_int),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        *((name, ctypes.c_int) for name in ("tile", "far")),
    ]


_ADDRESSES = ("keys", "values", "log_mass", "log_value", "lanes", "begin", "length")
_NUMBERS = (
    *("rows", "heads", "count", "segments", "by_query", "key_row", "key_head", "key_step", "value_row", "value_head"),
    *("value_step", "mass_row", "mass_head", "extra_row", "extra_head", "kind"),
)


class Source(ctypes.Structure):
    """`struct source` in `attention.c`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _ADDRESSES),
        *((name, ctypes.c_int64) for name in _NUMBERS),
        ("choice", ctypes.c_void_p),
    ]


def shape_of(
    query: Float[Tensor, "b hg q d"], heads: int, value_width: int, scale: float, softcap: float | None
) -> Shape:
    """A call's sizes and options."""
    rows, query_heads, count, width = query.shape
    return Shape(
        *(rows, heads, query_heads // heads, count, width, value_width, 0, 0),
        *query.stride()[:3],
        native.DTYPES[query.dtype],
        scale,
        softcap or 0.0,
    )


def sources_of(parts: Sequence[Entries]) -> "ctypes.Array[Source]":
    """Where parts lie, as was noted, and the choices that are to be made in them."""
    sources = (Source * len(parts))(*(part.noted[NOTED].source for part in parts))
    for source, part in zip(sources, parts, strict=True):
        if part.choice is not None:
            source.choice = ctypes.addressof(part.choice.asked)
    return sources


class _Noted(NamedTuple):
    """About a part; `kept` was made for the description and must live as long as that."""

    source: Source
    widths: tuple[int, int]  # of keys and of values
    kept: list[Tensor]
    at: list[int]  # where everything lay


@cache
def _function() -> Callable[..., int]:
    library = native.library()
    assert library is not None, "there is something to call"
    found = library.kvs_attend
    address, number = ctypes.c_void_p, ctypes.c_int64
    found.argtypes = [ctypes.POINTER(Shape), ctypes.POINTER(Source), number, address, address, address, number]
    return found


def _can_read(part: Entries) -> bool:
    """Whether C can read a part; if so, it is noted how, because what is held is read again and again."""
    keys, values = part.tokens.keys, part.tokens.values
    weights = part.tokens.weights
    noted, read = part.noted.get(NOTED), (keys, values, *weights)
    if torch.is_grad_enabled() and any(x.requires_grad for x in read):
        return False
    if noted is None or noted.at != native.where(*read, *noted.kept):
        if native.library_for(keys, values) is None or keys.stride(3) != 1 or values.stride(3) != 1:
            return False
        if keys.shape[:3] != values.shape[:3] or any(not can_read_weights(x, keys) for x in weights):
            return False
        kept = list[Tensor]()
        described = _described(part, kept)
        part.noted[NOTED] = _Noted(described, (keys.shape[3], values.shape[3]), kept, native.where(*read, *kept))
    return True


def _described(part: Entries, kept: list[Tensor]) -> Source:
    """How a part's entries are read."""
    segments, begin, length = part.segments, None, None
    runs = (0, 0)
    if segments is not None:
        if not segments.begin.shape[3]:  # to C no runs would mean all entries
            segments = segments.join(Segments(*2 * [segments.begin.new_zeros(*segments.begin.shape[:3], 1)]))
        kept += [segments.begin.contiguous(), segments.length.contiguous()]
        begin, length = (x.data_ptr() for x in kept)
        runs = (segments.begin.shape[3], segments.begin.shape[2])
    lanes = None
    if part.lanes is not None:
        kept.append(part.lanes.contiguous())
        lanes = kept[-1].data_ptr()
    source = Source(lanes=lanes, begin=begin, length=length, segments=runs[0], by_query=runs[1])
    lead_to(source, part.tokens)
    return source  # without a choice, which differs from query to query


def lead_to(source: Source, tokens: WeightedTokens) -> None:
    """Write into `source` where a part's entries lie, and how many there are."""
    keys, values = tokens.keys, tokens.values
    source.keys, source.values, source.kind = keys.data_ptr(), values.data_ptr(), native.DTYPES[keys.dtype]
    source.rows, source.heads, source.count, _ = keys.shape
    source.key_row, source.key_head, source.key_step, _ = keys.stride()
    source.value_row, source.value_head, source.value_step, _ = values.stride()
    source.log_mass, source.mass_row, source.mass_head = where_weights_lie(tokens.log_mass, keys)
    source.log_value, source.extra_row, source.extra_head = where_weights_lie(tokens.log_value, keys)


def can_read_weights(weights: Tensor, keys: Tensor) -> bool:
    """Whether C can read log weights of these keys."""
    there = native.library_for(weights, kinds=(torch.float32,)) is not None
    return there and weights.stride(2) == 1 and weights.shape[2] == keys.shape[2]


def where_weights_lie(weights: Tensor | None, like: Tensor) -> tuple[int | None, int, int]:
    """Where log weights of these keys lie, and their strides between rows and between heads."""
    if weights is None:
        return None, 0, 0
    row, head, _ = weights.expand(like.shape[:3]).stride()
    return weights.data_ptr(), row, head

"""Which buckets queries visit, in C: `router.c` has the classifier, `choice.c` the choice and the runs of entries.

Runs are chosen inside the call that reads them, so a step makes one call less.
"""

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.kernels import native
from kvsketch.kernels.native.attention import MOST_QUERIES
from kvsketch.kernels.routing.rounded import in_bytes, pays
from kvsketch.kernels.sources import Choice, Classifier, Limits, Segments, Staged

NOTE = "described for C"


def classify(query: Float[Tensor, "b hg q d"], by: Classifier, heads: int) -> Float[Tensor, "b h q c"] | None:
    """See `routing/__init__.py`."""
    found = question(query, by, heads)
    if found is None:
        return None
    scores = native.room(len(query), heads, query.shape[2], by.last[0].shape[2])
    threads = ctypes.c_int64(native.threads())
    failed = found.library.kvs_classify(ctypes.byref(found.asked), found.of.layers, *native.addresses(scores), threads)
    return None if failed else scores


def question(query: Float[Tensor, "b hg q d"], by: Classifier, heads: int) -> "Question | None":
    """Queries and classifier as C takes them; None where C cannot answer."""
    rows, query_heads, count, width = query.shape
    few = 0 < rows * count * (query_heads // heads) <= MOST_QUERIES
    library = native.library_for(query) if few else None
    noted = None if library is None or query.stride(3) != 1 else _noted(by, library)
    if library is None or noted is None or noted.kind != query.dtype:
        return None
    group, strides = query_heads // heads, query.stride()[:3]
    asked = Asked(query.data_ptr(), native.DTYPES[query.dtype], rows, heads, group, count, width, *strides)
    return Question(library, asked, noted)


def visit(
    scores: Float[Tensor, "l q *g c"],
    sizes: Int64[Tensor, "l c"],
    edges: Int64[Tensor, "l r c_1"],
    limits: Limits,
    staged: Staged,
    *,
    left: bool = False,
) -> tuple[Choice, Int64[Tensor, "1 l q"], Float[Tensor, "l q c"] | None] | None:
    """See `routing/__init__.py`. The numbers are filled in when the runs are chosen, that is when they are read."""
    library = native.library_for(scores)
    if library is None or scores.dtype != torch.float32 or scores.dim() > 3:
        return None
    if not all(x.is_contiguous() for x in (scores, sizes, edges)):
        return None
    lanes, queries, buckets = scores.shape
    read = native.room(1, lanes, queries, dtype=torch.int64)
    others = torch.empty_like(scores) if left else None
    asked = ChoiceInC(
        *(lanes, queries, buckets, limits.probes, edges.shape[1], int(limits.per_token)),
        -1.0 if limits.visit is None else float(limits.visit),
        -1.0 if limits.mass is None else limits.mass,
        *(int(isinstance(limits.visit, float)), staged.begin, staged.number),
        *(None if x is None else x.data_ptr() for x in (scores, sizes, edges, read, others)),
    )
    there = (scores, sizes, edges, read, others)  # `asked` has only addresses: these must live as long as it does
    return Choice(partial(_made, library, asked, there), asked, (sizes, edges)), read, others


def _made(library: ctypes.CDLL, asked: "ChoiceInC", _: Sequence[Tensor | None]) -> Segments:
    width = min(asked.probes, asked.buckets) * asked.runs + 1
    begin, length = native.room(2, 1, asked.lanes, asked.queries, width, dtype=torch.int64).unbind()
    threads = ctypes.c_int64(native.threads())
    if library.kvs_visit(ctypes.byref(asked), *native.addresses(begin, length), threads):
        raise MemoryError("no room for the choice of buckets")
    return Segments(begin, length)


class _Layer(ctypes.Structure):
    """`struct layer` in `router.c`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
        *((name, ctypes.c_int64) for name in ("inner", "columns")),
        *((name, ctypes.c_void_p) for name in ("steps", "levels", "sums")),
    ]


class Noted(NamedTuple):
    """About a classifier, for C."""

    at: list[int]  # where its tensors were
    kind: torch.dtype
    layers: "ctypes.Array[_Layer]"  # as C takes them
    read: list[Tensor]  # the tensors that `layers` points to


def _noted(by: Classifier, library: ctypes.CDLL) -> Noted | None:
    """How C reads a classifier; None where it cannot, or where a gradient of the classifier is wanted."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in by.tensors):
        return None
    at, noted = native.where(*by.tensors), by.noted.get(NOTE)
    if noted is None or noted.at != at:
        if native.library_for(*by.tensors) is None or not all(x.is_contiguous() for x in by.tensors):
            return None
        noted = by.noted[NOTE] = _described(by, at, bytes_pay=bool(library.kvs_bytes_pay()))
    return noted


def _described(by: Classifier, at: list[int], *, bytes_pay: bool) -> Noted:
    noted = Noted(at, by.last[0].dtype, (_Layer * 2)(), [])
    for place, layer in enumerate((by.inner, by.last)):
        if layer is None:
            continue
        weights, bias = layer
        first, *others = (in_bytes(weights) if bytes_pay and pays(weights) else None) or (weights,)
        sizes = weights.shape[1:]
        noted.layers[place] = _Layer(first.data_ptr(), bias.data_ptr(), *sizes, *(x.data_ptr() for x in others))
        noted.read.extend((first, bias, *others))
    return noted


def read_of(by: Classifier) -> tuple[int, bool]:
    """How many bytes of a classifier a step reads, and whether it has weights in bytes."""
    noted = by.noted.get(NOTE) if native.library() is not None else None
    read = by.tensors if noted is None else noted.read
    return sum(x.nbytes for x in read), any(x.dtype == torch.int8 for x in read)


_OF_QUERIES = ("kind", "rows", "heads", "group", "count", "width", "row", "head", "step")


class Asked(ctypes.Structure):
    """`struct asked` in `router.c`."""

    _fields_ = [("queries", ctypes.c_void_p), *((name, ctypes.c_int64) for name in _OF_QUERIES)]


class Question(NamedTuple):
    """What C asks a classifier."""

    library: ctypes.CDLL
    asked: Asked
    of: Noted


class ChoiceInC(ctypes.Structure):
    """`struct choice` in `choice.c`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("lanes", "queries", "buckets", "probes", "runs", "per_token")),
        *((name, ctypes.c_double) for name in ("visit", "mass")),
        *((name, ctypes.c_int64) for name in ("share", "staged_from", "staged")),
        *((name, ctypes.c_void_p) for name in ("scores", "sizes", "edges", "read", "left")),
    ]

"""Which buckets queries visit, in C: the classifier, the choice, and the runs of entries. `router.c` says how."""

import ctypes
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.kernels import native
from kvsketch.kernels.native.attention import MOST_QUERIES
from kvsketch.kernels.sources import Segments


def classify(
    query: Float[Tensor, "b hg q d"], layers: Sequence[tuple[Tensor, Tensor] | None], heads: int
) -> Float[Tensor, "b h q c"] | None:
    """Mean probability of every column over the group, by one or two layers of weights and biases [h, …].

    None where C does not do it: many queries, another device, or a wanted gradient.
    """
    rows, query_heads, count, width = query.shape
    there = [x for layer in layers if layer is not None for x in layer]
    few = 0 < rows * count * (query_heads // heads) <= MOST_QUERIES
    library = native.library_for(query, *there) if few else None
    if library is None or query.stride(3) != 1 or not all(x.is_contiguous() for x in there):
        return None
    asked = _Asked(
        query.data_ptr(),
        native.DTYPES[query.dtype],
        rows,
        heads,
        query_heads // heads,
        count,
        width,
        *query.stride()[:3],
    )
    described = (_Layer * len(layers))(
        *(
            _Layer() if layer is None else _Layer(*(x.data_ptr() for x in layer), *layer[0].shape[1:])
            for layer in layers
        )
    )
    scores = torch.empty(rows, heads, count, there[-1].shape[-1])
    threads = ctypes.c_int64(native.threads())
    failed = library.kvs_classify(ctypes.byref(asked), described, *native.addresses(scores), threads)
    return None if failed else scores


def visit(
    scores: Float[Tensor, "l q c"],
    sizes: Int64[Tensor, "l c"],
    edges: Int64[Tensor, "l r c_1"],
    *,
    probes: int,
    visit: int | float | None,
    mass: float | None,
    per_token: bool,
    staged: tuple[int, int],
    left: bool = False,
) -> tuple[Segments, Int64[Tensor, "1 l q"], Float[Tensor, "l q c"] | None] | None:
    """Runs of the buckets that each query visits, and of what is staged (where, how much); how many entries they are.

    With `left` the logs of the sizes of the other buckets too. None where C does not do it.
    """
    library = native.library_for(scores)
    if library is None or scores.dtype != torch.float32 or not all(x.is_contiguous() for x in (scores, sizes, edges)):
        return None
    lanes, queries, buckets = scores.shape
    runs, width = edges.shape[1], min(probes, buckets) * edges.shape[1] + 1
    begin, length = torch.empty(2, 1, lanes, queries, width, dtype=torch.int64).unbind()
    read = torch.empty(1, lanes, queries, dtype=torch.int64)
    others = torch.empty_like(scores) if left else None
    limits = _Limits(
        *(lanes, queries, buckets, probes, runs, int(per_token)),
        -1.0 if visit is None else float(visit),
        -1.0 if mass is None else mass,
        *(int(isinstance(visit, float)), *staged),
        None if others is None else others.data_ptr(),
    )
    failed = library.kvs_visit(ctypes.byref(limits), *native.addresses(scores, sizes, edges, begin, length, read))
    return None if failed else (Segments(begin, length), read, others)


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weights", "bias")),
        *((name, ctypes.c_int64) for name in ("inner", "columns")),
    ]


_OF_QUERIES = ("kind", "rows", "heads", "group", "count", "width", "row", "head", "step")


class _Asked(ctypes.Structure):
    _fields_ = [("queries", ctypes.c_void_p), *((name, ctypes.c_int64) for name in _OF_QUERIES)]


class _Limits(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("lanes", "queries", "buckets", "probes", "runs", "per_token")),
        *((name, ctypes.c_double) for name in ("visit", "mass")),
        *((name, ctypes.c_int64) for name in ("share", "staged_from", "staged")),
        ("left", ctypes.c_void_p),
    ]

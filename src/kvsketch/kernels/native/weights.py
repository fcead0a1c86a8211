"""How much attention entries got from queries, in C: from few by `native/weights.c`, from many by `native/looks.c`.

In torch it is `asking.log_weights`.
"""

import ctypes
from typing import NamedTuple

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from kvsketch.kernels import native
from kvsketch.kernels.native.attention import MOST_QUERIES

WHOLE = 16  # numbers: widths of keys are multiples of it, so whole vectors on any machine
ADDED, LARGEST, INSTEAD = range(3)  # what an old number becomes: the sum, the larger one, or what was found
NO_ROOM = "no room for the queries of a step"


class Weighing(ctypes.Structure):
    """`struct weighing` in `weights.c`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("lanes", "rows", "count", "width", "kind", "key_lane", "key_step")),
        *((name, ctypes.c_int64) for name in ("mass_lane", "got_lane", "got_step", "how", "counted")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


class Noting(NamedTuple):
    """Where it is noted how much attention every entry gets from a few queries, and how."""

    got: Float[Tensor, "l n"]
    keys: Float[Tensor, "l n d"]
    log_mass: Float[Tensor, "#l n"] | None = None
    how: int = ADDED
    counted: bool = False  # whether the number of weights is noted after what an entry got

    def weighing(self, rows: int, scale: float, softcap: float | None) -> Weighing | None:
        """How C is told of so many queries of every lane; None where C cannot do it."""
        got, keys, mass = self.got, self.keys, self.log_mass
        lanes, count, width = keys.shape
        if native.library_for(keys) is None or keys.stride(2) != 1:
            return None
        if not 0 < rows <= MOST_QUERIES or width % WHOLE or got.dtype != torch.float64 or not got.is_cpu:
            return None
        if got.shape != keys.shape[:2] or (mass is not None and mass.shape[1] != count):
            return None
        if mass is not None and (mass.dtype != torch.float32 or not mass.is_cpu or mass.stride(1) != 1):
            return None
        return Weighing(
            *(lanes, rows, count, width, native.DTYPES[keys.dtype], *keys.stride()[:2]),
            *(0 if mass is None else mass.expand(lanes, -1).stride(0), *got.stride(), self.how, int(self.counted)),
            *(scale, softcap or 0.0),
        )


def add_weights(
    to: Noting, queries: Float[Tensor, "l r d"], lse: Float[Tensor, "l r"], scale: float, softcap: float | None = None
) -> bool:
    """Note how much attention every entry got from these queries (log denominators known); False where C cannot.

    The weights of several queries are added up, or the largest of them counts. If memory runs out, some may have been
    added already: they must not be added again.
    """
    library, weighing = native.library_for(queries, to.keys), to.weighing(queries.shape[1], scale, softcap)
    if library is None or weighing is None or lse.dtype != torch.float32 or not lse.is_cpu:
        return False
    queries, lse, mass = queries.contiguous(), lse.contiguous(), to.log_mass
    of_mass = ctypes.c_void_p(None if mass is None else mass.data_ptr())
    at = (*native.addresses(queries, to.keys), of_mass, *native.addresses(lse, to.got))
    if library.kvs_weigh(ctypes.byref(weighing), *at, ctypes.c_int64(native.threads())):
        raise MemoryError(NO_ROOM)
    return True


class _Looking(ctypes.Structure):
    """`struct looking` in `looks.c`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("lanes", "heads", "rows", "asked", "count", "width", "kind")),
        *((name, ctypes.c_int64) for name in ("query_kind", "key_lane", "key_step", "got_lane", "got_step", "how")),
        ("scale", ctypes.c_float),
    ]


def add_many(
    got: Float[Tensor, "b h n"],
    queries: Float[Tensor, "b h gq d"],
    keys: Float[Tensor, "b h n d"],
    lse: Float[Tensor, "b h gq"],
    scale: float,
    ranks: tuple[Int32[Tensor, "b n"], Int32[Tensor, "b q"]] | None = None,
    *,
    how: int = ADDED,
) -> bool:
    """Note in `got` how much attention entries got from many queries, which see entries of no higher rank than theirs.

    Row r of a head's queries is query r % q. `got` is on the CPU, and its heads follow one another as those of a tensor
    do. False where C cannot, and then nothing was noted. A weight of NaN is never the largest.
    """
    rows, heads, asked, width = queries.shape
    library = native.library_for(queries, keys)
    if library is None or not asked or keys.stride(3) != 1:
        return False
    if got.dtype != torch.float64 or lse.dtype != torch.float32 or not lse.is_cpu:
        return False
    keys, got_by_lane, lse = keys.flatten(0, 1), got.view(rows * heads, -1), lse.contiguous()
    in_pairs = queries.dtype == torch.bfloat16 and width % 2 == 0 and library.kvs_pairs()
    queries = (queries if in_pairs else queries.float()).contiguous()
    of_keys, of_queries = (None, None) if ranks is None else (x.contiguous() for x in ranks)
    looking = _Looking(
        *(rows * heads, heads, asked, asked if of_queries is None else of_queries.shape[1], keys.shape[1], width),
        *(native.DTYPES[keys.dtype], native.DTYPES[queries.dtype], *keys.stride()[:2]),
        *(*got_by_lane.stride(), how),
        scale,
    )
    there = (queries, keys, lse, of_keys, of_queries, got_by_lane)
    at = [ctypes.c_void_p(None if x is None else x.data_ptr()) for x in there]
    if library.kvs_look(ctypes.byref(looking), *at, ctypes.c_int64(native.threads())):
        raise MemoryError("no room for the queries of a prompt")
    return True

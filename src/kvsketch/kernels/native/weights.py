"""What entries got of the attention of queries, in C: of few `native/weights.c`, of many `native/looks.c`.

In torch it is `asking.log_weights`.
"""

import ctypes

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from kvsketch.kernels import native
from kvsketch.kernels.native.attention import MOST_QUERIES

WHOLE = 16  # numbers: keys are whole vectors of any machine
ADDED, LARGEST, INSTEAD = range(3)  # what becomes of what was there: the sum, the larger one, or what was found


class _Weighing(ctypes.Structure):
    """`struct weighing` in `weights.c`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("lanes", "rows", "count", "width", "kind", "key_lane", "key_step")),
        *((name, ctypes.c_int64) for name in ("mass_lane", "got_lane", "got_step", "how")),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
    ]


def add_weights(
    got: Float[Tensor, "l n"],
    queries: Float[Tensor, "l r d"],
    keys: Float[Tensor, "l n d"],
    log_mass: Float[Tensor, "#l n"] | None,
    lse: Float[Tensor, "l r"],
    scale: float,
    softcap: float | None = None,
    *,
    how: int = ADDED,
) -> bool:
    """Note in `got` what every entry got of these queries, whose log denominators are known; False where C cannot.

    The weights of several queries are added up, or the largest of them counts. Where memory runs out a part may have
    been added: nobody may add it once more.
    """
    lanes, rows, width = queries.shape
    library = native.library_for(queries, keys)
    if library is None or not 0 < rows <= MOST_QUERIES or width % WHOLE or keys.stride(2) != 1:
        return False
    about = [x for x in (log_mass, lse) if x is not None]
    if got.dtype != torch.float64 or any(x.dtype != torch.float32 for x in about):
        return False
    if any(x.device.type != "cpu" for x in (got, *about)) or (log_mass is not None and log_mass.stride(1) != 1):
        return False
    queries, lse = queries.contiguous(), lse.contiguous()
    weighing = _Weighing(
        *(lanes, rows, keys.shape[1], width, native.DTYPES[keys.dtype], *keys.stride()[:2]),
        *(0 if log_mass is None else log_mass.expand(lanes, -1).stride(0), *got.stride(), how),
        *(scale, softcap or 0.0),
    )
    mass = ctypes.c_void_p(None if log_mass is None else log_mass.data_ptr())
    at = (*native.addresses(queries, keys), mass, *native.addresses(lse, got))
    if library.kvs_weigh(ctypes.byref(weighing), *at, ctypes.c_int64(native.threads())):
        raise MemoryError("no room for the queries of a step")
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
    """Note in `got` what entries got of many queries, who see those whose ranks are not above their own.

    Row r of a head's queries is query r % q. `got` is on the CPU, and its heads follow one another as those of a tensor
    do. False where C cannot, and then nothing was noted. What a NaN gives is not the largest of anything.
    """
    rows, heads, asked, width = queries.shape
    library = native.library_for(queries, keys)
    if library is None or not asked or keys.stride(3) != 1:
        return False
    if got.dtype != torch.float64 or lse.dtype != torch.float32 or lse.device.type != "cpu":
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

"""What entries got of the attention of few queries, in C: `native/weights.c`. In torch it is `asking.log_weights`."""

import ctypes

import torch
from jaxtyping import Float
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

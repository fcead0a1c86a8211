"""Where keys point in C, `kernels/native/directions.c`: None where C cannot be used."""

import ctypes

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from kvsketch.kernels import native
from kvsketch.kernels.directions.reference import LEAST

WHOLE = 16  # numbers: a multiple of the length of any machine's vectors
SUMMED = 1024  # keys that are summed together, before these sums are added up


def towards(keys: Float[Tensor, "l n d"], mean: Float[Tensor, "l d"]) -> Float[Tensor, "l n"] | None:
    """See `reference.py`."""
    library = native.library_for(keys)
    if library is None or keys.stride(2) != 1:
        return None
    if mean.dtype != torch.float64 or mean.device != keys.device or mean.shape != (len(keys), keys.shape[2]):
        return None
    found = native.room(*keys.shape[:2], dtype=torch.float64)
    mean = F.pad(mean, (0, -keys.shape[2] % WHOLE)).contiguous()
    about = [*keys.shape, native.DTYPES[keys.dtype], native.threads(), *keys.stride()[:2], mean.shape[1]]
    library.kvs_towards(
        native.numbers(about), *native.addresses(keys, mean), ctypes.c_double(LEAST), *native.addresses(found)
    )
    return found


def sum_of_directions(keys: Float[Tensor, "l n d"]) -> Float[Tensor, "l d"] | None:
    """See `reference.py`."""
    return _sum(keys, directions=True)


def total(keys: Float[Tensor, "l n d"]) -> Float[Tensor, "l d"] | None:
    """See `reference.py`."""
    return _sum(keys, directions=False)


def _sum(keys: Float[Tensor, "l n d"], *, directions: bool) -> Float[Tensor, "l d"] | None:
    library = native.library_for(keys)
    if library is None or keys.stride(2) != 1 or not keys.numel():
        return None
    (lanes, _, width), pieces = keys.shape, -(-keys.shape[1] // SUMMED)
    parts = native.room(pieces, lanes, width + -width % WHOLE, dtype=torch.float64)
    about = [*keys.shape, native.DTYPES[keys.dtype], native.threads(), *keys.stride()[:2], parts.shape[2], pieces]
    library.kvs_sum_of_keys(
        native.numbers([*about, directions]), *native.addresses(keys), ctypes.c_double(LEAST), *native.addresses(parts)
    )
    return parts[0, :, :width].clone()

"""Whether all numbers of tensors are finite (no NaN, no infinity), without a copy of them."""

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from kvsketch.kernels import native


def are_numbers(each: Sequence[Float[Tensor, "b h n _"]]) -> Bool[Tensor, " x"]:
    """Whether all numbers of each tensor are finite, on its device: no GPU is waited for."""
    each = [x.detach() for x in each]
    if (found := _in_c(each)) is not None:
        return found
    some = [x if x.numel() else x.new_zeros(1) for x in each]
    return torch.stack([torch.stack(torch.aminmax(x)) for x in some]).isfinite().all(1)  # NaN wins


def _in_c(each: Sequence[Float[Tensor, "b h n _"]]) -> Bool[Tensor, " x"] | None:
    """See `native/finite.c`."""
    library, sizes = native.library_for(*each), each[0].shape[:3]
    if library is None or any(x.ndim != 4 or x.stride(3) != 1 or x.shape[:3] != sizes for x in each):
        return None
    about = [*sizes, native.DTYPES[each[0].dtype], native.threads(), len(each)]
    for x in each:
        about += [x.shape[3], *x.stride()[:3]]
    found = native.room(len(each), dtype=torch.bool)
    library.kvs_are_numbers(native.numbers(about), native.pointers(*each), *native.addresses(found))
    return found

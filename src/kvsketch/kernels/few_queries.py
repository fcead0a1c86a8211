"""Attention of few queries by the fastest kernel that there is for their device: in C on CPUs, in Triton on GPUs."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import Partial
from kvsketch.kernels import native
from kvsketch.kernels.gpu import attention as in_triton
from kvsketch.kernels.native import attention as in_c
from kvsketch.kernels.native.prompt import in_tiles
from kvsketch.kernels.sources import Entries

IN_STEPS = 8  # rows of a group's queries: tiles are too large for so few
ENOUGH = 1 << 15  # rows times entries that are worth several calls, one for each part


def attend(
    query: Float[Tensor, "b hg q d"], parts: Sequence[Entries], heads: int, scale: float, softcap: float | None = None
) -> Partial | None:
    """Attention over all parts together, each read where it lies.

    None where no kernel does it, or where a kernel for many queries is faster, reading the parts one by one.
    """
    if torch.compiler.is_compiling():
        return None
    if query.is_cpu:
        if _are_many(query, parts, heads):
            return None
        found = in_c.attend(query, parts, heads, scale, softcap)
        # Only C makes choices as it reads; where it does not read the entries, `reading.read` has them chosen first.
        if found is not None or any(part.choice is not None for part in parts):
            return found
    return in_triton.attend(query, parts, heads, scale, softcap)


def _are_many(query: Tensor, parts: Sequence[Entries], heads: int) -> bool:
    """Whether queries of a few tokens, all of whose parts are read whole, may as well be treated as a prompt's."""
    rows = query.shape[2] * (query.shape[1] // heads)
    if query.shape[2] == 1 or rows <= IN_STEPS:
        return False
    if any(part.lanes is not None or part.segments or part.choice for part in parts):
        return False
    entries = sum(part.tokens.count for part in parts)
    return (len(parts) == 1 or rows * entries >= ENOUGH) and in_tiles(query.dtype)


def name(device: torch.device, dtype: torch.dtype = torch.float32, group: int = 1, width: int = 1) -> str:
    """Which kernels a device has for heads of a dtype and width, and `group` query heads per KV head, for reports."""
    if dtype not in native.DTYPES:
        return "torch"
    if device.type == "cpu" and native.library() is not None:
        return native.name() if group <= in_c.MOST_QUERIES else "torch"
    return "Triton" if in_triton.does_steps(device, dtype, group, width) else "torch"

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

IN_STEPS = 8  # rows of a group's queries that tiles are too large for
ENOUGH = 1 << 15  # rows times entries, where these are read in several calls


def attend(
    query: Float[Tensor, "b hg q d"], parts: Sequence[Entries], heads: int, scale: float, softcap: float | None = None
) -> Partial | None:
    """Attention over all parts together, each read where it lies.

    None where no kernel does it; or where they are read sooner one by one, by a kernel for many queries.
    """
    if torch.compiler.is_compiling():
        return None
    if query.is_cpu:
        if _are_many(query, parts, heads):
            return None
        found = in_c.attend(query, parts, heads, scale, softcap)
        # A choice is only made in C; where that does not read the entries, `reading.read` has them chosen first.
        if found is not None or any(part.choice is not None for part in parts):
            return found
    return in_triton.attend(query, parts, heads, scale, softcap)


def _are_many(query: Tensor, parts: Sequence[Entries], heads: int) -> bool:
    """Whether queries of a few tokens, all of whose parts are read whole, are as good as those of a prompt."""
    rows = query.shape[2] * (query.shape[1] // heads)
    if query.shape[2] == 1 or rows <= IN_STEPS:
        return False
    if any(part.lanes is not None or part.segments or part.choice for part in parts):
        return False
    entries = sum(part.tokens.count for part in parts)
    return (len(parts) == 1 or rows * entries >= ENOUGH) and in_tiles(query.dtype)


def name(device: torch.device, dtype: torch.dtype = torch.float32, group: int = 1, width: int = 1) -> str:
    """Which kernels a device has for so wide heads of a kind, and so many query heads of a KV head, for reports."""
    if dtype not in native.DTYPES:
        return "torch"
    if device.type == "cpu" and native.library() is not None:
        return native.name() if group <= in_c.MOST_QUERIES else "torch"
    return "Triton" if in_triton.does_steps(device, dtype, group, width) else "torch"

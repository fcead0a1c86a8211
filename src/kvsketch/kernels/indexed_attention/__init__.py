"""Attention over some of the rows in memory: runs of neighbours, other ones for every query.

`reference.py` is the definition, over all rows with a mask; `gathered.py` copies the rows that are read side by side.
A form that reads them where they lie (C, Triton) is one more file here and a line below.
"""

from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import Partial
from kvsketch.kernels.indexed_attention import gathered, reference
from kvsketch.kernels.indexed_attention.segments import Segments

FEW_QUERIES = 8  # each has its rows copied; more of them share a pass over all rows


def indexed_attention(
    query: Float[Tensor, "b hg q d"],
    pairs: Float[Tensor, "b h n de"],
    segments: Segments,
    scale: float,
    *,
    softcap: float | None = None,
) -> Partial:
    """Attention of every query over the rows of its segments; queries of a group share them.

    A pair is a key, as wide as a query, with its value behind it: what is read together lies together.
    """
    attend = gathered.attend if query.shape[2] <= FEW_QUERIES else reference.attend
    return attend(query, pairs, segments, scale, softcap=softcap)


__all__ = ["Segments", "indexed_attention"]

"""Which buckets queries visit, by the fastest kernel that there is for their device: in C on CPUs, in Triton on GPUs.

What no kernel does torch does, in `caches/lookup/`.
"""

from typing import Any

from torch import Tensor

from kvsketch.kernels.gpu import routing as in_triton
from kvsketch.kernels.native import routing as in_c
from kvsketch.kernels.sources import Segments


def classify(query: Tensor, layers: Any, heads: int) -> Tensor | None:
    """See `native/routing.py`."""
    found = in_triton.classify(query, layers, heads)
    return in_c.classify(query, layers, heads) if found is None else found


def visit(scores: Tensor, sizes: Tensor, edges: Tensor, **limits: Any) -> tuple[Segments, Tensor, Tensor | None] | None:
    """See `native/routing.py`."""
    found = in_triton.visit(scores, sizes, edges, **limits)
    return in_c.visit(scores, sizes, edges, **limits) if found is None else found

"""Which buckets queries visit, by the fastest kernel that there is for their device: in C on CPUs, in Triton on GPUs.

What no kernel does torch does, in `caches/lookup/`.
"""

from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.kernels.gpu import routing as in_triton
from kvsketch.kernels.native import routing as in_c
from kvsketch.kernels.sources import Choice, Layer, Limits, Segments, Staged


def classify(
    query: Float[Tensor, "b hg q d"], inner: Layer | None, last: Layer, heads: int
) -> Float[Tensor, "b h q c"] | None:
    """Mean probability of every column over the group, by a classifier of one layer or two.

    None where no kernel does it: many queries, another device, or a wanted gradient.
    """
    found = in_c.classify(query, inner, last, heads) if query.device.type == "cpu" else None
    return in_triton.classify(query, inner, last, heads) if found is None else found


def visit(
    scores: Float[Tensor, "l q c"],
    sizes: Int64[Tensor, "l c"],
    edges: Int64[Tensor, "l r c_1"],
    limits: Limits,
    staged: Staged,
    *,
    left: bool = False,
) -> tuple[Segments | Choice, Int64[Tensor, "1 l q"], Float[Tensor, "l q c"] | None] | None:
    """Runs of the buckets that each query visits, and of what is staged; how many entries they are.

    With `left` the logs of the sizes of the other buckets too. Where the runs are a choice that is still to be made, so
    are these numbers. None where no kernel does it.
    """
    found = in_c.visit(scores, sizes, edges, limits, staged, left=left) if scores.device.type == "cpu" else None
    return in_triton.visit(scores, sizes, edges, limits, staged, left=left) if found is None else found

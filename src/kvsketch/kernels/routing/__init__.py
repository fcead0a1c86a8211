"""Which buckets queries visit: the attention that they expect in each, and the runs of entries of the best ones.

`reference.py` is plain torch, `native.py` is in C, `in_triton.py` for GPUs.
"""

from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.kernels.routing import in_triton, native, reference
from kvsketch.kernels.sources import Choice, Classifier, Limits, Segments, Staged


def expect(query: Float[Tensor, "b hg q d"], by: Classifier, heads: int) -> Float[Tensor, "b h q *g c"]:
    """Mean probability of every column over the group; on GPUs the logits, from which `visit` computes it."""
    if query.device.type == "cpu" and (found := native.classify(query, by, heads)) is not None:
        return found
    found = in_triton.expect(query, by, heads)
    return reference.classify(query, by, heads) if found is None else found


def visit(
    scores: Float[Tensor, "l q *g c"],
    sizes: Int64[Tensor, "l c"],
    edges: Int64[Tensor, "l r c_1"],
    limits: Limits,
    staged: Staged,
    *,
    left: bool = False,
) -> tuple[Segments | Choice, Int64[Tensor, "1 l q"], Float[Tensor, "l q c"] | None]:
    """Runs of the buckets that each query visits, and of the staged entries; how many entries the runs have.

    `scores`: what a query expects of each bucket, or logits of a group's queries, whose mean probability is used.
    `edges` say where each run's buckets begin. With `left` the logs of the sizes of the other buckets too. Where the
    runs are a choice that is still to be made, the numbers are there once it is made.
    """
    for form in (native, in_triton) if scores.device.type == "cpu" else (in_triton,):
        if (found := form.visit(scores, sizes, edges, limits, staged, left=left)) is not None:
            return found
    return reference.visit(scores, sizes, edges, limits, staged, left=left)


__all__ = ["expect", "visit"]

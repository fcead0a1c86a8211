"""Which buckets queries visit: what they expect of each, and the runs of entries that the best ones are.

`reference.py` is plain torch, `native.py` in C, `in_triton.py` on GPUs.
"""

from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.kernels.routing import in_triton, native, reference
from kvsketch.kernels.sources import Choice, Classifier, Limits, Segments, Staged


def expect(query: Float[Tensor, "b hg q d"], by: Classifier, heads: int) -> Float[Tensor, "b h q *g c"]:
    """Mean probability of every column over the group; on GPUs logits, of which `visit` takes it."""
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
    """Runs of the buckets that each query visits, and of what is staged; how many entries they are.

    `scores`: what it expects of each, or logits of the queries of a group, of which it is the mean probability.
    `edges` say where each run's buckets begin. With `left` the logs of the sizes of the other buckets too. Where the
    runs are a choice that is still to be made, so are these numbers.
    """
    for form in (native, in_triton) if scores.device.type == "cpu" else (in_triton,):
        if (found := form.visit(scores, sizes, edges, limits, staged, left=left)) is not None:
            return found
    return reference.visit(scores, sizes, edges, limits, staged, left=left)


__all__ = ["expect", "visit"]

"""Which buckets queries visit, in plain torch: the definition for the forms in C and in Triton."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.kernels.sources import Classifier, Limits, Segments, Staged


def classify(query: Float[Tensor, "b hg q d"], by: Classifier, heads: int) -> Float[Tensor, "b h q c"]:
    """Mean probability of every column over the group."""
    inner, (weights, bias) = by.inner, by.last

    def probabilities(asking: Tensor) -> Tensor:
        found = asking if inner is None else torch.relu(torch.baddbmm(inner[1], asking, inner[0]))
        return torch.softmax(torch.baddbmm(bias, found, weights).float(), 2)

    return of_group(query, heads, weights.dtype, probabilities)


def of_group(
    query: Float[Tensor, "b hg q d"], heads: int, dtype: torch.dtype, score: Callable[[Tensor], Tensor]
) -> Float[Tensor, "b h q c"]:
    """Mean score over the group, where the rule of its KV head scores every query."""
    rows, _, queries, width = query.shape
    grouped = query.to(dtype).unflatten(1, (heads, -1)).transpose(0, 1)  # [h, b, g, q, d]
    scores = score(grouped.reshape(heads, -1, width))
    return scores.view(heads, rows, -1, queries, scores.shape[2]).mean(2).transpose(0, 1)


def mean_probability(logits: Float[Tensor, "... g c"]) -> Float[Tensor, "... c"]:
    """Probability of every column, mean over a group's queries."""
    return logits.softmax(-1).mean(-2)


@dataclass(frozen=True)
class Visited:
    """Buckets in the order of their score, and which of them are visited."""

    buckets: Int64[Tensor, "*l q p"]
    taken: Bool[Tensor, "*l q p"]


def choose(scores: Float[Tensor, "*l q c"], sizes: Int64[Tensor, "*l c"], limits: Limits) -> Visited:
    """The buckets with the largest scores, or the largest scores per token, until a limit is reached."""
    size = sizes.unsqueeze(-2).expand_as(scores)
    worth = (scores / size).masked_fill(size == 0, 0.0) if limits.per_token else scores
    best = worth.topk(min(limits.probes, scores.shape[-1]), dim=-1).indices
    taken = torch.ones_like(best, dtype=torch.bool)
    if limits.visit is not None:
        visit = limits.visit
        most = visit * sizes.sum(-1).double()[..., None, None] if isinstance(visit, float) else visit
        taken &= size.gather(-1, best).cumsum(-1) <= most
    if limits.mass is not None:
        expected = scores.gather(-1, best)
        taken &= expected.cumsum(-1) - expected < limits.mass  # the buckets before it were not enough
    taken[..., :1].fill_(True)  # there is no column if there are no probes
    return Visited(best, taken)


def visit(
    scores: Float[Tensor, "l q *g c"],
    sizes: Int64[Tensor, "l c"],
    edges: Int64[Tensor, "l r c_1"],
    limits: Limits,
    staged: Staged,
    *,
    left: bool = False,
) -> tuple[Segments, Int64[Tensor, "1 l q"], Float[Tensor, "l q c"] | None]:
    """See `routing/__init__.py`."""
    scores = mean_probability(scores) if scores.dim() == 4 else scores
    visited = choose(scores, sizes, limits)
    lanes, queries, buckets = scores.shape
    wide = edges[:, None].expand(-1, queries, -1, -1)
    numbers = visited.buckets[:, :, None].expand(-1, -1, edges.shape[1], -1)
    begin = wide.gather(3, numbers)
    length = (wide.gather(3, numbers + 1) - begin) * visited.taken[:, :, None]
    runs = Segments(begin.flatten(2)[None], length.flatten(2)[None]).join(staged.runs(lanes, queries))
    if not left:
        return runs, runs.rows, None
    among = torch.zeros(lanes, queries, buckets, dtype=torch.bool, device=scores.device)
    among.scatter_(2, visited.buckets, visited.taken)
    return runs, runs.rows, sizes[:, None].float().log().masked_fill(among, -torch.inf)

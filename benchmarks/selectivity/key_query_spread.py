"""How far a head's queries are from its keys: where both lie, what their products are, which buckets they fall into.

Paper: Saap (2025), section 3 and Figure 1.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.algorithms.saap import assign
from kvsketch.evaluation.results.rows import Row
from kvsketch.huggingface.capture import Captured

POINTS = 400  # keys of a map, and the same number of queries
ASKING = 256  # queries whose products are counted
RECENT = 16  # the latest keys, up to the query's own
BINS = 60


def key_query_spread(seen: Captured, head: int, centroids: Float[Tensor, "c d"], sinks: int = 1) -> Row:
    """Everything that the picture of one query head and its KV head shows; centroids are of keys before rotation."""
    assert seen.queries_before is not None, "captured before rotation"
    assert seen.keys_before is not None, "captured before rotation"
    kv_head = head * len(seen.keys) // len(seen.queries)
    queries, keys = seen.queries[head].float().cpu(), seen.keys[kv_head].float().cpu()
    queries_before, keys_before = seen.queries_before[head].float().cpu(), seen.keys_before[kv_head].float().cpu()
    return {
        "maps": {
            "before rotation": principal_map(keys_before, queries_before, sinks),
            "after rotation": principal_map(keys, queries, sinks),
        },
        "logits": logit_histograms(queries, keys, seen.scale, sinks),
        "buckets": {
            "keys": shares(keys_before[sinks:], centroids.cpu()),
            "queries": shares(queries_before[sinks:], centroids.cpu()),
        },
    }


def principal_map(keys: Float[Tensor, "n d"], queries: Float[Tensor, "n d"], sinks: int) -> Row:
    """Some keys and queries, and all sinks, along the first two principal components of those keys and queries."""
    some = evenly(sinks, len(keys), POINTS)
    points = {"keys": keys[some], "queries": queries[some]}
    centre, directions = principal_components(torch.cat(list(points.values())))
    points |= {"sink keys": keys[:sinks], "sink queries": queries[:sinks]}
    return {name: ((found - centre) @ directions.T).tolist() for name, found in points.items()}


def principal_components(points: Float[Tensor, "n d"]) -> tuple[Float[Tensor, " d"], Float[Tensor, "2 d"]]:
    """The points' centre, and the two directions in which they vary most, each with its largest component positive."""
    centre = points.mean(0)
    directions = torch.linalg.svd(points - centre, full_matrices=False).Vh[:2]
    largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
    return centre, directions * largest.sign()


def logit_histograms(queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"], scale: float, sinks: int) -> Row:
    """Histograms of logits, edges in common: of some queries with sinks, with the latest keys, and with all between."""
    asking = evenly(sinks + RECENT, len(queries), ASKING)
    logits = queries[asking] @ keys.T * scale
    place, asked = torch.arange(len(keys)), asking[:, None]
    kinds = {
        "first keys": (place < sinks).expand_as(logits),
        "keys between": (place >= sinks) & (place <= asked - RECENT),
        "latest keys": (place > asked - RECENT) & (place <= asked),
    }
    edges = torch.linspace(*logits[place <= asked].aminmax(), BINS + 1)
    found: Row = {
        kind: (torch.histogram(logits[chosen], edges).hist / max(1, int(chosen.sum()))).tolist()
        for kind, chosen in kinds.items()
    }
    return {"edges": edges.tolist(), "shares": found}


def shares(vectors: Float[Tensor, "n d"], centroids: Float[Tensor, "c d"]) -> list[float]:
    """The share of vectors that fall into each bucket."""
    counts = torch.bincount(assign(vectors, centroids), minlength=len(centroids))
    return (counts / len(vectors)).tolist()


def evenly(first: int, count: int, most: int) -> Tensor:
    """At most `most` numbers, evenly spaced from `first` to `count - 1`."""
    return torch.linspace(first, count - 1, min(most, count - first)).long()

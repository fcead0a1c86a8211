"""How far a layer's queries are from its keys, in numbers, for every query head.

Paper: Saap (2025), section 3 and Figure 1: the two clouds "are clearly distinct" and "on opposite sides of the origin",
products are "almost always negative", and some buckets take up to a tenth of the queries.
"""

import torch
import torch.nn.functional as F
from benchmarks.selectivity.bucket_sizes import bucket_sizes, distance
from benchmarks.selectivity.key_query_spread import ASKING, RECENT, evenly
from jaxtyping import Float
from torch import Tensor

from kvsketch.algorithms.saap import assign
from kvsketch.evaluation.results.rows import Row
from kvsketch.huggingface.capture import Captured


def separation(seen: Captured, centroids: Float[Tensor, "h c d"], sinks: int = 1) -> Row:
    """Clouds before and after rotation, products after it, buckets before it; `centroids` are of keys before it."""
    assert seen.queries_before is not None, "captured before rotation"
    assert seen.keys_before is not None, "captured before rotation"
    group = len(seen.queries) // len(seen.keys)
    clouds = {
        "before rotation": (seen.queries_before, seen.keys_before),
        "after rotation": (seen.queries, seen.keys),
    }
    negative, distances, largest = list[float](), list[float](), list[float]()
    for head, queries in enumerate(seen.queries):
        negative.append(negative_products(queries.float(), seen.keys[head // group].float(), sinks))
        vectors = seen.queries_before[head, sinks:], seen.keys_before[head // group, sinks:]
        filed = [assign(found.float(), centroids[head // group].to(found.device))[None].cpu() for found in vectors]
        distances.append(float(distance(*filed, centroids.shape[1])))
        largest.append(float(bucket_sizes(filed[0], centroids.shape[1]).max() / filed[0].shape[1]))
    found: Row = {when: _of_clouds(queries, keys, group, sinks) for when, (queries, keys) in clouds.items()}
    return found | {"negative": negative, "bucket_distance": distances, "largest_share": largest}


def _of_clouds(queries: Float[Tensor, "hg n d"], keys: Float[Tensor, "h n d"], group: int, sinks: int) -> Row:
    pairs = [(found[sinks:].float(), keys[head // group, sinks:].float()) for head, found in enumerate(queries)]
    return {
        "accuracy": [nearest_mean_accuracy(*pair) for pair in pairs],
        "cosine": [float(F.cosine_similarity(pair[0].mean(0), pair[1].mean(0), dim=0)) for pair in pairs],
        "distance": [distance_of_means(*pair) for pair in pairs],
    }


def nearest_mean_accuracy(queries: Float[Tensor, "n d"], keys: Float[Tensor, "m d"]) -> float:
    """How often a direction is nearer to its own kind's mean; means of every second vector, judged on the others."""
    clouds = [F.normalize(found, dim=1) for found in (queries, keys)]
    means = [found[::2].mean(0) for found in clouds]
    right = [
        ((found[1::2] - own).norm(dim=1) < (found[1::2] - other).norm(dim=1)).double().mean()
        for found, own, other in zip(clouds, means, reversed(means), strict=True)
    ]
    return float(sum(right) / 2)


def distance_of_means(queries: Float[Tensor, "n d"], keys: Float[Tensor, "m d"]) -> float:
    """Over the root of the clouds' summed mean squared distances from their means; nearly 0 for two that are alike."""
    means = [found.mean(0) for found in (queries, keys)]
    spread = sum((found - mean).square().sum(1).mean() for found, mean in zip((queries, keys), means, strict=True))
    return float((means[0] - means[1]).norm() / torch.as_tensor(spread).sqrt())


def negative_products(queries: Float[Tensor, "n d"], keys: Float[Tensor, "n d"], sinks: int) -> float:
    """The share of negative products, of some queries with all keys before them except sinks and the latest keys."""
    asking = evenly(sinks + RECENT, len(queries), ASKING).to(queries.device)
    place = torch.arange(len(keys), device=keys.device)
    between = (place >= sinks) & (place <= asking[:, None] - RECENT)
    return float(((queries[asking] @ keys.T < 0) & between).sum() / between.sum())

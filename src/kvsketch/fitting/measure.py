"""How well buckets are found in texts that nothing was fitted to.

Every long-range query is measured by itself: what a cache does with a group's queries together is not seen here.
"""

from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.algorithms.saap import divergence
from kvsketch.fitting.classifiers import Classifiers
from kvsketch.fitting.pool import Clusters, queries_of, shares_of
from kvsketch.fitting.settings import FitSettings
from kvsketch.fitting.shards import ShardLayer, long_range_queries, read_layer
from kvsketch.kernels.buckets import assign

PROBES = (1, 2, 4, 8, 16, 32, 64, 128)
CLASSIFIER, KMEANS, ROTATED = "classifier", "kmeans", "kmeans_rope"


@torch.no_grad()
def measure(
    paths: list[Path],
    layer: int,
    classifiers: Classifiers,
    clusters: Clusters,
    settings: FitSettings,
    device: str,
) -> dict[str, Any]:
    """Recall of far attention and the share of far keys that is read, by probes, for the classifier and for k-means.

    k-means visits the buckets whose centroids have the largest inner products with the query, before or after rotation.
    """
    probes = [count for count in PROBES if count < settings.buckets]
    has_far = long_range_queries(paths, layer) > 0
    tally = Tally(probes, lanes=len(clusters.before))
    for path in paths:
        shard = read_layer(path, layer, device)
        buckets = assign(shard.keys_before.float(), clusters.before)
        rotated_buckets = assign(shard.keys.float(), clusters.rotated)
        for lane in range(len(clusters.before)):
            chosen = queries_of(shard, lane, long_range_only=bool(has_far[lane]))
            if not len(chosen):
                continue
            queries, rotated = shard.queries_before[chosen].float(), shard.queries[chosen].float()
            answers = classifiers.log_probabilities(lane, queries)
            shares, sizes = _shares_and_sizes(shard, chosen, lane, buckets, settings)
            tally.add(CLASSIFIER, lane, answers, shares, sizes)
            tally.add(KMEANS, lane, queries @ clusters.before[lane].T, shares, sizes)
            tally.losses[lane] += float(divergence(answers, shares)) * len(chosen)
            shares, sizes = _shares_and_sizes(shard, chosen, lane, rotated_buckets, settings)
            tally.add(ROTATED, lane, rotated @ clusters.rotated[lane].T, shares, sizes)
    return tally.result()


def _shares_and_sizes(
    shard: ShardLayer, chosen: Int64[Tensor, " q"], lane: int, buckets: Int64[Tensor, "l n"], settings: FitSettings
) -> tuple[Float[Tensor, "q c"], Float[Tensor, "q c"]]:
    """Each bucket's share of each query's far attention, and its share of the far keys themselves."""
    equal = torch.zeros_like(shard.keys)  # every key has the same share of a query's attention
    shares, sizes = (
        shares_of(shard, chosen, lane, keys, buckets, settings.buckets, settings) for keys in (shard.keys, equal)
    )
    return shares, sizes


class Tally:
    """Sums over queries, for every way to choose buckets and every head."""

    def __init__(self, probes: list[int], lanes: int) -> None:
        self.probes = probes
        self.sums = {name: torch.zeros(2, lanes, len(probes)).double() for name in (CLASSIFIER, KMEANS, ROTATED)}
        self.losses, self.queries = torch.zeros(lanes).double(), torch.zeros(lanes).double()

    def add(
        self,
        name: str,
        lane: int,
        scores: Float[Tensor, "q c"],
        shares: Float[Tensor, "q c"],
        sizes: Float[Tensor, "q c"],
    ) -> None:
        """Add what each number of probes reaches with these scores."""
        best = scores.topk(max(self.probes), 1).indices
        for row, x in enumerate((shares, sizes)):
            reached = x.gather(1, best).double().cumsum(1).sum(0)
            self.sums[name][row, lane] += torch.stack([reached[count - 1] for count in self.probes]).cpu()
        if name == CLASSIFIER:
            self.queries[lane] += len(scores)

    def result(self) -> dict[str, Any]:
        """Means over queries; recall and selectivity also as means over heads, and the recall of each head."""
        queries = self.queries.clamp_min(1)
        found: dict[str, Any] = {"queries": self.queries.int().tolist(), "loss": _plain(self.losses / queries)}
        for name, sums in self.sums.items():
            recall, selectivity = sums / queries[:, None]
            found[name] = [
                {
                    "probes": count,
                    "recall": _plain(recall[:, place].mean()),
                    "selectivity": _plain(selectivity[:, place].mean()),
                    "recall_of_heads": _plain(recall[:, place]),
                }
                for place, count in enumerate(self.probes)
            ]
        return found


def _plain(x: Tensor) -> Any:
    return x.mul(1e5).round().div(1e5).tolist()

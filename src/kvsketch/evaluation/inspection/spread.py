"""How a model's keys, values and queries are spread, which decides whether clustering can work."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.algorithms.kcenter import greedy_k_center
from kvsketch.algorithms.subgen import founders
from kvsketch.evaluation.inspection.attended import attended
from kvsketch.huggingface.capture import Captured

Row = dict[str, Any]
STEPS = 12  # points of a curve over the length of a text
CENTRES = (16, 64, 256)  # of k-center; 16 as in Figure 1 of the SubGen paper


def inspect_layer(seen: Captured, shares: Sequence[float]) -> Iterator[Row]:
    """For every KV head: norms, how well its keys and its values cluster, and which of its tokens get the attention."""
    group = seen.queries.shape[0] // seen.keys.shape[0]
    for head in range(seen.keys.shape[0]):
        keys, values = seen.keys[head].float().cpu(), seen.values[head].float().cpu()
        distance = median_distance(keys)
        queries = seen.queries[head * group : (head + 1) * group].float()
        longest = float(queries.norm(dim=2).max())
        yield {
            "layer": seen.layer,
            "head": head,
            "tokens": len(keys),
            "scale": seen.scale,
            "queries": spread(queries.norm(dim=2)),
            "keys": spread(keys.norm(dim=1)),
            "centred_keys": spread((keys - keys.mean(0)).norm(dim=1)),
            "values": spread(values.norm(dim=1)),
            "median_distance": distance,
            "value_distance": median_distance(values),
            "clusters": [
                cell | {"log_spread": 2 * cell["delta"] * longest * seen.scale}  # 2δr: samples needed grow with its exp
                for cell in clusters_at_shares(keys, shares)
            ],
            "value_clusters": list(clusters_at_shares(values, shares)),
            "radii": radii(keys),
            "value_radii": radii(values),
            "attended": attended(queries.cpu(), keys, values, seen.scale),
        }


def spread(norms: Tensor) -> dict[str, float]:
    """Mean, standard deviation and largest of some norms."""
    return {"mean": float(norms.mean()), "deviation": float(norms.std()), "largest": float(norms.max())}


def median_distance(vectors: Float[Tensor, "n d"]) -> float:
    """The median distance between two vectors, from up to 1,000 of them."""
    few = vectors[:: -(-len(vectors) // 1000)]
    return float(torch.pdist(few).median())


def clusters_at_shares(vectors: Float[Tensor, "n d"], shares: Sequence[float]) -> Iterator[Row]:
    """Numbers of clusters against tokens, at radii δ that are shares of the vectors' own median distance."""
    distance = median_distance(vectors)
    for share in shares:
        for at, count in clusters_over_time(vectors, share * distance):
            yield {"share": share, "delta": share * distance, "at": at, "count": count}


def radii(vectors: Float[Tensor, "n d"]) -> list[Row]:
    """The largest distance of a vector to the nearest of k centres of k-center, over that with a single centre."""
    alone = float(greedy_k_center(vectors, 1).radius)
    return [
        {"centres": count, "share": float(greedy_k_center(vectors, count).radius) / alone if alone else 0.0}
        for count in CENTRES
    ]


def clusters_over_time(keys: Float[Tensor, "n d"], delta: float) -> list[tuple[int, int]]:
    """How many clusters there were after how many tokens: m against n for one δ."""
    found = founders(keys, delta)
    at = sorted({max(1, round(len(keys) * 2.0 ** (-i / 2))) for i in range(STEPS)})
    return [(n, int((found < n).sum())) for n in at]


def save_rows(rows: Sequence[Row], path: Path, about: dict[str, Any]) -> None:
    """Write a line of JSON for every head, after a line that says where they come from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(line) for line in [about, *rows]) + "\n", encoding="utf-8")

"""How a model's keys, values and queries are spread: what decides whether clustering can work."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.algorithms.subgen import founders
from kvsketch.huggingface.capture import Captured

Row = dict[str, Any]
STEPS = 12  # points of a curve over the length of a text


def inspect_layer(seen: Captured, shares: Sequence[float]) -> Iterator[Row]:
    """For every KV head: norms, and how many clusters its keys found at radii δ that are shares of their distance."""
    group = seen.queries.shape[0] // seen.keys.shape[0]
    for head in range(seen.keys.shape[0]):
        keys = seen.keys[head].float().cpu()
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
            "values": spread(seen.values[head].float().norm(dim=1)),
            "median_distance": distance,
            "clusters": [
                {
                    "share": share,
                    "delta": share * distance,
                    "log_spread": 2 * share * distance * longest * seen.scale,  # 2δr: samples needed grow with its exp
                    "at": at,
                    "count": count,
                }
                for share in shares
                for at, count in clusters_over_time(keys, share * distance)
            ],
        }


def spread(norms: Tensor) -> dict[str, float]:
    """Mean, standard deviation and largest of some norms."""
    return {"mean": float(norms.mean()), "deviation": float(norms.std()), "largest": float(norms.max())}


def median_distance(keys: Float[Tensor, "n d"]) -> float:
    """Of pairs of keys, from up to 1,000 of them."""
    few = keys[:: -(-len(keys) // 1000)]
    return float(torch.pdist(few).median())


def clusters_over_time(keys: Float[Tensor, "n d"], delta: float) -> list[tuple[int, int]]:
    """After how many tokens there were how many clusters: m against n for one δ."""
    found = founders(keys, delta)
    at = sorted({max(1, round(len(keys) * 2.0 ** (-i / 2))) for i in range(STEPS)})
    return [(n, int((found < n).sum())) for n in at]


def save_rows(rows: Sequence[Row], path: Path, about: dict[str, Any]) -> None:
    """A line of JSON for every head, below one on where they come from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(json.dumps(line) for line in [about, *rows]) + "\n", encoding="utf-8")

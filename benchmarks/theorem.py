"""SubGen's Theorem 1 in numbers: error against samples, and samples against 2δr. `python benchmarks/theorem.py`.

One head, with the executable algorithm. Writes docs/results/theorem.jsonl; `figures.py` draws it.
"""

import math

import torch

from common import RESULTS, write_row
from kvsketch.algorithms.subgen import (
    Clusters,
    log_normalizer,
    no_clusters,
    no_samples,
    query_stream_attn,
    update_matrix_product,
    update_softmax_normalizer,
)

WIDTH, TOKENS, CLUSTERS, DELTA, R = 16, 1000, 20, 0.2, 2.0
DOUBLE = torch.float64


def clustered(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys in balls of diameter δ around centres of norm 2; values at random."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLUSTERS, WIDTH, generator=generator, dtype=DOUBLE)
    centres *= 2 / centres.norm(dim=1, keepdim=True)
    offsets = torch.randn(TOKENS, WIDTH, generator=generator, dtype=DOUBLE)
    offsets *= DELTA / 2 * torch.rand(TOKENS, 1, generator=generator, dtype=DOUBLE) / offsets.norm(dim=1, keepdim=True)
    keys = centres[torch.randint(CLUSTERS, (TOKENS,), generator=generator)] + offsets
    return keys, torch.randn(TOKENS, WIDTH, generator=generator, dtype=DOUBLE)


def run(keys: torch.Tensor, values: torch.Tensor, s: int, t: int, generator: torch.Generator):
    clusters, samples = no_clusters(t, keys[0]), no_samples(s, keys[0], values[0])
    for key, value in zip(keys, values, strict=True):
        clusters = update_softmax_normalizer(clusters, DELTA, key, torch.rand(t, generator=generator, dtype=DOUBLE))
        samples = update_matrix_product(samples, key, value, torch.rand(s, generator=generator, dtype=DOUBLE))
    return clusters, samples


def query_of_norm(norm: float, generator: torch.Generator) -> torch.Tensor:
    query = torch.randn(WIDTH, generator=generator, dtype=DOUBLE)
    return query * norm / query.norm()


def error_against_samples(streams: int = 40, queries: int = 20) -> None:
    """Write errors over ‖softmax‖₂‖V‖_op: mean and 99th percentile over streams and queries, and the bound √(d/s)."""
    for s in (16, 32, 64, 128, 256, 512, 1024):
        errors = []
        for seed in range(streams):
            generator = torch.Generator().manual_seed(1000 + seed)
            keys, values = clustered(seed)
            clusters, samples = run(keys, values, s, 16, generator)
            for _ in range(queries):
                query = query_of_norm(R, generator)
                softmax = torch.softmax(keys @ query, 0)
                unit = softmax.norm() * torch.linalg.matrix_norm(values, ord=2)
                errors.append((query_stream_attn(clusters, samples, query) - softmax @ values).norm() / unit)
        found = torch.stack(errors)
        row = {"part": "error", "s": s, "t": 16, "streams": streams, "mean": float(found.mean())}
        row |= {"rms": float(found.square().mean().sqrt()), "q99": float(found.quantile(0.99)), "d": WIDTH}
        write_row("theorem", row)


def samples_against_spread(streams: int = 400) -> None:
    """Write how many samples t the denominator of one cluster needs for a relative error of 0.1, against 2δr.

    It needs (relative deviation of a single sample / 0.1)². `ball`: keys are uniform in a ball of radius δ; t is
    measured, with its standard error. `worst`: keys are at ±δ along the query, a share p of them at +δ; with
    R = e^(2δr) the squared deviation is p(1-p)(R-1)²/(1+p(R-1))², largest at p = 1/(1+R): (R-1)²/(4R).
    """
    for spread in (0.5, 1, 2, 3, 4, 5, 6, 7, 8):
        ratio = math.exp(spread)
        worst = (ratio - 1) ** 2 / (4 * ratio) / 0.01
        write_row("theorem", {"part": "spread", "kind": "worst", "spread": spread, "t": worst})
        squares = []
        for seed in range(streams):
            generator = torch.Generator().manual_seed(seed)
            query = query_of_norm(spread / 2, generator)  # δ = 1
            keys = torch.randn(2000, WIDTH, generator=generator, dtype=DOUBLE)
            radii = torch.rand(2000, 1, generator=generator, dtype=DOUBLE) ** (1 / WIDTH)
            keys *= radii / keys.norm(dim=1, keepdim=True)
            drawn = keys[torch.randint(2000, (64,), generator=generator)]  # uniform, by Lemma 2
            cluster = Clusters(keys[:1], drawn[None], torch.tensor([2000]))
            exact = (keys @ query).logsumexp(0)
            squares.append((torch.exp(log_normalizer(cluster, query, 1.0) - exact) - 1).square() * 64)
        found = torch.stack(squares) / 0.01
        row = {"part": "spread", "kind": "ball", "spread": spread, "t": float(found.mean())}
        write_row("theorem", row | {"standard_error": float(found.std() / math.sqrt(streams))})


if __name__ == "__main__":
    (RESULTS / "theorem.jsonl").unlink(missing_ok=True)
    samples_against_spread()
    error_against_samples()

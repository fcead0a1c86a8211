"""A clusterable stream of a million tokens through SubGen: seconds and bytes per token against n.

`python benchmarks/stream.py [TOKENS]`. One layer, one KV head, 64 wide, float32, one thread. New clusters come at a
rate such that n tokens have √n. Also timed: exact attention over the same tokens. Writes docs/results/stream.jsonl.
"""

import sys
import time
from statistics import median

import torch

from common import RESULTS, write_row
from kvsketch.attention import WeightedTokens, exact_attention
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.caches.forgetting.subgen import SubGen
from kvsketch.kernels.weighted_attention import weighted_attention

WIDTH, CHUNK, QUERIES = 64, 1000, 20
SCALE = WIDTH**-0.5


class Stream:
    """Chunks of keys and values; token i is in one of the first ⌈√i⌉ clusters, drawn uniformly."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.centres = 4 * torch.randn(1100, WIDTH, generator=self.generator)
        self.count = 0

    def chunk(self) -> tuple[torch.Tensor, torch.Tensor]:
        number = torch.arange(self.count, self.count + CHUNK) + 1
        self.count += CHUNK
        known = number.double().sqrt().ceil()
        which = (torch.rand(CHUNK, generator=self.generator) * known).long()
        keys = self.centres[which] + 0.01 * torch.randn(CHUNK, WIDTH, generator=self.generator)
        return keys[None, None], torch.randn(1, 1, CHUNK, WIDTH, generator=self.generator)


def seconds_of(function, repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return median(times)


def main(tokens: int) -> None:
    torch.set_num_threads(1)
    (RESULTS / "stream.jsonl").unlink(missing_ok=True)
    cache = LayerCache(SubGen(keep=4096, delta=1.0, s=1024, t=2), 0)
    stream = Stream()
    tokens_seen = {"keys": torch.empty(1, 1, tokens, WIDTH), "values": torch.empty(1, 1, tokens, WIDTH)}
    writing, next_row = 0.0, 2000
    since = 0
    while stream.count < tokens:
        start_of_chunk = stream.count
        keys, values = stream.chunk()
        tokens_seen["keys"][:, :, start_of_chunk : stream.count] = keys
        tokens_seen["values"][:, :, start_of_chunk : stream.count] = values
        start = time.perf_counter()
        cache.hold(NewTokens(keys, values))
        writing += time.perf_counter() - start
        since += CHUNK
        if stream.count < next_row and stream.count < tokens:
            continue
        next_row = round(stream.count * 2)
        row = {"tokens": stream.count, "write_seconds_per_token": writing / since} | compare(cache, tokens_seen, stream)
        write_row("stream", row)
        writing, since = 0.0, 0


def compare(cache: LayerCache, tokens_seen: dict[str, torch.Tensor], stream: Stream) -> dict[str, float]:
    """Bytes and errors of both, and their seconds for one query."""
    keys, values = (tensor[:, :, : stream.count] for tensor in tokens_seen.values())
    queries = 0.25 * stream.centres[None, None, :QUERIES]
    query = queries[:, :, :1]
    past = cache.past.details()
    gram = sum(part.double().T @ part.double() for part in values[0, 0].split(50_000))  # VᵀV, in pieces
    widest = float(torch.linalg.matrix_norm(gram, ord=2).sqrt())
    errors, shares = [], []
    for one in queries.split(1, 2):
        exact, got = exact_attention(one, keys, values, SCALE).out, cache.attend(one, SCALE).out
        softmax = torch.softmax((one[0, 0] @ keys[0, 0].T * SCALE)[0].double(), 0)
        errors.append(float((got - exact).norm() / exact.norm()))
        shares.append(float((got - exact).norm()) / (float(softmax.norm()) * widest))
    return {
        "read_seconds": seconds_of(lambda: cache.attend(query, SCALE), 21),
        "exact_read_seconds": seconds_of(lambda: weighted_attention(query, WeightedTokens(keys, values), SCALE), 11),
        "bytes": cache.nbytes,
        "exact_bytes": 2 * stream.count * WIDTH * 4,
        "clusters": past.get("clusters", 0.0),
        "entries": int(cache.past.count_entries()),
        "error_of_theorem": median(shares),  # ‖error‖ / (‖softmax‖₂ ‖V‖_op), median over queries
        "relative_error": median(errors),
    }


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000)

"""What BalanceKV's walk makes of shifted keys: `python benchmarks/shift.py BOOK [BOOK ...]`.

The walk gets keys minus the mean of their block, minus the mean of the text, or as they are. In pieces of books read by
`smollm2`, all tokens but the first and the last ones are halved once or twice in blocks; the last queries ask. Rows go
to docs/results/shift.jsonl, and a table shows errors over those of a uniform half with the same random numbers.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from bootstrap import RESAMPLES, Row, resampled
from common import RESULTS
from kvsketch.cli.models import load_model
from kvsketch.evaluation.results.provenance import provenance
from kvsketch.huggingface.capture import Captured, capture
from kvsketch.kernels.balanced_walk.reference import halving_signs, products_as_they_are

MODEL, LAYERS, TOKENS, BLOCK, SEEDS = "smollm2", (0, 1, 3, 6, 10, 14, 20, 25), 2048, 128, 3
PART = slice(200_000, 260_000)  # characters of a book
FIRST, LAST, ASKING = 4, 252, 64  # 14 blocks are between the first and the last tokens
SHIFTS, SHARPNESS, HALVINGS, GREEDY = ("block", "text", "none"), (1.0, 0.25), (1, 2), 1e6


def kept(seen: Captured, shift: str | None, sharpness: float, halvings: int, seed: int) -> Tensor:
    """Indices [h, m] of the tokens that each head keeps; `shift=None` keeps a uniform half."""
    heads, count = seen.keys.shape[0], seen.keys.shape[1] - FIRST - LAST
    there = torch.arange(FIRST, FIRST + count).expand(heads, -1)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(halvings):
        blocks = there.reshape(heads, -1, BLOCK)
        lanes = torch.arange(heads)[:, None, None]
        keys, values = (x.double()[lanes, blocks].flatten(0, 1) for x in (seen.keys, seen.values))
        if shift == "block":
            keys = keys - keys.mean(1, keepdim=True)
        elif shift == "text":
            keys = keys - seen.keys.double().mean(1).repeat_interleave(blocks.shape[1], 0)[:, None]
        uniforms = torch.rand(keys.shape[:2], generator=draw, dtype=torch.float64)
        found = products_as_they_are(keys, values, sharpness / math.sqrt(keys.shape[2]))
        chosen = (halving_signs(found, uniforms, GREEDY if shift else 0.0) < 0).view(heads, -1)
        there = there[chosen].view(heads, -1)
    return there


def errors(seen: Captured, there: Tensor, halvings: int) -> Tensor:
    """For each head, the mean distance of answers from the true ones, over the mean length of the true ones."""
    heads, count = seen.keys.shape[:2]
    weight = torch.full((heads, count), -torch.inf, dtype=torch.float64)
    weight[:, :FIRST], weight[:, -LAST:] = 0.0, 0.0
    weight.scatter_(1, there, halvings * math.log(2))
    queries = seen.queries.double().unflatten(0, (heads, -1))[:, :, -ASKING:].flatten(1, 2)
    logits = torch.bmm(queries, seen.keys.double().mT) * seen.scale
    later = torch.arange(count - ASKING, count).repeat(queries.shape[1] // ASKING)
    logits.masked_fill_(torch.arange(count) > later[:, None], -torch.inf)
    exact, found = (x.softmax(2) @ seen.values.double() for x in (logits, logits + weight[:, None]))
    return (found - exact).norm(dim=2).mean(1) / exact.norm(dim=2).mean(1)


def measure(path: Path) -> Iterator[Row]:
    """Rows of the heads of some layers in the middle of a book: mean log of the errors over those of a uniform half."""
    model, tokenizer = load_model(MODEL, "float32", None)
    ids = tokenizer(path.read_text(encoding="utf-8")[PART], return_tensors="pt")["input_ids"][:, :TOKENS]
    for seen in capture(model, ids, LAYERS):
        for halvings in HALVINGS:
            uniform = [errors(seen, kept(seen, None, 1.0, halvings, seed), halvings) for seed in range(SEEDS)]
            for shift, sharpness in product(SHIFTS, SHARPNESS):
                own = [errors(seen, kept(seen, shift, sharpness, halvings, seed), halvings) for seed in range(SEEDS)]
                about = {"text": path.name, "layer": seen.layer, "halvings": halvings}
                about |= {"shift": shift, "sharpness": sharpness}
                for head, log in enumerate((torch.stack(own).log() - torch.stack(uniform).log()).mean(0).tolist()):
                    yield about | {"head": head, "log": round(log, 4)}


def print_table(rows: Sequence[Row]) -> None:
    """Print geometric means over heads, layers and texts, with intervals."""
    print("| keys less the mean of | sharpness | rate | error over a uniform half's |\n|---|---|---|---|")
    for shift, sharpness, halvings in product(SHIFTS, SHARPNESS, HALVINGS):
        here = {"shift": shift, "sharpness": sharpness, "halvings": halvings}
        logs = torch.tensor([row["log"] for row in rows if here.items() <= row.items()])
        low, high = logs[resampled(len(logs), RESAMPLES)].mean(1).quantile(torch.tensor([0.025, 0.975])).exp().tolist()
        print(f"| {shift} | {sharpness:g} | 1/{2**halvings} | {logs.mean().exp():.3f} [{low:.3f}, {high:.3f}] |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("books", type=Path, nargs="+")
    found = [row for book in parser.parse_args().books for row in measure(book)]
    lines = [{"run": provenance() | {"model": MODEL, "seeds": SEEDS, "tokens": TOKENS, "block": BLOCK}}, *found]
    (RESULTS / "shift.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print_table(found)

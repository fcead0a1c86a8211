"""What a classifier with weights in bytes finds: `python benchmarks/rounded.py MODEL INDEX TEXT [TEXT ...]`.

Each of the last queries of a text asks as a decode step does: the queries of a group together, before rotation, in C.
Measured is the visited buckets' share of the attention to the past, which is all before the window except for the first
token: once with the classifier in bfloat16, and once with all of its weights in bytes. Rows go to
docs/results/rounded.jsonl, one for each text, layer and number of visited buckets.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from common import write_row
from kvsketch.caches.lookup.key_index import LayerIndex, read_index
from kvsketch.cli.models import load_model
from kvsketch.evaluation.results.rows import Row
from kvsketch.huggingface.capture import Captured, capture
from kvsketch.kernels import native
from kvsketch.kernels.buckets import assign
from kvsketch.kernels.routing import native as routing
from kvsketch.kernels.routing import rounded as rounding
from kvsketch.kernels.sources import Classifier

TOKENS, ASKING, WINDOW, SINKS, PROBES = 4096, 512, 255, 1, (8, 16, 32)
PART = slice(200_000, 260_000)  # characters of a book


def scores(seen: Captured, by: Classifier) -> Tensor:
    """Scores of every bucket by the classifier, for the last queries: [h, q, c]."""
    heads = len(seen.keys)
    asking = seen.queries_before[None, :, -ASKING:]
    found = [routing.classify(asking[:, :, q : q + 1].contiguous(), by, heads) for q in range(ASKING)]
    return torch.cat(found, 2)[0]


def attention_of(seen: Captured, buckets: Tensor, number: int) -> Tensor:
    """The share of every bucket in each group's attention to the past, query by query: [h, q, c]."""
    heads, count = seen.keys.shape[:2]
    queries = seen.queries[:, -ASKING:].double().unflatten(0, (heads, -1))
    logits = torch.einsum("hgqd,hnd->hgqn", queries, seen.keys.double()) * seen.scale
    at, key = torch.arange(count - ASKING, count)[:, None], torch.arange(count)
    logits.masked_fill_((key < SINKS) | (key > at - WINDOW), -torch.inf)
    shares = logits.softmax(3).mean(1)
    return torch.zeros(heads, ASKING, number).double().scatter_add_(
        2, buckets[:, None].expand(-1, ASKING, -1), shares
    )  # fmt: skip


def measure(seen: Captured, learnt: LayerIndex, number: int) -> Iterator[Row]:
    exact, rounded = (Classifier(learnt.classifier.inner, learnt.classifier.last) for _ in range(2))
    with patch.object(rounding, "LARGE", float("inf")):
        wanted = scores(seen, exact)
    with patch.object(rounding, "LARGE", -1):
        found = scores(seen, rounded)
    assert routing.read_of(rounded)[1], "these weights do not divide into blocks of bytes"
    shares = attention_of(seen, assign(seen.keys_before.float(), learnt.centroids), number)
    for probes in PROBES:
        chosen = [x.topk(probes, 2).indices for x in (wanted, found)]
        same = torch.zeros_like(wanted).scatter_(2, chosen[0], 1).gather(2, chosen[1]).mean()
        recall = [float(shares.gather(2, x).sum(2).mean()) for x in chosen]
        yield {
            "probes": probes, "buckets": number, "same": float(same), "recall": recall[0],
            "recall_in_bytes": recall[1],
        }  # fmt: skip


@torch.no_grad()
def main(name: str, folder: Path, texts: list[Path]) -> None:
    library = native.library()
    assert library is not None, "this is about a kernel in C"
    assert library.kvs_bytes_pay(), "this machine does not use that kernel"
    (model, tokenizer), index = load_model(name, "bfloat16", None), read_index(folder)
    for text in texts:
        ids = tokenizer(text.read_text(encoding="utf-8")[PART], return_tensors="pt")["input_ids"][:, :TOKENS]
        for seen in capture(model, ids, index.layers, before_rotation=True):
            learnt = index.layer(seen.layer, "cpu", torch.bfloat16)
            for row in measure(seen, learnt, index.buckets):
                hidden = learnt.classifier.last[0].shape[1]
                write_row("rounded", {"model": name, "text": text.stem, "layer": seen.layer,
                                      "hidden": hidden, "tokens": ids.shape[1], **row})  # fmt: skip


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("model")
    options.add_argument("index", type=Path)
    options.add_argument("texts", type=Path, nargs="+")
    given = options.parse_args()
    main(given.model, given.index, given.texts)

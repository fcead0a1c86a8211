"""What goes into a profile: which part of a text each KV head holds if one threshold decides for all heads."""

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.kernels.distances import rounded

SINKS, WINDOW = 4, 16  # tokens that every head holds whatever their scores
BITS = 16  # of a score that are compared, so that the order of a float32 sum's terms does not decide

Parts = dict[int, list[list[float]]]  # of each layer's heads, for each keep


def parts_of(scores: Mapping[int, Float[Tensor, "h n"]], keeps: Sequence[float]) -> Parts:
    """Which part of the tokens between sinks and window each head holds, if the best of all heads are kept.

    Of equal scores the one of the lower layer, lower head and earlier token comes first.
    """
    middle = [scores[layer][:, SINKS:-WINDOW].double().cpu() for layer in sorted(scores)]
    count, heads = middle[0].shape[1], [len(one) for one in middle]
    every = rounded(torch.cat([one.flatten() for one in middle]), BITS)
    order = every.sort(descending=True, stable=True).indices
    found: Parts = {layer: [[] for _ in range(own)] for layer, own in zip(sorted(scores), heads, strict=True)}
    for keep in keeps:
        most = round((keep * (count + SINKS + WINDOW) - SINKS - WINDOW) * sum(heads))
        kept = torch.zeros_like(every, dtype=torch.bool)
        kept[order[: max(0, most)]] = True
        shares = (kept.view(-1, count).sum(1) / count).split(heads)
        for layer, own in zip(sorted(scores), shares, strict=True):
            for head, share in enumerate(own.tolist()):
                found[layer][head].append(share)
    return found


def mean_parts(each: Sequence[Parts]) -> Parts:
    """The means over several texts."""
    return {
        layer: [
            [fmean(column) for column in zip(*(parts[layer][head] for parts in each), strict=True)]
            for head in range(len(heads))
        ]
        for layer, heads in each[0].items()
    }

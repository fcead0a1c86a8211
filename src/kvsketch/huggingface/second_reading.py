"""A text read a second time, right behind itself: which of its tokens are looked at again (KVzip, arXiv:2505.23416).

A model that reads what it has just read looks up what comes next: so the tokens that matter get much of somebody's
attention, whatever will be asked later. The largest weight that a token gets, from any query of a KV head, is its
score; the weights are over the text and the second reading together.
"""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.attention import Partial, fold_groups, logits_of
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.query import Query
from kvsketch.huggingface.generation import make_cache, prefill
from kvsketch.huggingface.supported import check_context
from kvsketch.kernels.weighted_attention.reference import LOGITS_AT_ONCE

CHUNK = 1024  # tokens read at a time


@torch.no_grad()
def second_reading(
    model: PreTrainedModel, ids: Tensor, *, chunk: int = CHUNK, progress: Callable[[int], None] | None = None
) -> dict[int, Float[Tensor, "h n"]]:
    """Read a text (a row of ids) twice, and return every full-attention layer's scores of its tokens.

    `progress` is called with the number of tokens read, of the two readings together.
    """
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < 2:
        raise ValueError(f"one text is read twice, ids of shape 1 × tokens, got shape {tuple(ids.shape)}")
    count = ids.shape[1]
    check_context(model, 2 * count, "a text and its second reading have")
    cache = make_cache(model, "exact")
    scores = dict[int, Tensor]()

    def read(start: int) -> None:
        prefill(model, ids, cache, chunk=chunk, progress=None if progress is None else lambda n: progress(start + n))

    read(0)
    for layer in cache.sketch_layers:
        layer.watcher = partial(_note, scores, layer.held, count)
    read(count)
    return {layer: found[0] for layer, found in scores.items()}


def _note(scores: dict[int, Tensor], held: LayerCache, count: int, asked: Query, whole: Partial) -> None:
    """Keep the largest weight that each token of the text has got by now."""
    keys = held.window.keys.view[:, :, :count]
    if held.layer not in scores:
        scores[held.layer] = torch.zeros(keys.shape[:3], device=keys.device)
    strip = max(1, LOGITS_AT_ONCE // (asked.queries.shape[1] * count))
    for queries, lse in zip(asked.queries.split(strip, 2), whole.lse.split(strip, 2), strict=True):
        logits = logits_of(queries, keys, asked.scale, asked.softcap)
        logits -= fold_groups(lse[..., None], keys.shape[1])
        torch.maximum(scores[held.layer], logits.amax(2).exp_(), out=scores[held.layer])

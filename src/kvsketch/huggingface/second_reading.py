"""How much the tokens of a text matter: the weights they get when a model reads it again (KVzip, arXiv:2505.23416).

A model that reads what it has just read looks up what comes next: so the tokens that matter get much attention from
some query, whatever will be asked later. A token's score is the largest weight that it gets from any query of a KV
head; the weights are over the text and what is read again at a time.
"""

from collections.abc import Callable

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.caches.core.asking import SECOND
from kvsketch.caches.exact import Exact
from kvsketch.huggingface.generation import make_cache, prefill
from kvsketch.huggingface.rereading import CHUNK


def second_reading(
    model: PreTrainedModel, ids: Tensor, *, chunk: int = CHUNK, progress: Callable[[int], None] | None = None
) -> dict[int, Float[Tensor, "h n"]]:
    """Read a text (a row of ids) twice, and return every full-attention layer's scores of its tokens.

    `progress` is called with the number of tokens read, of the two readings together.
    """
    if ids.ndim != 2 or ids.shape[0] != 1 or ids.shape[1] < 2:
        raise ValueError(f"one text is read twice, ids of shape 1 × tokens, got shape {tuple(ids.shape)}")
    config = Exact(noting=SECOND)
    (asking,) = config.askings.each
    cache = prefill(model, ids, make_cache(model, config), chunk=chunk, progress=progress)
    return {layer.held.layer: asking.score(layer.held.window.noted)[0].float() for layer in cache.sketch_layers}

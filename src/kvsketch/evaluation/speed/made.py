"""Data made up to be timed: keys and values, a model, an index of random buckets, heads with unequal shares."""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from kvsketch.caches.core.config import BudgetedConfig, MethodConfig, equal_until_read
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.profile import PROFILE, read_profile, write_profile
from kvsketch.caches.core.shares import PYRAMID
from kvsketch.caches.core.tokens import NewTokens, Unrotated
from kvsketch.caches.lookup.key_index import layer_file, write_index
from kvsketch.caches.lookup.saap import IndexedConfig
from kvsketch.files import write_tensors

NUMBER = 1  # of the layer that is timed alone: methods that look tokens up read layer 0 in full
KEEPS = (0.5, 0.25, 0.125, 0.0625, 0.03125)  # of the profile
UNEVEN = (0.25, 0.5, 1.0, 2.25)  # shares of heads, in turn: their mean is 1
Ready = Callable[[MethodConfig], MethodConfig]


def keys_and_values(
    heads: int, tokens: int, width: int, dtype: torch.dtype, seed: int
) -> tuple[Float[Tensor, "1 h n d"], Float[Tensor, "1 h n d"]]:
    """Random keys and values, made head by head: a whole layer in float32 would take much memory."""
    generator = torch.Generator().manual_seed(seed)
    pair = torch.empty(2, 1, heads, tokens, width, dtype=dtype)
    for place in pair.view(-1, tokens, width):
        place.copy_(torch.randn(tokens, width, generator=generator))
    return pair[0], pair[1]


def new_token(
    heads: int, group: int, width: int, dtype: torch.dtype, step: int
) -> tuple[Float[Tensor, "1 hg 1 d"], NewTokens]:
    """A query, and the key and value that come with it."""
    generator = torch.Generator().manual_seed(1_000_000 + step)
    drawn = torch.randn(1, heads * (group + 2), 1, width, generator=generator).to(dtype)
    query, key, value = drawn.split([heads * group, heads, heads], 1)
    return query.clone(), NewTokens(key.clone(), value.clone(), None, Unrotated(query, key))


def random_llama(
    *,
    layers: int = 8,
    heads: int = 32,
    kv_heads: int = 8,
    head_dim: int = 128,
    hidden: int = 512,
    mlp: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> LlamaForCausalLM:
    """A Llama with random weights; narrow outside attention, so that mostly attention and cache are measured.

    `mlp`: the width of its MLPs, if it is not twice the hidden width.
    """
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=hidden,
        intermediate_size=mlp or 2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=1 << 20,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(dtype).eval()


@contextmanager
def made_up(
    heads: int, width: int, layers: Sequence[int], index: tuple[int, int], model: Mapping[str, Any] | None = None
) -> Iterator[Ready]:
    """Made-up indexes and profiles: a function that completes configs which need one of the model's heads."""
    known = {"fingerprint": "", "kv_heads": heads, "head_width": width} if model is None else dict(model)
    with tempfile.TemporaryDirectory() as scratch:
        folder, profile = Path(scratch), Path(scratch) / "profile.json"
        index_made = cache(partial(_write_index, folder, heads, width, layers, index, known))  # it can be large
        parts = [[min(1.0, UNEVEN[head % len(UNEVEN)] * keep) for keep in KEEPS] for head in range(heads)]
        about = {"model": known, "tokens": 1, "keeps": KEEPS, "layers": {str(layer): parts for layer in layers}}
        write_profile(profile, about)

        def ready(config: MethodConfig) -> MethodConfig:
            if isinstance(config, IndexedConfig) and not config.index:
                index_made()
                return replace(config, index=scratch)
            if isinstance(config, BudgetedConfig) and config.heads == PROFILE:
                return replace(config, heads=str(profile))
            return config

        yield ready


def new_layer(config: MethodConfig) -> LayerCache:
    """An empty cache of one layer, whose heads share the budget as the config's profile says."""
    if not isinstance(config, BudgetedConfig) or equal_until_read(config) or config.heads == PYRAMID:
        return LayerCache(config, NUMBER)
    profile = read_profile(config.heads)
    return LayerCache(config, NUMBER, shares=lambda layer, heads, budget: config.divided(profile.shares(budget))[layer])


def _write_index(
    folder: Path, heads: int, width: int, layers: Sequence[int], index: tuple[int, int], model: Mapping[str, Any]
) -> None:
    """Write an index of random buckets, with routers of random weights."""
    generator, (buckets, hidden) = torch.Generator().manual_seed(3), index

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-2] ** 0.5

    centroids = F.normalize(normal(heads, buckets, width), dim=2)
    tensors = {"centroids": centroids, "rotated_centroids": centroids.clone()}
    tensors |= {"second": normal(heads, hidden or width, buckets), "second_bias": normal(heads, 1, buckets)}
    if hidden:
        tensors |= {"first": normal(heads, width, hidden), "first_bias": normal(heads, 1, hidden)}
    for layer in layers:
        write_tensors(folder / layer_file(layer), tensors, {})
    about = {"buckets": buckets, "hidden": hidden, "layers": {str(layer): {} for layer in layers}}
    write_index(folder, {"model": {"id": "made up", **model}, **about})

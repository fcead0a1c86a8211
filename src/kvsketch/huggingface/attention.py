"""The attention function and the mask function that transformers calls for an attached model.

A layer's `update` returns the new keys with a link to the layer's cache; the attention function
follows it, so a query is answered from that cache and nothing has to be kept beside the call. Keys
without a link (sliding layers, other caches, no cache) get ordinary attention, equal to stock (`ordinary.py`).
"""

import weakref
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from kvsketch.attention import Partial
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import NewTokens, Unrotated, ranks_of_latest
from kvsketch.huggingface.autocast import as_autocast, is_on, without_autocast
from kvsketch.huggingface.ordinary import as_output, ordinary_attention, with_sinks

ATTENTION_NAME = "kvsketch"  # must not contain "flash": transformers looks for that word
# Arguments of some models' attention that change its answer, and that neither we nor torch's own attention know.
NOT_KNOWN = ("sinks", "indices", "block_indices")
NOT_KNOWN_TO_US = ("position_bias", *NOT_KNOWN)


@runtime_checkable
class Linked(Protocol):
    """The cache's layer that linked keys lead to; `huggingface/layer.py` has it."""

    held: LayerCache
    is_first: bool  # of the cache's sketch layers
    watcher: Callable[[Query, Partial], None] | None

    def check_asked_by(self, module: nn.Module) -> None:
        """Refuse another model's module."""

    def before_rotation(self, module: nn.Module, queries: Tensor, keys: Tensor) -> Unrotated | None:
        """Queries and keys as they were before rotation, if the method asks for them."""

    def check_positions_once(self, positions: Tensor | None, new: NewTokens) -> None:
        """Refuse positions that do not continue those of the cache."""

    def read(
        self,
        query: Tensor,
        new: NewTokens,
        scale: float,
        softcap: float | None,
        *,
        lse: bool,
        sinks: Tensor | None,
    ) -> Partial:
        """Take in new tokens, and answer their queries."""


def register() -> None:
    """Make the two functions known to transformers under their name; a second time changes nothing."""
    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, mask)


def link(keys: Tensor, layer: Linked) -> Tensor:
    """The keys, as a new tensor object that leads to the layer they were given to."""
    linked = keys.view_as(keys)
    linked._kvsketch_layer = weakref.ref(layer)  # type: ignore[attr-defined]
    return linked


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> Tensor | None:
    """Plain causal layers get the padding mask as it is (None if nothing is padded), all others a stock 4-D mask."""
    check_not_empty(q_length)
    plain = mask_function is causal_mask_function and local_size is None
    if plain and not isinstance(q_offset, Tensor) and kv_length + kv_offset == q_offset + q_length:
        if torch.compiler.is_compiling():
            return attention_mask
        # Several tokens after others always get a mask: without one, some modules would let them see later tokens.
        behind = 1 < q_length < kv_length
        every = every_new = True
        if attention_mask is not None:
            # Read once here, and not in every layer: on a GPU each such look waits for the device.
            new = attention_mask[:, -q_length:]
            every, every_new = torch.stack([attention_mask.all(), new.all()]).tolist()
        if every and not behind:
            return None
        if attention_mask is None:
            attention_mask = torch.ones(batch_size, kv_length, dtype=torch.bool, device=kwargs.get("device"))
        attention_mask = attention_mask.view_as(attention_mask)
        attention_mask._kvsketch_new = None if every_new else new  # type: ignore[attr-defined]
        return attention_mask
    kwargs["allow_is_bidirectional_skip"] = False  # no mask would mean a causal one
    return sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        mask_function,
        attention_mask,
        local_size,
        allow_is_causal_skip=False,
        **kwargs,
    )


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of the new queries over a layer's cache and the new tokens. [b, hg, q, d] → [b, q, hg, e]"""
    layer = _linked_layer(key)
    if layer is not None:
        layer.check_asked_by(module)
    if layer is None or "output_attentions" in kwargs:  # else it was checked before the first layer
        check_no_weights(module, kwargs)
    for name in NOT_KNOWN if layer is None else NOT_KNOWN_TO_US:
        if kwargs.get(name) is not None:
            raise ValueError(
                f"the attention of this model also depends on {name} ({type(module).__name__}), which kvsketch does "
                "not serve: kvsketch.detach(model) and use transformers' own cache"
            )
    if layer is not None and dropout:
        raise ValueError(
            f"attention_dropout={dropout:g} is asked for, and a cache of kvsketch answers from all that it holds: call "
            "model.eval(), or train without a cache"
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    unrotated = None if layer is None else layer.before_rotation(module, query, key)
    if is_on(query):
        query, key, value = (as_autocast(x) for x in (query, key, value))
    with without_autocast(query):
        if layer is None:
            return ordinary_attention(module, query, key, value, attention_mask, dropout, scale, softcap, s_aux, kwargs)
        new = NewTokens(key, value, _valid(attention_mask, query, layer.held.seen), unrotated)
        if layer.is_first and not torch.compiler.is_compiling():
            layer.check_positions_once(kwargs.get("position_ids"), new)
        lse = s_aux is not None or layer.watcher is not None
        part = layer.read(query, new, scale, softcap, lse=lse, sinks=s_aux)
        part = with_sinks(part, s_aux)
        if layer.watcher is not None:
            layer.watcher(Query(query, scale, softcap, ranks=ranks_of_latest(new, layer.held.lengths)), part)
        return as_output(part, query), None


def check_not_empty(count: int) -> None:
    """Refuse a call without tokens."""
    if count == 0:
        raise ValueError(
            "the call brought no new tokens. To continue from a filled cache pass the whole text again, or only "
            "the new tokens with the mask of all: model.generate(**cache.new_tokens(ids), cache=cache); before "
            "transformers 5.24 past_key_values=cache"
        )


def check_no_weights(module: object, given: Mapping[str, Any]) -> None:
    """Refuse a call that asks for attention weights, itself or by the config of `module` (perhaps the whole model)."""
    asked = given.get("output_attentions")
    if getattr(getattr(module, "config", None), "output_attentions", False) if asked is None else asked:
        raise ValueError(
            "kvsketch does not form attention weights: leave output_attentions off, in the model's config too, or "
            'kvsketch.detach(model) and use "eager"'
        )


def _linked_layer(key: Tensor) -> Linked | None:
    reference_to_layer = getattr(key, "_kvsketch_layer", None)
    return None if reference_to_layer is None else reference_to_layer()


def check_mask(attention_mask: Tensor, rows: int, new: int, seen: int) -> None:
    """Refuse a mask that is not a 2-D one for all rows and tokens."""
    if attention_mask.ndim != 2:
        raise ValueError(
            f"a kvsketch cache takes a 2-D padding mask, rows × tokens, got shape {tuple(attention_mask.shape)}: "
            "custom 4-D masks, packed sequences, and models or images whose tokens see later ones are not supported. "
            "Give each sequence a row of its own; leave out token_type_ids, which make such a mask of text too"
        )
    if attention_mask.shape[0] != rows:
        raise ValueError(f"the attention mask is for {attention_mask.shape[0]} rows, but {rows} came")
    if attention_mask.shape[1] != seen + new:
        raise ValueError(
            f"the attention mask covers {attention_mask.shape[1]} tokens, but there are {seen + new}: {seen} in the "
            f"cache and {new} new ones. It must cover all of them, as that of cache.new_tokens(ids) does"
        )


def _valid(attention_mask: Tensor | None, query: Tensor, seen: int) -> Tensor | None:
    """Which of the new tokens are real; None if all are."""
    if attention_mask is None:
        return None
    rows, new = query.shape[0], query.shape[2]
    check_mask(attention_mask, rows, new, seen)
    if hasattr(attention_mask, "_kvsketch_new"):
        return attention_mask._kvsketch_new
    if new == 1 and torch.compiler.is_compiling():
        return None  # a decode step brings a real token; looking would break the graph
    valid = attention_mask[:, -new:]
    return None if bool(valid.all()) else valid

"""All layers of a cache: ours where a model attends to everything, transformers' own elsewhere."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from kvsketch.caches.core.config import BudgetedConfig, MethodConfig, equal_until_read
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.shares import LENGTH
from kvsketch.caches.core.spans import Protected
from kvsketch.huggingface import stock
from kvsketch.huggingface.head_shares import HeadShares
from kvsketch.huggingface.layer import HybridSketchLayer, SketchLayer
from kvsketch.huggingface.model import ModelLink
from kvsketch.huggingface.modules import OURS, of_layer
from kvsketch.huggingface.whole import Whole

NOT_OURS = (
    "this cache was given tokens by a model that it was not made for, or that is not attached: attach it with "
    "kvsketch.attach(model), and call the model itself, not a layer, a compiled part of it, or its forward"
)
NOT_USED = (
    "the model was given this cache, and none of its layers used it: transformers takes a cache as cache=, before 5.24 "
    "as past_key_values=, and ignores names that it does not know. Nothing was read"
)


class LayerStack:
    """All layers of one cache: by kind, what they hold together, and whether they all hold the same text."""

    def __init__(self, config: MethodConfig, model: ModelLink, protected: Protected | None = None) -> None:
        self.config, self.model = config, model
        self.whole = Whole(config, model, protected or Protected())
        self.latest: Any = None  # the layer that took tokens last
        self.touched = False  # a call or a move of rows has changed some layers, and has not come to its end
        types, options = get_layer_types_and_kwargs(model.config)
        options = [options] * len(types) if isinstance(options, dict) else options  # one dict up to transformers 5.17
        self.kinds = types
        self._shares = self._new_shares()
        self.layers = [self._new_layer(i, kind, options[i]) for i, kind in enumerate(types)]
        # Kept beside the layers, as every layer asks for them at every step: our layers, all that count tokens, and all
        # that sum tokens up (linear attention and the like).
        self.sketch = [layer for layer in self.layers if isinstance(layer, SketchLayer)]
        self.counting = [layer for layer in self.layers if isinstance(layer, CacheLayerMixin)]
        self.summing = [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        slides = [(i, getattr(layer, "sliding_window", None)) for i, layer in enumerate(self.layers)]
        self.whole.sliding = [(index, window) for index, window in slides if window]
        self.whole.ours = len(self.sketch)
        for layer in self.sketch[:1]:
            layer.is_first = True

    def _new_shares(self, length: int = LENGTH) -> HeadShares | None:
        """What says how heads share the budget, for texts of this length; None if all have equal shares."""
        if equal_until_read(self.config):
            return None
        assert isinstance(self.config, BudgetedConfig), "others hold everything"
        heads = self.model.heads
        ours = [index for index, kind in enumerate(self.kinds) if kind in OURS]
        by_layer = {index: of_layer(heads, index) for index in ours}
        return HeadShares(self.config, self.model, by_layer, length)

    def _new_layer(self, index: int, kind: str, options: dict[str, Any]) -> Any:
        if kind in OURS:
            by_bytes = self.whole.layer_bytes if isinstance(self.config.budget_given, str) else None
            held = LayerCache(self.config, index, by_bytes, self._shares, self.whole.spans_of, self.model.part_of)
            if kind == "hybrid":
                return HybridSketchLayer(held, self.model, options.get("number_of_states", 1))
            return SketchLayer(held, self.model)
        return DYNAMIC_LAYER_TYPE_MAPPING[kind](**options)

    # -- how a budget is divided

    def expect(self, length: int = LENGTH) -> None:
        """Before a text of this length is read, have heads share the budget as is right for it."""
        self._shares = self._new_shares(length)
        for layer in self.sketch:
            layer.held.shares = self._shares

    def check_budget(self, rows: int) -> None:
        """Refuse a budget in bytes that is too small for this number of rows."""
        if isinstance(self.config.budget_given, str):
            for layer in self.sketch:
                layer.held.budget_for(rows, self.whole.token_bytes(layer.held.layer))

    # -- what they hold

    @property
    def seen(self) -> int:
        """Tokens read so far, padding included."""
        return self.counting[0].get_seq_length()

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 while nothing was read."""
        layer = self.counting[0]
        if isinstance(layer, SketchLayer):
            return len(layer.held.lengths)
        return layer.keys.shape[0] if layer.is_initialized else 0

    @property
    def recording(self) -> bool:
        """Whether compression is held back, as assisted decoding asks."""
        return any(layer.held.recording for layer in self.sketch) or any(
            getattr(layer, "record_past", False) for layer in self.layers
        )

    # -- whether all layers hold the same text

    def check_whole(self) -> None:
        """Refuse to go on after a call, or a move of rows, that did not finish in all layers."""
        seen = self.seen  # compared one by one: with a set the compiler would make a graph for every length
        unequal = [layer for layer in self.counting if layer.get_seq_length() != seen]
        if self.touched or unequal or [layer for layer in self.sketch if layer.broken]:
            lengths = [layer.get_seq_length() for layer in self.counting]
            raise ValueError(
                f"an earlier call failed half-way: layers hold between {min(lengths)} and {max(lengths)} tokens. "
                "This cache cannot be used further; reset() it, or go on with a copy made before that call"
            )

    def check_in_step(self, layer: Any, index: int, count: int) -> None:
        """Refuse tokens for a layer after the first one, if they are not the ones that the first one took."""
        latest, first = self.latest, self.counting[0]
        if latest is not layer and isinstance(latest, SketchLayer) and latest.pending:
            if not self.touched:  # no call of the model that this cache was made for has begun
                raise ValueError(NOT_OURS)
            raise ValueError(
                f"layer {latest.held.layer} took {latest.pending} tokens that its attention never asked for: "
                "this model changes keys between cache and attention, which kvsketch does not support"
            )
        stands, stand = layer.get_seq_length(), first.get_seq_length()
        if stands + count != stand:
            raise ValueError(
                f"layer {index} was given {count} tokens at position {stands}, but the first layer stands at {stand}: "
                "all layers must read the same tokens"
            )

    def forget_refused(self, seen: int) -> None:
        """A call that began after `seen` tokens has failed: if the first layer refused it, nothing has moved."""
        first = self.counting[0]
        if isinstance(first, SketchLayer) and first.held.seen == seen and not first.broken and not self.summing:
            first.pending, self.touched = 0, False

    def check_alike(self, layer: SketchLayer) -> None:
        """Refuse a layer that has read other tokens than the first one."""
        ours, first = layer.held, self.sketch[0].held
        if (ours.seen, ours.lengths) != (first.seen, first.lengths):
            raise ValueError(f"{ours.lengths!s:.60} tokens were read here, {first.lengths!s:.60} in the first layer")
        if ours.spans != first.spans:
            raise ValueError(f"{ours.spans!s:.60} are protected here, {first.spans!s:.60} in the first layer")

    @contextmanager
    def changing(self) -> Iterator[None]:
        """A block whose changes are made in all layers, or the layers say that they are broken."""
        self.check_whole()
        self.touched = True
        yield
        self.touched = False


def bytes_held(layer: Any) -> int:
    """Bytes of memory that a layer holds, ours or not."""
    return layer.nbytes if isinstance(layer, SketchLayer) else stock.bytes_held(layer)

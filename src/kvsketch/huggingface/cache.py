"""A transformers `Cache` whose full-attention layers are kvsketch's; sliding and other layers stay stock."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from kvsketch.caches.base import MethodConfig
from kvsketch.caches.budget import parse_bytes
from kvsketch.caches.exact import Exact
from kvsketch.caches.question import LookupPast
from kvsketch.caches.registry import parse_spec
from kvsketch.huggingface import stock
from kvsketch.huggingface.attention import autocast_of, check_mask, check_some, refuse_weights
from kvsketch.huggingface.cache_file import write_cache
from kvsketch.huggingface.layer import HybridSketchLayer, SketchLayer
from kvsketch.huggingface.model import ModelLink
from kvsketch.huggingface.modules import attention_modules, heads_of
from kvsketch.huggingface.report import LayerReport, Report
from kvsketch.huggingface.weights import device_of


class SketchCache(Cache):
    """The cache that `make_cache` returns: pass it to `generate` or to the model as `past_key_values`."""

    def __init__(self, config: MethodConfig, model: ModelLink) -> None:
        self.config, self.model = config, model
        super().__init__(layers=[])
        self.reset()
        self.asked_for_length = False  # see DropGuard
        self.underway = False  # a call has begun
        self.touched = False  # a call or a move of rows has changed some layers, and has not come to its end
        if model.guard is not None:
            model.guard.caches.add(self)

    def reset(self) -> None:
        """Forget everything, a call that failed half-way included."""
        self.underway = self.touched = False
        self.read_by: str | None = None  # the fingerprint of the model whose keys are held, taken when the first came
        self.dtype: torch.dtype | None = None  # that of autocast, or of the model, when the first came
        # New layers: stock ones do not always forget that they recorded, or their length.
        types, options = get_layer_types_and_kwargs(self.model.config)
        options = [options] * len(types) if isinstance(options, dict) else options  # one dict up to transformers 5.17
        self.layers = [self._new_layer(i, kind, options[i]) for i, kind in enumerate(types)]
        self._kinds = types
        # Kept beside the layers, for every layer asks for them at every step: ours, and all that count tokens
        # (linear attention and the like do not).
        self.sketch_layers = [layer for layer in self.layers if isinstance(layer, SketchLayer)]
        self._counting_layers = [layer for layer in self.layers if isinstance(layer, CacheLayerMixin)]
        self._summing_layers = [layer for layer in self.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        for layer in self.sketch_layers[:1]:
            layer.is_first = True

    def _new_layer(self, index: int, kind: str, options: dict[str, Any]) -> Any:
        by_bytes = self._layer_bytes if isinstance(self.config.budget_given, str) else None
        if kind == "full_attention":
            return SketchLayer(self.config, index, self.model, by_bytes)
        if kind == "hybrid":
            return HybridSketchLayer(self.config, index, self.model, by_bytes, options.get("number_of_states", 1))
        return DYNAMIC_LAYER_TYPE_MAPPING[kind](**options)

    def _layer_bytes(self, rows: int, entry_bytes: int) -> int:
        """One sketch layer's share of a budget in bytes: what sliding layers leave, in equal parts."""
        total = parse_bytes(str(self.config.budget_given))
        sliding = [(i, layer) for i, layer in enumerate(self.layers) if getattr(layer, "sliding_window", None)]
        needed = sum(layer.sliding_window * rows * self._token_bytes(index) for index, layer in sliding)
        if total <= needed:
            raise ValueError(
                f"keep={self.config.budget_given!r} is less than the sliding layers alone need: "
                f"{needed:,} bytes for {rows} rows"
            )
        return (total - needed) // len(self.sketch_layers)

    def _token_bytes(self, index: int) -> int:
        """Bytes that keys and values of a token take in a layer, by the model's config."""
        heads, width = (found[index] if isinstance(found, list) else found for found in heads_of(self.model.config))
        return 2 * heads * width * (self.dtype or torch.float32).itemsize

    # -- what transformers calls

    def begin_call(self, module: nn.Module, given: Mapping[str, Any]) -> None:
        """Refuse what cannot be read, before any layer takes a part of it; the decoder tells what it was given."""
        new = given.get("input_ids")
        new = given.get("inputs_embeds") if new is None else new
        if not isinstance(new, Tensor):
            return  # the decoder will say so
        rows, count = new.shape[:2]
        check_some(count)
        self.model.check_module(module)
        self._check_call(rows, count)
        if given.get("output_attentions"):
            refuse_weights()
        mask = given.get("attention_mask")
        if isinstance(mask, Tensor):
            check_mask(mask, rows, count, self.seen)
        if not torch.compiler.is_compiling():
            self._look_at(module, new, mask, given.get("position_ids"))
            self._check_layers(module, rows)
        self._recognise()
        for layer in self._summing_layers:
            stock.make_writable(layer)
        self.underway = True

    def end_call(self, *, failed: bool = False) -> None:
        """All layers have taken what came; or the call failed, and some have if any was touched."""
        self.underway = False
        if failed:
            return
        for layer in self._summing_layers:
            stock.let_go_of_history(layer)
        self.touched = False

    def _look_at(self, module: Any, new: Tensor, mask: Tensor | None, positions: Tensor | None) -> None:
        """Refuse numbers that cannot be read; the compiler cannot trace this."""
        count = new.shape[1]
        if count > 1:  # as with keys: a single token is not worth waiting for the device
            least, most = torch.stack(torch.aminmax(new)).tolist()
            known = getattr(module.get_input_embeddings(), "num_embeddings", math.inf)
            if new.is_floating_point() and not math.isfinite(least + most):
                raise ValueError("inputs_embeds are NaN or infinite; nothing of them was read")
            if not new.is_floating_point() and not 0 <= least <= most < known:
                raise ValueError(
                    f"token ids are from {least} to {most}, and the model has tokens 0 to {known - 1}: is this another "
                    "model's tokenizer? Nothing of them was read"
                )
        if not self.sketch_layers:
            return
        first, valid = self.sketch_layers[0], None
        if mask is not None:
            first.check_hidden(mask, count)
            valid = mask[:, -count:].bool()
            valid = None if bool(valid.all()) else valid
        if isinstance(positions, Tensor) and positions.ndim < 3:
            if positions.ndim != 2 or positions.shape[0] not in (1, new.shape[0]) or positions.shape[1] != count:
                raise ValueError(
                    f"positions of {new.shape[0]} rows × {count} tokens are wanted, got shape {tuple(positions.shape)}"
                )
            first.check_positions(positions, valid, new.shape[0])

    def _check_layers(self, decoder: Any, rows: int) -> None:
        """Refuse what layers of ours could not take, before others have taken their part of it."""
        module = next(attention_modules(decoder))
        dtype = autocast_of(device_of(module) or decoder.device) or decoder.dtype
        if self.seen == 0:
            self.dtype = dtype
            if isinstance(self.config.budget_given, str):
                for layer in self.sketch_layers:
                    layer.held.budget_for(rows, self._token_bytes(layer.held.layer))
        elif self.dtype not in (None, dtype):
            raise ValueError(
                f"this cache was filled in {self.dtype}, and tokens came in {dtype}: stay with the torch.autocast, and "
                "with the model's precision, that it began with, or have a new cache read the text"
            )
        for layer in self.sketch_layers if self.config.before_rotation else ():
            layer.check_watched(module)

    def _recognise(self) -> None:
        """Note down which weights make the first keys, and refuse a method that does not fit them."""
        if self.seen == 0 and not torch.compiler.is_compiling():
            self.model.check_method(self.config)
            self.read_by = self.model.fingerprint()

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Take a state of a layer with linear attention or a convolution."""
        self._check_begun()
        self.touched = True
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Take the other state of a layer with linear attention."""
        self._check_begun()
        self.touched = True
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def _check_begun(self) -> None:
        """What stock layers take cannot be taken back, so nothing may come there that was not looked at before."""
        if not self.underway:
            raise ValueError(
                "this cache was given tokens by a model that it was not made for, or that is not attached: attach it "
                "with kvsketch.attach(model), and call the model itself, not a layer or a compiled part of it"
            )

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's new tokens."""
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"the model has a layer {layer_idx}, but this cache was made for {len(self.layers)} layers"
            )
        layer = self.layers[layer_idx]
        if not isinstance(layer, SketchLayer):
            self._check_begun()
        self._check_layer(layer_idx, key_states, value_states)
        self.touched = self.underway
        keys, values = layer.update(key_states, value_states, *args, **kwargs)
        if not isinstance(layer, SketchLayer):
            stock.let_go(layer, prompt=key_states.shape[2] > 1)
        return keys, values

    @property
    def seen(self) -> int:
        """Tokens read so far, padding included."""
        return self._counting_layers[0].get_seq_length()

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 while nothing was read."""
        layer = self._counting_layers[0]
        if isinstance(layer, SketchLayer):
            return len(layer.held.lengths)
        return layer.keys.shape[0] if layer.is_initialized else 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read so far, padding included."""
        self.asked_for_length = True
        return super().get_seq_length(layer_idx)

    def _check_call(self, rows: int, count: int) -> None:
        """Refuse tokens that cannot follow those that were read."""
        self.model.check_attached()
        self.asked_for_length = False
        self.check_whole()
        if self.rows not in (0, rows):
            raise ValueError(
                f"the cache holds {self.rows} rows, but {rows} came: for beams or several answers "
                "from a filled cache call cache.batch_repeat_interleave(n) first"
            )
        self._check_rotation(self.seen, count)
        if any(layer.held.recording and not layer.cropped for layer in self.sketch_layers):
            self.end_recording()

    def _check_layer(self, layer_idx: int, keys: Tensor, values: Tensor) -> None:
        """Refuse a layer that is out of step, and keys that are no numbers."""
        layer, count = self.layers[layer_idx], keys.shape[2]
        first = self._counting_layers[0]
        if layer is first:
            if not self.underway:  # a layer was called by itself, or a part of the model that was compiled
                self._check_call(keys.shape[0], count)
                self._recognise()
        else:
            waiting = next((other for other in self.sketch_layers if other.pending), None)
            if waiting is not None:
                raise ValueError(
                    f"layer {waiting.held.layer} took {waiting.pending} tokens that its attention never asked for: "
                    "this model changes keys between cache and attention, which kvsketch does not support"
                )
            if layer.get_seq_length() + count != first.get_seq_length():
                raise ValueError(
                    f"layer {layer_idx} was given {count} tokens at position {layer.get_seq_length()}, but the first "
                    f"layer stands at {first.get_seq_length()}: all layers must read the same tokens"
                )
        # One token at a time is not looked at: the check would stall a GPU at every layer of every
        # step, and a NaN shows in the logits as it does with any cache.
        if count > 1 and not torch.compiler.is_compiling():
            for name, tensor in (("keys", keys), ("values", values)):
                extremes = torch.stack(torch.aminmax(tensor.detach()))  # NaN wins; and no copy of a long prompt
                if not bool(extremes.isfinite().all()):
                    raise ValueError(
                        f"layer {layer_idx} was given {name} that are NaN or infinite; it has stored none of them. "
                        "Look for an overflow in the model (float16?) or in its inputs"
                    )

    def check_alike(self, layer: SketchLayer) -> None:
        """Refuse a layer that has read other tokens than the first one."""
        ours, first = layer.held, self.sketch_layers[0].held
        if (ours.seen, ours.lengths) != (first.seen, first.lengths):
            raise ValueError(f"{ours.lengths!s:.60} tokens were read here, {first.lengths!s:.60} in the first layer")

    def check_whole(self) -> None:
        """Refuse to go on after a call, or a move of rows, that did not come to its end in all layers."""
        seen = self.seen  # compared one by one: of a set the compiler would make a graph for every length
        unequal = any(layer.get_seq_length() != seen for layer in self._counting_layers)
        if self.touched or unequal or any(layer.broken or layer.pending for layer in self.sketch_layers):
            lengths = [layer.get_seq_length() for layer in self._counting_layers]
            raise ValueError(
                f"an earlier call failed half-way: layers hold between {min(lengths)} and {max(lengths)} tokens. "
                "This cache cannot be used further; reset() it, or go on with a copy made before that call"
            )

    def _check_rotation(self, seen: int, count: int) -> None:
        """Refuse to mix keys that were rotated with different frequencies."""
        rope = self.model.rope
        if rope is None or seen == 0 or seen + count <= rope.limit:
            return
        if rope.kind == "dynamic" and count > 1:
            raise ValueError(
                f"this model rescales its rotary frequencies with the length beyond {rope.limit} tokens, so keys of "
                f"different calls do not fit together: {seen} tokens are held and {count} came. Pass the whole prompt "
                "in one call, or stay below"
            )
        if rope.kind == "longrope" and seen <= rope.limit:
            raise ValueError(rope.crossing(seen, seen + count))

    def activate_past_recording(self) -> None:
        """Called by assisted decoding, which feeds the whole prompt again and so needs an empty cache."""
        if self.seen > 0:
            raise ValueError(
                f"assisted decoding (and prompt look-up) must start from an empty cache, this one holds "
                f"{self.seen} tokens: transformers would feed them a second time. Use a new cache, or "
                "generate without an assistant"
            )
        for index, layer in enumerate(self.layers):
            # A convolution's states can be kept for a while; what was summed up cannot be taken apart.
            if isinstance(layer, LinearAttentionCacheLayerMixin) and self._kinds[index] != "conv":
                raise ValueError(
                    f"assisted decoding (and prompt look-up) takes tokens back, and the linear attention of layer "
                    f"{index} cannot: generate without an assistant"
                )
        super().activate_past_recording()

    @property
    def recording(self) -> bool:
        """Whether compression is held back, as assisted decoding asks."""
        return any(layer.held.recording for layer in self.sketch_layers) or any(
            getattr(layer, "record_past", False) for layer in self.layers
        )

    def end_recording(self) -> None:
        """Compress what assisted decoding held back, now that it has ended."""
        for layer in self.layers:
            if isinstance(layer, SketchLayer):
                layer.settle(recording=False)
            elif getattr(layer, "record_past", False):
                if self.seen:
                    layer.crop(0)  # back to the size of its window
                layer.record_past = False
                stock.fill_up(layer)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Take back the last tokens, padding included, given as a number below zero: all layers do, or none does."""
        tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 brings a tensor
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes the number of tokens to remove, as in crop(-3), got {tokens_to_remove}")
        self.check_whole()
        recording = [layer for layer in self.layers if getattr(layer, "record_past", False)]
        dropped = self._real_tokens(-tokens_to_remove)
        if tokens_to_remove:
            for layer in self.sketch_layers:
                layer.held.check_crop(-tokens_to_remove, dropped)
            for index, layer in enumerate(self.layers):
                if layer not in recording:
                    stock.check_can_go_back(layer, index)
        with self._in_one_piece():
            for layer in self.layers:
                if isinstance(layer, SketchLayer):
                    layer.take_back(-tokens_to_remove, dropped)
                elif tokens_to_remove or layer in recording:
                    layer.crop(tokens_to_remove)

    def _real_tokens(self, count: int) -> list[int]:
        """How many of the last `count` columns are a token of each row, and not padding."""
        for layer in self.sketch_layers[:1]:
            if layer.padding.length:
                return layer.padding.view[:, max(0, layer.padding.length - count) :].sum(1).tolist()
        return [count] * self.rows

    # -- rows

    @contextmanager
    def _in_one_piece(self) -> Iterator[None]:
        """Whatever is done here is done in all layers, or the cache says that it is broken."""
        self.check_whole()
        self.touched = True
        yield
        self.touched = False

    def _move_rows(self, indices: Tensor, move: Callable[[Any], None]) -> None:
        """Have each row become what another one was, in all layers; before the first call there are none."""
        self.check_whole()
        if self.rows == 0:
            return
        whole = indices.ndim == 1 and indices.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        if not whole or not indices.numel() or not 0 <= int(indices.min()) <= int(indices.max()) < self.rows:
            raise ValueError(
                f"rows {indices.tolist()!s:.60} were asked for, but the cache holds rows 0 to {self.rows - 1}: name "
                "one of them, or several, by their numbers"
            )
        with self._in_one_piece():
            for layer in self.layers:
                move(layer)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        rows = torch.as_tensor(beam_idx)
        self._move_rows(rows, lambda layer: layer.reorder_cache(rows.long()))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
            raise ValueError(f"rows can be repeated once or more often, got {repeats!r:.40}")
        rows = torch.arange(self.rows).repeat_interleave(repeats)
        self._move_rows(rows, lambda layer: stock.repeat_rows(layer, repeats, rows))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, by their numbers or by a mask."""
        indices = torch.as_tensor(indices)
        rows = indices
        if indices.dtype == torch.bool:
            if self.rows and indices.shape != (self.rows,):
                raise ValueError(f"a mask of rows must be {self.rows} booleans, got shape {tuple(indices.shape)}")
            rows = indices.nonzero()[:, 0]
        self._move_rows(rows, lambda layer: stock.select_rows(layer, rows.long()))

    def __deepcopy__(self, memo: dict[int, Any]) -> "SketchCache":
        """An independent copy, for the same model."""
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin  # before the layers, which may refer to the cache
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        if self.model.guard is not None:
            self.model.guard.caches.add(twin)
        return twin

    def fork(self) -> "SketchCache":
        """An independent copy, for one more question about the same text."""
        return copy.deepcopy(self)

    def compress(self, method: str | MethodConfig) -> "SketchCache":
        """A cache of another method that holds the same text, as if it had read that in one call.

        Only an exact cache still has the text. One exact read serves many methods: in a call that reads a whole prompt
        with `prefill="exact"`, tokens see all earlier ones whatever the method, so keys and values are the same.
        """
        config = parse_spec(method)
        if not isinstance(self.config, Exact):
            raise ValueError(f"only an exact cache can be compressed by another method, this one is {self.config}")
        if config.prefill != "exact":
            raise ValueError(
                f"{config} reads a prompt in chunks that see compressed ones: have it read the text itself"
            )
        if config.before_rotation:
            raise ValueError(
                f"{config.name} files keys as they are before rotation, and an exact cache holds them rotated: have a "
                "cache of this method read the text itself"
            )
        self.check_whole()
        if self.recording:
            self.end_recording()
        twin = SketchCache(config, self.model)
        twin.read_by, twin.dtype = self.read_by, self.dtype
        for old, new in zip(self.layers, twin.layers, strict=True):
            if isinstance(new, SketchLayer):
                new.read_again(old)
            else:
                new.__dict__.update(copy.deepcopy(old.__dict__))
        return twin

    # -- what a user asks

    @property
    def nbytes(self) -> int:
        """Bytes of memory held by all layers, spare room included."""
        return sum(_layer_bytes_held(layer) for layer in self.layers)

    def report(self) -> Report:
        """What is held, against what an uncompressed cache would hold."""
        layers = []
        for index, layer in enumerate(self.layers):
            if not isinstance(layer, SketchLayer):
                layers.append(LayerReport(index, None, _layer_bytes_held(layer), _layer_bytes_held(layer), None, 0))
                continue
            held, entries = layer.held, layer.held.count_entries()
            full = 0
            if entries is not None:
                keys, values = held.window.keys.view, held.window.values.view
                per_token = keys.shape[1] * (keys.shape[3] + values.shape[3]) * keys.element_size()
                full = held.seen * keys.shape[0] * per_token + layer.nbytes - held.nbytes
            details, warning = ({}, None) if held.past is None else (held.past.details(), held.past.warning())
            read = held.past.selectivity() if isinstance(held.past, LookupPast) else None
            of_heads = [_per_head(measured) for measured in (entries, held.error, read, held.recall)]
            layers.append(
                LayerReport(
                    layer=index,
                    entries=of_heads[0],
                    nbytes=layer.nbytes,
                    full_nbytes=full,
                    error=of_heads[1],
                    measured_at=held.measured_at,
                    read=of_heads[2],
                    recall=of_heads[3],
                    details=details,
                    warning=warning,
                )
            )
        return Report(str(self.config), self.seen, tuple(layers))

    def new_tokens(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Inputs for `generate` that continue from this cache with only the new tokens.

        `model.generate(**cache.new_tokens(ids), past_key_values=cache)`. Knows the padding of the tokens already
        read. The last token that `generate` returned was not read yet: what follows an answer begins with it
        (`torch.cat([answer[:, -1:], question], 1)`).
        """
        if input_ids.ndim != 2 or input_ids.shape[1] == 0:
            raise ValueError(
                f"new tokens are rows × tokens with at least one token, got shape {tuple(input_ids.shape)}"
            )
        if self.seen == 0:
            raise ValueError("the cache is empty: pass the prompt to generate as it is")
        if input_ids.shape[0] != self.rows:
            raise ValueError(f"the cache holds {self.rows} rows, but {input_ids.shape[0]} came")
        if not self.sketch_layers and self.rows > 1:
            raise ValueError(
                "no layer of this model is kvsketch's, so the padding of its rows is not known: pass generate the new "
                "tokens with an attention_mask that covers all tokens"
            )
        if self.recording:
            self.end_recording()
        new = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if self.sketch_layers and self.sketch_layers[0].padding.length:
            old = self.sketch_layers[0].padding.view.to(new)
        else:
            old = new.new_ones(self.rows, self.seen)
        return {"input_ids": input_ids, "attention_mask": torch.cat([old, new], 1)}

    def save(self, path: str | Path) -> None:
        """Write everything held to a safetensors file; `kvsketch.load_cache` reads it back.

        The file appears whole or not at all.
        """
        if self.seen == 0:
            raise ValueError("the cache is empty: there is nothing to save before it has read a prompt")
        self.check_whole()
        if self.recording:
            self.end_recording()
        now = self.model.fingerprint()
        read_by = self.read_by or now
        if now is not None and now != read_by:
            raise ValueError(
                "the model's weights, or its adapters, have changed since this cache began to read: what it holds was "
                "made by others, and a file would say that it fits these. Have a new cache read the text"
            )
        if read_by is None:
            raise ValueError("the model that this cache was made for is gone, so a file could not say whose it is")
        model_type = self.model.config.model_type
        write_cache(path, self.config, self.layers, model_type=model_type, read_by=read_by, dtype=self.dtype)


def _per_head(measured: Tensor | None) -> list[float] | None:
    """The mean over rows."""
    return None if measured is None else measured.double().mean(0).tolist()


def _layer_bytes_held(layer: Any) -> int:
    return layer.nbytes if isinstance(layer, SketchLayer) else stock.bytes_held(layer)

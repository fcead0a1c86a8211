"""A transformers `Cache` whose full-attention layers are kvsketch's; sliding and other layers stay stock."""

import copy
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.core.spans import Protected
from kvsketch.caches.registry import parse_spec
from kvsketch.huggingface import stock, taking_back
from kvsketch.huggingface.attention import check_mask, check_no_weights, check_not_empty
from kvsketch.huggingface.before_call import (
    Finite,
    check_caches_are_used,
    check_goes_on,
    check_numbers,
    check_own_mask,
    check_shares_nothing,
)
from kvsketch.huggingface.cache_file import check_same_weights, write_cache
from kvsketch.huggingface.compressing import check_can_become, hold_again
from kvsketch.huggingface.graphs import Steps
from kvsketch.huggingface.identity import Identity
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.layers import NOT_OURS, NOT_USED, LayerStack, bytes_held
from kvsketch.huggingface.model import ModelLink
from kvsketch.huggingface.modules import OURS
from kvsketch.huggingface.prompt import Prompt
from kvsketch.huggingface.report import Report, report_on
from kvsketch.huggingface.rows import reorder_rows, repeat_rows, select_rows


class SketchCache(Cache):
    """The cache that `make_cache` returns: pass it to `generate` or to the model as `cache`.

    (Before transformers 5.24 the argument's name is `past_key_values`.)

    Its layers are in a `LayerStack`. Here is what transformers calls, in the order of a call, and what users call.
    """

    def __init__(
        self, config: MethodConfig, model: ModelLink, questions: Sequence[Tensor] = (), protect: Protected | None = None
    ) -> None:
        self.config, self.model, self.questions, self.protect = config, model, questions, protect
        super().__init__(layers=[])
        self.reset()
        self.asked_for_length = False  # see DropGuard
        self.steps: Steps | None = None  # set while steps are recorded
        if model.guard is not None:
            model.guard.watch(self)

    def reset(self) -> None:
        """Forget everything, a call that failed half-way included."""
        self.underway, self.seen_before = False, 0  # whether a call has begun, and how many tokens were seen before it
        self.settles_later = False  # whether layers write to the past only at a call's end, as compiled ones do
        self.finite = Finite()  # checks what a call's layers are given
        # The model whose keys are held, as it was when the first keys came; its fingerprint if they are from a file.
        self.read_by: Identity | str | None = None
        # Layers are made anew: stock ones do not always forget that they recorded, or their length.
        self._stack = LayerStack(self.config, self.model, self.protect)
        self.layers, self.sketch_layers = self._stack.layers, self._stack.sketch
        self.prompt = Prompt(self.config, self._stack, self.questions, self.model.rope)
        self.steps = None

    # -- what transformers calls

    def begin_call(self, module: nn.Module, given: Mapping[str, Any]) -> None:
        """Refuse a call that cannot be read, before any layer takes a part of it; `given`: the decoder's arguments."""
        if self.in_recorded_step:
            return
        self.underway = False  # an interruption may have left it set
        self.finite.forget()
        new = given.get("input_ids")
        new = given.get("inputs_embeds") if new is None else new
        if not isinstance(new, Tensor):
            return  # the decoder will say so
        mask = given.get("attention_mask")
        if isinstance(mask, Mapping):  # one for each kind of layer, from a model around this one (Gemma 3 with images)
            mask = next((mask[kind] for kind in OURS if kind in mask), None)
            given = {**given, "attention_mask": mask}
        rows, count = new.shape[:2]
        check_not_empty(count)
        self.model.check_module(module)
        self.prompt.check(self, module, given, rows, count)
        self._check_call(rows, count)
        check_caches_are_used(module)
        check_shares_nothing(given)
        check_no_weights(module, given)
        if isinstance(mask, Tensor):
            check_mask(mask, rows, count, self.stack.seen)
        if not torch.compiler.is_compiling():  # a compiler cannot trace code that looks at numbers
            check_numbers(self.stack, module, given, new)
            self.seen_before = self.stack.seen
        self._recognise()
        for layer in self.stack.summing:
            stock.make_writable(layer)
        self.underway = True
        self._leave_due(later=torch.compiler.is_compiling())
        self.prompt.note(module, given, count)

    def end_call(self, *, failed: bool = False, came: bool = True) -> None:
        """All layers have taken the call's tokens, if any `came`; or it failed, and some have if any was touched."""
        if self.in_recorded_step:
            return
        begun, self.underway = self.underway, False
        late = self.settles_later
        self._leave_due(later=False)
        if failed:
            self.finite.forget()
            if begun:
                self.stack.forget_refused(self.seen_before)
        else:
            try:
                self.finite.hear()
                if begun and came and self.stack.seen == self.seen_before and not torch.compiler.is_compiling():
                    raise ValueError(NOT_USED)
            except ValueError:
                self.prompt.call_ended(self, begun=begun, failed=True)
                raise
            for layer in self.stack.summing:
                stock.release_history(layer)
            self.stack.touched = self.asked_for_length = False
            if late and True in [layer.held.leaves() for layer in self._stack.sketch]:
                _settle(self._stack)
        self.prompt.call_ended(self, begun=begun, failed=failed)

    def _leave_due(self, *, later: bool) -> None:
        """Have layers put off due writes to the past to the call's end, where it is compiled; or make them at once."""
        if self.settles_later != later:
            self.settles_later = later
            for layer in self._stack.sketch:
                layer.held.settles_later = later

    def _check_call(self, rows: int, count: int) -> None:
        """Refuse tokens that cannot follow those that were read."""
        self.model.check_attached()
        self.asked_for_length = False
        self.stack.check_whole()
        if self.stack.rows and self.stack.rows != rows:  # not `rows in (...)`: untraced for a size that may change
            raise ValueError(
                f"the cache holds {self.stack.rows} rows, but {rows} came: for beams or several answers "
                "from a filled cache call cache.batch_repeat_interleave(n) first"
            )
        if self.model.rope is not None:
            self.model.rope.check_can_follow(self.stack.seen, count)
        if not self.prompt.held and any(layer.held.recording and not layer.cropped for layer in self.sketch_layers):
            self.end_recording()

    def _recognise(self) -> None:
        """Note down which weights make the first keys, and refuse a method that does not fit them."""
        if self.stack.seen == 0 and not torch.compiler.is_compiling():
            now = self.model.now()
            if now is not None:
                now.fitted(self.config)
                now.look()
                self.read_by = now

    def _check_begun(self) -> None:
        """Refuse what comes to a stock layer outside a checked call: what such a layer takes cannot be taken back."""
        if not self.underway:
            raise ValueError(NOT_OURS)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Take a layer's new tokens."""
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"the model has a layer {layer_idx}, but this cache was made for {len(self.layers)} layers"
            )
        layer, count = self.layers[layer_idx], key_states.shape[2]
        if self.in_recorded_step:
            return layer.update(key_states, value_states)
        stack, ours = self.stack, isinstance(layer, SketchLayer)
        first = stack.counting[0]
        if not ours:
            self._check_begun()
        if layer is not first:
            stack.check_in_step(layer, layer_idx, count)
        elif not self.underway:  # a layer, or a compiled part of the model, was called by itself
            if self.config.holds_back and self.stack.seen == 0:
                raise ValueError(NOT_OURS)  # nobody would know what the prompt was, nor where it ends
            self._check_call(key_states.shape[0], count)
            check_no_weights(self.model, {})
            self._recognise()
        # A single token is not checked: that would stall a GPU at every layer of every step, and a NaN shows in the
        # logits as it does with any cache.
        refuse: Callable[[], None] | None = None
        if count > 1 and not torch.compiler.is_compiling():
            late = self.underway and layer is not first
            key_states, value_states, refuse = self.finite.of(layer, layer_idx, key_states, value_states, late=late)
        stack.touched, stack.latest = self.underway, layer
        keys, values = layer.update(key_states, value_states, *args, **kwargs)
        if ours:
            layer.refuse = refuse
        else:
            stock.release_unused(layer, prompt=count > 1)
        return keys, values

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        """The state of a layer with a convolution; for a single token models change it in place, and do not say so."""
        self._check_begun()
        found = super().get_conv_state(layer_idx, *args, **kwargs)
        self.stack.touched = self.stack.touched or found is not None
        return found

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        """Whether a layer holds a state; with transformers 5.17 a model that asks may then change it in place."""
        found = super().has_previous_state(layer_idx, *args, **kwargs)
        if self.underway and layer_idx is not None:
            self.stack.touched = self.stack.touched or found
        return found

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Take a state of a layer with linear attention or a convolution."""
        self._check_begun()
        self.stack.touched = True
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor:
        """Take the other state of a layer with linear attention."""
        self._check_begun()
        self.stack.touched = True
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens read so far, padding included."""
        self.asked_for_length = True
        return super().get_seq_length(layer_idx)

    def activate_past_recording(self) -> None:
        """Called by assisted decoding, which feeds the whole prompt again and so needs an empty cache."""
        taking_back.check_can_record(self.stack, self.config)
        super().activate_past_recording()

    def end_recording(self) -> None:
        """Compress what assisted decoding held back, now that it has ended; or what was read of a prompt."""
        self._end_prompt()
        taking_back.end_recording(self.stack)

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Take back the last tokens, padding included, in all layers or in none; crop(-3) takes back three."""
        taking_back.crop(self.stack, tokens_to_remove, self._end_prompt)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row `beam_idx[i]` was."""
        self._end_prompt()
        reorder_rows(self.stack, beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row `repeats` times."""
        self._end_prompt()
        repeat_rows(self.stack, repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows, by their numbers or by a mask."""
        self._end_prompt()
        select_rows(self.stack, indices)

    # -- steps that are recorded: `graphs.py`

    @property
    def stack(self) -> LayerStack:
        """All layers, in the state that callers expect: recorded steps are closed first."""
        self._close()
        return self._stack

    @property
    def in_recorded_step(self) -> bool:
        """Whether a step is under way in which this class checks and notes nothing."""
        return self.steps is not None and self.steps.inside

    def check_step(self, model: nn.Module, given: Mapping[str, Any]) -> None:
        """Check a single token before it comes, as at the beginning of any call."""
        decoder = next((module for module in model.modules() if id(module) == self.model.decoder), model)
        self.begin_call(decoder, given)
        self.end_call(came=False)

    def _close(self) -> None:
        if self.steps is not None:
            self.steps.close()

    def without_room(self) -> None:
        """Give up the spare room that recorded steps needed."""
        for layer in self.stack.sketch:
            layer.held.without_room()

    # -- copies

    def __deepcopy__(self, memo: dict[int, Any]) -> "SketchCache":
        """An independent copy, for the same model."""
        twin = self.__class__.__new__(self.__class__)
        memo[id(self)] = twin  # before the rest, which may refer to it
        self._close()
        own = {name: value for name, value in self.__dict__.items() if name != "steps"}
        twin.__dict__.update({"steps": None} | {name: copy.deepcopy(value, memo) for name, value in own.items()})
        if self.model.guard is not None:
            self.model.guard.watch(twin)
        twin.prompt.open = False
        twin.without_room()
        return twin

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a cache is not pickled: cache.save(path) writes it, kvsketch.load_cache(model, path) reads it, and "
            "cache.fork() copies it"
        )

    def fork(self) -> "SketchCache":
        """An independent copy, for one more question about the same text."""
        self.stack.check_whole()
        return copy.deepcopy(self)

    def compress(self, method: str | MethodConfig) -> "SketchCache":
        """A cache of another method that holds the same text, as if it had read the text in one call.

        Only an exact cache still has the text. One exact read serves many methods: in a call that reads a whole prompt
        with `prefill="exact"`, tokens see all earlier ones whatever the method, so keys and values are the same.
        """
        config = parse_spec(method)
        check_can_become(self.config, config, self.prompt)
        config = self.model.fitted(config)
        self._settle()
        twin = SketchCache(config, self.model)
        twin.read_by, twin.stack.whole.dtype = self.read_by, self.stack.whole.dtype
        twin.prompt.noted = self.prompt.noted
        hold_again(config, self.stack, twin.stack)
        return twin

    # -- what a user asks

    @property
    def seen(self) -> int:
        """Tokens read so far, padding included."""
        return self._stack.seen

    @property
    def rows(self) -> int:
        """Rows of the batch; 0 while nothing was read."""
        return self._stack.rows

    @property
    def nbytes(self) -> int:
        """Bytes of memory held by all layers, spare room included."""
        return sum(bytes_held(layer) for layer in self.stack.layers)

    @property
    def recording(self) -> bool:
        """Whether compression is held back, as assisted decoding asks."""
        return self.stack.recording

    def report(self) -> Report:
        """What is held, against what an uncompressed cache would hold."""
        self.stack.check_whole()
        return report_on(self.stack, self.model.group)

    def new_tokens(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        """Inputs for `generate` that continue from this cache with only the new tokens.

        `model.generate(**cache.new_tokens(ids), cache=cache)`. The mask includes the padding of tokens already
        read. The last token that `generate` returned was not read yet: tokens that follow an answer must begin with it
        (`torch.cat([answer[:, -1:], question], 1)`).
        """
        self.stack.check_whole()
        check_goes_on(input_ids, self.stack)
        check_own_mask(attention_mask, input_ids)
        if self.recording and not self.prompt.held:
            self.end_recording()
        new = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        known = self.sketch_layers[0].positions.real if self.sketch_layers else None
        old = new.new_ones(self.rows, self.seen) if known is None else known.to(new)
        return {"input_ids": input_ids, "attention_mask": torch.cat([old, new], 1)}

    def save(self, path: str | Path) -> None:
        """Write everything held to a safetensors file; `kvsketch.load_cache` reads it back.

        The file appears whole or not at all.
        """
        self.stack.check_whole()
        if self.seen == 0:
            raise ValueError("the cache is empty: there is nothing to save before it has read a prompt")
        self.model.check_in_one("saving a cache")
        self._settle()
        known = self.read_by.fingerprint if isinstance(self.read_by, Identity) else self.read_by
        read_by = check_same_weights(known, self.model)
        model_type, dtype = self.model.config.model_type, self.stack.whole.dtype
        write_cache(
            path, self.config, self.layers,
            model_type=model_type, read_by=read_by, dtype=dtype, noted=self.prompt.noted,
        )  # fmt: skip

    def _end_prompt(self) -> None:
        """Treat what was read of a prompt as all of it."""
        if self.prompt.held:
            self.stack.check_whole()
            self.prompt.end(self)

    def _settle(self) -> None:
        """Hold nothing back any more; refuse a cache that is not whole."""
        self.stack.check_whole()
        if self.recording:
            self.end_recording()


@torch.compiler.disable  # else the graph breaks in the midst of every layer, and all around it is compiled in pieces
def _settle(stack: LayerStack) -> None:
    with stack.changing():  # layers that have evicted tokens do not fit together with layers that have not
        for layer in stack.sketch:
            if not layer.held.recording:
                layer.settle(recording=False)

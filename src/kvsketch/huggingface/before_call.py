"""Checks that refuse tokens, masks, positions and keys that cannot be read, before any layer has taken a part of them.

What stock layers take cannot be taken back, so a call is checked as a whole, at its beginning.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvsketch.caches.core.storage import fetched
from kvsketch.huggingface.attention import check_not_empty
from kvsketch.huggingface.autocast import autocast_of, may_be_on
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.layers import LayerStack
from kvsketch.huggingface.modules import attention_modules
from kvsketch.huggingface.weights import device_of
from kvsketch.kernels.finite import are_numbers

STORED_NONE = "; it has stored none of them"
# The property's name up to transformers 5.17, and the one since.
CHECKPOINTING = next(
    name for name in ("is_activation_checkpointing", "is_gradient_checkpointing") if hasattr(PreTrainedModel, name)
)


def check_numbers(stack: LayerStack, decoder: Any, given: Mapping[str, Any], new: Tensor) -> None:
    """Refuse a call whose tokens, mask or positions are wrong, or which layers of ours could not take."""
    if new.shape[1] > 1:  # as with keys: a single token is not worth waiting for the device
        check_tokens(decoder, new)
    if stack.sketch:
        check_places(stack.sketch[0], new, given.get("attention_mask"), given.get("position_ids"))
    check_layers(stack, decoder, len(new))


def check_ids(ids: object, what: str) -> None:
    """Refuse anything that is not a tensor of token ids."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype == torch.bool:
        came = f"{ids.dtype} of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else type(ids).__name__
        raise ValueError(f"{what}, got {came}: tokenizer(text, return_tensors='pt')['input_ids'] gives them")


def check_tokens(decoder: Any, new: Tensor) -> None:
    """Refuse token ids that the model does not have, and embeddings that are NaN or infinite."""
    least, most = torch.stack(torch.aminmax(new)).tolist()
    known = getattr(decoder.get_input_embeddings(), "num_embeddings", math.inf)
    if new.is_floating_point() and not math.isfinite(least + most):
        raise ValueError("inputs_embeds are NaN or infinite; nothing of them was read")
    if not new.is_floating_point() and not 0 <= least <= most < known:
        raise ValueError(
            f"token ids are from {least} to {most}, and the model has tokens 0 to {known - 1}: is this another "
            "model's tokenizer? Nothing of them was read"
        )


def check_places(first: SketchLayer, new: Tensor, mask: Tensor | None, positions: Tensor | None) -> None:
    """Refuse a mask or positions by which new tokens do not continue what the first of our layers has read."""
    rows, count = new.shape[:2]
    first.positions.checked, valid = False, None
    if mask is not None:
        first.positions.check_mask(mask, count, first.held.seen)
        valid = mask[:, -count:].bool()
    if isinstance(positions, Tensor) and positions.ndim < 3:
        check_not_empty(positions.numel())  # empty when transformers reads a text in chunks and all of it was read
        if positions.ndim != 2 or positions.shape[0] not in (1, rows) or positions.shape[1] != count:
            raise ValueError(
                f"positions of {rows} rows × {count} tokens are wanted, got shape {tuple(positions.shape)}"
            )
        first.check_positions(positions, valid, rows)


def check_shares_nothing(given: Mapping[str, Any]) -> None:
    """Refuse a call that asks for the keys of all tokens that layers hold."""
    if given.get("return_shared_kv_states"):
        raise ValueError(
            "return_shared_kv_states asks for all keys and values of some layers, from which an assistant drafts (that "
            "of Gemma 4): layers of kvsketch give out none but new ones. Generate without that assistant, or with "
            "transformers' own cache"
        )


def check_caches_are_used(decoder: nn.Module) -> None:
    """Refuse a model that does not give its layers the cache that it was given."""
    if decoder.training and getattr(decoder, CHECKPOINTING, False):
        raise ValueError(
            "the model is in training with gradient checkpointing, where transformers leaves caches out: call "
            "model.eval() first, or turn that off"
        )


def check_layers(stack: LayerStack, decoder: Any, rows: int) -> None:
    """Refuse what layers of ours could not take: a budget, a precision, keys whose rotation is not watched."""
    dtype = decoder.dtype
    if may_be_on():
        dtype = autocast_of(device_of(next(attention_modules(decoder))) or decoder.device) or dtype
    if stack.seen == 0:
        stack.whole.dtype = dtype
        stack.check_budget(rows)
    elif stack.whole.dtype not in (None, dtype):
        raise ValueError(
            f"this cache was filled in {stack.whole.dtype}, and tokens came in {dtype}: stay with the torch.autocast, "
            "and with the model's precision, that it began with, or have a new cache read the text"
        )
    if stack.config.before_rotation:
        module = next(attention_modules(decoder))
        for layer in stack.sketch:
            layer.check_watched(module)


class Finite:
    """Checks that a call's layers are given finite numbers: each check is started at once, and its result read later.

    Waiting for a result stalls a GPU, which then has nothing to do until Python has found it more.
    """

    def __init__(self) -> None:
        self.unheard: Callable[[str], None] | None = None  # reads the latest layer's result, and refuses by it

    def of(
        self, layer: Any, index: int, keys: Tensor, values: Tensor, *, late: bool
    ) -> tuple[Tensor, Tensor, Callable[[], None] | None]:
        """Refuse a layer's keys and values if some are NaN or infinite: now, or as soon as that is known.

        The function returned refuses them once attention is under way, and before any is stored, so that the cache is
        as good as before. With `late` a layer on a GPU goes on, with zeros for what is to be refused: a call that has
        begun has failed half-way in any case.
        """
        there = are_numbers((keys, values))
        refuse = partial(_refuse, index, fetched(there))
        self.hear()
        if not isinstance(layer, SketchLayer) or layer.held.config.before_rotation:  # keys are compared, which waits
            refuse(STORED_NONE)
            return keys, values, None
        if keys.device.type == "cpu" or not late:
            return keys, values, partial(refuse, STORED_NONE)
        self.unheard, right = refuse, there.all()
        keys, values = (torch.where(right, x, x.new_zeros(())) for x in (keys, values))
        return keys, values, None

    def hear(self) -> None:
        """Refuse what an earlier layer was given, if it was NaN or infinite."""
        refuse, self.unheard = self.unheard, None
        if refuse is not None:
            refuse("")

    def forget(self) -> None:
        """Drop the result that was not read: its call has failed."""
        self.unheard = None


def _refuse(index: int, told: Callable[[], Tensor], more: str) -> None:
    for name, right in zip(("keys", "values"), told().tolist(), strict=True):
        if not right:
            raise ValueError(
                f"layer {index} was given {name} that are NaN or infinite{more}. "
                "Look for an overflow in the model (float16?) or in its inputs"
            )


def check_own_mask(mask: object, ids: Tensor) -> None:
    """Refuse a mask that does not cover exactly these tokens; None is accepted."""
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != ids.shape):
        came = f"shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(
            f"attention_mask must be a tensor that covers the new tokens alone, {tuple(ids.shape)}, got {came}"
        )


def check_goes_on(input_ids: Tensor, stack: LayerStack) -> None:
    """Refuse tokens that cannot continue what layers hold."""
    check_ids(input_ids, "new tokens are token ids, rows × tokens")
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise ValueError(f"new tokens are rows × tokens with at least one token, got shape {tuple(input_ids.shape)}")
    if stack.seen == 0:
        raise ValueError("the cache is empty: pass the prompt to generate as it is")
    if input_ids.shape[0] != stack.rows:
        raise ValueError(f"the cache holds {stack.rows} rows, but {input_ids.shape[0]} came")
    if not stack.sketch and stack.rows > 1:
        raise ValueError(
            "no layer of this model is kvsketch's, so the padding of its rows is not known: pass generate the new "
            "tokens with an attention_mask that covers all tokens"
        )

"""Handling the layers of a cache that stay transformers' own."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionCacheLayerMixin

from kvsketch.caches.core.buffers import writable
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.storage import storage_bytes, with_prefix

STATES = {"conv": "conv_states", "recurrent": "recurrent_states"}  # of layers with linear attention or a convolution
SAVED = {  # names of the layer classes whose state is known
    "DynamicSlidingWindowLayer",
    "LinearAttentionLayer",
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
    "DummyLayer",
}


def release_unused(layer: Any, prompt: bool) -> None:
    """Have a layer hold only what it uses: not all keys of a long prompt, not a call's autograd history."""
    for name in ("keys", "values"):
        tensor = getattr(layer, name, None)
        if not isinstance(tensor, Tensor):
            continue
        tensor = tensor.detach()
        if prompt and tensor.untyped_storage().nbytes() > 2 * tensor.numel() * tensor.element_size():
            tensor = tensor.clone()  # a sliding layer keeps a view of the whole prompt
        setattr(layer, name, tensor)


def release_history(layer: Any) -> None:
    """Drop the autograd history of a layer's states."""
    _change_states(layer, lambda state: state.detach() if state.requires_grad else state)


def make_writable(layer: Any) -> None:
    """Replace a layer's states that were made in inference mode, so that they can be written to."""
    _change_states(layer, writable)


def _change_states(layer: Any, change: Callable[[Tensor], Tensor]) -> None:
    for name in STATES.values():
        states = getattr(layer, name)
        for number, state in states.items():
            if state is not None:
                states[number] = change(state)


def pad_convolutions(layer: Any) -> None:
    """Pad a layer's convolution states to the width of their kernels, also after fewer tokens."""
    for number, state in getattr(layer, STATES["conv"], {}).items():
        if state is not None:
            missing = layer.conv_kernel_size[number] - state.shape[-1]
            layer.conv_states[number] = F.pad(state, (max(0, missing), 0))


def check_can_go_back(layer: Any, index: int) -> None:
    """Refuse to take back tokens in a layer that has dropped what it would need for that."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        what = f"the state of layer {index} (linear attention, or a convolution) has summed them up"
    elif getattr(layer, "is_sliding", False) and layer.get_seq_length() >= layer.sliding_window:
        what = f"the sliding window of layer {index} has moved on and dropped what it would need"
    else:
        return
    raise ValueError(f"cannot take back tokens: {what}. Keep a cache.fork() from before those tokens instead")


def repeat_rows(layer: Any, repeats: int, rows: Tensor) -> None:
    """Every row several times; a layer that sums tokens up can only reorder its rows."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.reorder_cache(rows)
    else:
        layer.batch_repeat_interleave(repeats)


def select_rows(layer: Any, rows: Tensor) -> None:
    """Only these rows."""
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        layer.reorder_cache(rows)
    else:
        layer.batch_select_indices(rows)


def bytes_held(layer: Any) -> int:
    """Bytes of memory that a layer holds."""
    found = list(vars(layer).values())
    for name in STATES.values():
        found += list(getattr(layer, name, {}).values())
    return storage_bytes(value for value in found if isinstance(value, Tensor))


def state_of(layer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Everything that `restore` needs, as tensors and as JSON."""
    if type(layer).__name__ not in SAVED:
        raise ValueError(f"layers of type {type(layer).__name__} cannot be saved: their state is not known here")
    tensors, numbers = dict[str, Tensor](), dict[str, Any]()
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        tensors |= {"keys": layer.keys, "values": layer.values}
    if isinstance(layer, DynamicSlidingWindowLayer):
        numbers["cumulative_length"] = int(layer.cumulative_length)
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        states, beside = linear_state(layer)
        return tensors | states, numbers | beside
    return tensors, numbers


def linear_state(layer: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The part of a layer's state that belongs to linear attention, or a convolution."""
    tensors = dict[str, Tensor]()
    for short, name in STATES.items():
        tensors |= {f"{short}.{i}": state for i, state in getattr(layer, name).items() if state is not None}
    numbers = range(layer.number_of_states)
    return tensors, {
        "had": [bool(layer.has_previous_state[i]) for i in numbers],
        "kernels": [layer.conv_kernel_size[i] for i in numbers],
    }


def restore(layer: Any, tensors: dict[str, Tensor], numbers: dict[str, Any], beside: LayerCache | None) -> None:
    """Take back what `state_of` gave; refuses a state that cannot be, or does not fit a layer of ours (`beside`)."""
    if beside is None:
        rows, seen = len(tensors["keys"]), numbers["cumulative_length"]
    else:
        rows, seen = len(beside.lengths), beside.seen
    kinds = {tensor.dtype for name, tensor in tensors.items() if name in ("keys", "values")}
    if isinstance(layer, DynamicLayer):
        keys, values = tensors["keys"], tensors["values"]
        kept = seen if not layer.is_sliding else min(seen, layer.sliding_window - 1)
        if keys.ndim != 4 or keys.shape != values.shape or keys.shape[::2][:2] != (rows, kept) or len(kinds) != 1:
            raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} of {rows} rows, {kept} tokens")
        if not keys.is_floating_point():
            raise ValueError(f"keys of {keys.dtype}")
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    if isinstance(layer, DynamicSlidingWindowLayer):
        if numbers["cumulative_length"] != seen:
            raise ValueError(f"{numbers['cumulative_length']!r:.40} tokens were read, and {seen} by other layers")
        layer.cumulative_length = seen
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        restore_linear(layer, tensors, numbers, rows)


def restore_linear(layer: Any, tensors: dict[str, Tensor], numbers: dict[str, Any], rows: int) -> None:
    """Take back what `linear_state` gave for this number of rows."""
    kernels, had = numbers["kernels"], numbers["had"]
    if not len(kernels) == len(had) == layer.number_of_states:
        raise ValueError(f"{len(kernels)} and {len(had)} states, and not {layer.number_of_states}")
    for i, kernel in enumerate(kernels):
        conv, recurrent = (with_prefix(tensors, f"{short}.").get(str(i)) for short in STATES)
        for state in (conv, recurrent):
            if state is not None and not (state.ndim >= 2 and len(state) == rows and bool(state.isfinite().all())):
                raise ValueError(f"a state of shape {tuple(state.shape)} for {rows} rows, or one that is no number")
        if (conv is not None or recurrent is not None) != had[i] or kernel != (
            None if conv is None else conv.shape[-1]
        ):
            raise ValueError(
                f"a convolution of {kernel!r:.40} for states {'that are' if had[i] else 'that are not'} there"
            )
        if conv is not None:
            layer.lazy_initialization(conv_states=conv, state_idx=i, conv_kernel_size=kernel)
            layer.conv_states[i].copy_(conv)
        if recurrent is not None:
            layer.lazy_initialization(recurrent_states=recurrent, state_idx=i)
            layer.recurrent_states[i].copy_(recurrent)
        layer.has_previous_state[i] = had[i]

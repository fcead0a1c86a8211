"""Taking back tokens, and holding back compression until it is known which tokens those are: assisted decoding."""

from collections.abc import Callable

from torch import Tensor
from transformers.cache_utils import LinearAttentionCacheLayerMixin

from kvsketch.caches.core.config import MethodConfig
from kvsketch.huggingface import stock
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.layers import LayerStack


def check_can_record(stack: LayerStack, config: MethodConfig) -> None:
    """Refuse assisted decoding where the prompt cannot be fed again, as it does, or tokens cannot be taken back."""
    if config.askings:
        raise ValueError(
            f"{config} goes by queries, including those of a draft that is taken back later: generate without an "
            "assistant, or use a method that does not go by queries, such as keydiff"
        )
    if stack.seen > 0:
        raise ValueError(
            f"assisted decoding (and prompt look-up) must start from an empty cache, this one holds "
            f"{stack.seen} tokens: transformers would feed them a second time. Use a new cache, or "
            "generate without an assistant"
        )
    for index, layer in enumerate(stack.layers):
        # A convolution's states can be kept for a while; tokens that were summed up cannot be taken back.
        if isinstance(layer, LinearAttentionCacheLayerMixin) and stack.kinds[index] != "conv":
            raise ValueError(
                f"assisted decoding (and prompt look-up) takes tokens back, and the linear attention of layer "
                f"{index} cannot: generate without an assistant"
            )


def end_recording(stack: LayerStack) -> None:
    """Compress what assisted decoding held back, now that it has ended."""
    with stack.changing():
        for layer in stack.layers:
            if isinstance(layer, SketchLayer):
                layer.settle(recording=False)
            elif getattr(layer, "record_past", False):
                if stack.seen:
                    layer.crop(0)  # back to the size of its window
                layer.record_past = False
                stock.pad_convolutions(layer)


def crop(stack: LayerStack, tokens_to_remove: int | Tensor, end_prompt: Callable[[], None]) -> None:
    """Take back the last tokens, padding included, in all layers or in none; their number is given below zero.

    `end_prompt` is called before that: it takes what was read of a prompt that is held back for all of it.
    """
    tokens_to_remove = int(tokens_to_remove)  # transformers 5.17 brings a tensor
    if tokens_to_remove > 0:
        raise ValueError(f"crop takes the number of tokens to remove, as in crop(-3), got {tokens_to_remove}")
    if tokens_to_remove and stack.config.askings:
        raise ValueError(
            f"cannot take back tokens: {stack.config} goes by queries, and what theirs look at has been noted. Keep a "
            "cache.fork() from before those tokens instead"
        )
    end_prompt()
    stack.check_whole()
    recording = [layer for layer in stack.layers if getattr(layer, "record_past", False)]
    dropped = _real_tokens(stack, -tokens_to_remove)
    if tokens_to_remove:
        for layer in stack.sketch:
            layer.held.check_crop(-tokens_to_remove, dropped)
        for index, layer in enumerate(stack.layers):
            if layer not in recording:
                stock.check_can_go_back(layer, index)
    with stack.changing():
        for layer in stack.layers:
            if isinstance(layer, SketchLayer):
                layer.take_back(-tokens_to_remove, dropped)
            elif tokens_to_remove or layer in recording:
                layer.crop(tokens_to_remove)


def _real_tokens(stack: LayerStack, count: int) -> list[int]:
    """How many of the last `count` places of each row are tokens, and not padding."""
    if not stack.sketch:
        return [count] * stack.rows
    return stack.sketch[0].positions.real_tokens(count, stack.rows)

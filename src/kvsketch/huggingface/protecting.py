"""Protected tokens of a prompt; before any of it is read, protection that is not possible is refused."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from kvsketch.caches.core.allocation import budget_of
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.core.spans import Given, Protected, read_spans
from kvsketch.huggingface.layers import LayerStack


@contextmanager
def protecting(stack: LayerStack, given: Given, lengths: list[int]) -> Iterator[None]:
    """Protect these tokens, if any, of the prompt that is read in this block, besides those the cache was told of.

    `lengths` are those of the prompt's rows. A prompt that is refused leaves nothing changed.
    """
    before, wanted = stack.whole.protected, read_spans(given)
    if wanted:
        stack.whole.protected = _first_given(stack, wanted)
    try:
        check_protected(stack, lengths)
        yield
    except BaseException:
        if stack.seen == 0:
            stack.whole.protected = before
            stack.expect()
        raise


def _first_given(stack: LayerStack, wanted: Protected) -> Protected:
    """What a user protects now; refused if something is protected already, or was read."""
    if stack.seen or any(layer.held.started for layer in stack.sketch):
        raise ValueError(
            "this cache has read before, and some of that may be gone: what is protected must be said with the first "
            "prompt, or to kvsketch.make_cache. Use a new cache, or reset() this one"
        )
    if stack.whole.protected:
        raise ValueError("this cache was made with protect=, and prefill is told to protect too: leave one of them out")
    return wanted


def check_protected(stack: LayerStack, lengths: list[int]) -> None:
    """A prompt with rows of these lengths begins: refuse to protect what is not in it, or more than may be held."""
    if stack.seen or not stack.whole.protected:
        return
    for row, (spans, length) in enumerate(zip(stack.whole.protected.of(len(lengths)), lengths, strict=True)):
        if spans.end > length:
            raise ValueError(
                f"protect goes up to token {spans.end:,} of row {row}, and its prompt has {length:,}, padding not "
                "counted. A prompt that comes in several calls is read with kvsketch.prefill(model, ids, cache, "
                "chunk=...), which knows all of it"
            )
    prepare(stack, lengths)


def prepare(stack: LayerStack, lengths: Sequence[int]) -> None:
    """Refuse to protect more of rows of these lengths than may be held; divide the budget as is right for them."""
    if not stack.whole.protected:
        return
    config = stack.config
    check_room(config, stack.whole.protected)
    for row, (spans, length) in enumerate(zip(stack.whole.protected.of(len(lengths)), lengths, strict=True)):
        beside = spans.beside(config.sinks)
        if isinstance(config.budget_given, float):
            most = Budget(config.budget_given, None, config.floor()).entries(length)
            if beside > most:
                raise ValueError(
                    f"{beside:,} tokens of row {row} are protected, and of its {length:,} tokens "
                    f"keep={config.budget_given!r} lets a KV head hold {most:,}: keep more, or protect less"
                )
    stack.expect(min(lengths))


def check_room(config: MethodConfig, protected: Protected) -> None:
    """Refuse to protect more than fits into a number of entries."""
    if isinstance(config.budget_given, int):
        beside = max(spans.beside(config.sinks) for spans in protected.rows)
        budget_of(config, None, 1, len(protected.rows), beside)


def lengths_of(rows: int, count: int, mask: Tensor | None) -> list[int]:
    """Tokens of each row, padding not counted."""
    return [count] * rows if mask is None else mask.sum(1).tolist()

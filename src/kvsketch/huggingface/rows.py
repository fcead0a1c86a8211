"""Moving rows of a batch, in all layers of a cache at once: for beams and for several answers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvsketch.caches.core.spans import Protected
from kvsketch.huggingface import stock
from kvsketch.huggingface.layers import LayerStack


def reorder_rows(stack: LayerStack, order: Tensor) -> None:
    """Row i becomes what row `order[i]` was."""
    rows = torch.as_tensor(order, device="cpu")
    _move_rows(stack, rows, lambda layer: layer.reorder_cache(rows.long()))


def repeat_rows(stack: LayerStack, repeats: int) -> None:
    """Every row `repeats` times."""
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise ValueError(f"rows can be repeated once or more often, got {repeats!r:.40}")
    rows = torch.arange(stack.rows, device="cpu").repeat_interleave(repeats)
    _move_rows(stack, rows, lambda layer: stock.repeat_rows(layer, repeats, rows))


def select_rows(stack: LayerStack, indices: Tensor) -> None:
    """Only these rows, by their numbers or by a mask."""
    indices = torch.as_tensor(indices, device="cpu")
    rows = indices
    if indices.dtype == torch.bool:
        if stack.rows and indices.shape != (stack.rows,):
            raise ValueError(f"a mask of rows must be {stack.rows} booleans, got shape {tuple(indices.shape)}")
        rows = indices.nonzero()[:, 0]
    _move_rows(stack, rows, lambda layer: stock.select_rows(layer, rows.long()))


def _move_rows(stack: LayerStack, indices: Tensor, move: Callable[[Any], None]) -> None:
    """Have each row become what another one was, in all layers; before the first call there are no rows."""
    stack.check_whole()
    if stack.rows == 0:
        return
    whole = indices.ndim == 1 and indices.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not whole or not indices.numel() or not 0 <= int(indices.min()) <= int(indices.max()) < stack.rows:
        raise ValueError(
            f"rows {indices.tolist()!s:.60} were asked for, but the cache holds rows 0 to {stack.rows - 1}: name "
            "one of them, or several, by their numbers"
        )
    with stack.changing():
        for layer in stack.layers:
            move(layer)
        if stack.sketch and not stack.whole.protected.alike:
            stack.whole.protected = Protected(tuple(stack.sketch[0].held.spans), alike=False)

"""Attention of prompts on a GPU: a chunk of queries over weighted tokens, and new tokens among themselves."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gpu_layer import GROUP, HEADS, SCALE, WIDTH, allowed, entries, held_against, stock
from gpu_machine import Machine
from kvsketch.attention import Partial
from kvsketch.kernels.gpu import flash, many_queries
from kvsketch.kernels.sources import Entries

IN_CUDNN = "torch's, with lse"  # cuDNN's or flash; cuDNN's is not used while a graph is recorded


def prompts(on: Machine, chunk: int, count: int, among: int) -> Iterator[dict[str, Any]]:
    """Rows of a chunk of queries that sees all weighted tokens, and of new tokens that see those before them."""
    tokens = entries(on, count, on.dtype, weighted=True)
    query = on.random(1, HEADS * GROUP, chunk, WIDTH).to(on.dtype)
    found = many_queries.attend(query, tokens, SCALE)
    some = slice(0, min(chunk, 8))
    held_against(
        Partial(found.out[:, :, some], found.lse[:, :, some]), query[:, :, some], [Entries(tokens)], allowed(on.dtype)
    )
    new, asking = entries(on, among, on.dtype), on.random(1, HEADS * GROUP, among, WIDTH).to(on.dtype)
    last = slice(max(0, among - 8), among)
    in_flash = partial(flash.attend, asking, new.keys, new.values, SCALE, causal=True)
    seen = torch.arange(among, device=on.device) <= torch.arange(among, device=on.device)[last, None]
    for found in (many_queries.attend(asking, new, SCALE, causal=True), in_flash()):
        if found is not None:  # torch has this form only on GPUs
            held_against(
                Partial(found.out[:, :, last], found.lse[:, :, last]), asking[:, :, last], [Entries(new)],
                allowed(on.dtype), visible=seen[None, None],
            )  # fmt: skip
    causal = partial(F.scaled_dot_product_attention, scale=SCALE, enable_gqa=True, is_causal=True)
    forms: dict[tuple[str, str, int], Callable[[], Any]] = {
        ("chunk", "ours, weighted", chunk * count): partial(many_queries.attend, query, tokens, SCALE),
        ("chunk", "stock, no weights", chunk * count): partial(stock, query, tokens),
        ("among", "ours", among**2 // 2): partial(many_queries.attend, asking, new, SCALE, causal=True),
        ("among", "stock", among**2 // 2): partial(causal, asking, new.keys, new.values),
    }
    if on.device.type == "cuda":
        forms["among", IN_CUDNN, among**2 // 2] = in_flash
    for (what, form, pairs), call in forms.items():
        yield {
            "what": what,
            "form": form,
            "products": 4 * pairs * HEADS * GROUP * WIDTH,
            "us": on.times([call], graph=form != IN_CUDNN),
        }

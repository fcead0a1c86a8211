"""Decode steps on a GPU that read all entries, checked and then timed beside torch's own forms."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

from gpu_layer import GROUP, HEADS, SCALE, WIDTH, allowed, copies_of, entries, held_against, ours, stock
from gpu_machine import Machine
from kvsketch.attention import Partial, WeightedTokens
from kvsketch.kernels.gpu import attention
from kvsketch.kernels.sources import Entries, Segments

FLEX = 131_072  # the only number of tokens for which FlexAttention is compiled, which takes long
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def check_attention(on: Machine) -> None:
    """Raise an error unless attention of few queries agrees with its definition in difficult cases."""
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        if on.device.type == "cpu" and dtype == torch.bfloat16:
            continue
        many, more = (777, 5000) if on.device.type == "cuda" else (70, 130)
        for count, weighted in ((1, False), (many, True), (more, False)):
            tokens = entries(on, count, dtype, weighted)
            query = on.random(1, HEADS * GROUP, 1, WIDTH).to(dtype)
            runs = Segments(*(x[None, :, None] for x in cuts(on, count)))
            for segments in (None, runs):
                parts = [Entries(tokens, segments=segments)]
                found = [attention.attend(query, parts, HEADS, SCALE) for _ in range(3)]
                assert all(one is not None for one in found), f"no kernel for {dtype}, {count} tokens"
                assert all(torch.equal(one.out, found[0].out) for one in found), "the same answer every time"
                held_against(found[0], query, parts, allowed(dtype))
    if on.device.type == "cuda":
        beyond_two_to_the_31(on)


def cuts(on: Machine, count: int) -> tuple[Tensor, Tensor]:
    """Beginnings and lengths of some runs of each head, of any lengths."""
    number = min(20, (count + 1) // 2)
    ends = torch.rand(HEADS, max(2 * number, count), generator=on.draw, device=on.device).argsort(1)[:, : 2 * number]
    ends = (ends % (count + 1)).sort(1).values.unflatten(1, (number, 2))
    return ends[..., 0].contiguous(), ends[..., 1] - ends[..., 0]


def beyond_two_to_the_31(on: Machine) -> None:
    """Compare the last row of a cache with the definition: its numbers lie farther than 32 bits count."""
    keys, values = (torch.empty(8, HEADS, 300_000, WIDTH, device=on.device, dtype=on.dtype) for _ in range(2))
    for x in (keys, values):
        x[-1] = on.random(HEADS, 300_000, WIDTH).to(on.dtype)
        x[:-1] = 0
    query = on.random(8, HEADS * GROUP, 1, WIDTH).to(on.dtype)
    found = attention.attend(query, [Entries(WeightedTokens(keys, values))], HEADS, SCALE)
    last = Entries(WeightedTokens(keys[-1:], values[-1:]))
    held_against(Partial(found.out[-1:], found.lse[-1:]), query[-1:], [last], allowed(on.dtype))


def dense(on: Machine, count: int) -> Iterator[dict[str, Any]]:
    """Rows of a step that reads all tokens: ours, with and without weights, and torch's forms."""
    weighted = [entries(on, count, on.dtype, weighted=True) for _ in range(copies_of(on, count))]
    plain = [replace(tokens, log_mass=None) for tokens in weighted]
    query = on.random(1, HEADS * GROUP, 1, WIDTH).to(on.dtype)
    forms = {"ours": (ours, plain), "ours, weighted": (ours, weighted), "stock": (stock, plain)}
    if on.device.type == "cuda":
        forms |= {name: (partial(by_backend, backend), plain) for name, backend in BACKENDS.items()}
        if count == FLEX:
            forms["flex"] = (partial(torch.compile(flex_attention, dynamic=False), scale=SCALE, enable_gqa=True), plain)
    for name, (form, copies) in forms.items():
        if form is ours:
            held_against(ours(query, copies[-1]), query, [Entries(copies[-1])], allowed(on.dtype))
        try:
            given = [(tokens.keys, tokens.values) if name == "flex" else (tokens,) for tokens in copies]
            taken = on.times([partial(form, query, *one) for one in given])
        except Exception as error:  # a backend may not take these shapes, or a compiler may fail
            taken = {"error": " ".join(str(error).split())[:200]}
        read = count * HEADS * (WIDTH * 4 + 4 * (copies is weighted))
        yield {"what": "dense", "form": name, "tokens": count, "bytes": read, "us": taken}


def by_backend(backend: SDPBackend, query: Tensor, tokens: WeightedTokens) -> Tensor:
    with sdpa_kernel(backend):
        return stock(query, tokens)


def unequal(on: Machine, count: int) -> Iterator[dict[str, Any]]:
    """A row of a step over heads with four budgets and a window: the five parts that most layers of `kvzip` have."""
    query = on.random(1, HEADS * GROUP, 1, WIDTH).to(on.dtype)
    budgets = [count >> halvings for halvings in range(4)]
    each, size = HEADS // len(budgets), min(64, count)
    copies = list[list[Entries]]()
    for tokens in (entries(on, count, on.dtype) for _ in range(copies_of(on, count))):
        parts = [Entries(WeightedTokens(tokens.keys[:, :, :size], tokens.values[:, :, :size]))]
        for place, budget in enumerate(budgets):
            own = slice(place * each, (place + 1) * each)
            some = WeightedTokens(tokens.keys[:, own, :budget], tokens.values[:, own, :budget])
            parts.append(Entries(some, torch.arange(own.start, own.stop, device=on.device)))
        copies.append(parts)
    held_against(attention.attend(query, copies[-1], HEADS, SCALE), query, copies[-1], allowed(on.dtype))
    taken = on.times([partial(attention.attend, query, parts, HEADS, SCALE) for parts in copies])
    read = (each * sum(budgets) + HEADS * size) * WIDTH * 4
    yield {"what": "dense", "form": "four budgets", "tokens": count, "bytes": read, "us": taken}

"""Kernels on a GPU, checked and then timed, in one run of less than ten minutes: `python benchmarks/gpu.py OUT`.

First every kernel is held against its definition in float64; one that fails is not timed, and the run ends with an
error. Then, for a layer of 8 KV heads × 128 in bfloat16 with four query heads each: a decode step that reads all tokens
beside torch's own forms; one that reads 32 of 1,024 buckets, of equal and of very unlike sizes; BalanceKV's halving of
all blocks; and of a prompt a chunk of queries against weighted tokens, and new tokens among themselves. Each is timed
with launches by Python and as a CUDA graph, steps over eight copies in turn, so that nothing is in a cache; and beside
a copy of memory in the same run. What is timed is held against the definition too, once. Last come whole models, with
steps by Python and recorded. Rows go to OUT/gpu.jsonl. `--dry` goes through all of it on the CPU, with few tokens:
under Triton's interpreter, and with no meaning for the times.

`--compile` does without a GPU what can be done there: it compiles for compute capability 9.0, and says how many
registers, how much shared memory, and whether anything is spilled.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

if "--dry" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import gpu_paper
from gpu_compiled import compiled
from gpu_decode import decoding
from gpu_fit import fitting
from gpu_large import large
from gpu_machine import Machine
from kvsketch.attention import Partial, WeightedTokens, merge, weighted_attention
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens, Unrotated
from kvsketch.caches.forgetting.balancekv.practical import WALKS
from kvsketch.caches.registry import parse_spec
from kvsketch.evaluation.results.provenance import provenance
from kvsketch.kernels import kcenter
from kvsketch.kernels.balanced_walk import gathered, strips, walk_in_triton
from kvsketch.kernels.directions import in_triton as directions_in_triton
from kvsketch.kernels.directions import reference as reference_directions
from kvsketch.kernels.gpu import attention, flash, many_queries
from kvsketch.kernels.kcenter import reference
from kvsketch.kernels.places import in_triton as places_in_triton
from kvsketch.kernels.places import reference as reference_places
from kvsketch.kernels.routing import in_triton as routing
from kvsketch.kernels.routing import reference as reference_routing
from kvsketch.kernels.sources import Classifier, Entries, Limits, Segments, Staged

HEADS, GROUP, WIDTH = 8, 4, 128
SCALE = WIDTH**-0.5
COPIES = 8  # caches in turn: together larger than what a processor keeps
WINDOW = 2048
IN_CUDNN = "torch's, with lse"  # cuDNN's or flash; the former is not used while a graph is recorded
FLEX = 131_072  # tokens of the one size at which FlexAttention is compiled, which takes long
BLOCK = 256  # tokens that are halved together
ROUNDED = 8  # of more buckets one may be another, where rounding decides
LOGITS_APART = 0.02  # of their length: what a classifier's rounding makes of its logits, in bytes too
FULL = {
    "tokens": (32_768, 131_072, 171_000, 500_000),
    "saap": (171_000, 1024, 32),
    "halved": 131_072,
    "centred": (131_072, 1024),
    "prompt": (1024, 131_072, 16_384),
    "model": (32_768, 192),
    "large": (16_384, 131_072, 160),
    "fitted": 16_384,
    "rounds": 100,
}
DRY = {
    "tokens": (130,),
    "saap": (300, 16, 2),
    "halved": 64,
    "centred": (500, 20),
    "prompt": (20, 100, 40),
    "model": (300, 6),
    "large": (60, 90, 8),
    "fitted": 120,
    "rounds": 2,
}
BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def check_attention(on: Machine) -> None:
    """Attention of few queries says what its definition says, on what is hard; else this raises an error."""
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


def check_walk(on: Machine) -> None:
    """BalanceKV's walk halves blocks as the definition does, but for a few where rounding decides."""
    for dtype in (torch.float32, on.dtype):
        if on.device.type == "cuda" and dtype == torch.float32:
            continue  # torch's work there
        keys, values = (on.random(64 if on.device.type == "cuda" else 2, BLOCK, WIDTH).to(dtype) for _ in range(2))
        keys, values, *rest = walk_of(on, keys, values)
        exact = strips.halving_signs(keys.double(), values.double(), *rest) > 0
        found = walk_in_triton.keep_half(keys, values, *rest), strips.halving_signs(keys, values, *rest) > 0
        differ, of_torch = (int((one != exact).any(1).sum()) for one in found)
        assert differ <= 3 + 2 * of_torch, f"{differ} of {len(keys)} blocks are halved otherwise ({of_torch} by torch)"


def beyond_two_to_the_31(on: Machine) -> None:
    """A cache whose last numbers lie farther than 32 bits count: its last row is held against the definition."""
    keys, values = (torch.empty(8, HEADS, 300_000, WIDTH, device=on.device, dtype=on.dtype) for _ in range(2))
    for x in (keys, values):
        x[-1] = on.random(HEADS, 300_000, WIDTH).to(on.dtype)
        x[:-1] = 0
    query = on.random(8, HEADS * GROUP, 1, WIDTH).to(on.dtype)
    found = attention.attend(query, [Entries(WeightedTokens(keys, values))], HEADS, SCALE)
    last = Entries(WeightedTokens(keys[-1:], values[-1:]))
    held_against(Partial(found.out[-1:], found.lse[-1:]), query[-1:], [last], allowed(on.dtype))


def in_float64(tokens: WeightedTokens, heads: slice) -> WeightedTokens:
    parts = (tokens.keys, tokens.values, tokens.log_mass, tokens.log_value)
    return WeightedTokens(*(None if x is None else x[:, heads].double() for x in parts))


def allowed(dtype: torch.dtype) -> float:
    """How far an answer may be from the definition: what its own rounding makes of it."""
    return 2 * torch.finfo(dtype).eps + 1e-5


def held_against(
    found: Any, query: Tensor, parts: Sequence[Entries], most: float, visible: Tensor | None = None
) -> None:
    """Raise an error if an answer is farther from the definition in float64, head by head, than may be."""
    for head in range(query.shape[1] // GROUP):
        mine = slice(head * GROUP, (head + 1) * GROUP)
        right = merge(
            *(
                weighted_attention(
                    query[:, mine].double(), in_float64(part.tokens, here), SCALE,
                    visible=visible if part.segments is None else part.segments.mask(part.tokens.count)[:, here],
                )
                for part in parts
                for here in places_of(head, part)
            )
        )  # fmt: skip
        error = float((found.out[:, mine].double() - right.out).norm() / right.out.norm())
        assert error < most, f"head {head}: an error of {error:.1e}, and {most:.1e} may be"
        off = float((found.lse[:, mine].double() - right.lse).abs().max())
        assert off < 1e-3, f"head {head}: the logarithm of the denominator is off by {off:.1e}"


def places_of(head: int, part: Entries) -> list[slice]:
    """Where a head's entries are among those of a part: nowhere, or in one place."""
    lanes = range(HEADS) if part.lanes is None else part.lanes.tolist()
    return [slice(place, place + 1) for place, lane in enumerate(lanes) if lane == head]


def entries(on: Machine, count: int, dtype: torch.dtype, weighted: bool = False) -> WeightedTokens:
    keys, values = (on.random(1, HEADS, count, WIDTH).to(dtype) for _ in range(2))
    return WeightedTokens(keys, values, on.random(1, HEADS, count) if weighted else None)


def cuts(on: Machine, count: int) -> tuple[Tensor, Tensor]:
    """Some runs of each head, of any lengths."""
    number = min(20, (count + 1) // 2)
    ends = torch.rand(HEADS, max(2 * number, count), generator=on.draw, device=on.device).argsort(1)[:, : 2 * number]
    ends = (ends % (count + 1)).sort(1).values.unflatten(1, (number, 2))
    return ends[..., 0].contiguous(), ends[..., 1] - ends[..., 0]


def walk_of(on: Machine, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, float, float]:
    uniforms = torch.rand(keys.shape[:2], generator=on.draw, device=on.device)
    sizes = torch.full((len(keys),), keys.shape[1], device=on.device)
    return keys, values, uniforms, sizes, SCALE, WALKS["greedy"]


def of_a_copy(on: Machine) -> dict[str, Any]:
    """How fast memory is read and written, of which all else is a share."""
    count = 1 << (28 if on.device.type == "cuda" else 16)
    there = [torch.zeros(count, device=on.device, dtype=torch.bfloat16) for _ in range(2)]
    return {"what": "copy", "bytes": 4 * count, "us": on.times([partial(there[0].copy_, there[1])])}


def dense(on: Machine, count: int) -> Iterator[dict[str, Any]]:
    """A step that reads all tokens: ours, with and without weights, and torch's forms."""
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
        except Exception as error:  # a backend that does not take these shapes, a compiler that fails
            taken = {"error": " ".join(str(error).split())[:200]}
        read = count * HEADS * (WIDTH * 4 + 4 * (copies is weighted))
        yield {"what": "dense", "form": name, "tokens": count, "bytes": read, "us": taken}


def unequal(on: Machine, count: int) -> Iterator[dict[str, Any]]:
    """A step over heads with four budgets and a window: the five parts that most layers of `kvzip` have."""
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


def copies_of(on: Machine, count: int) -> int:
    """So many caches in turn, as long as they take 16 GiB at most."""
    return min(COPIES if on.device.type == "cuda" else 2, max(2, (1 << 34) // (count * HEADS * WIDTH * 4)))


def ours(query: Tensor, *held: WeightedTokens, runs: Segments | None = None) -> Any:
    """As in a model: what is read is described anew at each step. Runs are those of the first."""
    parts = [Entries(tokens, segments=None if place else runs) for place, tokens in enumerate(held)]
    return attention.attend(query, parts, held[0].keys.shape[1], SCALE)


def stock(query: Tensor, tokens: WeightedTokens) -> Tensor:
    return F.scaled_dot_product_attention(query, tokens.keys, tokens.values, scale=SCALE, enable_gqa=True)


def by_backend(backend: SDPBackend, query: Tensor, tokens: WeightedTokens) -> Tensor:
    with sdpa_kernel(backend):
        return stock(query, tokens)


def looked_up(on: Machine, count: int, buckets: int, probes: int) -> Iterator[dict[str, Any]]:
    """A step that reads some buckets and a window; which buckets is known, or is asked of a classifier first."""
    query = on.random(1, HEADS * GROUP, 1, WIDTH).to(on.dtype)
    copies = [
        (entries(on, count, on.dtype), entries(on, min(WINDOW, count), on.dtype)) for _ in range(copies_of(on, count))
    ]
    for kind in ("equal", "lognormal", "one of a fifth"):
        shares = torch.ones(HEADS, buckets, device=on.device)
        if kind == "lognormal":
            shares = torch.exp(0.7 * on.random(HEADS, buckets))
        if kind == "one of a fifth":
            shares[:, 0] = 0.25 * (buckets - 1)
        ends = (shares.cumsum(1) / shares.sum(1, keepdim=True) * count).long()
        begins = F.pad(ends[:, :-1], (1, 0))
        chances = torch.rand(HEADS, buckets, generator=on.draw, device=on.device)
        chances[:, 0] = -1  # the large one among them
        visited = chances.argsort(1)[:, :probes]
        runs = Segments(*(x.gather(1, visited)[None, :, None] for x in (begins, ends - begins)))
        past, window = copies[-1]
        parts = [Entries(past, segments=runs), Entries(window)]
        held_against(ours(query, past, window, runs=runs), query, parts, allowed(on.dtype))
        read = int(runs.rows.sum()) + HEADS * window.count
        taken = on.times([partial(ours, query, *held, runs=runs) for held in copies])
        row = {"what": "looked up", "form": kind, "tokens": count, "bytes": read * WIDTH * 4, "us": taken}
        yield row | {"share": read / (count * HEADS)}
        of_the_paper = as_in_the_paper(on, query, copies, ends, visited)
        yield row | {"form": f"{kind}, as in the paper", "us": on.times(of_the_paper)}
        sizes, edges = ends - begins, F.pad(ends, (1, 0))[:, None].contiguous()
        routers = [router(on, buckets, to_the_first=kind == "one of a fifth") for _ in copies]
        buckets_of = sizes, edges, Staged.on(on.device, 0, 0), probes
        check_router(on, query, past, window, routers[-1], *buckets_of)
        asked = [partial(visiting, query, by, *buckets_of) for by in routers]
        behind_ours = [lambda a=a, b=b: (a(), b()) for a, b in zip(asked, of_the_paper, strict=True)]
        yield row | {"form": f"{kind}, as in the paper behind our router", "us": on.times(behind_ours)}
        calls = [partial(routed, query, *held, by, *buckets_of) for held, by in zip(copies, routers, strict=True)]
        read = sum(int(call()[1].sum()) for call in calls) / len(calls) + HEADS * window.count
        learnt = sum(x.nbytes for x in routers[0].tensors)
        if routing.NOTE in routers[0].noted:
            learnt -= routers[0].last[0].nbytes // 2
        row |= {"form": f"{kind}, and its router", "bytes": read * WIDTH * 4 + learnt, "us": on.times(calls)}
        yield row | {"share": read / (count * HEADS)}
        if kind == "lognormal":
            yield from one_head(on, query, copies, runs, routers, sizes, edges, probes)


def one_head(
    on: Machine, query: Tensor, copies: Sequence[Sequence[WeightedTokens]], runs: Segments,
    routers: Sequence[Classifier], sizes: Tensor, edges: Tensor, probes: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The same for a single KV head, of which the paper speaks; and for it a step that reads all."""
    mine, own = query[:, :GROUP], Segments(runs.begin[:, :1], runs.length[:, :1])
    held = [[WeightedTokens(x.keys[:, :1], x.values[:, :1]) for x in both] for both in copies]
    tensors = [[x[:1].contiguous() for x in by.tensors] for by in routers]
    own_routers = [Classifier((x[0], x[1]), (x[2], x[3])) for x in tensors]
    buckets = sizes[:1], edges[:1], Staged.on(on.device, 0, 0), probes
    past, window = held[-1]
    parts = [Entries(past, segments=own), Entries(window)]
    held_against(ours(mine, past, window, runs=own), mine, parts, allowed(on.dtype))
    check_router(on, mine, past, window, own_routers[-1], *buckets)
    forms: dict[str, list[Callable[[], Any]]] = {
        "one head": [partial(ours, mine, *both, runs=own) for both in held],
        "one head, and its router": [
            partial(routed, mine, *both, one, *buckets) for both, one in zip(held, own_routers, strict=True)
        ],
        "one head, all": [partial(stock, mine, past) for past, _ in held],
    }
    for form, calls in forms.items():
        yield {"what": "looked up", "form": form, "tokens": held[0][0].count, "us": on.times(calls)}


def as_in_the_paper(
    on: Machine, query: Tensor, copies: Sequence[Sequence[WeightedTokens]], ends: Tensor, visited: Tensor
) -> list[Callable[[], Tensor]]:
    """The paper's kernel over the same buckets, whose tokens lie anywhere in the text; held against the definition."""
    count, edges = copies[0][0].count, F.pad(ends, (1, 0)).contiguous()
    places = torch.rand(HEADS, count, generator=on.draw, device=on.device).argsort(1).int()
    calls = [
        partial(
            gpu_paper.attend,
            *(query, past.keys, past.values, (window.keys, window.values), places, edges, visited.contiguous(), SCALE),
        )
        for past, window in copies
    ]
    found, (past, window) = calls[-1](), copies[-1]
    for head in range(HEADS):
        runs = [places[head, edges[head, bucket] : edges[head, bucket + 1]] for bucket in visited[head].tolist()]
        own, here = torch.cat(runs).long(), slice(head * GROUP, (head + 1) * GROUP)
        tokens = WeightedTokens(
            *(torch.cat([x[:, head, own], y[:, head]], 1)[:, None].double()
              for x, y in ((past.keys, window.keys), (past.values, window.values)))
        )  # fmt: skip
        right = weighted_attention(query[:, here].double(), tokens, SCALE).out
        error = float((found[:, here].double() - right).norm() / right.norm())
        assert error < allowed(on.dtype), f"the paper's kernel, head {head}: an error of {error:.1e}"
    return calls


def router(on: Machine, buckets: int, *, to_the_first: bool) -> Classifier:
    """A classifier of every head, as `kvsketch fit` makes it; one that expects all in the first bucket, or any."""
    inner = 16 if on.device.type == "cpu" else 1024

    def layer(width: int, columns: int) -> tuple[Tensor, Tensor]:
        return (on.random(HEADS, width, columns) / width**0.5).to(on.dtype), on.random(HEADS, 1, columns).to(on.dtype)

    found = Classifier(layer(WIDTH, inner), layer(inner, buckets))
    if to_the_first:
        found.last[1][:, :, 0] = 30.0
    return found


def visiting(
    query: Tensor, by: Classifier, sizes: Tensor, edges: Tensor, staged: Staged, probes: int
) -> tuple[Segments, Tensor]:
    """What the queries visit, and how many tokens that are."""
    scores = routing.expect(query, by, len(sizes))
    runs, read, _ = routing.visit(scores[0], sizes, edges, Limits(probes), staged)
    return runs, read


def routed(
    query: Tensor, past: WeightedTokens, window: WeightedTokens, by: Classifier, *buckets: Any
) -> tuple[Partial, Tensor]:
    """The answer, and how many tokens of the past were read."""
    runs, read = visiting(query, by, *buckets)
    return ours(query, past, window, runs=runs), read


def check_router(
    on: Machine, query: Tensor, past: WeightedTokens, window: WeightedTokens, by: Classifier, sizes: Tensor,
    edges: Tensor, staged: Staged, probes: int,
) -> None:  # fmt: skip
    """Logits are those of float64, the buckets those that they say, and the answer is that of what lies in them."""
    first, first_bias, last, last_bias = (x.double() for x in by.tensors)
    asking = query[0, :, 0].double().unflatten(0, (len(sizes), GROUP))
    right = torch.relu(asking @ first + first_bias) @ last + last_bias
    logits = routing.expect(query, by, len(sizes))
    error = float((logits[0, :, 0].double() - right).norm() / right.norm())
    assert error < LOGITS_APART, f"the classifier's logits are {error:.1e} of their length off"
    runs, _ = visiting(query, by, sizes, edges, staged, probes)
    expected = reference_routing.visit(logits[0], sizes, edges, Limits(probes), staged)[0]
    for head in range(len(sizes)):
        own, theirs = (
            set(zip(x.begin[0, head].flatten().tolist(), x.length[0, head].flatten().tolist(), strict=True))
            for x in (runs, expected)
        )
        rounded = 2 * (probes > ROUNDED)
        assert len(own ^ theirs) <= rounded, f"head {head} visits {own - theirs}, and {theirs - own} were expected"
    parts = [Entries(past, segments=runs), Entries(window)]
    held_against(ours(query, past, window, runs=runs), query, parts, allowed(on.dtype))


def halved(on: Machine, count: int) -> Iterator[dict[str, Any]]:
    """All blocks of a layer, once."""
    keys, values = (on.random(HEADS * count // BLOCK, BLOCK, WIDTH).to(on.dtype) for _ in range(2))
    given = walk_of(on, keys, values)
    for name, form in {"ours": walk_in_triton.keep_half, "torch": strips.halving_signs}.items():
        clock = Machine(dry=on.device.type == "cpu", rounds=3) if name == "torch" else on  # which takes long
        yield {
            "what": "halved",
            "form": name,
            "tokens": count,
            "us": clock.times([partial(form, *given)], graph=name == "ours"),
        }
    yield compressed(on, count)
    if on.device.type == "cuda":  # to a quarter: what is kept is halved again
        half = [x[: len(x) // 2] if isinstance(x, Tensor) else x for x in given]
        twice = partial(on.times, [lambda: (walk_in_triton.keep_half(*given), walk_in_triton.keep_half(*half))])
        yield {"what": "halved", "form": "ours, twice", "tokens": count, "us": twice()}


def compressed(on: Machine, count: int) -> dict[str, Any]:
    """All that `balancekv(keep=0.25)` does with a layer's tokens: those set apart, numbers, draws and both halvings."""
    keys, values = (on.random(1, HEADS, count, WIDTH).to(on.dtype) for _ in range(2))
    new, config = NewTokens(keys, values, None, Unrotated(keys, keys)), parse_spec("balancekv(keep=0.25)")

    def call() -> LayerCache:
        cache = LayerCache(config, 1)
        cache.hold(new)
        return cache

    clock = Machine(dry=on.device.type == "cpu", rounds=min(on.rounds, 20))
    form = "to a quarter, with all that belongs to it"
    return {"what": "halved", "form": form, "tokens": count, "us": clock.times([call], graph=False)}


def centred(on: Machine, count: int, centres: int) -> Iterator[dict[str, Any]]:
    """Greedy k-center over all tokens of a layer; its centres of some of them are the definition's."""
    normal, counts = on.random(1, HEADS, count, WIDTH), torch.tensor([centres], device=on.device)
    middles = 4 * on.random(1, HEADS, max(1, centres // 4), WIDTH)
    clustered = normal + middles.repeat(1, 1, -(-count // middles.shape[2]), 1)[:, :, :count]
    clock = Machine(dry=on.device.type == "cpu", rounds=min(on.rounds, 20))
    for form, points in (("", normal.to(on.dtype)), (", clustered", clustered.to(on.dtype))):
        few, wanted = points[0, :, :2000], min(centres, 100)
        found = kcenter.k_center(few[None], torch.full_like(counts, wanted))
        right = reference.k_center(few.double(), counts.new_full((HEADS,), wanted), few[..., 0] == few[..., 0])
        others, wide = int((found.centres[0] != right.centres).sum()), radius(few, right.centres)
        fine = not others or (form and radius(few, found.centres[0]) < 1.001 * wide)
        assert fine, f"{others} of {wanted} centres of each of {HEADS} heads are not those of float64"
        us = clock.times([partial(kcenter.k_center, points, counts)], graph=False)
        yield {"what": "k-center", "form": f"{centres} centres{form}", "tokens": count, "us": us}


def radius(points: Tensor, centres: Tensor) -> float:
    """How far a point is from the nearest centre of its head, at most."""
    own = points.double().gather(1, centres[..., None].expand(-1, -1, points.shape[2]))
    return float(torch.cdist(points.double(), own).amin(2).max())


def choosing(on: Machine, count: int) -> Iterator[dict[str, Any]]:
    """What methods that choose among tokens do beside that, for a layer: half of the places copied, and so on."""
    keys = on.random(HEADS, count, WIDTH).to(on.dtype)
    there = torch.rand(HEADS, count, generator=on.draw, device=on.device) < 0.5
    every, mean = reference_places.in_front(there), keys.sum(1, dtype=torch.float64)
    order, along, size = every[:, : count // 2], reference_directions.towards(keys, mean), min(BLOCK, count)
    numbers = torch.rand(HEADS, count // size, size, generator=on.draw, device=on.device)
    sizes = torch.full((HEADS, count // size), size, device=on.device)
    rest = SCALE, WALKS["greedy"]
    of_blocks = partial(gathered, keys, keys, every, count // size, size)
    forms: dict[tuple[str, str], Callable[[], Any]] = {
        ("copied", "ours"): partial(places_in_triton.chosen_of, (keys, keys), order),
        ("copied", "torch"): partial(reference_places.chosen_of, (keys, keys), order),
        ("numbered", "ours"): partial(places_in_triton.in_front, there),
        ("numbered", "torch"): partial(reference_places.in_front, there),
        ("directed", "ours"): partial(directions_in_triton.towards, keys, mean),
        ("directed", "torch"): partial(reference_directions.towards, keys, mean),
        ("summed", "ours"): partial(directions_in_triton.total, keys),
        ("summed", "torch"): partial(reference_directions.total, keys),
        ("least first", "ours"): partial(places_in_triton.least_in_front, along, count // 8),
        ("least first", "torch"): partial(reference_places.least_in_front, along, count // 8),
        ("halved", "where they lie"): partial(walk_in_triton.keep_half_of, keys, keys, every, numbers, sizes, *rest),
        ("halved", "copied"): lambda: walk_in_triton.keep_half(
            *of_blocks(), numbers.flatten(0, 1), sizes.flatten(), *rest
        ),
    }
    for what in ("copied", "numbered", "least first", "halved"):
        found, right = (call() for (name, _), call in forms.items() if name == what)
        assert all(map(torch.equal, found, right)), f"{what}: ours are not torch's"
    for what in ("directed", "summed"):  # in float64, in another order
        found, right = (call() for (name, _), call in forms.items() if name == what)
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9, msg=f"{what}: ours is not torch's")
    for (what, form), call in forms.items():
        yield {"what": what, "form": form, "tokens": count, "us": on.times([call])}


def prompts(on: Machine, chunk: int, count: int, among: int) -> Iterator[dict[str, Any]]:
    """A chunk of queries that sees all weighted tokens, and new tokens that see those before them."""
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
        if found is not None:  # torch has it on GPUs alone
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


@torch.no_grad()
def run(out: Path, dry: bool, only: Sequence[str] = ()) -> None:
    sizes = DRY if dry else FULL
    on = Machine(dry, sizes["rounds"])
    assert attention.runs_on(on.device), "kernels in Triton do not run here: the line above says why"
    out.mkdir(parents=True, exist_ok=True)
    copy = of_a_copy(on)
    best = copy["bytes"] / min(one["median"] for one in copy["us"].values())
    about = provenance() | {"device": torch.cuda.get_device_name() if not dry else "interpreter"}
    failed = list[str]()
    with open(out / "gpu.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(copy | {"provenance": about}) + "\n")
        print(line_of(copy, best), flush=True)
        for name, rows in sections(on, sizes).items():
            if only and name not in only:
                continue
            try:
                for row in rows:
                    file.write(json.dumps(row | {"provenance": about}) + "\n")
                    file.flush()
                    print(line_of(row, best), flush=True)
            except Exception as error:  # what is wrong is not timed; what comes behind it is
                traceback.print_exc()
                failed.append(f"{name}: {' '.join(str(error).split())[:200]}")
            torch.cuda.empty_cache()
    if failed:
        sys.exit("\n".join(["not timed to the end:", *failed]))


def sections(on: Machine, sizes: dict[str, Any]) -> dict[str, Iterator[dict[str, Any]]]:
    """What is checked and then timed together."""
    steps = (row for count in sizes["tokens"] for row in chain(dense(on, count), unequal(on, count)))
    return {
        "attention": behind(check_attention, on, steps),
        "look-up": looked_up(on, *sizes["saap"]),
        "halving": behind(check_walk, on, halved(on, sizes["halved"])),
        "k-center": centred(on, *sizes["centred"]),
        "choosing": choosing(on, sizes["prompt"][2]),
        "prompts": prompts(on, *sizes["prompt"]),
        "models": decoding(on, *sizes["model"]),
        "large model": large(on, *sizes["large"]),
        "fitting": fitting(on, sizes["fitted"]),
    }


def behind(check: Callable[[Machine], None], on: Machine, rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows behind a check, if it holds."""
    check(on)
    yield from rows


def line_of(row: dict[str, Any], best: float) -> str:
    """A row for the screen: microseconds, and the share of a copy's speed."""
    shown = [f"{row['what']:10} {row.get('form', ''):16} {row.get('tokens', 0):8,}"]
    for name, taken in row["us"].items():
        if isinstance(taken, str):
            shown.append(f"{name}: {taken}")
            continue
        share = f" ({row['bytes'] / taken['median'] / best:.2f} of a copy)" if "bytes" in row else ""
        share += f" ({row['products'] / taken['median'] / 1e6:.0f} TFLOP/s)" if "products" in row else ""
        share += f" (mean {taken['mean']:.1f})" if "mean" in taken else ""
        shown.append(f"{name} {taken['median']:10.1f} µs{share}")
    return "  ".join(shown)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, nargs="?", default=Path("gpu-report"))
    parser.add_argument("--dry", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--only", default="", help="parts, with commas: attention, look-up, halving, …")
    given = parser.parse_args()
    if given.compile:
        for line in compiled():
            print(line, flush=True)
    else:
        run(given.out, given.dry, tuple(filter(None, given.only.split(","))))

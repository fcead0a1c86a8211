"""Decode steps on a GPU that read some buckets, which are known or chosen by a classifier first."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import gpu_paper
from gpu_layer import GROUP, HEADS, SCALE, WIDTH, allowed, copies_of, entries, held_against, ours, stock
from gpu_machine import Machine
from kvsketch.attention import Partial, WeightedTokens, weighted_attention
from kvsketch.kernels.routing import in_triton as routing
from kvsketch.kernels.routing import reference as reference_routing
from kvsketch.kernels.sources import Classifier, Entries, Limits, Segments, Staged

WINDOW = 2048
ROUNDED = 8  # if more buckets are visited, one may be another where rounding decides
LOGITS_APART = 0.02  # error that rounding may cause in a classifier's logits, over their length; in bytes too


def looked_up(on: Machine, count: int, buckets: int, probes: int) -> Iterator[dict[str, Any]]:
    """Rows of a step that reads some buckets and a window; the buckets are known, or chosen by a classifier first."""
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
        chances[:, 0] = -1  # always visit the large one
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
    """The same rows for a single KV head, as in the paper; also a step of it that reads all tokens."""
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
    """Calls of the paper's kernel for the same buckets, tokens anywhere in the text; checked against the definition."""
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
    """A classifier for every head, of the form that `kvsketch fit` makes; it may expect all in the first bucket."""
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
    """The runs that the queries visit, and how many tokens those contain."""
    scores = routing.expect(query, by, len(sizes))
    runs, read, _ = routing.visit(scores[0], sizes, edges, Limits(probes), staged)
    return runs, read


def routed(
    query: Tensor, past: WeightedTokens, window: WeightedTokens, by: Classifier, *buckets: Any
) -> tuple[Partial, Tensor]:
    """The answer, and how many tokens of the past the step read."""
    runs, read = visiting(query, by, *buckets)
    return ours(query, past, window, runs=runs), read


def check_router(
    on: Machine, query: Tensor, past: WeightedTokens, window: WeightedTokens, by: Classifier, sizes: Tensor,
    edges: Tensor, staged: Staged, probes: int,
) -> None:  # fmt: skip
    """Check logits against float64, the visited buckets against the logits, and the answer against those buckets."""
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

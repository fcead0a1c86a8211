"""Which buckets queries visit, in Triton: `gpu/route.py` has a classifier's layers, `gpu/choice.py` the choice."""

import struct
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.kernels import gpu
from kvsketch.kernels.routing.reference import mean_probability
from kvsketch.kernels.routing.rounded import ByColumn, by_column, pays
from kvsketch.kernels.sources import Classifier, Limits, Segments, Staged

MOST_ROWS = 64  # of a group's queries together
MOST_BUCKETS = 4096
SLICE = 64  # units or buckets of a program
AT_ONCE, STAGES = 128, 4  # units of a round, and rounds under way
NOT_SORTED = 64  # up to so many buckets are chosen without sorting all
NOTE = "in bytes for Triton"
TINY = 1e-300  # for no tokens: the bits of 0 would be taken as a number of 32 bits
MOST_UNITS, MOST_ASKING = 1024, 16  # units of an inner layer, queries of a group: in bytes these fit registers


def expect(query: Float[Tensor, "b hg q d"], by: Classifier, heads: int) -> Float[Tensor, "b h q g c"] | None:
    """Logits: see `routing/__init__.py`."""
    if not gpu.wanted_on(query.device):
        return None
    _, query_heads, count, width = query.shape
    there = by.tensors
    rows, buckets = count * (query_heads // heads), there[-1].shape[-1]
    if gpu.spills(query.device, there[-1].dtype, rows, width):
        return None
    if not 0 < rows <= MOST_ROWS or width > gpu.MOST_WIDTH or buckets > MOST_BUCKETS or query.stride(3) != 1:
        return None
    if not gpu.can_read(query.device, query, *there) or not all(x.is_contiguous() for x in there):
        return None
    if len({x.dtype for x in there}) > 1 or not gpu.works("a classifier", query.device, there[-1].dtype, _check):
        return None
    what = f"a classifier of {there[-1].dtype} × {width}, {[tuple(x.shape[1:]) for x in there]}, {rows} rows"
    known = _in_bytes(by, rows)
    found = None
    if known is not None:
        found = gpu.tried(f"{what} in bytes", query.device, lambda: _logits(query, by, heads, known))
    return gpu.tried(what, query.device, lambda: _logits(query, by, heads, None)) if found is None else found


def _in_bytes(by: Classifier, asking: int) -> ByColumn | None:
    """The classifier's last layer in bytes, if that pays; it is noted, and not made while a graph is recorded."""
    weights = by.last[0]
    if by.inner is None or not pays(weights) or asking > MOST_ASKING:
        return None
    if weights.shape[1] % 16 or weights.shape[1] > MOST_UNITS:
        return None
    if not gpu.works("a classifier in bytes", weights.device, weights.dtype, partial(_check, rounded=True)):
        return None
    at, noted = [x.data_ptr() for x in by.tensors], by.noted.get(NOTE)
    if noted is None or noted[0] != at:  # torch may move a tensor, for example to share it with a process
        if gpu.recording(weights.device):
            return None
        noted = by.noted[NOTE] = at, by_column(weights, by.inner)
    found: ByColumn | None = noted[1]
    return found


def _logits(query: Tensor, by: Classifier, heads: int, known: ByColumn | None) -> Tensor:
    inner, last = by.inner, by.last
    rows, query_heads, count, width = query.shape
    hidden, buckets = last[0].shape[1:]
    group, device = query_heads // heads, query.device
    lanes, asking, slices = rows * heads, group * count, -(-buckets // SLICE)
    logits = torch.empty(rows, heads, count, group, buckets, dtype=torch.float32, device=device)
    units = query if inner is None else torch.empty(lanes, asking, hidden, dtype=last[0].dtype, device=device)
    levels = bounds = unit = units
    if known is not None:
        levels, bounds = known.levels, known.bounds
        units = torch.empty(lanes, 2, asking, hidden, dtype=torch.int8, device=device)
        unit = torch.empty(lanes, asking, dtype=torch.float32, device=device)
    shared = {
        "HEADS": heads, "GROUP": group, "HIDDEN": 0 if inner is None else hidden, "SLICE": SLICE, **gpu.early(device),
    }  # fmt: skip
    of_queries = {"WIDTH": width, "ROWS": gpu.power_of_two(asking, 16), "KEY_BLOCK": gpu.power_of_two(width, 16)}
    from kvsketch.kernels.gpu import route

    with gpu.current(device):
        if inner is not None:
            route.inner[(lanes, -(-hidden // SLICE))](
                *(query, *inner, units, levels, bounds, unit), query.stride()[:3], count, **shared, **of_queries,
                BYTES=known is not None, num_warps=4, num_stages=2,
            )  # fmt: skip
        if known is None:
            route.last[(lanes, slices)](
                *(query, units, *last, logits), query.stride()[:3], count, **shared, **of_queries,
                BUCKETS=buckets, AT_ONCE=AT_ONCE, num_warps=4, num_stages=STAGES,
            )  # fmt: skip
        else:
            route.last_in_bytes[(lanes, slices)](
                *(units, unit, known.weights, known.steps, last[1], logits), count, **shared,
                BUCKETS=buckets, ROWS=gpu.power_of_two(asking, 8), DEEP=gpu.power_of_two(hidden, 64), num_warps=8,
            )  # fmt: skip
    return logits


def visit(
    scores: Float[Tensor, "l q *g c"],
    sizes: Int64[Tensor, "l c"],
    edges: Int64[Tensor, "l r c_1"],
    limits: Limits,
    staged: Staged,
    *,
    left: bool = False,
) -> tuple[Segments, Int64[Tensor, "1 l q"], Float[Tensor, "l q c"] | None] | None:
    """See `routing/__init__.py`."""
    if not gpu.wanted_on(scores.device):
        return None
    queries, buckets = scores.shape[1], scores.shape[-1]
    if scores.dtype != torch.float32 or not all(x.is_contiguous() for x in (scores, sizes, edges)):
        return None
    if (
        edges.shape[1] < 1
        or not 0 < buckets <= MOST_BUCKETS
        or limits.probes < 1
        or queries < 1
        or not gpu.can_read(scores.device, scores)
    ):
        return None
    if not gpu.works("the choice of buckets", scores.device, torch.float32, _check_choice):
        return None
    by_logits = partial(_check_choice, logits=True)
    if scores.dim() == 4 and not gpu.works("the choice by logits", scores.device, torch.float32, by_logits):
        scores = mean_probability(scores)
    return gpu.tried(
        f"the choice among {buckets} buckets, {scores.shape[2:]}, {limits}, {left}",
        scores.device,
        lambda: _visited(scores, sizes, edges, limits, staged, left),
    )


def _visited(
    scores: Tensor, sizes: Tensor, edges: Tensor, limits: Limits, staged: Staged, left: bool
) -> tuple[Segments, Tensor, Tensor | None]:
    lanes, queries, buckets = scores.shape[0], scores.shape[1], scores.shape[-1]
    probes, runs, device = min(limits.probes, buckets), edges.shape[1], scores.device
    group = scores.shape[2] if scores.dim() == 4 else 0
    if group and probes > NOT_SORTED and limits.mass is not None:  # the kernel reads scores once more
        scores, group = mean_probability(scores), 0
    kinds = (0 if limits.visit is None else 1 + isinstance(limits.visit, float)) + 4 * (limits.mass is not None)
    begin, length = torch.empty(2, 1, lanes, queries, probes * runs + 1, dtype=torch.int64, device=device).unbind()
    read = torch.empty(1, lanes, queries, dtype=torch.int64, device=device)
    others = torch.empty(lanes, queries, buckets, dtype=torch.float32, device=device) if left else None
    from kvsketch.kernels.gpu.choice import visit as kernel

    with gpu.current(device):
        kernel[(lanes * queries,)](
            *(scores, sizes, edges, staged.at, begin, length, read, scores if others is None else others),
            *(queries, gpu.odd(runs)),
            *(_bits(float(limits.visit or TINY)), float(limits.mass or 0.0)),
            GROUP=group, GROUP_BLOCK=gpu.power_of_two(group), PROBES=probes, BUCKETS=buckets,
            BUCKET_BLOCK=gpu.power_of_two(buckets), PLACES=gpu.power_of_two(probes), SORTED=probes > NOT_SORTED,
            PER_TOKEN=limits.per_token, LIMITS=kinds, LEFT=left, num_warps=4, **gpu.early(device),
        )  # fmt: skip
    return Segments(begin, length), read, others


def _bits(x: float) -> int:
    """The bits of a float64."""
    (found,) = struct.unpack("<q", struct.pack("<d", x))
    return int(found)


def _check(device: torch.device, dtype: torch.dtype, *, rounded: bool = False) -> None:
    """Compare a classifier's kernels with torch in float64."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cpu").to(device, dtype)

    query, first, second = normal(1, 4, 1, 128), normal(2, 128, 208) / 8, normal(2, 208, 300) / 8
    biases = normal(2, 1, 208), normal(2, 1, 300)
    asked = [x.double() for x in (query.view(1, 2, 2, 128), first, biases[0], second, biases[1])]
    inner = torch.relu(torch.einsum("bhgd,hdk->bhgk", asked[0], asked[1]) + asked[2])
    right = torch.softmax(torch.einsum("bhgk,hkc->bhgc", inner, asked[3]) + asked[4], 3).mean(2, keepdim=True)
    layers = (first, biases[0]), (second, biases[1])
    known = by_column(second, layers[0]) if rounded else None
    found = mean_probability(_logits(query, Classifier(*layers), 2, known))
    most = 1e-4 if dtype == torch.float32 and not rounded else 0.05
    torch.testing.assert_close(found.double(), right, rtol=most, atol=most * float(right.max()))


def _check_choice(device: torch.device, dtype: torch.dtype, *, logits: bool = False) -> None:
    """Compare the choice with torch: many buckets by numbers from 0 on and by others, and few by logits."""
    draw = torch.Generator().manual_seed(0)
    worth = torch.stack([torch.randperm(300, generator=draw, device="cpu") for _ in range(2)]).to(device, dtype) / 20
    sizes = torch.randint(0, 9, (2, 300), generator=draw, device="cpu").to(device)
    edges = F.pad(sizes.cumsum(1), (1, 0))[:, None].contiguous()
    given = ((worth[:, None], 200), (worth[:, None] - 7, 200), (worth[:, None], 32))
    for scores, probes in [(worth[:, None, None].repeat(1, 1, 2, 1), 32)] if logits else given:
        staged, best = Staged.on(device, 2600, 3), worth.topk(probes).indices
        runs, read, left = _visited(scores.contiguous(), sizes, edges, Limits(probes), staged, left=True)
        assert torch.equal(runs.begin[0, :, 0, :probes], edges[:, 0].gather(1, best)), "the largest come first"
        assert torch.equal(read[0, :, 0], sizes.gather(1, best).sum(1) + 3), "as many as there are"
        others = sizes.float().log().scatter(1, best, -float("inf"))
        torch.testing.assert_close(left, others[:, None])

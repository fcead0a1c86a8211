"""Which buckets queries visit, in Triton: classifier and choice, a launch each. `gpu/route.py` has the kernels."""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.kernels import gpu
from kvsketch.kernels.sources import Classifier, Limits, Segments, Staged

MOST_ROWS = 64  # of a group's queries together
MOST_BUCKETS = 4096
SLICE = 64  # units or buckets of a program
AT_ONCE, STAGES = 128, 4  # units of a round, and rounds under way


def classify(query: Float[Tensor, "b hg q d"], by: Classifier, heads: int) -> Float[Tensor, "b h q c"] | None:
    """See `routing/__init__.py`."""
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
    if len({x.dtype for x in there}) > 1 or not gpu.works("routing", query.device, there[-1].dtype, _check):
        return None
    what = f"a classifier of {there[-1].dtype} × {width}, {[tuple(x.shape[1:]) for x in there]}, {rows} rows"
    return gpu.tried(what, query.device, lambda: _classified(query, by, heads))


def _classified(query: Tensor, by: Classifier, heads: int) -> Tensor:
    inner, last = by.inner, by.last
    rows, query_heads, count, width = query.shape
    hidden, buckets = last[0].shape[1:]
    group, device = query_heads // heads, query.device
    lanes, asking, slices = rows * heads, query_heads // heads * count, -(-buckets // SLICE)
    logits = torch.empty(lanes, asking, buckets, dtype=torch.float32, device=device)
    scores = torch.empty(rows, heads, count, buckets, dtype=torch.float32, device=device)
    units = query if inner is None else torch.empty(lanes, asking, hidden, dtype=last[0].dtype, device=device)
    shared = {
        "HEADS": heads, "GROUP": group, "WIDTH": width, "HIDDEN": 0 if inner is None else hidden, "SLICE": SLICE,
        "ROWS": gpu.power_of_two(asking, 16), "KEY_BLOCK": gpu.power_of_two(width, 16), "num_warps": 4,
        **gpu.early(device),
    }  # fmt: skip
    from kvsketch.kernels.gpu import route

    with gpu.current(device):
        if inner is not None:
            route.inner[(lanes, -(-hidden // SLICE))](
                query, *inner, units, query.stride()[:3], count, **shared, num_stages=2
            )
        route.last[(lanes, slices)](
            *(query, units, *last, logits, scores, gpu.counters(lanes, device)), query.stride()[:3], count, **shared,
            BUCKETS=buckets, AT_ONCE=AT_ONCE, SLICES=slices, BUCKET_BLOCK=gpu.power_of_two(buckets),
            GROUP_BLOCK=gpu.power_of_two(group), num_stages=STAGES,
        )  # fmt: skip
    return scores


def visit(
    scores: Float[Tensor, "l q c"],
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
    queries, buckets = scores.shape[1:]
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
    if not gpu.works("routing", scores.device, torch.float32, _check):
        return None
    return gpu.tried(
        f"the choice among {buckets} buckets, {limits}, {left}",
        scores.device,
        lambda: _visited(scores, sizes, edges, limits, staged, left),
    )


def _visited(
    scores: Tensor, sizes: Tensor, edges: Tensor, limits: Limits, staged: Staged, left: bool
) -> tuple[Segments, Tensor, Tensor | None]:
    lanes, queries, buckets = scores.shape
    probes, runs, device = min(limits.probes, buckets), edges.shape[1], scores.device
    kinds = (0 if limits.visit is None else 1 + isinstance(limits.visit, float)) + 4 * (limits.mass is not None)
    begin, length = torch.empty(2, 1, lanes, queries, probes * runs + 1, dtype=torch.int64, device=device).unbind()
    read = torch.empty(1, lanes, queries, dtype=torch.int64, device=device)
    others = torch.empty_like(scores) if left else None
    from kvsketch.kernels.gpu.route import visit as kernel

    with gpu.current(device):
        kernel[(lanes * queries,)](
            *(scores, sizes, edges, staged.at, begin, length, read, scores if others is None else others),
            *(queries, gpu.odd(runs)),
            *(float(limits.visit or 0.0), float(limits.mass or 0.0)),
            PROBES=probes, BUCKETS=buckets, BUCKET_BLOCK=gpu.power_of_two(buckets), PLACES=gpu.power_of_two(probes),
            PER_TOKEN=limits.per_token, LIMITS=kinds, LEFT=left, num_warps=4, **gpu.early(device),
        )  # fmt: skip
    return Segments(begin, length), read, others


def _check(device: torch.device, dtype: torch.dtype) -> None:
    """Hold both kernels against torch in float64."""
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cpu").to(device, dtype)

    query, first, second = normal(1, 4, 1, 128), normal(2, 128, 200) / 8, normal(2, 200, 300) / 8
    biases = normal(2, 1, 200), normal(2, 1, 300)
    asked = [x.double() for x in (query.view(1, 2, 2, 128), first, biases[0], second, biases[1])]
    inner = torch.relu(torch.einsum("bhgd,hdk->bhgk", asked[0], asked[1]) + asked[2])
    right = torch.softmax(torch.einsum("bhgk,hkc->bhgc", inner, asked[3]) + asked[4], 3).mean(2, keepdim=True)
    found = _classified(query, Classifier((first, biases[0]), (second, biases[1])), 2)
    most = 1e-4 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(found.double(), right, rtol=most, atol=most * float(right.max()))
    sizes = torch.randint(0, 9, (2, 300), generator=draw, device="cpu").to(device)
    edges = F.pad(sizes.cumsum(1), (1, 0))[:, None].contiguous()
    for middle in (0.0, right.median()):  # probabilities, and numbers of which half are below 0
        scores = (right[0] - middle).float().contiguous()
        runs, read, left = _visited(scores, sizes, edges, Limits(200), Staged.on(device, 2600, 3), left=True)
        best = scores[:, 0].topk(200).indices
        assert torch.equal(runs.begin[0, :, 0, :200], edges[:, 0].gather(1, best)), "the largest come first"
        assert torch.equal(read[0, :, 0], sizes.gather(1, best).sum(1) + 3), "as many as there are"
        others = sizes.float().log().scatter(1, best, -float("inf"))
        torch.testing.assert_close(left, others[:, None])

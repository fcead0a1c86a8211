"""Weighted attention in Triton: entries of several kinds in one launch, read where they lie. `attend.py` is the kernel.

For few queries: decode steps, and blocks of a few tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens, merge, weighted_attention
from kvsketch.kernels import gpu
from kvsketch.kernels.sources import Entries, Segments

WHAT = "attention of few queries"
MOST_ROWS = 128  # of a group's queries together
MOST_SPLITS = 64
MOST_PARTS = 6  # of one launch: each has code of its own in the kernel
PROGRAMS = 2  # for each processor
AT_ONCE, WARPS, STAGES = 64, 4, 3  # entries of a round; a program's warps, and its rounds under way
MERGED = 1 << 14  # numbers, of all splits, that are merged together: those of some queries, or of one
LISTS = 3, 6, 9, 12  # runs of a part, as powers of two: there is a kernel for each, and a program holds the list
NOTED = "triton"  # under this name parts carry their description
Description = tuple[
    tuple[Any, ...], tuple[int, ...], tuple[int, ...], int, int, int
]  # pointers, strides, sizes, what there is, and how far entries are apart


def attend(
    query: Float[Tensor, "b hg q d"], parts: Sequence[Entries], heads: int, scale: float, softcap: float | None = None
) -> Partial | None:
    """Attention over all parts together.

    None where Triton does not do it: many queries, another device, numbers that do not lie side by side, wide heads, a
    wanted gradient.
    """
    if not gpu.wanted_on(query.device):
        return None
    _, query_heads, queries, width = query.shape
    group, value_width = query_heads // heads, parts[0].tokens.values.shape[3]
    if not 0 < queries * group <= MOST_ROWS or query.stride(3) != 1:
        return None
    if not gpu.can_read(query.device, query) or not all(_can_read(part, query.device) for part in parts):
        return None
    parts = [piece for part in parts for piece in _pieces(part)]
    if len(parts) > MOST_PARTS:
        first = attend(query, parts[:MOST_PARTS], heads, scale, softcap)
        rest = None if first is None else attend(query, parts[MOST_PARTS:], heads, scale, softcap)
        return None if first is None or rest is None else merge(first, rest)
    together = 1 if any(_by_query(part) for part in parts) else queries
    if _is_too_much(query.device, query.dtype, together * group, max(width, value_width)):
        return None
    kinds = {part.tokens.keys.dtype for part in parts}
    if not all(gpu.works(WHAT, query.device, kind, _check) for kind in kinds):
        return None
    described = [(str(part.tokens.keys.dtype), _has(part), part.segments is not None) for part in parts]
    what = f"attention of {query.dtype} × {width} and {value_width}, {queries} × {group} rows, {softcap}, {described}"
    return gpu.tried(what, query.device, lambda: _attended(query, parts, heads, scale, softcap))


def runs_on(device: torch.device) -> bool:
    """Whether the kernel is used on this device, for the numbers that models compute with there."""
    return gpu.works(WHAT, device, torch.bfloat16 if device.type == "cuda" else torch.float32, _check)


def does_steps(device: torch.device, dtype: torch.dtype, group: int, width: int) -> bool:
    """Whether the kernel does a model's steps there: with this dtype, `group` queries of each KV head, this width."""
    if not gpu.wanted_on(device) or dtype not in gpu.DTYPES or not 0 < group <= MOST_ROWS:
        return False
    if device.type == "cpu" and dtype == gpu.NOT_INTERPRETED:
        return False
    return not _is_too_much(device, dtype, group, width) and gpu.works(WHAT, device, dtype, _check)


def _is_too_much(device: torch.device, dtype: torch.dtype, rows: int, width: int) -> bool:
    return gpu.too_wide(device, dtype, width) or gpu.spills(device, dtype, rows, width)


def _check(device: torch.device, dtype: torch.dtype) -> None:
    """Compare the kernel with the definition."""
    draw = torch.Generator().manual_seed(0)
    for queries, each in ((1, 1), (2, 2)):  # the same runs for all queries, and each query's own
        query, keys, values, late, later, mass = (
            torch.randn(1, heads, count, 128, generator=draw, device="cpu").to(device, dtype)
            for heads, count in ((4, queries), (2, 90), (2, 90), (2, 300), (2, 300), (2, 90))
        )
        begin, length = (torch.tensor(x, device=device).expand(1, 2, each, 3) for x in ([3, 9, 40], [5, 0, 33]))
        runs = Segments(begin + torch.arange(each, device=device)[:, None], length)
        past, window = (
            WeightedTokens(keys, values, mass[..., 0].float().contiguous()),
            WeightedTokens(late, later, None),
        )
        found = _attended(query, [Entries(past, segments=runs), Entries(window)], 2, 0.1, None)
        right = merge(
            weighted_attention(query.double(), doubled(past), 0.1, visible=runs.mask(90)),
            weighted_attention(query.double(), doubled(window), 0.1),
        )
        gpu.assert_like(found.out, right.out, found.lse, right.lse)


def doubled(tokens: WeightedTokens) -> WeightedTokens:
    """The same in float64, to find what is right: on a GPU torch's products of float32 may have fewer bits."""
    weights = (None if x is None else x.double() for x in (tokens.log_mass, tokens.log_value))
    return WeightedTokens(tokens.keys.double(), tokens.values.double(), *weights)


def _attended(query: Tensor, parts: Sequence[Entries], heads: int, scale: float, softcap: float | None) -> Partial:
    rows, query_heads, queries, width = query.shape
    group, value_width = query_heads // heads, parts[0].tokens.values.shape[3]
    lanes, device = rows * heads, query.device
    described = [_described(part, lanes) for part in parts]
    by_query = any(_by_query(part) for part in parts)
    programs, each = (lanes * queries, group) if by_query else (lanes, group * queries)
    single = [part.tokens.keys.dtype == torch.float32 for part in parts]
    small = max(width, value_width) <= 128 and any(single) == all(single)
    splits = _splits(PROGRAMS * gpu.processors(device) // programs)
    value_block, split_block = gpu.power_of_two(value_width, 16), gpu.power_of_two(splits)
    out = query.new_empty(rows, query_heads, queries, value_width)
    done = gpu.counters(programs, device)
    lse, sums, tops = (
        query.new_empty(shape, dtype=torch.float32)
        for shape in ((rows, query_heads, queries), (programs, splits, each, value_width), (programs, splits, 2, each))
    )
    from kvsketch.kernels.gpu.attend import attend as kernel

    with gpu.current(device):
        kernel[(programs, splits)](
            *(query, out, lse, sums, tops, done),
            *(tuple(each) for each in zip(*(one[:3] for one in described), strict=True)),
            *(*query.stride()[:3], queries, float(scale), float(softcap or 1.0)),
            HEADS=heads, GROUP=group, BY_QUERY=by_query, WIDTH=width, VALUE_WIDTH=value_width,
            PARTS=len(parts), HAS=tuple(one[3] for one in described), KEY_STEPS=tuple(one[4] for one in described),
            VALUE_STEPS=tuple(one[5] for one in described), SOFTCAP=softcap is not None, SPLITS=splits,
            ROWS=gpu.power_of_two(each, 16), AT_ONCE=AT_ONCE if small else 32,
            KEY_BLOCK=gpu.power_of_two(width, 16), VALUE_BLOCK=value_block, SPLIT_BLOCK=split_block,
            TOGETHER=min(max(1, MERGED // (split_block * value_block)), gpu.power_of_two(each)),
            num_warps=WARPS if each <= 64 else 8,
            num_stages=2 if any(single) else STAGES, **gpu.early(device),
        )  # fmt: skip
    return Partial(out, lse)


def _splits(programs: int) -> int:
    """How many splits a lane is cut into, where so many of its programs have room at once.

    They are merged in a tile of the next power of two: a few more than such a power are not worth twice the tile.
    """
    splits = min(MOST_SPLITS, max(1, programs))
    least = gpu.power_of_two(splits + 1) // 2
    return least if splits < 1.25 * least else splits


def can_read_tokens(tokens: WeightedTokens, device: torch.device) -> bool:
    """Whether kernels can read entries where they lie."""
    weights = tokens.weights
    if tokens.count == 0 or not gpu.can_read(device, tokens.keys, tokens.values, *weights):
        return False
    if tokens.keys.stride(3) != 1 or tokens.values.stride(3) != 1 or tokens.keys.dtype != tokens.values.dtype:
        return False
    return all(x.dtype == torch.float32 and x.stride(2) == 1 for x in weights)


def _pieces(part: Entries) -> Sequence[Entries]:
    """The same entries in parts, none of which has more runs than a program holds."""
    runs = part.segments
    if runs is None or runs.begin.shape[3] <= 1 << LISTS[-1]:
        return (part,)
    lists = zip(runs.begin.split(1 << LISTS[-1], 3), runs.length.split(1 << LISTS[-1], 3), strict=True)
    return [Entries(part.tokens, part.lanes, Segments(*both)) for both in lists]


def _can_read(part: Entries, device: torch.device) -> bool:
    return can_read_tokens(part.tokens, device) and (part.segments is None or part.segments.begin.shape[3] > 0)


def _by_query(part: Entries) -> bool:
    """Whether each query reads entries of its own."""
    return part.segments is not None and part.segments.begin.shape[2] > 1


def _described(part: Entries, lanes: int) -> Description:
    """Where the entries lie, as the kernel takes it; noted, because what is held is read again and again."""
    if NOTED in part.noted:
        noted: Description = part.noted[NOTED]
        return noted
    made = part.lanes is not None or part.segments is not None
    found = _description(part, lanes)
    if not (made and gpu.recording(part.tokens.keys.device)):  # what a graph writes is not there before it is replayed
        part.noted[NOTED] = found
    return found


def _description(part: Entries, lanes: int) -> Description:
    tokens, keys = part.tokens, part.tokens.keys
    weights = tokens.log_mass, tokens.log_value
    mass, extra = ((keys, (0, 0)) if x is None else (x, x.expand(keys.shape[:3]).stride()[:2]) for x in weights)
    slots = keys
    if part.lanes is not None:
        slots = torch.full((lanes,), -1, dtype=torch.int64, device=keys.device)
        slots[part.lanes] = torch.arange(len(part.lanes), device=keys.device)
    begins = lengths = keys
    runs, by_query, longest = 1, 1, -1
    if part.segments is not None:
        begins, lengths = part.segments.begin.contiguous(), part.segments.length.contiguous()
        by_query, runs = begins.shape[2:]
        longest = next(size for size in LISTS if runs <= 1 << size)
    return (
        (keys, tokens.values, mass[0], extra[0], slots, begins, lengths),
        (*keys.stride()[:2], *tokens.values.stride()[:2], *map(gpu.odd, (*mass[1], *extra[1]))),
        (gpu.odd(keys.shape[2]), keys.shape[1], gpu.odd(runs), by_query),
        _has(part) + 8 * (1 + longest),
        keys.stride(2),
        tokens.values.stride(2),
    )


def _has(part: Entries) -> int:
    """Which weights a part has, and whether it is of some lanes."""
    return gpu.bits(part.tokens.log_mass, part.tokens.log_value, part.lanes)

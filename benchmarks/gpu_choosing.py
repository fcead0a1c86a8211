"""Work of forgetting methods on the tokens of a layer, on a GPU: halving blocks, finding centres, choosing the best."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpu_layer import HEADS, SCALE, WIDTH
from gpu_machine import Machine
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens, Unrotated
from kvsketch.caches.forgetting.balancekv.practical import WALKS
from kvsketch.caches.registry import parse_spec
from kvsketch.kernels import kcenter
from kvsketch.kernels.balanced_walk import gathered, strips, walk_in_triton
from kvsketch.kernels.directions import in_triton as directions_in_triton
from kvsketch.kernels.directions import reference as reference_directions
from kvsketch.kernels.kcenter import reference
from kvsketch.kernels.places import in_triton as places_in_triton
from kvsketch.kernels.places import reference as reference_places

BLOCK = 256  # tokens that are halved together


def check_walk(on: Machine) -> None:
    """Check that BalanceKV's walk halves blocks as its definition does, except for a few where rounding decides."""
    for dtype in (torch.float32, on.dtype):
        if on.device.type == "cuda" and dtype == torch.float32:
            continue  # torch does this there
        keys, values = (on.random(64 if on.device.type == "cuda" else 2, BLOCK, WIDTH).to(dtype) for _ in range(2))
        keys, values, *rest = walk_of(on, keys, values)
        exact = strips.halving_signs(keys.double(), values.double(), *rest) > 0
        found = walk_in_triton.keep_half(keys, values, *rest), strips.halving_signs(keys, values, *rest) > 0
        differ, of_torch = (int((one != exact).any(1).sum()) for one in found)
        assert differ <= 3 + 2 * of_torch, f"{differ} of {len(keys)} blocks are halved otherwise ({of_torch} by torch)"


def walk_of(on: Machine, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, float, float]:
    uniforms = torch.rand(keys.shape[:2], generator=on.draw, device=on.device)
    sizes = torch.full((len(keys),), keys.shape[1], device=on.device)
    return keys, values, uniforms, sizes, SCALE, WALKS["greedy"]


def halved(on: Machine, count: int) -> Iterator[dict[str, Any]]:
    """Rows of halving all blocks of a layer, once; to a quarter too."""
    keys, values = (on.random(HEADS * count // BLOCK, BLOCK, WIDTH).to(on.dtype) for _ in range(2))
    given = walk_of(on, keys, values)
    for name, form in {"ours": walk_in_triton.keep_half, "torch": strips.halving_signs}.items():
        clock = Machine(dry=on.device.type == "cpu", rounds=3) if name == "torch" else on  # torch takes long
        yield {
            "what": "halved",
            "form": name,
            "tokens": count,
            "us": clock.times([partial(form, *given)], graph=name == "ours"),
        }
    yield compressed(on, count)
    if on.device.type == "cuda":  # to a quarter: the kept half is halved again
        half = [x[: len(x) // 2] if isinstance(x, Tensor) else x for x in given]
        twice = partial(on.times, [lambda: (walk_in_triton.keep_half(*given), walk_in_triton.keep_half(*half))])
        yield {"what": "halved", "form": "ours, twice", "tokens": count, "us": twice()}


def compressed(on: Machine, count: int) -> dict[str, Any]:
    """All work of `balancekv(keep=0.25)` on a layer's tokens: setting some apart, numbers, draws and both halvings."""
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
    """Rows of greedy k-center over all tokens of a layer; its centres of a few tokens must be the definition's."""
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
    """The largest distance from a point to the nearest centre of its head."""
    own = points.double().gather(1, centres[..., None].expand(-1, -1, points.shape[2]))
    return float(torch.cdist(points.double(), own).amin(2).max())


def choosing(on: Machine, count: int) -> Iterator[dict[str, Any]]:
    """Rows of other work of methods that choose among a layer's tokens: copying half of the places, and so on."""
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
    for what in ("directed", "summed"):  # sums in float64, in another order
        found, right = (call() for (name, _), call in forms.items() if name == what)
        torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-9, msg=f"{what}: ours is not torch's")
    for (what, form), call in forms.items():
        yield {"what": what, "form": form, "tokens": count, "us": on.times([call])}

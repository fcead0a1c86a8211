"""Where memory runs out in the middle of a call of C: the right answer, or none, and the next call is as any other."""

import copy
import ctypes

import pytest
import torch

from drawn import normal
from kvsketch.attention import Partial, WeightedTokens
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens, Unrotated
from kvsketch.caches.registry import parse_spec
from kvsketch.kernels import native
from kvsketch.kernels.balanced_walk import native as walk
from kvsketch.kernels.kcenter import native as kcenter
from kvsketch.kernels.native import assign, attention, merge, prompt, weights
from kvsketch.kernels.places import native as places
from kvsketch.kernels.routing import native as routing
from kvsketch.kernels.sources import Classifier, Entries, Limits, Staged
from made_index import make_index

pytestmark = pytest.mark.skipif(native.library() is None, reason="there is no C compiler")
HEADS, GROUP, WIDTH, SCALE, MOST = 2, 2, 32, 0.2, 60
KEYS = normal(1, HEADS, 70, WIDTH, seed=1)
ASKED = normal(1, HEADS * GROUP, 60, WIDTH, seed=2)
TOKENS = WeightedTokens(KEYS, KEYS)
LESS = torch.full((HEADS, GROUP), 9.0)
BY = Classifier(
    (normal(HEADS, WIDTH, WIDTH, seed=3), normal(HEADS, 1, WIDTH, seed=4)),
    (normal(HEADS, WIDTH, 24, seed=5), normal(HEADS, 1, 24, seed=6)),
)
LONG = Partial(normal(1, 32, 33, WIDTH, seed=7), normal(1, 32, 33, 1, seed=8)[..., 0])


def limit(pieces):
    """Give out so many pieces of memory from now on; -1: any number."""
    native.loaded().kvs_limit_memory(ctypes.c_int64(pieces))


def merged():
    first = Partial(LONG.out.clone(), LONG.lse.clone())
    return first.out if merge.merge_into((first, LONG)) else None


def noted():
    got = torch.zeros(HEADS, 70, dtype=torch.float64)
    done = weights.add_weights(weights.Noting(got, KEYS[0]), ASKED[0, :, 0].view(HEADS, GROUP, WIDTH), LESS, SCALE)
    return got if done else None


def noted_of_many():
    got = torch.zeros(1, HEADS, 70, dtype=torch.float64)
    less = LESS[None].repeat_interleave(60, 2)
    return got if weights.add_many(got, ASKED.view(1, HEADS, -1, WIDTH), KEYS, less, SCALE) else None


def visited():
    scores, sizes, edges = normal(HEADS, 1, 5), torch.full((HEADS, 5), 3), 3 * torch.arange(6).expand(HEADS, 1, 6)
    staged = Staged.on(sizes.device, 15, 0)
    return routing.visit(scores, sizes, edges.contiguous(), Limits(2), staged)[0].made().length


def halved():
    keys, uniforms = normal(HEADS, 64, WIDTH), torch.rand(HEADS, 64, generator=torch.Generator().manual_seed(0))
    return walk.keep_half(keys, keys, uniforms, torch.full((HEADS,), 64), SCALE, 1.0)


def clustered():
    return kcenter.k_center(KEYS[0], torch.tensor([4, 7]), torch.ones(HEADS, 70, dtype=torch.bool), 7)


def rearranged():
    x, index = normal(HEADS, 50, 4), torch.tensor([[40, 3, 51, 7, 3, 9]]).expand(HEADS, -1)
    return x if places.keep_in_place(index, 50, [x], [normal(HEADS, 5, 4, seed=1)]) else None


CALLS = {
    "a step": lambda: attention.attend(ASKED[:, :, :1], [Entries(TOKENS)], HEADS, SCALE),
    "a prompt": lambda: prompt.attend(ASKED, TOKENS, SCALE, softcap=50.0),
    "a classifier": lambda: routing.classify(ASKED[:, :, :1], BY, HEADS),
    "a choice": visited,
    "few notes": noted,
    "many notes": noted_of_many,
    "parts": merged,
    "buckets": lambda: assign.assign(KEYS[0], normal(HEADS, 40, WIDTH)),
    "the least": lambda: places.least_in_front(normal(HEADS, 50, 1)[..., 0].double(), 20),
    "other places": rearranged,
    "the best": lambda: places.best(normal(HEADS, 50, 1)[..., 0].double(), 5, [(30, 9), (15, 2)], 24),
    "a walk": halved,
    "k-center": clustered,
}


def tensors_of(found):
    return [found] if isinstance(found, torch.Tensor) else list(vars(found).values())


@pytest.mark.parametrize("name", CALLS)
def test_a_kernel_that_gets_no_memory_says_so(name):
    """With no piece of memory, with one, with two, and so on until it needs no more."""
    expected, refused = CALLS[name](), 0
    if name == "buckets" and expected is None:
        pytest.skip("torch does it where vectors are short")
    for pieces in range(MOST):
        limit(pieces)
        try:
            found = CALLS[name]()
        except MemoryError as error:
            found = None
            assert "no room" in str(error)
        finally:
            limit(-1)
        refused += found is None
        for now in (CALLS[name](), *([] if found is None else [found])):
            assert all(map(torch.equal, tensors_of(now), tensors_of(expected)))
    assert 0 < refused < MOST


SPECS = [
    "exact",
    "h2o(keep=0.4, window=40)",
    "snapkv(keep=0.4, window=40)",
    "saap(index={index!r}, probes=2, window=40, staging=32, full_layers=0)",
]


def come(layer, count, seed):
    keys, values, unrotated = (normal(1, HEADS, count, WIDTH, seed=seed + n) for n in range(3))
    query, asked = (normal(1, HEADS * GROUP, count, WIDTH, seed=seed + n) for n in (3, 4))
    return layer.read(query, NewTokens(keys, values, None, Unrotated(asked, unrotated)), SCALE)


def held_by(layer):
    """All tensors of a layer; notes as the numbers that they are, where they are of attention."""
    numbers = ("notes",) if layer.config.askings else ()
    return [x.view(torch.float64) if name.endswith(numbers) else x for name, x in sorted(layer.state()[0].items())]


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_a_step_that_gets_no_memory_is_answered_by_torch_or_refused(spec, tmp_path):
    """Also where it was to take the short road; who was answered holds what it would have held."""
    index = str(make_index(tmp_path / "index", heads=HEADS, width=WIDTH, buckets=6))
    ready, shorter, answered = LayerCache(parse_spec(spec.format(index=index)), 1), 0, 0
    come(ready, 150, 0)
    for pieces in range(12):
        layer, other = copy.deepcopy(ready), copy.deepcopy(ready)
        for seed in (10, 20):
            come(layer, 1, seed)
            come(other, 1, seed)
        assert layer.again is not None
        limit(pieces)
        try:
            found = come(layer, 1, 30)
        except MemoryError as error:
            assert "no room" in str(error)
            continue
        finally:
            limit(-1)
        answered += 1
        shorter += layer.again is not None and layer.again.served
        for seed, got in ((30, found), (40, come(layer, 1, 40)), (50, come(layer, 1, 50))):
            expected = come(other, 1, seed)
            torch.testing.assert_close(got.out, expected.out)
            torch.testing.assert_close(got.lse, expected.lse)
        for mine, expected in zip(held_by(layer), held_by(other), strict=True):
            torch.testing.assert_close(mine, expected)
    assert answered
    assert 0 < shorter < 12, "with enough, and not without any"

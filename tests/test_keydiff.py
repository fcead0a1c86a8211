"""KeyDiff keeps the keys least like the mean direction: against the definition, in one call, chunks and steps."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from drawn import normal
from kvsketch.caches.core.chooser import Pool
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.caches.forgetting.keydiff import KeyDiff, LeastAlike
from kvsketch.caches.forgetting.scored import FREED
from kvsketch.kernels import native
from kvsketch.kernels.directions import reference as directions
from lanes import entries_of

HEADS, WIDTH = 3, 8


def plainly(keys, calls, config, budget):
    """One head, token numbers alone: what is kept after calls of these sizes, and runs of the others that have means.

    Tokens of the window leave before those of the call that pushes them out.
    """
    held, runs, left, seen = [], [], 0, 0
    for size in calls:
        due = max(0, seen + size - config.sinks - config.window) // config.leaving * config.leaving
        in_window = max(0, seen - config.sinks)
        for stop in (min(due, in_window), due) if size > 1 else (due,):
            if stop <= left:
                continue
            held, left = [*held, *range(config.sinks + left, config.sinks + stop)], stop
            every = F.normalize(keys[config.sinks : config.sinks + left].double(), dim=1)
            scores = {token: -float(F.normalize(keys[token].double(), dim=0) @ every.mean(0)) for token in held}
            room = config.room(budget, left)
            means = max(1, int(config.residual * room)) if config.residual and left > room else 0
            best = sorted(sorted(held, key=lambda token: (-scores[token], token))[: room - means])
            runs = sorted([*runs, *([token] for token in held if means and token not in best)])
            held = best
            while len(runs) > means:
                at = min(range(len(runs) - 1), key=lambda i: len(runs[i]) + len(runs[i + 1]))
                runs[at : at + 2] = [sorted(runs[at] + runs[at + 1])]
        seen += size
    return held, runs


@pytest.fixture(autouse=True, params=[False, True])
def in_torch(monkeypatch, request):
    """By kernels in C, and by torch, which goes through long prompts in strips."""
    monkeypatch.setattr(directions, "AT_ONCE", 70)
    with native.off() if request.param else nullcontext():
        yield


@pytest.mark.parametrize("keep", [0.25, 80])
@pytest.mark.parametrize("calls", [[500], [200, 1, 1, 100, *[1] * 40, 158]], ids=str)
def test_what_is_kept_is_what_the_definition_keeps(keep, calls):
    config = KeyDiff(keep=keep)
    keys, values = 1 + normal(1, HEADS, 500, WIDTH), normal(1, HEADS, 500, WIDTH, seed=1)
    cache, start = LayerCache(config, 0), 0
    for size in calls:
        part = slice(start, start + size)
        new = NewTokens(keys[:, :, part], values[:, :, part])
        cache.read(normal(1, HEADS, size, WIDTH, seed=start), new, 0.3)
        start += size
    held = entries_of(cache.past).keys[0]
    for head in range(HEADS):
        expected, _ = plainly(keys[0, head], calls, config, cache.budgets[0])
        assert torch.equal(held[head], keys[0, head, expected])
    assert int(cache.count_entries().max()) <= cache.budgets[0].entries(500)


def test_equal_keys_go_by_their_order():
    cache = LayerCache(KeyDiff(keep=60), 0)
    keys = torch.ones(1, 1, 300, WIDTH)
    values = torch.arange(300.0)[None, None, :, None].expand(1, 1, 300, WIDTH)
    cache.hold(NewTokens(keys, values))
    assert entries_of(cache.past).values[0, 0, :, 0].tolist() == [*range(4, 4 + 32)]


def test_a_large_cache_is_gone_through_now_and_then(monkeypatch):
    """A little more is dropped than must be, and then tokens join: nothing that is held is looked at, or copied."""
    looked_at = []
    for kind, name in ((LeastAlike, "scores"), (Pool, "_joined")):
        before = getattr(kind, name)

        def noted(own, *given, before=before, name=name):
            looked_at.append(name)
            return before(own, *given)

        monkeypatch.setattr(kind, name, noted)
    config = KeyDiff(keep=1500)
    room = 1500 - config.exact_entries()
    cache, blocks = LayerCache(config, 0), 30
    cache.hold(NewTokens(normal(1, HEADS, 3000, WIDTH), normal(1, HEADS, 3000, WIDTH, seed=1)))
    looked_at.clear()
    for seed in range(blocks * config.leaving):
        new = NewTokens(normal(1, HEADS, 1, WIDTH, seed=seed), normal(1, HEADS, 1, WIDTH, seed=-seed))
        cache.read(normal(1, HEADS, 1, WIDTH), new, 0.3)
        held = cache.streams.pasts[0].count_entries()
        assert bool(((held >= room - room // FREED) & (held <= room)).all())
    apart = room // FREED // config.leaving + 1  # blocks
    assert looked_at.count("scores") in (blocks // apart, blocks // apart + 1)
    assert looked_at.count("_joined") <= 3 * looked_at.count("scores")

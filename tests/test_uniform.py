"""Uniform sampling as a cache: equal to the one-head algorithm, unbiased, and better than dropping the weights."""

import math

import pytest
import torch

from kvsketch.algorithms.draws import uniforms
from kvsketch.algorithms.sampling import empty_sample, offer_token
from kvsketch.attention import exact_attention, weighted_attention
from kvsketch.caches.core.config import BLOCK
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens
from kvsketch.caches.forgetting.uniform import Uniform
from lanes import entries_of

HEADS, WIDTH = 3, 8
SCALE = WIDTH**-0.5


def stream(count, seed=0, rows=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, HEADS, count, WIDTH, generator=generator) for _ in range(3)]


@pytest.mark.parametrize("keep", [0.25, 0.5, 300])
def test_every_head_holds_what_the_one_head_algorithm_holds(keep):
    config = Uniform(keep=keep, seed=9, window=16)
    query, keys, values = stream(900)
    cache = LayerCache(config, layer=2)
    cache.read(query, NewTokens(keys, values), SCALE)
    left = (900 - config.sinks - config.window) // BLOCK * BLOCK
    entries = entries_of(cache.past)
    for head in range(HEADS):
        sample = empty_sample(config.plan(cache.budgets[0]), keys[0, head, 0], values[0, head, 0])
        for rank in range(left):
            at = config.sinks + rank
            sample = offer_token(sample, keys[0, head, at], values[0, head, at], uniforms(9, 2, head, rank))
        assert torch.equal(entries.keys[0, head], sample.keys)
        assert torch.equal(entries.values[0, head], sample.values)
        assert torch.equal(entries.log_mass[0, head], sample.log_weights)


@pytest.mark.slow
def test_the_mass_of_what_was_dropped_stays_in_the_denominator():
    """Averaged over seeds, numerator and denominator are those of exact attention."""
    seeds, count = 400, 500
    query, keys, values = stream(count)
    query = query[:, :, -1:]
    exact = exact_attention(query, keys, values, SCALE)
    sums = []
    for seed in range(seeds):
        cache = LayerCache(Uniform(keep=160, seed=seed, window=8), 0)
        cache.hold(NewTokens(keys, values))
        part = cache.attend(query, SCALE)
        share = torch.exp(part.lse - exact.lse)
        sums.append(torch.cat([share[..., None], share[..., None] * part.out], -1).flatten(1))
    sums = torch.cat(sums)
    expected = torch.cat([torch.ones_like(exact.lse)[..., None], exact.out], -1).flatten(1)
    standard_error = sums.std(0) / math.sqrt(seeds)
    assert ((sums.mean(0) - expected[0]).abs() < 4 * standard_error).all()


@pytest.mark.slow
def test_error_falls_as_one_over_the_root_of_the_sample():
    count, seeds = 4096 + 4 + 8, 24
    query, keys, values = stream(count)
    exact = exact_attention(query[:, :, -64:], keys, values, SCALE).out
    sizes = [256, 512, 1024]
    errors = []
    for size in sizes:
        squared = []
        for seed in range(seeds):
            cache = LayerCache(Uniform(keep=size + 4 + 8 + BLOCK, seed=seed, window=8), 0)
            cache.hold(NewTokens(keys, values))
            squared.append((cache.attend(query[:, :, -64:], SCALE).out - exact).square().mean())
        errors.append(torch.stack(squared).mean().sqrt().item())
    # Without replacement the variance has a factor 1 - m/n, which is taken out before the slope is read off.
    corrected = [error / math.sqrt(1 - size / 4096) for error, size in zip(errors, sizes, strict=True)]
    slope = math.log(corrected[-1] / corrected[0]) / math.log(sizes[-1] / sizes[0])
    assert -0.6 < slope < -0.4


def test_without_weights_the_exact_parts_weigh_too_much():
    """The sample then counts for itself alone: the denominator is too small, by the mass that was dropped."""
    query, keys, values = stream(1000)
    exact = exact_attention(query[:, :, -16:], keys, values, SCALE)
    errors = {}
    for weights in ("count", "none"):
        cache = LayerCache(Uniform(keep=0.125, weights=weights, window=64), 0)
        cache.read(query, NewTokens(keys, values), SCALE)
        part = cache.attend(query[:, :, -16:], SCALE)
        errors[weights] = (part.lse - exact.lse).abs().mean().item()
    assert errors["none"] > 10 * errors["count"]
    unweighted = weighted_attention(query[:, :, -1:], entries_of(cache.past), SCALE)
    assert (entries_of(cache.past).log_mass == 0).all()
    assert unweighted.out.isfinite().all()


def test_layers_and_heads_draw_for_themselves():
    query, keys, values = stream(1000)
    keys, values = keys[:, :1].expand(-1, HEADS, -1, -1), values[:, :1].expand(-1, HEADS, -1, -1)
    held = []
    for layer in (0, 1):
        cache = LayerCache(Uniform(keep=0.25), layer)
        cache.read(query, NewTokens(keys, values), SCALE)
        held += list(entries_of(cache.past).keys[0])
    for i, one in enumerate(held):
        for other in held[:i]:
            assert not torch.equal(one, other)

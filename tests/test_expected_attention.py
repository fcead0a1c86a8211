"""Expected Attention keeps what its definition keeps: written plainly, one head at a time."""

import math

import pytest
import torch

import kvsketch
import zoo
from drawn import normal_doubles as normal
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import Ahead, NewTokens, Unrotated
from kvsketch.caches.forgetting.expected_attention import unpacked
from kvsketch.caches.registry import parse_spec
from kvsketch.huggingface.rotation import ROTATION
from lanes import entries_of
from states import difference, state_of
from test_rotation import file_of

HEADS, GROUP, WIDTH, SCALE = 2, 3, 8, 0.7
CALLS = [200, *[1] * 20, 60, *[1] * 9]


def rotation(position):
    """Rotary embedding as a matrix: of halves, in planes that turn ever slower."""
    angles = position / 100.0 ** (torch.arange(0, WIDTH, 2, dtype=torch.float64) / WIDTH)
    cosines, sines = angles.cos().diag(), angles.sin().diag()
    return torch.cat([torch.cat([cosines, -sines], 1), torch.cat([sines, cosines], 1)])


def mean_rotation(first, count):
    """Row i is what becomes of the i-th unit vector."""
    return torch.stack([rotation(place) for place in range(first, first + count)]).mean(0).T


def text(count):
    """Queries before and after rotation, keys, values; queries are alike, or nothing could be expected of them."""
    shapes = (HEADS * GROUP, HEADS, HEADS)
    queries, keys, values = (normal(1, heads, count, WIDTH, seed=seed) for seed, heads in enumerate(shapes))
    queries = queries + 2 * normal(1, HEADS * GROUP, 1, WIDTH, seed=9)
    turns = torch.stack([rotation(place) for place in range(count)])
    return queries, torch.einsum("bhnd,ned->bhne", queries, turns), keys, values


def plainly(queries, keys, values, calls, config, budget):
    """The tokens of one KV head that are kept, by its queries [g, n, d] before rotation."""
    held, left, seen = [], 0, 0
    numbers = GROUP * (2 * (WIDTH + WIDTH * (WIDTH + 1) // 2) + (config.window + 8) * WIDTH)
    beside = math.ceil(numbers / (2 * WIDTH))  # as many entries have room for so many numbers
    for size in calls:
        due = max(0, seen + size - 4 - config.window) // 8 * 8
        in_window = max(0, seen - 4)
        for stop in (min(due, in_window), due) if size > 1 else (due,):
            if stop <= left:
                continue
            held, left = [*held, *range(4 + left, 4 + stop)], stop
            turn = mean_rotation(4 + left + config.window, config.ahead).T
            shares = []
            for own in queries[:, 4 : 4 + left]:
                mean, covariance = turn @ own.mean(0), turn @ own.T.cov(correction=0) @ turn.T
                logs = [k @ mean / WIDTH**0.5 + k @ covariance @ k / WIDTH / 2 for k in keys[held]]
                shares.append(torch.stack(logs).softmax(0))
            scores = (torch.stack(shares).mean(0) + config.epsilon) * values[held].norm(dim=1)
            room = config.room(budget, left)
            room -= beside if left > room else 0
            held = sorted(held[i] for i in scores.argsort(descending=True)[:room])
        seen += size
    return held


@pytest.mark.parametrize("spec", ["keep=0.5", "keep=130, epsilon=0, ahead=40"])
def test_what_is_kept_is_what_the_definition_keeps(spec):
    config = parse_spec(f"expected_attention({spec})")
    queries, rotated, keys, values = text(sum(CALLS))
    cache, start = LayerCache(config, 0), 0
    for size in CALLS:
        part = slice(start, start + size)
        ahead = Ahead(torch.arange(start, start + size)[None], mean_rotation)
        unrotated = Unrotated(queries[:, :, part], keys[:, :, part], ahead)
        cache.read(rotated[:, :, part], NewTokens(keys[:, :, part], values[:, :, part], None, unrotated), SCALE)
        start += size
    for head in range(HEADS):
        group = queries[0, head * GROUP : (head + 1) * GROUP]
        expected = plainly(group, keys[0, head], values[0, head], CALLS, config, cache.budgets[0])
        assert torch.equal(entries_of(cache.past).keys[0, head], keys[0, head, expected])
    (bundle,) = cache.past.bundles
    left, known = queries[0, :, 4 : 4 + cache.left[0]], bundle.holding.per_lane
    torch.testing.assert_close(known["mean"].flatten(0, 1), left.mean(1).float())
    covariance = torch.stack([own.T.cov(correction=0) for own in left]).unflatten(0, (HEADS, GROUP))
    torch.testing.assert_close(unpacked(known["covariance"], known["mean"]), covariance, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "llama_yarn", "gemma3", "gpt_oss", "glm4", "cohere2"])
def test_what_follows_is_rotated_as_the_model_will(family):
    """The mean over positions of what the model's own function makes of unit vectors; the layers of a model differ."""
    model = zoo.build(family)
    cache = kvsketch.prefill(model, zoo.tokens(1, 60), kvsketch.make_cache(model, "expected_attention(keep=0.75)"))
    for layer in cache.sketch_layers:
        turned = layer.held.past.method.turned
        if family == "cohere2":
            assert turned is None, "its full layers rotate nothing"
            continue
        kinds = {"layer_type": "full_attention"} if family == "gemma3" else {}
        cosines, sines = model.model.rotary_emb(torch.zeros(1, 5, 1), torch.arange(70, 75)[None], **kinds)
        units = torch.eye(16)[None, :, None].expand(-1, -1, 5, -1)
        expected = getattr(file_of(model), ROTATION).rotate(units, units, cosines, sines)[0].mean(2)[0]
        torch.testing.assert_close(turned(70, 5).float(), expected, rtol=1e-4, atol=1e-6)
    kvsketch.detach(model)


def test_rows_that_begin_elsewhere_and_copies():
    """A model that is given no positions counts padding too: a row keeps what it would keep from the beginning."""
    model, ids, spec = zoo.build("llama", layers=2), zoo.tokens(2, 260), "expected_attention(keep=0.8, ahead=8)"
    mask = torch.ones_like(ids)
    mask[1, :83] = 0
    both, alone, plain = (kvsketch.make_cache(model, spec) for _ in range(3))
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=both)
        model(ids[1:, 83:], position_ids=torch.arange(83, 260)[None], past_key_values=alone)
        model(ids[1:, 83:], past_key_values=plain)
    for layer, own, first in zip(both.sketch_layers, alone.sketch_layers, plain.sketch_layers, strict=True):
        (bundle,) = (bundle for bundle in layer.held.past.bundles if bundle.rows == [1])
        expected, entries = entries_of(own.held.past), bundle.holding.entries()
        torch.testing.assert_close(entries.keys, expected.keys[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(entries.values, entries_of(first.held.past).values[0], rtol=1e-4, atol=1e-4)
    twin = alone.fork()
    for cache in (alone, twin):
        with torch.no_grad():
            for place, step in enumerate(zoo.tokens(1, 20, seed=1).split(1, 1), 260):
                model(step, position_ids=torch.tensor([[place]]), past_key_values=cache)
    assert difference(state_of(alone), state_of(twin)) is None


def test_what_cannot_be_expected_is_refused():
    model = zoo.build("llama", layers=2)
    with pytest.raises(ValueError, match="goes by queries as they are before rotation, and nobody noted those here"):
        LayerCache(parse_spec("expected_attention"), 0).hold(NewTokens(*normal(2, 1, 2, 9, 8).float()))
    exact = kvsketch.prefill(model, zoo.tokens(1, 60), kvsketch.make_cache(model, "exact"))
    with pytest.raises(ValueError, match="expected_attention goes by queries or keys as they are before rotation"):
        exact.compress("expected_attention")
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    with pytest.raises(ValueError, match="rotates otherwise once a text is longer than 1024 tokens: use a method"):
        kvsketch.make_cache(model, "expected_attention")
    with pytest.raises(ValueError, match="Gemma4ForCausalLM does not rotate queries and keys together"):
        kvsketch.make_cache(zoo.build("gemma4"), "expected_attention")
    for wrong in ("epsilon=-1", "ahead=0", "heads='threshold'"):
        with pytest.raises(ValueError, match=wrong.split("=")[0]):
            parse_spec(f"expected_attention({wrong})")

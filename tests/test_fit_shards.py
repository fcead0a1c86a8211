"""Shards: a text's keys and its long-range queries, as the model's layers had them."""

import pytest
import torch

from fitted import KV_HEADS, TOKENIZER, sentences, tiny_model
from kvsketch.algorithms import saap
from kvsketch.fitting.corpus import Text
from kvsketch.fitting.settings import ShardSettings
from kvsketch.fitting.shards import Reader, Shards, long_range_queries, read_layer
from kvsketch.huggingface.capture import capture
from zoo import build, tokens

APART, AWAY, WANTED = 24, 12, 20


def text_of(seed=0):
    ids = torch.tensor(TOKENIZER(sentences(60, seed))["input_ids"])
    return Text(ids, f"text {seed}")


def shards_in(folder, model="tiny", **given):
    options = {"apart": APART, "away": AWAY, "queries": WANTED, "layers": (1, 2)} | given
    return Shards(folder, {"model": model}, ShardSettings(**options))


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """A shard, and what the model's layers saw."""
    model, text = tiny_model(), text_of()
    shards = shards_in(tmp_path_factory.mktemp("shards"))
    Reader(lambda: model, shards)(text)
    return shards.path(text), {s.layer: s for s in capture(model, text.ids[None], before_rotation=True)}


@pytest.mark.parametrize("layer", [1, 2])
def test_keys_are_those_of_the_layer_before_rotation_and_after(layer, read):
    path, seen = read
    shard = read_layer(path, layer)
    assert torch.equal(shard.keys, seen[layer].keys)
    assert torch.equal(shard.keys_before, seen[layer].keys_before)
    assert not torch.equal(shard.keys, shard.keys_before)
    assert torch.equal(shard.key_positions, torch.arange(shard.keys.shape[1]))
    assert shard.scale == seen[layer].scale


@pytest.mark.parametrize("layer", [1, 2])
def test_queries_are_long_range_ones_of_their_kv_heads_group_at_their_positions(layer, read):
    path, seen = read
    shard = read_layer(path, layer)
    group = len(seen[layer].queries) // KV_HEADS
    at = shard.key_positions
    assert shard.query_is_far.all()
    places = set()
    for row, (head, position) in enumerate(
        zip(shard.query_heads.tolist(), shard.query_positions.tolist(), strict=True)
    ):
        heads = range(head * group, (head + 1) * group)
        mine = [h for h in heads if torch.equal(seen[layer].queries[h, position], shard.queries[row])]
        assert len(mine) == 1
        assert torch.equal(seen[layer].queries_before[mine[0], position], shard.queries_before[row])
        places.add((mine[0], position))
        assert position - 1 > APART, "it has a key behind the sink that is farther away"
        asked = shard.queries[row][None].float()
        assert saap.long_range(asked, shard.keys[head], torch.tensor([position]), at, AWAY).all()
    assert len(places) == len(shard.queries), "none twice"


@pytest.mark.parametrize("layer", [1, 2])
def test_a_head_gives_as_many_queries_as_wanted_or_as_there_are(layer, read):
    path, seen = read
    shard, count = read_layer(path, layer), seen[layer].keys.shape[1]
    counts = torch.bincount(shard.query_heads, minlength=KV_HEADS)
    assert torch.equal(counts, long_range_queries([path], layer))
    for head in range(KV_HEADS):
        group = seen[layer].queries.unflatten(0, (KV_HEADS, -1))[head]
        at = torch.arange(count)
        there = sum(int(saap.long_range(q, shard.keys[head], at, at, AWAY)[APART + 2 :].sum()) for q in group)
        assert counts[head] == min(WANTED, there)
        assert there > 0


def test_a_head_without_long_range_queries_gives_a_few_others(tmp_path):
    model, text = tiny_model(), text_of()
    shards = shards_in(tmp_path, away=1000)
    Reader(lambda: model, shards)(text)
    shard = read_layer(shards.path(text), 1)
    assert not shard.query_is_far.any()
    assert (torch.bincount(shard.query_heads) == 3).all()  # an eighth of 20
    assert not long_range_queries([shards.path(text)], 1).any()


def test_a_shard_is_known_by_its_model_settings_and_text(tmp_path):
    model, shards = tiny_model(), shards_in(tmp_path)
    assert not shards.has(text_of())
    Reader(lambda: model, shards)(text_of())
    assert shards.has(text_of())
    assert not shards.has(text_of(1))
    for other in ({"apart": 25}, {"away": 13}, {"queries": 21}, {"layers": (1,)}, {"model": "other"}, {"seed": 1}):
        assert not shards_in(tmp_path, **other).has(text_of())
    before = shards.path(text_of()).read_bytes()
    Reader(lambda: model, shards)(text_of())
    assert shards.path(text_of()).read_bytes() == before, "the same whenever it is made"


def test_a_shard_that_was_cut_off_is_not_there(tmp_path):
    model, shards = tiny_model(), shards_in(tmp_path)
    Reader(lambda: model, shards)(text_of())
    path = shards.path(text_of())
    path.write_bytes(path.read_bytes()[:-100])
    assert not shards.has(text_of())
    for read in (lambda: read_layer(path, 1), lambda: long_range_queries([path], 1)):
        with pytest.raises(ValueError, match=r"shard .*safetensors is missing or damaged: run the same command again"):
            read()


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3", "gpt_oss", "smollm3"])
def test_other_families_leave_shards_too(family, tmp_path):
    model, text = build(family), Text(tokens(1, 60)[0], family)
    (layer,) = [seen.layer for seen in capture(model, text.ids[None], at_most=1)]
    shards = shards_in(tmp_path, layers=(layer,))
    Reader(lambda: model, shards)(text)
    shard = read_layer(shards.path(text), layer)
    assert len(shard.queries)
    assert shard.softcap == (5.0 if family == "gemma2" else None)

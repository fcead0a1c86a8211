"""Queries and keys before rotation: bit for bit what the model's own layers had, and no trace left behind."""

import copy
import gc
import pickle
import sys
import threading
import weakref
from dataclasses import replace

import pytest
import torch

import kvsketch
from kvsketch.huggingface.capture import capture
from kvsketch.huggingface.modules import attention_modules
from kvsketch.huggingface.rotation import ROTATION, WATCH, BeforeRotation
from zoo import FAMILIES, build, tokens


class Noting(BeforeRotation):
    """Still knows when the call is over what it has noted."""

    def _leave_layer(self, module, arguments, output):
        self._here.layer = None


def file_of(model):
    """The modeling file whose name is replaced for a while."""
    return sys.modules[type(next(attention_modules(model))).__module__]


def rotated_again(model, seen, layer, count):
    """Rotate what was noted by the model's own function and frequencies, or not, where a layer has none."""
    inner = model.model
    positions = torch.arange(count)[None]
    states = torch.zeros(1, count, model.config.hidden_size)
    kinds = getattr(model.config, "layer_types", None)
    rotary = inner.rotary_emb
    try:
        cos, sin = rotary(states, positions)
    except TypeError:
        cos, sin = rotary(states, positions, layer_type=kinds[layer])
    return getattr(file_of(model), ROTATION)(seen.queries_before[None], seen.keys_before[None], cos, sin)


@pytest.mark.parametrize("family", FAMILIES)
def test_rotating_what_was_noted_gives_what_attention_saw(family):
    """By the model's own function and frequencies, computed apart from the capture, bit for bit, for every family."""
    model = build(family)
    name = getattr(file_of(model), ROTATION)
    for seen in capture(model, tokens(1, 40), before_rotation=True):
        assert seen.queries_before.shape == seen.queries.shape
        assert seen.keys_before.shape == seen.keys.shape
        module = next(m for m in attention_modules(model) if m.layer_idx == seen.layer)
        if family == "cohere2" or not getattr(module, "use_rope", True):
            assert torch.equal(seen.queries_before, seen.queries), "these layers rotate nothing"
            assert torch.equal(seen.keys_before, seen.keys)
            continue
        queries, keys = rotated_again(model, seen, seen.layer, 40)
        assert torch.equal(queries[0], seen.queries)
        assert torch.equal(keys[0], seen.keys)
        assert not torch.equal(seen.keys_before, seen.keys)
    assert getattr(file_of(model), ROTATION) is name, "nothing is left behind"
    assert capture(model, tokens(1, 40), [seen.layer])[0].keys.equal(seen.keys), "watching changes nothing"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_before_rotation_are_those_of_the_projection(dtype):
    """Llama's first layer, by hand: no rotation function in between."""
    model = build("llama", dtype=dtype)
    ids = tokens(1, 30)
    (seen,) = capture(model, ids, [0], before_rotation=True)
    layer = model.model.layers[0]
    with torch.no_grad():
        states = layer.input_layernorm(model.model.embed_tokens(ids))
        keys = layer.self_attn.k_proj(states).view(1, 30, -1, 16).transpose(1, 2)
        queries = layer.self_attn.q_proj(states).view(1, 30, -1, 16).transpose(1, 2)
    assert torch.equal(seen.keys_before, keys[0])
    assert torch.equal(seen.queries_before, queries[0])


def test_nothing_is_noted_of_another_model_of_the_same_family():
    watched, other = build("llama"), build("llama", seed=1)
    with Noting(watched) as watch, torch.no_grad():
        other(tokens(1, 10))
        assert not getattr(watch._here, "noted", {})
        watched(tokens(1, 10))
        assert sorted(watch._here.noted) == [0, 1, 2, 3]
    with Noting(watched, [1, 3]) as watch, torch.no_grad():
        watched(tokens(1, 10))
        assert sorted(watch._here.noted) == [1, 3]


def test_watches_may_end_in_any_order_and_after_errors():
    first, second = build("llama"), build("llama", seed=1)
    name = getattr(file_of(first), ROTATION)
    one, two = Noting(first), Noting(second)
    one.__enter__()
    two.__enter__()
    one.__exit__(None, None, None)
    with torch.no_grad():
        second(tokens(1, 10))
    assert sorted(two._here.noted) == [0, 1, 2, 3]
    two.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="on purpose"), BeforeRotation(first):
        raise RuntimeError("on purpose")
    with torch.no_grad():
        expected = second(tokens(1, 10)).logits
        assert torch.equal(build("llama", seed=1)(tokens(1, 10)).logits, expected)
    assert getattr(file_of(first), ROTATION) is name


def test_a_layer_that_attends_to_other_vectors_is_refused():
    model = build("llama")
    with Noting(model) as watch, torch.no_grad():
        model(tokens(1, 10))
        noted = watch._here.noted[2]
        with pytest.raises(ValueError, match="layer 2 of LlamaForCausalLM does not attend to the vectors"):
            watch.take(2, noted.rotated_queries[..., :8], noted.rotated_keys[..., :8])
        noted = watch._here.noted[1]
        with pytest.raises(ValueError, match="layer 1 of LlamaForCausalLM does not attend to the vectors"):
            watch.take(1, noted.rotated_queries + 1, noted.rotated_keys)
        noted = watch._here.noted[3]
        # Ten numbers of ten tokens: from the same place on, in another order.
        turned = noted.rotated_queries[..., :10].transpose(2, 3)
        watch._here.noted[3] = replace(noted, rotated_queries=noted.rotated_queries[..., :10])
        with pytest.raises(ValueError, match="layer 3 of LlamaForCausalLM does not attend to the vectors"):
            watch.take(3, turned, noted.rotated_keys)
        noted = watch._here.noted[0]
        queries, keys = watch.take(0, noted.rotated_queries.clone(), noted.rotated_keys)
        assert torch.equal(queries, noted.queries)
        assert torch.equal(keys, noted.keys)


def test_a_model_that_rotates_elsewhere_is_refused_before_it_is_watched(monkeypatch):
    model = build("llama")
    monkeypatch.delattr(file_of(model), ROTATION)
    with pytest.raises(ValueError, match="does not rotate queries and keys together by apply_rotary_pos_emb"):
        kvsketch.attach(model, before_rotation=True)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == "sdpa"


def test_without_being_asked_nothing_is_watched():
    (seen,) = capture(build("llama"), tokens(1, 20), [1])
    assert seen.queries_before is None
    assert seen.keys_before is None


def test_what_was_noted_is_let_go_when_the_layer_is_through():
    model = build("llama")
    with BeforeRotation(model) as watch, torch.no_grad():
        model(tokens(1, 10))
        assert watch._here.noted == {}


def unrotated_of(model):
    """What a watched model's attention gets of a call, by the watch on its modules."""
    cache = kvsketch.make_cache(model, "exact")
    seen = []
    for layer in cache.layers:
        read = layer.read

        def reading(query, new, *rest, at=layer.held.layer, read=read, **options):
            watch = getattr(next(m for m in attention_modules(model) if m.layer_idx == at), WATCH)
            seen.append(watch.take(at, query, new.keys))
            return read(query, new, *rest, **options)

        layer.read = reading
    kvsketch.prefill(model, tokens(1, 10), cache)
    return seen


@pytest.mark.parametrize("first", ["copy", "original"])
def test_a_copy_of_a_watched_model_is_watched_by_itself(first):
    model = build("llama")
    name = getattr(file_of(model), ROTATION)
    kvsketch.attach(model, before_rotation=True)
    expected = unrotated_of(model)
    twin = copy.deepcopy(model)
    kvsketch.attach(twin, before_rotation=True)
    kvsketch.detach(twin if first == "copy" else model)
    for (queries, keys), others in zip(unrotated_of(model if first == "copy" else twin), expected, strict=True):
        assert torch.equal(queries, others[0])
        assert torch.equal(keys, others[1])
    kvsketch.detach(model)
    kvsketch.detach(twin)
    assert getattr(file_of(model), ROTATION) is name
    for one in (model, twin):  # a copy brings hooks along, of a watch that is not its own
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in one.modules())
        assert not any(m._forward_hooks_with_kwargs or m._forward_hooks_always_called for m in one.modules())


def test_a_watched_model_can_be_pickled_and_freed_though_a_copy_lives():
    gc.collect()  # so that no model of another test is watched
    model = build("llama")
    name = getattr(file_of(model), ROTATION)
    kvsketch.attach(model, before_rotation=True)
    twin = pickle.loads(pickle.dumps(model))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert getattr(file_of(twin), ROTATION) is name


def test_a_rotation_that_somebody_replaces_is_noticed_and_left_to_them():
    model = build("llama")
    file, name = file_of(model), getattr(file_of(model), ROTATION)
    kvsketch.attach(model, before_rotation=True)
    setattr(file, ROTATION, lambda *arguments, **options: name(*arguments, **options))
    other = getattr(file, ROTATION)
    with pytest.raises(ValueError, match="the rotation of LlamaForCausalLM is not watched any more"):
        unrotated_of(model)
    kvsketch.detach(model)
    assert getattr(file, ROTATION) is other
    setattr(file, ROTATION, name)


def test_a_first_call_is_compared_however_short_it_is():
    model = build("llama")
    with Noting(model) as watch, torch.no_grad():
        model(tokens(1, 1))
        noted = watch._here.noted[0]
        with pytest.raises(ValueError, match="layer 0 of LlamaForCausalLM does not attend to the vectors"):
            watch.take(0, noted.rotated_queries + 1, noted.rotated_keys, check=False)


def test_watches_may_come_and_go_while_another_model_runs():
    """In other threads; a set of them would break under the one that runs."""
    running, others = build("llama"), [build("llama", seed=seed) for seed in (1, 2)]
    stop, failed = threading.Event(), []

    def come_and_go(model):
        while not stop.is_set():
            with BeforeRotation(model):
                pass

    threads = [threading.Thread(target=come_and_go, args=(model,)) for model in others]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with BeforeRotation(running), torch.no_grad():
            for thread in threads:
                thread.start()
            expected = running(tokens(1, 10)).logits
            for _ in range(60):
                failed.append(not torch.equal(running(tokens(1, 10)).logits, expected))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert not any(failed)

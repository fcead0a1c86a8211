"""Models whose layers sum tokens up beside those with attention: what was summed up cannot be taken back.

So a call is refused before anything has moved, and whatever moves rows moves all layers, or is refused by name.
"""

import copy

import pytest
import torch
from transformers import DynamicCache, ZambaConfig, ZambaForCausalLM

import kvsketch
import zoo
from kvsketch.files import TensorFile, write_tensors
from kvsketch.huggingface.identity import describe_model
from kvsketch.kernels import native
from made_index import make_index

pytestmark = pytest.mark.usefixtures("as_users_run_it")
COMPRESSED = "uniform(keep=0.5, window=16)"
GREEDY = {"max_new_tokens": 10, "do_sample": False}


def padded(rows=2, count=60, padding=21):
    ids, mask = zoo.tokens(rows, count), torch.ones(rows, count, dtype=torch.long)
    mask[0, :padding] = 0
    return ids * mask, mask


def state(cache):
    """All that all layers hold."""
    found = {}
    for index, layer in enumerate(cache.layers):
        if hasattr(layer, "held"):
            tensors, numbers = layer.state()
            found |= {f"{index}.{name}": tensor.clone() for name, tensor in tensors.items()} | {f"{index}": numbers}
        for name in ("conv_states", "recurrent_states"):
            for number, tensor in getattr(layer, name, {}).items():
                found[f"{index}.{name}.{number}"] = None if tensor is None else tensor.clone()
        for name in ("keys", "values"):
            if isinstance(getattr(layer, name, None), torch.Tensor):
                found[f"{index}.{name}"] = getattr(layer, name).clone()
    return found


def same(left, right):
    assert left.keys() == right.keys()
    for name, value in left.items():
        equal = torch.equal(value, right[name]) if isinstance(value, torch.Tensor) else value == right[name]
        assert equal, name


def go_on(model, cache, rows=2, **options):
    """Text after a few new tokens."""
    question = zoo.tokens(rows, 5, seed=3)
    return model.generate(**cache.new_tokens(question), past_key_values=cache, **GREEDY, **options)


@pytest.mark.parametrize("family", [*zoo.HYBRIDS, *zoo.WIDE])
@pytest.mark.parametrize("mode", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}], ids=str)
def test_with_nothing_dropped_every_mode_gives_stocks_text_in_padded_batches(family, mode):
    stock, ours = zoo.build(family), zoo.build(family)
    ids, mask = padded()
    texts = []
    for model, cache in ((stock, DynamicCache(config=stock.config)), (ours, kvsketch.make_cache(ours, "exact"))):
        torch.manual_seed(0)
        texts.append(model.generate(ids, attention_mask=mask, past_key_values=cache, **(GREEDY | mode)))
    assert torch.equal(*texts)


@pytest.mark.parametrize("family", [*zoo.HYBRIDS, *zoo.WIDE])
def test_a_second_turn_goes_on_as_stocks(family):
    stock, ours = zoo.build(family), zoo.build(family)
    ids, more = zoo.tokens(1, 60), zoo.tokens(1, 9, seed=3)
    stock_cache, cache = DynamicCache(config=stock.config), kvsketch.make_cache(ours, "exact")
    with torch.no_grad():
        for part in (ids, more, more[:, :1]):
            expected = stock(part, past_key_values=stock_cache).logits
            got = ours(part, past_key_values=cache).logits
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", [*zoo.HYBRIDS, *zoo.WIDE])
def test_its_attention_is_compressed_and_rows_answer_as_if_alone(family):
    model, ids = zoo.build(family), zoo.tokens(2, 400)
    cache = kvsketch.prefill(model, ids, kvsketch.make_cache(model, COMPRESSED))
    assert cache.sketch_layers
    report = cache.report()
    assert report.nbytes < 0.8 * report.full_nbytes
    assert report.error > 0
    together = go_on(model, cache)
    for row in range(2):
        alone = kvsketch.prefill(model, ids[row : row + 1], kvsketch.make_cache(model, COMPRESSED))
        question = zoo.tokens(2, 5, seed=3)[row : row + 1]
        text = model.generate(**alone.new_tokens(question), past_key_values=alone, **GREEDY)
        assert torch.equal(together[row : row + 1], text)


@pytest.mark.parametrize("family", [*zoo.HYBRIDS, *zoo.WIDE])
def test_rows_are_repeated_selected_and_put_in_another_order_in_all_layers(family):
    model, ids = zoo.build(family), zoo.tokens(3, 100)
    cache = kvsketch.prefill(model, ids, kvsketch.make_cache(model, COMPRESSED))
    cache.batch_select_indices(torch.tensor([2, 0]))
    cache.batch_repeat_interleave(2)
    cache.reorder_cache(torch.tensor([3, 1, 2, 0]))
    got, question = [2, 2, 0, 0], zoo.tokens(1, 5, seed=4)
    got[0], got[1], got[2], got[3] = got[3], got[1], got[2], got[0]
    together = model.generate(**cache.new_tokens(question.expand(4, -1)), past_key_values=cache, **GREEDY)
    for place, row in enumerate(got):
        alone = kvsketch.prefill(model, ids[row : row + 1], kvsketch.make_cache(model, COMPRESSED))
        expected = model.generate(**alone.new_tokens(question), past_key_values=alone, **GREEDY)
        assert torch.equal(together[place : place + 1], expected)


@pytest.mark.parametrize("family", [*zoo.HYBRIDS, *zoo.WIDE])
@pytest.mark.parametrize("turn", ["saved", "forked", "compressed"])
def test_copies_and_files_hold_all_layers(family, turn, tmp_path):
    model = zoo.build(family)
    cache = kvsketch.prefill(model, zoo.tokens(2, 100), kvsketch.make_cache(model, "exact"))
    if turn == "saved":
        cache.save(tmp_path / "cache.safetensors")
        model_again = zoo.build(family)
        other = kvsketch.load_cache(model_again, tmp_path / "cache.safetensors")
    else:
        model_again, other = model, cache.fork() if turn == "forked" else cache.compress("exact")
    same(state(other), state(cache) | {key: state(other)[key] for key in state(other) if key.isdecimal()})
    assert torch.equal(go_on(model_again, other), go_on(model, cache))


def unknown_token(model, cache):
    model(torch.full((2, 3), zoo.VOCABULARY), past_key_values=cache)


def under_autocast(model, cache):
    with torch.autocast("cpu", torch.bfloat16):
        model(zoo.tokens(2, 3), past_key_values=cache)


REFUSED = {
    "autocast": under_autocast,
    "attention weights": lambda m, c: m(zoo.tokens(2, 3), past_key_values=c, output_attentions=True),
    "mask of one row": lambda m, c: m(zoo.tokens(2, 3), past_key_values=c, attention_mask=torch.ones(1, 103)),
    "mask that hides": lambda m, c: m(
        zoo.tokens(2, 3), past_key_values=c, attention_mask=(torch.arange(103) > 50).long().expand(2, -1)
    ),
    "positions in a row": lambda m, c: m(zoo.tokens(2, 3), past_key_values=c, position_ids=torch.arange(100, 103)),
    "more positions": lambda m, c: m(zoo.tokens(2, 3), past_key_values=c, position_ids=torch.arange(100, 105)[None]),
    "4-D mask": lambda m, c: m(zoo.tokens(2, 3), past_key_values=c, attention_mask=torch.ones(2, 1, 3, 103).bool()),
    "short mask": lambda m, c: m(zoo.tokens(2, 3), past_key_values=c, attention_mask=torch.ones(2, 5)),
    "other rows": lambda m, c: m(zoo.tokens(3, 3), past_key_values=c),
    "beams": lambda m, c: m.generate(zoo.tokens(2, 101), past_key_values=c, num_beams=2, max_new_tokens=2),
    "infinite input": lambda m, c: m(inputs_embeds=torch.full((2, 3, 64), float("inf")), past_key_values=c),
    "unknown token": unknown_token,
    "wrong position": lambda m, c: m(zoo.tokens(2, 3), past_key_values=c, position_ids=torch.arange(3)[None]),
    "packed": lambda m, c: m(zoo.tokens(2, 3), past_key_values=c, position_ids=torch.tensor([[100, 101, 0]])),
    "no mask of all": lambda m, c: m.generate(zoo.tokens(2, 50), past_key_values=c, max_new_tokens=2),
    "another model": lambda m, c: zoo.attached("llama")(zoo.tokens(2, 3), past_key_values=c),
    "a twin": lambda m, c: type(m)(m.config).eval()(zoo.tokens(2, 3), past_key_values=c),
    "a layer alone": lambda m, c: c.update_conv_state(torch.zeros(2, 64, 3), 0),
    "assistant": lambda m, c: m.generate(
        zoo.tokens(1, 101), past_key_values=c, max_new_tokens=2, prompt_lookup_num_tokens=2
    ),
    "tokens taken back": lambda m, c: c.crop(-1),
    "rows that are not there": lambda m, c: c.batch_select_indices(torch.tensor([0, 2])),
    "no rows": lambda m, c: c.batch_repeat_interleave(0),
    "none of the rows": lambda m, c: c.batch_select_indices(torch.zeros(2, dtype=torch.bool)),
    "rows as booleans": lambda m, c: c.reorder_cache(torch.tensor([True, False])),
    "rows as numbers with a point": lambda m, c: c.batch_select_indices(torch.tensor([0.0, 1.0])),
    "a mask of other rows": lambda m, c: c.batch_select_indices(torch.ones(3, dtype=torch.bool)),
}


@pytest.mark.parametrize("family", [*zoo.HYBRIDS, "gemma3"])
def test_what_is_refused_has_moved_nothing(family):
    """Nor in sliding layers, which take tokens before the first layer of ours."""
    model = zoo.build(family)
    cache = kvsketch.prefill(model, zoo.tokens(2, 100), kvsketch.make_cache(model, COMPRESSED))
    before, expected = state(cache), go_on(model, copy.deepcopy(cache))
    for name, call in REFUSED.items():
        if family in ("gemma3", "falcon_h1") and name == "a layer alone":
            continue  # there is no such state, or it has another place
        kvsketch.attach(model)
        with pytest.raises(ValueError, match=r"\w"), torch.no_grad():
            call(model, cache)
        same(state(cache), before)
    assert torch.equal(go_on(model, cache), expected)


@pytest.mark.parametrize("family", zoo.HYBRIDS)
@pytest.mark.parametrize("layer", range(4))
def test_a_call_that_fails_half_way_leaves_a_cache_that_says_so(family, layer):
    """Also where it fails before the first layer with attention, whose length would tell."""
    model = zoo.build(family)
    cache = kvsketch.prefill(model, zoo.tokens(2, 100), kvsketch.make_cache(model, COMPRESSED))
    before = state(cache)

    def fail(*args):
        raise KeyboardInterrupt

    hook = model.model.layers[layer].register_forward_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        model(zoo.tokens(2, 3), past_key_values=cache)
    hook.remove()
    with pytest.raises(AssertionError):
        same(state(cache), before)
    for call in (
        lambda: go_on(model, cache),
        lambda: cache.save("never"),
        lambda: cache.reorder_cache(torch.arange(2)),
    ):
        with pytest.raises(ValueError, match="an earlier call failed half-way"):
            call()
    cache.reset()
    kvsketch.prefill(model, zoo.tokens(2, 100), cache)
    same(state(cache), before)


@pytest.mark.parametrize("family", zoo.HYBRIDS)
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("uniform(keep='20KB', window=16)", "give more bytes"),
        ("saap(index='INDEX', window=16)", r"attach\(model, before_rotation=True\)"),
    ],
    ids=["bytes", "unwatched"],
)
def test_what_a_method_refuses_at_the_first_tokens_has_moved_nothing(family, spec, message, tmp_path):
    model = zoo.build(family)
    known = describe_model(model)
    index = make_index(tmp_path / "index", model, heads=known["kv_heads"], width=known["head_width"])
    cache = kvsketch.make_cache(model, spec.replace("INDEX", index))
    kvsketch.detach(model)
    kvsketch.attach(model)
    before = state(cache)
    with pytest.raises(ValueError, match=message), torch.no_grad():
        model(zoo.tokens(2, 40), past_key_values=cache)
    same(state(cache), before)
    cache.stack.check_whole()


@pytest.mark.parametrize("family", [*zoo.HYBRIDS, *zoo.WIDE])
def test_no_state_keeps_the_history_of_a_call_with_gradients(family):
    model = zoo.build(family)
    cache = kvsketch.make_cache(model, COMPRESSED)
    model(zoo.tokens(2, 40), past_key_values=cache)
    assert not any(x.requires_grad for x in state(cache).values() if isinstance(x, torch.Tensor))
    with torch.no_grad(), native.off():  # as attention is computed where a gradient is wanted
        expected = kvsketch.prefill(model, zoo.tokens(2, 40), kvsketch.make_cache(model, COMPRESSED))
    same(state(cache), state(expected))


@pytest.mark.parametrize("family", zoo.HYBRIDS)
def test_a_call_that_fails_before_the_first_layer_has_moved_nothing_and_let_nobody_in(family):
    model = zoo.build(family)
    cache = kvsketch.prefill(model, zoo.tokens(2, 60), kvsketch.make_cache(model, COMPRESSED))
    before = state(cache)
    with pytest.raises(IndexError):
        model(torch.full((2, 1), zoo.VOCABULARY), past_key_values=cache)  # one token alone is not looked at
    with pytest.raises(ValueError, match="that it was not made for, or that is not attached"), torch.no_grad():
        zoo.build(family, seed=1)(zoo.tokens(2, 3), past_key_values=cache)
    same(state(cache), before)
    go_on(model, cache)


@pytest.mark.parametrize("family", zoo.HYBRIDS)
@pytest.mark.parametrize("at", [0, 1])
def test_a_single_token_that_is_interrupted_has_moved_nothing_or_the_cache_says_so(family, at):
    """Models change the state of a convolution where it lies, and tell the cache nothing."""

    def stop(*_):
        raise KeyboardInterrupt

    model = zoo.build(family)
    cache = kvsketch.prefill(model, zoo.tokens(2, 60), kvsketch.make_cache(model, COMPRESSED))
    before = state(cache)
    hook = model.model.layers[at].register_forward_hook(stop)
    with pytest.raises(KeyboardInterrupt), torch.no_grad():
        model(zoo.tokens(2, 1), past_key_values=cache)
    hook.remove()
    for use in (cache.fork, lambda: go_on(model, cache)):
        with pytest.raises(ValueError, match="an earlier call failed half-way"):
            use()
    assert before.keys() == state(cache).keys()


@pytest.mark.parametrize("family", [*zoo.HYBRIDS, "gemma3", "llama"])
@pytest.mark.parametrize("count", [1, 60])
def test_what_is_saved_while_tokens_may_be_taken_back_is_whole(family, count, tmp_path):
    model = zoo.build(family)
    cache = kvsketch.make_cache(model, COMPRESSED)
    if family in ("qwen3_next", "falcon_h1"):
        with pytest.raises(ValueError, match="takes tokens back"):
            cache.activate_past_recording()
        return
    cache.activate_past_recording()
    kvsketch.prefill(model, zoo.tokens(2, count), cache)
    cache.save(tmp_path / "c.safetensors")
    loaded = kvsketch.load_cache(model, tmp_path / "c.safetensors")
    assert torch.equal(go_on(model, loaded), go_on(model, cache))


@pytest.mark.parametrize("family", zoo.HYBRIDS)
def test_what_was_read_in_inference_mode_goes_on_outside_of_it(family):
    model, again = zoo.build(family), zoo.build(family)
    with torch.inference_mode():
        cache = kvsketch.prefill(model, zoo.tokens(2, 60), kvsketch.make_cache(model, COMPRESSED))
    other = kvsketch.prefill(again, zoo.tokens(2, 60), kvsketch.make_cache(again, COMPRESSED))
    assert torch.equal(go_on(model, cache), go_on(again, other))


def forged(saved, change):
    with TensorFile(saved) as file:
        tensors, about = file.read(), file.about
    change(tensors, about["layers"])
    write_tensors(saved, tensors, about)


def drop_states(tensors, layers):
    for name in [name for name in tensors if ".conv." in name or ".recurrent." in name]:
        del tensors[name]


def no_numbers(tensors, layers):
    for name in tensors:
        if ".conv." in name:
            tensors[name] = tensors[name] * torch.nan


def large_kernel(tensors, layers):
    for layer in layers:
        if "kernels" in layer["state"]:
            layer["state"]["kernels"] = [10**9]


def other_rows(tensors, layers):
    for name in tensors:
        if ".conv." in name:
            tensors[name] = tensors[name][:1].clone()


@pytest.mark.parametrize("family", zoo.HYBRIDS)
@pytest.mark.parametrize("change", [drop_states, no_numbers, large_kernel, other_rows])
def test_states_that_no_layer_has_are_refused_and_the_model_left_alone(family, change, tmp_path):
    model = zoo.build(family)
    cache = kvsketch.prefill(model, zoo.tokens(2, 60), kvsketch.make_cache(model, COMPRESSED))
    cache.save(tmp_path / "c.safetensors")
    forged(tmp_path / "c.safetensors", change)
    fresh = zoo.build(family)
    with pytest.raises(ValueError, match=r"holds a state of layer \d that"):
        kvsketch.load_cache(fresh, tmp_path / "c.safetensors")
    assert fresh.config._attn_implementation == "sdpa"


def test_attention_that_does_not_know_its_number_is_refused_by_name():
    config = ZambaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=4,
        num_hidden_layers=8, attn_layer_period=4, attn_layer_offset=2,
    )  # fmt: skip
    with pytest.raises(ValueError, match="layer 2 of ZambaForCausalLM has attention that does not know its number"):
        kvsketch.make_cache(ZambaForCausalLM(config), COMPRESSED)


def test_a_model_without_any_attention_is_refused_by_name():
    with pytest.raises(ValueError, match=r"Mamba2ForCausalLM has no attention layer \(linear_attention\)"):
        kvsketch.make_cache(zoo.build("mamba2", attention="eager"))


def test_what_wide_heads_need_of_a_budget_in_bytes_is_what_they_hold():
    """Full layers have one head of 32, sliding ones two of 16, and keys are also values."""
    model = zoo.build("gemma4")
    cache = kvsketch.prefill(model, zoo.tokens(1, 900), kvsketch.make_cache(model, "uniform(keep='120KB', window=16)"))
    assert 0.8 * 120_000 < cache.nbytes < 1.05 * 120_000 + 4 * 128 * 256
    assert cache.sketch_layers[0].held.window.keys.view.shape[1::2] == (1, 32)

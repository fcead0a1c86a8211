"""Generation through transformers' own `generate`: every mode, padded batches, later turns, chunks, copies."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from transformers import DynamicCache

import kvsketch
import zoo
from kvsketch.huggingface.attaching import _begin_call
from kvsketch.huggingface.naming import as_argument, cache_in

FAMILIES = ["llama", "gemma3", "qwen3", "gpt_oss"]
COMPRESSED = "uniform(keep=0.5, window=16)"
GREEDY = {"do_sample": False}
build = partial(zoo.build, layers=2)  # one that slides and one that does not, where there are two kinds


def generate(model, ids, cache=None, **options):
    options = {"max_new_tokens": 12, **GREEDY, **options}
    return model.generate(ids, past_key_values=cache, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"do_sample": True, "top_k": 20},
        {"do_sample": True, "num_return_sequences": 3},
        {"num_beams": 4},
        {"num_beams": 3, "num_return_sequences": 2},
        {"num_beams": 3, "do_sample": True},
        {"prefill_chunk_size": 16},
        {"repetition_penalty": 1.3, "min_new_tokens": 5},
    ],
    ids=str,
)
def test_with_nothing_dropped_every_mode_gives_stocks_text(family, mode):
    stock, ours = build(family), build(family)
    ids = zoo.tokens(2, 60)
    torch.manual_seed(0)
    expected = generate(stock, ids, **mode)
    torch.manual_seed(0)
    got = generate(ours, ids, kvsketch.make_cache(ours, "exact"), **mode)
    assert torch.equal(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "mode", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3, "prefill_chunk_size": 50}], ids=str
)
def test_every_mode_runs_compressed(family, mode):
    model = build(family)
    cache = kvsketch.make_cache(model, COMPRESSED)
    ids = zoo.tokens(2, 400)
    out = generate(model, ids, cache, **mode)
    assert out.shape[1] == 412
    assert torch.equal(out[0, :400], ids[0])
    assert cache.get_seq_length() == 411
    assert cache.nbytes < 0.8 * cache.report().full_nbytes


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_beams_over_a_compressed_cache_follow_their_rows(family):
    """Beams swap rows at every step; in a padded batch every prompt must still give what it gives alone."""
    model = build(family)
    ids = zoo.tokens(2, 200)
    mask = torch.ones_like(ids)
    mask[0, :90] = 0
    swaps = []

    class Watched(kvsketch.SketchCache):
        def reorder_cache(self, beam_idx):
            swaps.append(beam_idx.tolist() != sorted(beam_idx.tolist()))
            super().reorder_cache(beam_idx)

    def beams(ids, mask=None):
        cache = kvsketch.make_cache(model, COMPRESSED)
        cache.__class__ = Watched
        return generate(model, ids, cache, attention_mask=mask, num_beams=3, max_new_tokens=40)

    together = beams(ids, mask)
    assert any(swaps), "no beam ever changed its row: choose another seed"
    for row, skip in enumerate((90, 0)):
        assert torch.equal(together[row, 200:], beams(ids[row : row + 1, skip:])[0, 200 - skip :])


@pytest.mark.parametrize("spec", ["uniform", "streaming_llm"])
def test_beams_on_a_prompt_shorter_than_the_window(spec):
    stock, model = build("llama"), build("llama")
    ids = zoo.tokens(1, 20)
    got = generate(model, ids, kvsketch.make_cache(model, spec), num_beams=3)
    assert torch.equal(got, generate(stock, ids, num_beams=3))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("helper", ["same model", "other model", "prompt look-up"])
def test_assisted_decoding_from_an_empty_cache_gives_greedy_text(family, helper):
    stock, ours = build(family), build(family)
    ids = zoo.tokens(1, 60)
    options = {
        "same model": {"assistant_model": build(family)},
        # One whose layers do not slide: transformers 5.17 cuts the masks of those wrongly, with stock caches too.
        "other model": {"assistant_model": build("llama", seed=7)},
        "prompt look-up": {"prompt_lookup_num_tokens": 3},
    }[helper]
    expected = generate(stock, ids, max_new_tokens=30)
    assert torch.equal(generate(ours, ids, kvsketch.make_cache(ours, "exact"), max_new_tokens=30, **options), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_assisted_decoding_compresses_between_its_steps(family):
    model = build(family)
    cache = kvsketch.make_cache(model, "uniform(keep=0.25, window=16)")
    generate(model, zoo.tokens(1, 400), cache, max_new_tokens=40, prompt_lookup_num_tokens=3)
    layer = cache.sketch_layers[0].held
    assert layer.left[0] >= 350
    assert all(stock.keys.shape[2] <= 16 for stock in cache.layers if stock not in cache.sketch_layers)
    # The tokens of a later call are compressed too: recording has ended with assisted decoding.
    kvsketch.prefill(model, zoo.tokens(1, 200, seed=5), cache)
    assert layer.left[0] >= 580
    assert all(stock.keys.shape[2] <= 16 for stock in cache.layers if stock not in cache.sketch_layers)
    cache.reset()
    kvsketch.prefill(model, zoo.tokens(1, 200), cache, chunk=50)
    assert all(stock.keys.shape[2] <= 16 for stock in cache.layers if stock not in cache.sketch_layers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("llama", "streaming_llm(keep=0.25)"),
        ("llama", "clustergen(keep=0.5)"),
        ("llama", "subgen(keep=140, window=16)"),
        ("qwen3", "balancekv(keep=0.5, window=16)"),
        ("gemma3", COMPRESSED),
        ("gpt_oss", "exact"),
        ("gpt_oss", COMPRESSED),
    ],
)
def test_every_row_of_a_padded_batch_equals_the_row_alone(family, spec):
    model = build(family)
    ids = zoo.tokens(3, 200)
    mask = torch.ones_like(ids)
    mask[0, :90], mask[1, :7] = 0, 0
    ids = ids.masked_fill(mask == 0, 0)
    together = generate(model, ids, kvsketch.make_cache(model, spec), attention_mask=mask, max_new_tokens=50)
    for row, skip in enumerate((90, 7, 0)):
        alone = generate(model, ids[row : row + 1, skip:], kvsketch.make_cache(model, spec), max_new_tokens=50)
        assert torch.equal(together[row : row + 1, skip:], alone)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_is_compressed_chunk_by_chunk(family):
    """The budget holds after every chunk, and positions stay those of the text."""
    model = build(family)
    ids = zoo.tokens(1, 640)
    cache = kvsketch.make_cache(model, "uniform(keep=160, window=16)")
    largest = 0

    def watch(read):
        nonlocal largest
        largest = max(largest, *(int(layer.held.count_entries().max()) for layer in cache.sketch_layers))
        assert cache.get_seq_length() == read

    kvsketch.prefill(model, ids, cache, chunk=64, progress=watch)
    assert 100 < largest <= 160
    by_generate = kvsketch.make_cache(model, "uniform(keep=160, window=16)")
    generate(model, ids, by_generate, prefill_chunk_size=64, max_new_tokens=1)
    for one, other in zip(cache.sketch_layers, by_generate.sketch_layers, strict=True):
        assert one.held.seen == other.held.seen == 640
        torch.testing.assert_close(one.held.window.keys.view, other.held.window.keys.view, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_streaming_prefill_in_one_call_equals_chunks_by_hand(family):
    """As one forward pass keeps all activations but reads layer by layer, only the cache matters for the answer."""
    model = build(family)
    ids = zoo.tokens(1, 512)
    text = []
    for options in ({}, {"prefill_chunk_size": 128}):
        cache = kvsketch.make_cache(model, "uniform(keep=0.5, window=16, prefill='streaming', chunk=128)")
        text.append(generate(model, ids, cache, **options))
    assert torch.equal(*text)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("padded", [False, True])
def test_a_second_turn_with_nothing_dropped_gives_stocks_text(family, padded):
    stock, ours = build(family), build(family)
    first, second = zoo.tokens(2, 60), zoo.tokens(2, 20, seed=3)
    mask = torch.ones_like(first)
    if padded:
        mask[0, :25] = 0
        first = first.masked_fill(mask == 0, 0)
    stock_cache, cache = DynamicCache(config=stock.config), kvsketch.make_cache(ours, "exact")
    one = generate(stock, first, stock_cache, attention_mask=mask)
    two = generate(ours, first, cache, attention_mask=mask)
    assert torch.equal(one, two)
    both = torch.cat([one, second], 1)
    full_mask = torch.cat([mask, mask.new_ones(2, both.shape[1] - 60)], 1)
    expected = generate(stock, both, stock_cache, attention_mask=full_mask)
    as_whole_text = generate(ours, both, cache.fork(), attention_mask=full_mask)
    assert torch.equal(as_whole_text, expected)
    # Only the new tokens: the last generated one was never fed, so it comes with them.
    new = both[:, cache.get_seq_length() :]
    only_new = ours.generate(**cache.new_tokens(new), past_key_values=cache, max_new_tokens=12, do_sample=False)
    assert torch.equal(only_new[:, new.shape[1] :], expected[:, both.shape[1] :])


@pytest.mark.parametrize("family", FAMILIES)
def test_later_turns_are_compressed(family):
    model = build(family)
    cache = kvsketch.make_cache(model, "uniform(keep=160, window=16)")
    kvsketch.prefill(model, zoo.tokens(1, 300), cache)
    for turn in range(4):
        ids = zoo.tokens(1, 300, seed=10 + turn)
        out = model.generate(**cache.new_tokens(ids), past_key_values=cache, max_new_tokens=5, do_sample=False)
        assert out.shape[1] == 305
        assert all(int(layer.held.count_entries().max()) <= 160 for layer in cache.sketch_layers)
    assert cache.get_seq_length() == 300 + 4 * 304


@pytest.mark.parametrize("copying", [copy.deepcopy, lambda cache: cache.fork()], ids=["deepcopy", "fork"])
def test_one_text_many_questions(copying):
    model = build("llama")
    ids = zoo.tokens(1, 300)
    cache = kvsketch.prefill(model, ids, kvsketch.make_cache(model, COMPRESSED))
    before = cache.report()
    questions = [zoo.tokens(1, 9, seed=seed) for seed in range(3)]
    answers = []
    for question in questions:
        twin = copying(cache)
        answers.append(
            model.generate(**twin.new_tokens(question), past_key_values=twin, max_new_tokens=8, do_sample=False)
        )
    assert cache.report() == before
    for question, answer in zip(questions, answers, strict=True):
        fresh = kvsketch.prefill(model, ids, kvsketch.make_cache(model, COMPRESSED))
        expected = model.generate(
            **fresh.new_tokens(question), past_key_values=fresh, max_new_tokens=8, do_sample=False
        )
        assert torch.equal(answer, expected)


def test_beams_from_a_filled_cache_after_repeating_its_row():
    model = build("llama")
    ids = zoo.tokens(1, 100)
    filled = kvsketch.prefill(model, ids[:, :90], kvsketch.make_cache(model, COMPRESSED))
    repeated = filled.fork()
    repeated.batch_repeat_interleave(3)
    out = model.generate(ids, past_key_values=repeated, num_beams=3, max_new_tokens=6, do_sample=False)
    assert out.shape == (1, 106)
    with pytest.raises(ValueError, match="batch_repeat_interleave"):
        model.generate(ids, past_key_values=filled, num_beams=3, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize(("chosen", "rows"), [([2, 0], (2, 0)), ([True, False, True], (0, 2))])
def test_rows_can_be_selected_from_a_filled_cache(chosen, rows):
    model = build("llama")
    ids = zoo.tokens(3, 150)
    cache = kvsketch.prefill(model, ids, kvsketch.make_cache(model, COMPRESSED))
    cache.batch_select_indices(torch.tensor(chosen))
    question = zoo.tokens(1, 5, seed=4).expand(2, -1)
    got = model.generate(**cache.new_tokens(question), past_key_values=cache, max_new_tokens=6, do_sample=False)
    for place, row in enumerate(rows):
        alone = kvsketch.prefill(model, ids[row : row + 1], kvsketch.make_cache(model, COMPRESSED))
        expected = model.generate(
            **alone.new_tokens(question[:1]), past_key_values=alone, max_new_tokens=6, do_sample=False
        )
        assert torch.equal(got[place : place + 1], expected)


def test_crop_takes_back_the_uncompressed_tail():
    model = build("llama")
    cache = kvsketch.prefill(model, zoo.tokens(1, 300), kvsketch.make_cache(model, "uniform(keep=0.5, window=64)"))
    question, other = zoo.tokens(1, 6, seed=4), zoo.tokens(1, 6, seed=5)
    expected = cache.fork()
    first = model.generate(**expected.new_tokens(question), past_key_values=expected, max_new_tokens=1, do_sample=False)
    kvsketch.prefill(model, other, cache)
    cache.crop(-6)
    assert cache.get_seq_length() == 300
    got = model.generate(**cache.new_tokens(question), past_key_values=cache, max_new_tokens=1, do_sample=False)
    assert torch.equal(got, first)
    with pytest.raises(ValueError, match="only the last"):
        cache.crop(-200)


def test_crop_with_sliding_layers_is_all_or_nothing():
    model = build("gemma3")
    cache = kvsketch.prefill(model, zoo.tokens(1, 12), kvsketch.make_cache(model, COMPRESSED))
    cache.crop(-3)  # the sliding windows of 16 have not moved yet
    assert cache.get_seq_length() == 9
    kvsketch.prefill(model, zoo.tokens(1, 60), cache)
    lengths = [layer.get_seq_length() for layer in cache.layers]
    with pytest.raises(ValueError, match=r"the sliding window of layer 0 has moved on.*fork"):
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == lengths == [69] * 2
    cache.crop(0)
    assert generate(model, zoo.tokens(1, 80), cache, max_new_tokens=2).shape[1] == 82


def test_a_bare_forward_without_positions_continues_at_the_right_place():
    """Logical and physical length are different numbers: positions follow the logical one."""
    model = build("llama")
    ids = zoo.tokens(1, 300)
    cache = kvsketch.prefill(model, ids, kvsketch.make_cache(model, COMPRESSED))
    step = torch.tensor([[5]])
    with torch.no_grad():
        implied = model(step, past_key_values=cache.fork()).logits
        stated = model(step, past_key_values=cache.fork(), position_ids=torch.tensor([[300]])).logits
    assert torch.equal(implied, stated)
    with pytest.raises(ValueError, match="goes on at position 150, but the cache has read 300"):
        model(step, past_key_values=cache, position_ids=torch.tensor([[150]]))


def test_several_new_tokens_equal_one_at_a_time():
    """Appended tokens see each other causally, as long as no block leaves the window between them."""
    model = build("llama")
    cache = kvsketch.prefill(model, zoo.tokens(1, 290), kvsketch.make_cache(model, COMPRESSED))
    more = zoo.tokens(1, 8, seed=6)
    one_by_one, left = cache.fork(), cache.sketch_layers[0].held.left
    with torch.no_grad():
        together = model(more, past_key_values=cache).logits
        apart = torch.cat([model(token, past_key_values=one_by_one).logits for token in more.split(1, 1)], 1)
    assert one_by_one.sketch_layers[0].held.left == left
    torch.testing.assert_close(together, apart, rtol=1e-4, atol=1e-5)


def test_reset_gives_an_empty_cache():
    model = build("gemma3")
    ids = zoo.tokens(1, 200)
    cache = kvsketch.make_cache(model, COMPRESSED)
    first = generate(model, ids, cache)
    cache.reset()
    assert cache.get_seq_length() == 0
    assert torch.equal(generate(model, ids, cache), first)


def test_two_models_and_caches_at_once():
    """Steps of two models alternate; each answers as if alone."""
    models = [build("llama", seed=0), build("llama", seed=1)]
    ids = zoo.tokens(1, 120)

    def steps(model):
        cache = kvsketch.make_cache(model, COMPRESSED)
        for call in (ids, *zoo.tokens(1, 20, seed=2).split(1, 1)):
            yield model(call, past_key_values=cache).logits[:, -1].detach()

    alone = [list(steps(model)) for model in models]
    for one, other, *expected in zip(steps(models[0]), steps(models[1]), *alone, strict=True):
        assert torch.equal(one, expected[0])
        assert torch.equal(other, expected[1])
    assert not torch.allclose(alone[0][-1], alone[1][-1])


def test_a_later_padded_turn_with_sliding_layers_gives_stocks_text():
    """Left-padded questions in a second turn, then a third: sliding layers need the true mask."""
    stock, ours = build("gemma3"), build("gemma3")
    turns = [zoo.tokens(2, count, seed=count) for count in (40, 12, 5)]
    masks = [torch.ones_like(turn) for turn in turns]
    masks[0][0, :9] = masks[1][1, :6] = 0
    stock_cache, cache = DynamicCache(config=stock.config), kvsketch.make_cache(ours, "exact")
    for place, (turn, mask) in enumerate(zip(turns, masks, strict=True)):
        known = torch.cat(masks[: place + 1], 1)
        positions = (known.cumsum(1) - 1).clamp_min(0)[:, -turn.shape[1] :]
        inputs = cache.new_tokens(turn, mask) if place else {"input_ids": turn, "attention_mask": mask}
        assert torch.equal(inputs["attention_mask"], known)
        with torch.no_grad():
            expected = stock(turn, attention_mask=known, position_ids=positions, past_key_values=stock_cache).logits
            got = ours(**inputs, position_ids=positions, past_key_values=cache).logits
        torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=1e-5, atol=5e-6)


def test_a_streamed_padded_batch_equals_its_rows_alone():
    model = build("llama")
    spec = "uniform(keep=0.5, window=16, prefill='streaming', chunk=64)"
    ids = zoo.tokens(2, 300)
    mask = torch.ones_like(ids)
    mask[0, :101] = 0
    for feed in ("one call", "chunks"):
        cache = kvsketch.make_cache(model, spec)
        if feed == "chunks":
            kvsketch.prefill(model, ids[:, :-1], cache, attention_mask=mask[:, :-1])
        together = generate(model, ids, cache, attention_mask=mask)
        for row, skip in enumerate((101, 0)):
            alone = kvsketch.make_cache(model, spec)
            if feed == "chunks":
                kvsketch.prefill(model, ids[row : row + 1, skip:-1], alone)
            assert torch.equal(together[row : row + 1, skip:], generate(model, ids[row : row + 1, skip:], alone))


def test_a_model_that_only_slides_can_be_continued():
    stock, ours = zoo.build("mistral_sliding"), zoo.build("mistral_sliding")
    with pytest.warns(UserWarning, match="nothing to compress"):
        cache = kvsketch.make_cache(ours, "uniform")
    ids, question = zoo.tokens(1, 40), zoo.tokens(1, 6, seed=3)
    kvsketch.prefill(ours, ids, cache)
    got = ours.generate(**cache.new_tokens(question), past_key_values=cache, max_new_tokens=8, do_sample=False)
    expected = generate(stock, torch.cat([ids, question], 1), max_new_tokens=8)
    assert torch.equal(got[:, 6:], expected[:, 46:])


def test_nothing_of_a_call_stays_alive_in_the_cache():
    for family in ("llama", "gemma3"):
        model = build(family)
        cache = kvsketch.make_cache(model, COMPRESSED)
        model(zoo.tokens(1, 200), past_key_values=cache)  # no torch.no_grad
        model(zoo.tokens(1, 1), past_key_values=cache)
        for layer in cache.layers:
            held = (
                [layer.held.window.keys.buffer, layer.held.window.values.buffer]
                if layer in cache.sketch_layers
                else [layer.keys]
            )
            assert not any(tensor.requires_grad for tensor in held)
        assert cache.fork().get_seq_length() == 201


def test_a_model_spread_over_devices_by_accelerate():
    import accelerate

    model, spread = build("llama"), build("llama")
    ids = zoo.tokens(1, 200)
    expected = generate(model, ids, kvsketch.make_cache(model, COMPRESSED))
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "cpu" for i in range(2)}
    spread = accelerate.dispatch_model(spread, device_map=places, force_hooks=True)
    assert torch.equal(generate(spread, ids, kvsketch.make_cache(spread, COMPRESSED)), expected)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("spec", ["exact", "uniform(keep='150KB')", "kvzip(keep=0.5)", "retrieval(window=40)"])
def test_a_cache_that_nobody_has_is_freed_at_once(family, spec):
    """Not when Python looks for cycles next: that can be many caches later."""
    model, ids = build(family), zoo.tokens(1, 150)

    def made():
        read = kvsketch.prefill(
            model, ids, kvsketch.make_cache(model, spec, protect=[(0, 9)] if "keep" in spec else ())
        )
        yield read.fork()
        model.generate(**read.new_tokens(ids[:, :9]), past_key_values=read, max_new_tokens=40, **GREEDY)
        yield read
        if "keep" in spec:
            exact = kvsketch.prefill(model, ids, kvsketch.make_cache(model, "exact(noting='second reading')"))
            yield exact.compress(spec)

    gc.collect()
    gc.disable()
    try:
        parts = [weakref.ref(part) for cache in made() for part in (cache, *cache.layers)]
        assert len(parts) >= 6
        assert not [part() for part in parts if part() is not None]
    finally:
        gc.enable()


def test_a_cache_is_found_under_whatever_name_a_transformers_has_for_it():
    """`cache` since 5.24: under a name that nobody looked for, no call was looked at, and prompts had no end."""
    model = zoo.build("llama")
    for name in ("past_key_values", "cache", "one that nobody knows yet"):
        cache = kvsketch.make_cache(model, "kvzip(keep=0.5)")
        _begin_call(model.model, (), {"input_ids": zoo.tokens(1, 9), "past_key_values": None} | {name: cache})
        assert cache.underway
    assert cache_in({"past_key_values": DynamicCache(), "cache": cache}) is cache, "of two, as models do"
    assert as_argument(lambda input_ids, cache=None: None, 3) == {"cache": 3}
    assert as_argument(lambda input_ids, past_key_values=None: None, 3) == {"past_key_values": 3}

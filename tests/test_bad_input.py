"""Bad input gets a ValueError that says what was expected, what came and what to do; nothing is lost by it."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

import kvsketch
import zoo
from kvsketch.huggingface.layer import SketchLayer
from kvsketch.huggingface.naming import as_argument
from states import difference, state_of

pytestmark = pytest.mark.usefixtures("as_users_run_it")
COMPRESSED = "uniform(keep=0.5, window=16)"


@pytest.fixture
def model():
    return zoo.build("llama")


@pytest.fixture
def filled(model):
    return kvsketch.prefill(model, zoo.tokens(1, 200), kvsketch.make_cache(model, COMPRESSED))


def answer(model, cache):
    """Greedy text after one more question: the same before and after a refused call."""
    twin = cache.fork()
    inputs = twin.new_tokens(zoo.tokens(1, 7, seed=9))
    return model.generate(**inputs, past_key_values=twin, max_new_tokens=6, do_sample=False)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("uniform(keep=0)", "keep must be a fraction"),
        ("uniform(keep=0.0)", "keep must be a fraction"),
        ("uniform(keep=-1)", "keep must be a fraction"),
        ("uniform(keep=1.5)", "keep must be a fraction"),
        ("uniform(keep=True)", "keep must be a fraction"),
        ("uniform(keep='12 parsecs')", "is not a size"),
        ("uniform(keep='lots')", "is not a size"),
        ("uniform(keep='0MB')", "no memory at all"),
        ("uniform(keep='0.25')", "has no quotes, as in keep=0.25"),
        ("uniform(keep=50)", "needs at least"),
        ("uniform(keep=1)", r"keep=1\.0 is all that it reads"),
        ("streaming_llm(keep=20)", "needs at least"),
        ("uniform(window=0)", "window must be a whole number of at least 1"),
        ("uniform(sinks=-1)", "sinks must be a whole number of at least 0"),
        ("uniform(prefill='later')", "prefill must be one of exact, streaming"),
        ("uniform(chunk=0)", "chunk must be a whole number of at least 1"),
        ("uniform(weights='some')", "weights must be one of count, none"),
        ("unifrom(keep=0.5)", "did you mean uniform"),
        ("streamingllm", "did you mean streaming_llm"),
        ("quantum", "there are exact, streaming_llm, uniform"),
        ("uniform(kep=0.5)", "no option 'kep'.*did you mean keep"),
        ("exact(keep=0.5)", "exact has no option 'keep'"),
        ("uniform(0.5)", "every option needs its name"),
        ("uniform(keep=0.5", "cannot read the spec"),
        ("uniform(keep=open('x'))", "values are numbers or quoted text"),
        ("", "cannot read the spec"),
        ("a.b(c=1)", "cannot read the spec"),
    ],
)
def test_specs(spec, message, model):
    with pytest.raises(ValueError, match=message):
        kvsketch.make_cache(model, spec)
    assert model.config._attn_implementation == "sdpa", "a refused spec must not attach the model"


def test_a_budget_in_bytes_that_is_too_small_says_what_is_needed(model):
    cache = kvsketch.make_cache(model, "uniform(keep='10KB')")
    with pytest.raises(ValueError, match=r"needs at least \d+ \(1 rows, [\d,]+ bytes a layer\)"):
        model(zoo.tokens(1, 20), past_key_values=cache)


def test_a_budget_in_bytes_below_the_sliding_layers_needs_says_so():
    model = zoo.build("gemma3")
    cache = kvsketch.make_cache(model, "uniform(keep='1KB')")
    with pytest.raises(ValueError, match="less than the sliding layers alone need"):
        model(zoo.tokens(1, 20), past_key_values=cache)


WRONG_TYPES = """
import kvsketch
import zoo
from kvsketch.caches.core.spans import read_spans
model, ids, by_questions = zoo.build("llama"), zoo.tokens(1, 9), "kvzip(queries='questions')"
cache = kvsketch.make_cache(model)
for call, message in (
    (lambda: kvsketch.parse_spec("uniform(keep=None)"), "keep must be a fraction"),
    (lambda: kvsketch.parse_spec("uniform(keep=[1])"), "keep must be a fraction"),
    (lambda: kvsketch.parse_spec("uniform(window=2.5)"), "window must be a whole number"),
    (lambda: kvsketch.parse_spec("uniform(seed='x')"), "seed must be a whole number"),
    (lambda: kvsketch.parse_spec("streaming_heads(window=0.25)"), "window must be a whole number of at least 1"),
    (lambda: kvsketch.parse_spec(None), "a spec is text such as \\"uniform(keep=0.25)\\", got None"),
    (lambda: kvsketch.make_cache(model, 0.5), "got 0.5; a budget is written keep=0.5"),
    (lambda: read_spans((0, 20)), "protect is (start, stop) pairs of whole numbers for all rows"),
    (lambda: kvsketch.make_cache("llama"), "expected a transformers model, got str"),
    (lambda: kvsketch.prefill(model, [[1, 2]], cache), "a prompt is token ids, rows × tokens, got list: tokenizer("),
    (lambda: kvsketch.prefill(model, ids, None), "prefill fills a cache of kvsketch.make_cache(model, ...), got None"),
    (lambda: kvsketch.prefill(model, ids, cache, chunk=1.5), "chunk must be a whole number"),
    (lambda: kvsketch.prefill(model, ids, cache, protect=ids), "protect is (start, stop) pairs of whole numbers"),
    (lambda: kvsketch.make_cache(model, by_questions, questions=["Who?"]), "a question is token ids, 1 × tokens, got"),
    (lambda: cache.new_tokens("Who?"), "new tokens are token ids, rows × tokens, got str"),
    (lambda: kvsketch.prefill(model, ids, cache, attention_mask=[[1]]), "covers the new tokens alone, (1, 9), got"),
):
    try:
        call()
    except ValueError as error:
        assert message in str(error), error
    else:
        raise AssertionError(message)
"""


def test_wrong_types_as_a_user_sees_them():
    """In a process of its own: here the run-time checks of the tests would answer first."""
    command, here = [sys.executable, "-c", WRONG_TYPES], Path(__file__).parent
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here)
    assert done.returncode == 0, done.stderr


def test_empty_prompts(model, filled):
    empty = torch.zeros(1, 0, dtype=torch.long)
    for call in (
        lambda: kvsketch.prefill(model, empty, kvsketch.make_cache(model)),
        lambda: filled.new_tokens(empty),
        lambda: model(empty, past_key_values=kvsketch.make_cache(model)),
    ):
        with pytest.raises(ValueError, match=r"at least one token|no new tokens"):
            call()


@pytest.mark.parametrize("count", [1, 2, 3, 5, 20, 21, 68])
def test_prompts_shorter_than_sinks_and_window_are_exact(count):
    stock, ours = zoo.build("llama"), zoo.build("llama")
    ids = zoo.tokens(1, count)
    for spec in ("uniform(keep=0.25)", "streaming_llm(keep=200)", "uniform(keep=0.25, prefill='streaming', chunk=7)"):
        got = ours.generate(ids, past_key_values=kvsketch.make_cache(ours, spec), max_new_tokens=5, do_sample=False)
        assert torch.equal(got, stock.generate(ids, max_new_tokens=5, do_sample=False))


def test_new_tokens_of_an_empty_cache(model):
    with pytest.raises(ValueError, match="the cache is empty"):
        kvsketch.make_cache(model).new_tokens(zoo.tokens(1, 3))


def test_new_tokens_for_other_rows(filled):
    with pytest.raises(ValueError, match="holds 1 rows, but 2 came"):
        filled.new_tokens(zoo.tokens(2, 3))
    with pytest.raises(ValueError, match=r"covers the new tokens alone, \(1, 3\), got shape \(1, 2\)"):
        filled.new_tokens(zoo.tokens(1, 3), torch.ones(1, 2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_keys_that_are_not_finite(model, value):
    cache = kvsketch.make_cache(model, COMPRESSED)
    weight = model.model.layers[0].self_attn.k_proj.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = value
    with pytest.raises(ValueError, match=r"layer 0 was given keys that are NaN or infinite; it has stored none"):
        model(zoo.tokens(1, 200), past_key_values=cache)
    with torch.no_grad():
        weight.copy_(good)
    assert cache.get_seq_length() == 0
    kvsketch.prefill(model, zoo.tokens(2, 200), cache)  # the cache is as good as new, and any rows may come
    assert cache.get_seq_length() == 200


def test_keys_that_are_not_finite_are_told_from_a_wrong_rotation_and_then_forgotten(model):
    cache = kvsketch.prefill(model, zoo.tokens(1, 40), kvsketch.make_cache(model, "expected_attention(keep=0.25)"))
    weight = model.model.layers[0].self_attn.k_proj.weight
    good = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
        with pytest.raises(ValueError, match=r"layer 0 was given keys that are NaN or infinite"):
            model(zoo.tokens(1, 20), past_key_values=cache)
        weight.copy_(good)
        assert model(zoo.tokens(1, 1), past_key_values=cache).logits.isfinite().all()
    assert cache.seen == 41


def test_a_nan_in_a_decode_step_shows_in_its_logits(model, filled):
    embedding = torch.full((1, 1, 64), float("nan"))
    with torch.no_grad():
        logits = model(inputs_embeds=embedding, past_key_values=filled).logits
    assert logits.isnan().all()


def test_a_call_that_fails_half_way_leaves_a_cache_that_says_so(model, filled):
    weight = model.model.layers[2].self_attn.v_proj.weight
    good = weight.detach().clone()
    copy_before = filled.fork()
    expected = answer(model, copy_before)
    with torch.no_grad():
        weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="layer 2 was given values that are NaN"):
        kvsketch.prefill(model, zoo.tokens(1, 5), filled)
    with torch.no_grad():
        weight.copy_(good)
    for _ in range(2):
        with pytest.raises(ValueError, match="failed half-way: layers hold between 200 and 205 tokens"):
            kvsketch.prefill(model, zoo.tokens(1, 5), filled)
    for say in (filled.report, lambda: filled.new_tokens(zoo.tokens(1, 5))):
        with pytest.raises(ValueError, match="failed half-way"):
            say()
    assert torch.equal(answer(model, copy_before), expected)
    filled.reset()
    kvsketch.prefill(model, zoo.tokens(1, 200), filled)
    assert torch.equal(answer(model, filled), expected)


def test_a_failure_inside_a_layer_is_not_forgotten(model, filled):
    """Here a query of the wrong width; running out of memory ends the same way."""
    from kvsketch.huggingface.attention import attention

    keys = torch.zeros(1, 2, 5, 16)
    linked, values = filled.update(keys, keys, 0)
    with pytest.raises((RuntimeError, TypeError)):
        attention(model.model.layers[0].self_attn, torch.zeros(1, 8, 5, 7), linked, values)
    for call in (lambda: kvsketch.prefill(model, zoo.tokens(1, 5), filled), lambda: filled.save("never.safetensors")):
        with pytest.raises(ValueError, match="failed half-way"):
            call()
    empty = kvsketch.make_cache(model, "h2o(keep=0.3)")
    linked, values = empty.update(keys, keys, 0)
    with pytest.raises((RuntimeError, TypeError)):
        attention(model.model.layers[0].self_attn, torch.zeros(1, 8, 5, 7), linked, values)
    for say in (empty.report, lambda: empty.new_tokens(zoo.tokens(1, 5)), lambda: empty.save("never.safetensors")):
        with pytest.raises(ValueError, match="failed half-way"):
            say()


def test_a_cache_of_another_model(model, filled):
    twin = zoo.build("llama")
    kvsketch.attach(twin)
    before = answer(model, filled)
    with pytest.raises(ValueError, match="made for another model object"):
        twin(zoo.tokens(1, 3), past_key_values=filled)
    assert torch.equal(answer(model, filled), before)


def test_models_that_share_a_config_are_told_apart(model, filled):
    twin = type(model)(model.config).eval()
    assert twin.config is model.config
    with pytest.raises(ValueError, match="made for another model object"):
        twin(zoo.tokens(1, 3), past_key_values=filled)
    kvsketch.attach(twin)
    kvsketch.detach(twin)
    kvsketch.detach(model)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("count", [1, 3])
def test_a_model_that_was_never_attached_leaves_the_cache_as_it_was(model, filled, count):
    """Where it does not fail by itself, and where it does: nothing of its tokens is held."""
    before, ids = answer(model, filled), zoo.tokens(1, count)
    other = zoo.build("llama")
    kvsketch.detach(other)
    with pytest.raises(ValueError, match="a model that it was not made for, or that is not attached"):
        other(ids, past_key_values=kvsketch.make_cache(model, COMPRESSED))
    with pytest.raises((ValueError, RuntimeError)):
        other(ids, past_key_values=filled)
    assert torch.equal(answer(model, filled), before)


def test_rows_that_are_padded_on_the_right_cannot_be_gone_on_with(model):
    """Transformers counts positions from the last place: stock answers such rows wrongly, and says nothing."""
    ids = zoo.tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[1, -20:] = 0
    with pytest.raises(ValueError, match="row 1 goes on at position 1 behind padding, and the cache has read 40"):
        model.generate(ids, attention_mask=mask, past_key_values=kvsketch.make_cache(model), max_new_tokens=4)


def test_a_model_inside_another_is_the_same_model(model):
    kvsketch.attach(model)
    kvsketch.attach(model.model)
    kvsketch.detach(model)
    kvsketch.detach(model.model)
    assert model.config._attn_implementation == "sdpa"


def test_other_heads_widths_and_types():
    model = zoo.build("llama")
    cache = kvsketch.prefill(model, zoo.tokens(1, 50), kvsketch.make_cache(model, COMPRESSED))
    for keys in (torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 16, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"holds 2 KV heads of width 16 in torch\.float32, but"):
            cache.update(keys, keys, 0)
    with pytest.raises(ValueError, match="holds 1 rows, but 2 came"):
        model(zoo.tokens(2, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="made for 4 layers"):
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 7)


REFUSED_CALLS = {
    "attention weights": lambda m, c: m(zoo.tokens(1, 3), past_key_values=c, output_attentions=True),
    "an assistant's keys": lambda m, c: m(zoo.tokens(1, 3), past_key_values=c, return_shared_kv_states=True),
    "4-D mask": lambda m, c: m(zoo.tokens(1, 3), past_key_values=c, attention_mask=torch.ones(1, 1, 3, 203).bool()),
    "other rows": lambda m, c: m(zoo.tokens(2, 3), past_key_values=c),
    "beams": lambda m, c: m.generate(zoo.tokens(1, 201), past_key_values=c, num_beams=2, max_new_tokens=2),
    "infinite input": lambda m, c: m(inputs_embeds=torch.full((1, 3, 64), float("inf")), past_key_values=c),
    "wrong position": lambda m, c: m(zoo.tokens(1, 3), past_key_values=c, position_ids=torch.arange(3)[None]),
    "another model": lambda m, c: zoo.attached("gemma3")(zoo.tokens(1, 3), past_key_values=c),
}


@pytest.mark.parametrize("call", REFUSED_CALLS)
def test_with_sliding_layers_a_refused_call_leaves_a_cache_that_is_whole_or_says_that_it_is_not(call):
    """Sliding layers before the first full one have taken the tokens by the time some mistakes can be seen."""
    model = zoo.build("gemma3")
    cache = kvsketch.prefill(model, zoo.tokens(1, 200), kvsketch.make_cache(model, COMPRESSED))
    expected = answer(model, cache)
    with pytest.raises(ValueError, match=r"kvsketch|cache|NaN"), torch.no_grad():
        REFUSED_CALLS[call](model, cache)
    lengths = {layer.get_seq_length() for layer in cache.layers}
    if lengths == {200}:
        assert torch.equal(answer(model, cache), expected)
    else:
        with pytest.raises(ValueError, match="failed half-way"):
            model(zoo.tokens(1, 1), past_key_values=cache)
    assert lengths == {200} or call in ("attention weights", "4-D mask", "wrong position", "another model")


@pytest.mark.parametrize("count", [1, 7, 50, 120, 150, 199])
def test_new_ids_without_the_mask_of_all(model, filled, count):
    """transformers takes them for the whole text and cuts off what the cache has seen."""
    before = answer(model, filled)
    with pytest.raises(ValueError, match=r"cache\.new_tokens"):
        model.generate(zoo.tokens(1, count), past_key_values=filled, max_new_tokens=3, do_sample=False)
    assert torch.equal(answer(model, filled), before)


def test_a_text_that_was_read_comes_again_in_chunks(model, filled):
    with pytest.raises(ValueError, match=r"cache\.new_tokens"):
        model.generate(zoo.tokens(1, 200), past_key_values=filled, prefill_chunk_size=16, max_new_tokens=3)


@pytest.mark.parametrize("spec", ["exact", "kvzip(keep=0.5)", "snapkv(keep=0.5)"])
def test_a_cache_that_the_model_is_given_and_does_not_use(spec, model):
    """Transformers ignores what it has no name for; then the text would be forgotten without a word."""
    cache, ids = kvsketch.make_cache(model, spec), zoo.tokens(1, 60)
    for name in ("past_key_value", "kv_cache"):
        with pytest.raises(ValueError, match="none of its layers used it: transformers takes a cache as cache="):
            model(ids, **{name: cache})
    model(ids, past_key_values=cache)
    fresh = kvsketch.make_cache(model, spec)
    model(ids, past_key_values=fresh)
    assert difference(state_of(cache), state_of(fresh)) is None


def test_a_prompt_that_nobody_tells_of(model):
    """`kvzip` must know where it ends; hooks do not see `forward`."""
    with pytest.raises(ValueError, match="call the model itself, not a layer, a compiled part of it, or its forward"):
        model.model.forward(zoo.tokens(1, 60), **as_argument(model.model.forward, kvsketch.make_cache(model, "kvzip")))
    cache = kvsketch.prefill(model, zoo.tokens(1, 60), kvsketch.make_cache(model, "kvzip"))
    assert model.model.forward(zoo.tokens(1, 1), **as_argument(model.model.forward, cache))[0].isfinite().all()


def test_without_attaching(model, filled):
    before = answer(model, filled)
    kvsketch.detach(model)
    with pytest.raises(ValueError, match=r'computes attention with "sdpa".*attach'):
        model(zoo.tokens(1, 1), past_key_values=filled)
    model.set_attn_implementation("eager")
    with pytest.raises(ValueError, match=r'computes attention with "eager".*attach'):
        model(zoo.tokens(1, 1), past_key_values=filled)
    kvsketch.attach(model)
    assert torch.equal(answer(model, filled), before)


@pytest.mark.parametrize("shape", [(1, 1, 3, 203), (1, 1, 3, 3)])
def test_masks_of_four_dimensions(model, filled, shape):
    before = answer(model, filled)
    mask = torch.ones(shape, dtype=torch.bool)
    with pytest.raises(ValueError, match="takes a 2-D padding mask"):
        model(zoo.tokens(1, 3), attention_mask=mask, past_key_values=filled, position_ids=torch.arange(200, 203)[None])
    assert torch.equal(answer(model, filled), before)


def test_a_mask_that_is_too_short(model, filled):
    before = answer(model, filled)
    mask = torch.tensor([[0, 1]])
    with pytest.raises(ValueError, match="covers 2 tokens, but there are 203"):
        model(zoo.tokens(1, 3), attention_mask=mask, past_key_values=filled, position_ids=torch.arange(200, 203)[None])
    assert torch.equal(answer(model, filled), before)


def test_packed_sequences(model):
    """Positions that start again mean several sequences in one row; stock sees them only without a cache."""
    positions = torch.cat([torch.arange(20), torch.arange(20)])[None]
    with pytest.raises(ValueError, match="packed"):
        model(zoo.tokens(1, 40), position_ids=positions, past_key_values=kvsketch.make_cache(model, COMPRESSED))
    stock = zoo.build("llama")
    kvsketch.attach(model)
    with torch.no_grad():  # without our cache: as stock
        got = model(zoo.tokens(1, 40), position_ids=positions, use_cache=False).logits
        expected = stock(zoo.tokens(1, 40), position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=5e-6)


def test_attention_weights(model, filled):
    before = answer(model, filled)
    with pytest.raises(ValueError, match="does not form attention weights"):
        model(zoo.tokens(1, 3), past_key_values=filled, output_attentions=True)
    assert torch.equal(answer(model, filled), before)
    own = zoo.build("llama")
    own.config._attn_implementation, own.config.output_attentions = "eager", True
    with pytest.raises(ValueError, match="output_attentions off, in the model's config too"):
        own(zoo.tokens(1, 3), past_key_values=kvsketch.make_cache(own))
    with pytest.raises(ValueError, match="output_attentions off, in the model's config too"):
        own(zoo.tokens(1, 3))  # attached, with a cache of transformers' own
    alone, keys = kvsketch.make_cache(own), torch.randn(1, 2, 3, 16)  # no call of the model's decoder
    with pytest.raises(ValueError, match="output_attentions off, in the model's config too"):
        alone.update(keys, keys, 0)


def test_dropout_of_attention():
    """It was left out without a word."""
    training = zoo.build("llama").train()
    for layer in training.model.layers:
        layer.self_attn.attention_dropout = 0.5
    cache = kvsketch.make_cache(training)
    with pytest.raises(ValueError, match=r"attention_dropout=0\.5 is asked for.*call model\.eval\(\)"):
        training(zoo.tokens(1, 9), past_key_values=cache)
    assert training.eval()(zoo.tokens(1, 9), past_key_values=cache).logits.isfinite().all()


def test_assistants_with_a_filled_cache(model, filled):
    ids = torch.cat([zoo.tokens(1, 200), zoo.tokens(1, 5, seed=2)], 1)
    for options in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": zoo.build("llama")}):
        with pytest.raises(ValueError, match="must start from an empty cache"):
            model.generate(ids, past_key_values=filled, max_new_tokens=3, do_sample=False, **options)


def test_crop_by_a_positive_number(filled):
    with pytest.raises(ValueError, match="number of tokens to remove"):
        filled.crop(3)


def test_a_cache_implementation_beside_the_cache(model, filled):
    with pytest.raises(ValueError, match="cache_implementation"):
        model.generate(zoo.tokens(1, 201), past_key_values=filled, cache_implementation="static", max_new_tokens=2)


def test_prefill_arguments(model):
    cache = kvsketch.make_cache(model)
    with pytest.raises(ValueError, match="chunk must be a whole number of at least 1, got 0"):
        kvsketch.prefill(model, zoo.tokens(1, 5), cache, chunk=0)
    with pytest.raises(ValueError, match="attention_mask must be a tensor that covers the new tokens alone"):
        kvsketch.prefill(model, zoo.tokens(1, 5), cache, attention_mask=torch.ones(1, 4))


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
def test_a_model_that_leaves_caches_out(model):
    """In training with gradient checkpointing transformers gives layers none, and says so in the log alone."""
    model.gradient_checkpointing_enable()
    model.train()
    with pytest.raises(ValueError, match=r"leaves caches out: call model.eval\(\) first"):
        kvsketch.prefill(model, zoo.tokens(1, 50), kvsketch.make_cache(model, COMPRESSED))
    kvsketch.prefill(model.eval(), zoo.tokens(1, 50), kvsketch.make_cache(model, COMPRESSED))


def test_a_cache_is_not_pickled(filled):
    with pytest.raises(TypeError, match=r"cache.save\(path\) writes it"):
        pickle.dumps(filled)


def test_a_cache_that_the_model_drops_at_its_rotary_switch():
    """Phi-3 with longrope recomputes everything with a cache of its own; that must not go unnoticed."""
    model = zoo.longrope_phi3(limit=32)
    for prompt in (28, 60):  # crossing while decoding, and in the first call
        cache = kvsketch.make_cache(model, COMPRESSED)
        with pytest.raises(ValueError, match="switches its rotary frequencies at 32 tokens"):
            model.generate(zoo.tokens(1, prompt), past_key_values=cache, max_new_tokens=12, do_sample=False)
    with pytest.raises(ValueError, match="switches its rotary frequencies at 32 tokens"):
        kvsketch.prefill(model, zoo.tokens(1, 60), kvsketch.make_cache(model, COMPRESSED), chunk=16)


def test_longrope_on_one_side_of_the_switch_is_right():
    stock, model = zoo.longrope_phi3(limit=32), zoo.longrope_phi3(limit=32)
    short = {"max_new_tokens": 6, "do_sample": False}
    ids = zoo.tokens(1, 24)
    got = model.generate(ids, past_key_values=kvsketch.make_cache(model, "exact"), **short)
    assert torch.equal(got, stock.generate(ids, **short))
    long = zoo.tokens(1, 60)
    cache = kvsketch.prefill(model, long[:, :-1], kvsketch.make_cache(model, "exact"))
    got = model.generate(long, past_key_values=cache, **short)
    assert torch.equal(got, stock.generate(long, **short))
    # Calls that have nothing to do with a cache of ours are none of the guard's business.
    kvsketch.make_cache(model, "exact")
    assert torch.equal(model.generate(long, **short), stock.generate(long, **short))
    with torch.no_grad():
        assert torch.equal(model(long).logits, stock(long).logits)
        alive = kvsketch.prefill(model, ids, kvsketch.make_cache(model, "exact"))
        model(ids[:, :1], past_key_values=alive)
        assert torch.equal(model(long, use_cache=False).logits, stock(long).logits), "one that has read is alive"
    assert alive.seen == 25


def test_a_fork_that_is_dropped_at_the_rotary_switch():
    model = zoo.longrope_phi3(limit=32)
    ids = zoo.tokens(1, 28)
    fork = kvsketch.prefill(model, ids[:, :-1], kvsketch.make_cache(model, COMPRESSED)).fork()
    with pytest.raises(ValueError, match="switches its rotary frequencies at 32 tokens"):
        model.generate(ids, past_key_values=fork, max_new_tokens=12, do_sample=False)


def test_dynamic_rotary_scaling():
    stock, model = zoo.dynamic_llama(limit=32), zoo.dynamic_llama(limit=32)
    ids = zoo.tokens(1, 60)
    with pytest.raises(ValueError, match="rescales its rotary frequencies"):
        kvsketch.prefill(model, ids, kvsketch.make_cache(model, COMPRESSED), chunk=20)
    got = model.generate(ids, past_key_values=kvsketch.make_cache(model, "exact"), max_new_tokens=6, do_sample=False)
    assert torch.equal(got, stock.generate(ids, max_new_tokens=6, do_sample=False))


def test_models_whose_layers_share_a_cache():
    model = zoo.build("llama")
    model.config.num_kv_shared_layers = 2
    with pytest.raises(ValueError, match="share one cache"):
        kvsketch.make_cache(model)


def test_a_model_that_changes_keys_after_the_cache(model):
    """As MLA does: the link is lost, and that is noticed in the first call."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

    cache = kvsketch.make_cache(model, COMPRESSED)
    ours = ALL_ATTENTION_FUNCTIONS["kvsketch"]

    def lossy(module, query, key, *args, **kwargs):
        return ours(module, query, key.clone(), *args, **kwargs)

    AttentionInterface.register("kvsketch", lossy)
    try:
        with pytest.raises(ValueError, match="changes keys between cache and attention"):
            model(zoo.tokens(1, 20), past_key_values=cache)
    finally:
        AttentionInterface.register("kvsketch", ours)


def test_a_stock_cache_can_still_be_used_after_all_this(model, filled):
    stock = zoo.build("llama")
    ids = zoo.tokens(1, 30)
    got = model.generate(ids, past_key_values=DynamicCache(config=model.config), max_new_tokens=5, do_sample=False)
    assert torch.equal(got, stock.generate(ids, max_new_tokens=5, do_sample=False))
    assert copy.deepcopy(filled).get_seq_length() == 200


def test_positions_are_looked_at_once_a_call_and_not_in_every_layer(monkeypatch):
    model = zoo.build("llama")
    cache = kvsketch.make_cache(model, COMPRESSED)
    looked, check = [], SketchLayer.check_positions
    monkeypatch.setattr(SketchLayer, "check_positions", lambda self, *given: looked.append(self) or check(self, *given))
    for count in (100, 3, 1):
        looked.clear()
        places = cache.seen + torch.arange(count)[None]
        model(zoo.tokens(1, count), past_key_values=cache, position_ids=places)
        assert len(looked) == 1

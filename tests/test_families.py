"""Every supported family of models: equal to stock while nothing is dropped, equal to the oracle when much is."""

import threading
import time
import warnings

import pytest
import torch
import transformers as T
from transformers import DynamicCache

import kvsketch
import oracle
import zoo
from kvsketch.huggingface.attention import attention
from kvsketch.kernels import native
from states import difference, state_of

ROWS, PROMPT, STEPS = 3, 150, 40
COMPRESSED = [
    "uniform(keep=0.5, window=16, seed=3)",
    "uniform(keep=104, sinks=2, window=16)",
    "streaming_llm(keep=0.25)",
]


def build(family, **given):
    """As many layers as there are kinds."""
    return zoo.build(family, layers=4 if family == "cohere2" else 2, **given)


def padding_mask(rows=ROWS, count=PROMPT):
    """Left padding: 60 tokens in the first row, 3 in the second, none in the others."""
    mask = torch.ones(rows, count, dtype=torch.long)
    mask[0, :60] = 0
    mask[1, :3] = 0
    return mask


@torch.no_grad()
def logits(model, cache, calls, mask=None):
    """Logits of every token that is fed, call by call, with positions as `generate` would give them."""
    out, seen = [], 0
    for ids in calls:
        seen += ids.shape[1]
        options = {}
        if mask is not None:
            mask = torch.cat([mask, mask.new_ones(mask.shape[0], max(0, seen - mask.shape[1]))], 1)
            known = mask[:, :seen]
            options["attention_mask"] = known
            options["position_ids"] = (known.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
        out.append(model(ids, past_key_values=cache, use_cache=True, **options).logits)
    return torch.cat(out, 1)


def calls_of(rows, prompt=PROMPT, steps=STEPS):
    return [zoo.tokens(rows, prompt), *zoo.tokens(rows, steps, seed=2).split(1, 1)]


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_with_nothing_dropped_logits_equal_stock(family):
    stock, ours = build(family), build(family)
    cache = kvsketch.make_cache(ours, "exact")
    calls = calls_of(2)
    expected = logits(stock, DynamicCache(config=stock.config), calls)
    got = logits(ours, cache, calls)
    if zoo.exact_attention_of(family) == "sdpa":
        # Without kernels in C the prompt goes through the very call that stock makes, and a decode step where query and
        # KV heads are as many; with groups, stock's call on a CPU is the slow one that we avoid.
        with native.off():
            plain = logits(ours, kvsketch.make_cache(ours, "exact"), calls)
        assert torch.equal(plain[:, :PROMPT], expected[:, :PROMPT])
        if stock.config.num_attention_heads == stock.config.num_key_value_heads:
            assert torch.equal(plain, expected)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=2e-6)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gemma2"])
@pytest.mark.parametrize("spec", ["exact", "uniform(keep=0.5, window=16)"])
def test_models_in_double_precision_take_the_road_of_devices_without_a_kernel_of_ours(family, spec):
    ours, slow = build(family, dtype=torch.float64), build(family, dtype=torch.float64)
    config = kvsketch.parse_spec(spec)
    oracle.install(slow, config)
    calls = [*calls_of(2), zoo.tokens(2, 30, seed=3)]
    expected = logits(slow, DynamicCache(config=slow.config), calls)
    torch.testing.assert_close(logits(ours, kvsketch.make_cache(ours, config), calls), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_with_padding_and_nothing_dropped_logits_equal_stock(family):
    stock, ours = build(family), build(family)
    mask = padding_mask()
    calls = calls_of(ROWS, steps=6)
    expected = logits(stock, DynamicCache(config=stock.config), calls, mask)
    got = logits(ours, kvsketch.make_cache(ours, "exact"), calls, mask)
    real = torch.cat([mask, mask.new_ones(ROWS, 6)], 1).bool()
    torch.testing.assert_close(got[real], expected[real], rtol=1e-5, atol=5e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "spec"),
    [(family, COMPRESSED[0]) for family in zoo.FAMILIES]
    + [(family, spec) for family in ("llama", "gemma2", "gpt_oss") for spec in COMPRESSED[1:]],
)
def test_compressed_padded_batches_follow_the_oracle(family, spec):
    """Prompt, decoding across several blocks, and a second turn, for rows of different lengths."""
    ours, slow = build(family), build(family)
    config = kvsketch.parse_spec(spec)
    oracle.install(slow, config)
    cache = kvsketch.make_cache(ours, config)
    calls = [*calls_of(ROWS), zoo.tokens(ROWS, 45, seed=3), *zoo.tokens(ROWS, 3, seed=4).split(1, 1)]
    mask = padding_mask()
    expected = logits(slow, DynamicCache(config=slow.config), calls, mask)
    got = logits(ours, cache, calls, mask)
    real = torch.cat([mask, mask.new_ones(ROWS, got.shape[1] - PROMPT)], 1).bool()
    torch.testing.assert_close(got[real], expected[real], rtol=1e-4, atol=1e-5)
    exact = build(family)
    dropped = logits(exact, DynamicCache(config=exact.config), calls, mask)
    assert (got[:, -1] - dropped[:, -1]).abs().max() > 1e-3, "compression should have had an effect"


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near_stock(family, dtype):
    stock, ours = zoo.build(family, dtype=dtype), zoo.build(family, dtype=dtype)
    calls = calls_of(2, steps=8)
    expected = logits(stock, DynamicCache(config=stock.config), calls).float()
    got = logits(ours, kvsketch.make_cache(ours, "exact"), calls).float()
    wide = zoo.build(family, dtype=dtype).float()
    truth = logits(wide, DynamicCache(config=wide.config), calls)
    ours_error, stock_error = (got - truth).norm(), (expected - truth).norm()
    assert ours_error <= 2 * stock_error


def test_a_model_without_full_attention_warns_that_there_is_nothing_to_compress():
    model = zoo.build("mistral_sliding")
    stock = zoo.build("mistral_sliding")
    with pytest.warns(UserWarning, match="nothing to compress"):
        cache = kvsketch.make_cache(model, "uniform")
    calls = calls_of(2, steps=6)
    expected = logits(stock, DynamicCache(config=stock.config), calls)
    torch.testing.assert_close(logits(model, cache, calls), expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("deepseek_v3", "MLA"),
        ("bloom", "does not let its attention be exchanged"),
        ("recurrent_gemma", "keep what they have read in the model itself"),
    ],
)
def test_families_that_cannot_be_served_are_refused(family, reason):
    model = zoo.build(family, attention="eager")
    before = model.config._attn_implementation
    with pytest.raises(ValueError, match=reason):
        kvsketch.make_cache(model, "uniform")
    assert model.config._attn_implementation == before


def test_remote_code_is_refused():
    model = zoo.build("llama")
    remote = type("RemoteModel", (type(model),), {"__module__": "transformers_modules.somebody.something"})
    model.__class__ = remote
    with pytest.raises(ValueError, match="remote code"):
        kvsketch.make_cache(model)


def test_encoder_decoder_models_are_refused():
    small = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "vocab_size": 32}
    model = T.T5ForConditionalGeneration(T.T5Config(**small))
    with pytest.raises(ValueError, match="encoder-decoder"):
        kvsketch.make_cache(model)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("padded", [False, True])
def test_an_attached_model_without_our_cache_answers_as_before(family, padded):
    """No cache, a stock cache in one call, in chunks, and token by token."""
    stock, ours = build(family), build(family)
    kvsketch.attach(ours)
    mask = padding_mask() if padded else None
    real = padding_mask().bool() if padded else torch.ones(ROWS, PROMPT, dtype=torch.bool)
    ids = zoo.tokens(ROWS, PROMPT)
    with torch.no_grad():
        options = {"attention_mask": mask, "use_cache": False}
        torch.testing.assert_close(
            ours(ids, **options).logits[real], stock(ids, **options).logits[real], rtol=1e-5, atol=5e-6
        )
    for calls in ([ids], list(ids.split(40, 1)), [ids[:, :140], *ids[:, 140:].split(1, 1)]):
        expected = logits(stock, DynamicCache(config=stock.config), calls, mask)
        got = logits(ours, DynamicCache(config=ours.config), calls, mask)
        torch.testing.assert_close(got[real], expected[real], rtol=1e-5, atol=5e-6)


def test_attention_that_says_it_goes_both_ways_sees_of_several_new_tokens_what_it_sees_with_stock():
    """As PaliGemma's says: behind others stock has a mask that tells it otherwise, for a prompt none."""
    stock, ours = build("llama"), build("llama")
    for module in (*stock.modules(), *ours.modules()):
        if hasattr(module, "is_causal"):
            module.is_causal = False
    kvsketch.attach(ours)
    for mask in (None, padding_mask()):
        real = slice(None) if mask is None else mask.bool()
        calls = list(zoo.tokens(ROWS, PROMPT).split(90, 1))
        expected = logits(stock, DynamicCache(config=stock.config), calls, mask)
        got = logits(ours, DynamicCache(config=ours.config), calls, mask)
        torch.testing.assert_close(got[real], expected[real], rtol=1e-5, atol=5e-6)


def test_a_model_whose_tokens_see_those_behind_them_is_refused():
    model = T.RobertaForCausalLM(T.RobertaConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=200,
    )).eval()  # fmt: skip
    with pytest.raises(ValueError, match="models or images whose tokens see later ones are not supported"):
        model(zoo.tokens(2, 40), past_key_values=kvsketch.make_cache(model))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_an_attached_model_still_works_with_a_static_cache(family):
    stock, ours = build(family), build(family)
    kvsketch.attach(ours)
    ids = zoo.tokens(2, 30)
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "disable_compile": True}
    assert torch.equal(ours.generate(ids, **options), stock.generate(ids, **options))


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss"])
def test_training_an_attached_model_gives_the_same_gradients(family):
    stock, ours = build(family), build(family)
    kvsketch.attach(ours)
    ids = zoo.tokens(2, 30)
    for model in (stock, ours):
        model.train()
        model(ids, labels=ids).loss.backward()
    for (name, one), (_, other) in zip(stock.named_parameters(), ours.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_attached_it_drops_weights_in_training_and_adds_masks_as_stock_does(family):
    ids = zoo.tokens(2, 30)
    added = torch.zeros(2, 1, 30, 30).masked_fill(torch.ones(30, 30).triu(1).bool(), torch.finfo(torch.float32).min)
    added[..., 3:9] -= 1.5  # a mask may say more than yes or no
    model = build(family)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    found = []
    for change in (lambda: None, lambda: kvsketch.attach(model)):
        change()
        model.train()
        torch.manual_seed(0)
        found.append([model(ids).logits])
        model.eval()
        found[-1] += [model(ids, attention_mask=added).logits, model(ids).logits]
    for stock, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, stock)
    assert not torch.allclose(found[1][0], found[1][2], atol=1e-3)


@pytest.mark.parametrize("spec", ["exact", "kvzip(keep=1.0)", "retrieval(window=40)"])
@pytest.mark.parametrize(("family", "count"), [("llama", 7), ("llama", 1), ("gemma3", 1)])
def test_what_follows_a_prompt_learns_as_with_stock(family, count, spec):
    """What is held is given; what comes has gradients, though what is held has changed when they are asked for."""
    stock, ours = build(family), build(family)
    caches = DynamicCache(config=stock.config), kvsketch.make_cache(ours, spec)
    for model, cache in zip((stock, ours), caches, strict=True):
        with torch.inference_mode():
            model(zoo.tokens(2, 60), past_key_values=cache)
        answer = model(zoo.tokens(2, count, 7), past_key_values=cache).logits
        with torch.no_grad():
            model(zoo.tokens(2, 1, 8), past_key_values=cache)
        answer.square().mean().backward()
    for (name, one), (_, other) in zip(stock.named_parameters(), ours.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=name)


def test_detach_restores_the_model():
    for family in ("llama", "gemma2", "gpt_oss"):
        model = build(family)
        before = {name: value for name, value in vars(model).items() if not name.startswith("_")}
        attention, config = model.config._attn_implementation, model.config.to_dict()
        attributes = [set(vars(module)) for module in model.modules()]
        hooks = [len(module._forward_pre_hooks) + len(module._forward_hooks) for module in model.modules()]
        kvsketch.make_cache(model, "uniform")
        assert model.config._attn_implementation == "kvsketch"
        kvsketch.detach(model)
        assert model.config._attn_implementation == attention
        assert model.config.to_dict() == config
        assert [set(vars(module)) for module in model.modules()] == attributes
        assert [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules()] == hooks
        assert {name: value for name, value in vars(model).items() if not name.startswith("_")} == before
        kvsketch.detach(model)  # a second time is harmless


def test_inside_a_with_block_a_model_is_attached_and_afterwards_as_it_was():
    model = zoo.build("llama", attention="eager")
    with kvsketch.attached(model) as same:
        assert same is model
        kvsketch.prefill(model, zoo.tokens(1, 50), kvsketch.make_cache(model, kvsketch.Uniform(keep=0.5)))
        assert model.config._attn_implementation == "kvsketch"
    assert model.config._attn_implementation == "eager"
    kvsketch.attach(model)
    with kvsketch.attached(model):
        pass
    assert model.config._attn_implementation == "kvsketch"
    kvsketch.detach(model)
    one, other = kvsketch.attached(model), kvsketch.attached(model)  # of two threads
    for block in (one, other):
        block.__enter__()
    one.__exit__(None, None, None)
    assert model.config._attn_implementation == "kvsketch", "the other's is not over"
    other.__exit__(None, None, None)
    assert model.config._attn_implementation == "eager"


def test_a_cache_without_a_method_is_exact():
    assert kvsketch.make_cache(zoo.build("llama")).config == kvsketch.Exact()


def test_attaching_twice_keeps_the_first_attention_for_detach():
    model = zoo.build("llama", attention="eager")
    kvsketch.make_cache(model, "uniform")
    kvsketch.make_cache(model, "exact")
    kvsketch.detach(model)
    assert model.config._attn_implementation == "eager"


def test_threads_that_attach_one_model_hang_up_its_hooks_once():
    model = zoo.build("llama")
    register = model.model.register_forward_pre_hook

    def slowly(*arguments, **options):
        time.sleep(0.02)
        return register(*arguments, **options)

    model.model.register_forward_pre_hook = slowly
    threads = [threading.Thread(target=kvsketch.attach, args=(model,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(model.model._forward_pre_hooks) == 1
    kvsketch.detach(model)
    assert not model.model._forward_pre_hooks


def test_detach_gives_back_what_the_user_chose_last():
    model = zoo.build("llama", attention="sdpa")
    kvsketch.attach(model)
    model.set_attn_implementation("eager")
    kvsketch.attach(model)
    kvsketch.detach(model)
    assert model.config._attn_implementation == "eager"


def gemma_with_images():
    text = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    text |= {"num_attention_heads": 2, "num_key_value_heads": 1, "layer_types": ["sliding_attention", "full_attention"]}
    text |= {"sliding_window": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    images = {"mm_tokens_per_image": 4, "image_token_index": 96, "boi_token_index": 95, "eoi_token_index": 94}
    config = T.Gemma3Config(text_config=text, vision_config=vision | {"image_size": 28, "patch_size": 14}, **images)
    with warnings.catch_warnings(), torch.random.fork_rng():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return T.Gemma3ForConditionalGeneration(config).eval()


def test_a_vision_language_model_has_only_its_text_attached():
    model = gemma_with_images()
    before = model.config.vision_config._attn_implementation
    kvsketch.make_cache(model, "uniform")
    assert model.config.text_config._attn_implementation == "kvsketch"
    assert model.config.vision_config._attn_implementation == before
    kvsketch.detach(model)
    assert model.config.text_config._attn_implementation == before


def test_a_model_that_reads_images_too_reads_text_as_stock_does():
    """It hands its decoder a mask for every kind of layer, and embeddings in place of ids."""
    stock, ours = gemma_with_images(), gemma_with_images()
    calls, mask = calls_of(ROWS), padding_mask()
    expected = logits(stock, DynamicCache(config=stock.config), calls, mask)
    real = torch.cat([mask, mask.new_ones(ROWS, STEPS)], 1).bool()
    for spec in ("exact", "uniform(keep=1.0)"):
        got = logits(ours, kvsketch.make_cache(ours, spec), calls, mask)
        torch.testing.assert_close(got[real], expected[real], rtol=1e-4, atol=2e-5)
    cache, ids = kvsketch.make_cache(ours, "exact"), calls[0][:1]
    with pytest.raises(ValueError, match="leave out token_type_ids"), torch.no_grad():
        ours(ids, past_key_values=cache, token_type_ids=torch.zeros_like(ids))
    with pytest.raises(ValueError, match="keydiff or snapkv"):
        ours.generate(ids, past_key_values=kvsketch.make_cache(ours, keep=0.25), max_new_tokens=2)
    kvsketch.prefill(ours, ids, cache)
    assert cache.seen == ids.shape[1]


SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
INDEXED = {"index_block_size": 8, "index_topk_blocks": 2, "index_n_heads": 2, "index_head_dim": 16}


def small(kind, **given):
    config = T.AutoConfig.for_model(kind, **SMALL | given)
    return T.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


@pytest.mark.parametrize(
    ("kind", "given", "reason"),
    [
        ("minimax_m3_vl_text", EXPERTS | INDEXED | {"layer_types": ["full_attention", "minimax_m3_sparse"]}, "sparse"),
        ("deepseek_v4", {"num_experts_per_tok": 2, "n_routed_experts": 4}, "compressed_attention"),
    ],
)
def test_layers_whose_masks_only_their_own_code_knows_are_refused(kind, given, reason):
    if kind not in T.CONFIG_MAPPING:
        pytest.skip("this transformers does not have it")
    with pytest.raises(ValueError, match=f"does not know .*{reason}"):
        kvsketch.attach(small(kind, **given))


def test_attention_that_goes_by_more_than_we_know_and_attention_that_looks_twice_are_refused():
    ids = torch.randint(1, 97, (1, 40))
    cases = [("diffllama", {}, "twice")]
    if "inkling_text" in T.CONFIG_MAPPING:
        experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        cases.append(("inkling_text", experts | {"layer_types": ["hybrid", "hybrid"]}, "position_bias"))
    for kind, given, reason in cases:
        model = small(kind, **given)
        with pytest.raises(ValueError, match=reason), torch.no_grad():
            model(ids, past_key_values=kvsketch.make_cache(model))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "phi3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_under_autocast_answers_are_as_near_as_stocks(family, dtype):
    """Keys come in single precision then, and values in half."""
    stock, ours = build(family), build(family)
    calls, mask = calls_of(2, steps=8), padding_mask()[:2]
    real = torch.cat([mask, mask.new_ones(2, 8)], 1).bool()
    truth = logits(stock, DynamicCache(config=stock.config), calls, mask)
    with torch.autocast("cpu", dtype):
        expected = logits(stock, DynamicCache(config=stock.config), calls, mask)
        got = logits(ours, kvsketch.make_cache(ours, "exact"), calls, mask)
        detached = logits(ours, DynamicCache(config=ours.config), calls, mask)  # attached, with a cache of stock
    limit = 2 * (expected.float() - truth)[real].norm()
    assert (got.float() - truth)[real].norm() <= limit
    assert (detached.float() - truth)[real].norm() <= limit


AUTOCAST = [
    "streaming_llm(keep=140)", "uniform(keep=0.25, window=16)", "clustergen(keep=0.25)", "subgen(keep=150, window=16)",
    "balancekv(keep=0.25, window=16)", "balancekv(keep=0.25, window=16, augmented=False)",
    "balancekv(keep=0.5, window=16, mode='faithful')", "lsh(bins=6, window=40, staging=50)",
    "lsh(kind='magicpig', bits=4, tables=9, window=40)", "random_buckets(buckets=8, probes=2, window=40, staging=50)",
    "retrieval(top=0.1, window=40)",
]  # fmt: skip


@pytest.mark.parametrize("spec", AUTOCAST)
def test_under_autocast_a_method_holds_what_it_holds_without(spec):
    """Given the same keys and values: in half precision, for the model's own parts are computed otherwise."""
    model, ids = zoo.build("llama", dtype=torch.bfloat16), zoo.tokens(2, 300)
    states = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            cache = kvsketch.make_cache(model, spec)
            keys = [torch.randn(2, 2, 300, 16, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(2)]
            queries = torch.randn(2, 8, 300, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
            linked, values = cache.update(*keys, 0)
            attention(model.model.layers[0].self_attn, queries, linked, values)
            states.append(state_of(cache))
    assert difference(*states) is None
    with torch.autocast("cpu", torch.bfloat16):
        whole = kvsketch.make_cache(model, spec)
        text = model.generate(ids, past_key_values=whole, max_new_tokens=36, do_sample=False)
    assert text.shape == (2, 336)


def test_a_cache_filled_under_autocast_says_so_where_there_is_none():
    model = zoo.build("llama")
    with torch.autocast("cpu", torch.bfloat16):
        cache = kvsketch.prefill(model, zoo.tokens(1, 40), kvsketch.make_cache(model, "exact"))
    with pytest.raises(ValueError, match=r"filled in torch.bfloat16, and tokens came in torch.float32.*autocast"):
        kvsketch.prefill(model, zoo.tokens(1, 3), cache)

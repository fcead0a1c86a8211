"""Weights are known wherever they are, and as they are when it matters: the right model is let in, and no other."""

import copy
import itertools
import warnings

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model

import kvsketch
import zoo
from kvsketch.huggingface.identity import describe_model
from kvsketch.huggingface.weights import devices_of_layers, sample_weights
from kvsketch.kernels import native
from made_index import make_index

pytestmark = [
    pytest.mark.usefixtures("as_users_run_it"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft's
]
SPEC = "uniform(keep=0.5, window=16)"
OTHER = "saved for another model"


def read(model, spec=SPEC, count=120):
    return kvsketch.prefill(model, zoo.tokens(1, count), kvsketch.make_cache(model, spec))


def answer(model, cache):
    return model.generate(**cache.new_tokens(zoo.tokens(1, 5, seed=3)), past_key_values=cache, max_new_tokens=8)


def offloaded(model, way, folder):
    """The same model with its weights elsewhere."""
    if way == "cpu":
        return cpu_offload(model, execution_device="cpu")
    if way == "disk":
        return disk_offload(model, str(folder), execution_device="cpu")
    places = {name: "cpu" for name, _ in model.named_children()} | {"model": "cpu"}
    layers = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"} | layers
    return dispatch_model(model, places, offload_dir=str(folder), main_device="cpu", force_hooks=True)


@pytest.fixture(params=["cpu", "disk", "half on disk"])
def away(request, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # accelerate's own
        folders = (tmp_path / f"weights {number}" for number in itertools.count())  # it writes none that is there
        yield lambda model: offloaded(model, request.param, next(folders))


def test_offloaded_weights_count_in_a_fingerprint(away):
    for rounded in (True, False):
        at_home = sample_weights(zoo.build("llama")).fingerprint(rounded=rounded)
        assert sample_weights(away(zoo.build("llama"))).fingerprint(rounded=rounded) == at_home
    other = zoo.build("llama")
    with torch.no_grad():
        other.model.layers[3].mlp.up_proj.weight.add_(1e-2)  # of a layer that is away
    assert sample_weights(away(other)).fingerprint(rounded=True) != sample_weights(zoo.build("llama")).fingerprint(
        rounded=True
    )


def test_a_fingerprint_is_the_same_without_c():
    """A file that was made where there is a compiler is loaded where there is none."""
    model = zoo.build("llama").to(torch.bfloat16)
    model.model.norm.weight.data = model.model.norm.weight.data.float()
    with native.off():
        expected = sample_weights(model)
    found = sample_weights(model)
    assert found.shapes == expected.shapes
    assert all(torch.equal(found.numbers[name], x) for name, x in expected.numbers.items())
    assert found.fingerprint(rounded=False) == expected.fingerprint(rounded=False)


@pytest.mark.parametrize("rounded", [True, False])
def test_the_sample_of_a_matrix_is_not_one_of_its_columns(rounded):
    """64 numbers at equal steps of a matrix of 64 columns are."""
    model = zoo.build("llama")
    before = sample_weights(model).fingerprint(rounded=rounded)
    for lines in ((slice(None), slice(1, None)), (slice(1, None), slice(None))):
        other = zoo.build("llama")
        with torch.no_grad():
            other.model.layers[0].self_attn.o_proj.weight[:, :64][lines].add_(1)
        assert sample_weights(other).fingerprint(rounded=rounded) != before


def test_a_cache_of_an_offloaded_model_is_loaded_to_where_its_layers_compute(away, tmp_path):
    model = zoo.build("llama")
    cache = read(model)
    cache.save(tmp_path / "c.safetensors")
    again = away(zoo.build("llama"))
    assert set(devices_of_layers(again).values()) == {torch.device("cpu")}
    loaded = kvsketch.load_cache(again, tmp_path / "c.safetensors")
    assert all(layer.held.window.keys.view.device.type == "cpu" for layer in loaded.sketch_layers)
    assert torch.equal(answer(again, loaded), answer(model, cache))
    other = away(zoo.build("llama", seed=1))
    with pytest.raises(ValueError, match=OTHER):
        kvsketch.load_cache(other, tmp_path / "c.safetensors")


def test_each_layer_is_loaded_to_its_own_device():
    """As far as that can be seen on a machine with one: where accelerate would bring a layer's weights."""
    model = zoo.build("llama")
    for index, layer in enumerate(model.model.layers):
        hook = type("Hook", (), {"execution_device": index if index < 2 else f"cuda:{index}", "weights_map": None})()
        layer.self_attn.q_proj._hf_hook = hook
    assert devices_of_layers(model) == {index: torch.device("cuda", index) for index in range(4)}


def test_weights_that_are_not_there_are_said_to_be(tmp_path):
    read(zoo.build("llama")).save(tmp_path / "c.safetensors")
    with torch.device("meta"):
        model = type(zoo.build("llama"))(zoo.build("llama").config)
    with pytest.raises(
        ValueError, match=r"embed_tokens.weight of LlamaForCausalLM has no numbers.*load the weights first"
    ):
        kvsketch.load_cache(model, tmp_path / "c.safetensors")


@pytest.mark.parametrize("way", ["cpu", "disk"])  # accelerate converts none that is in both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_offloaded_weights_count_as_they_are_brought(way, dtype, tmp_path):
    model = offloaded(zoo.build("llama"), way, tmp_path / "weights")
    model.to(dtype)
    read(model).save(tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=OTHER):
        kvsketch.load_cache(zoo.build("llama"), tmp_path / "c.safetensors")
    kvsketch.load_cache(zoo.build("llama").to(dtype), tmp_path / "c.safetensors")


@pytest.mark.filterwarnings("ignore:.*quantiz:DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
def test_packed_weights_are_weights(tmp_path):
    def quantized(more):
        model = zoo.build("llama")
        with torch.no_grad():
            model.model.layers[1].self_attn.k_proj.weight.mul_(1 + more)
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)

    read(quantized(0)).save(tmp_path / "c.safetensors")
    kvsketch.load_cache(quantized(0), tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=OTHER):
        kvsketch.load_cache(quantized(0.5), tmp_path / "c.safetensors")


def test_what_is_no_weight_does_not_count():
    model = zoo.build("llama")
    before = sample_weights(model).fingerprint(rounded=False)
    model.note = torch.nn.Dropout(0.5)
    assert sample_weights(model).fingerprint(rounded=False) == before


# -- changes after make_cache


def halve(model):
    model.half()
    model.bfloat16()


def train(model):
    model(zoo.tokens(1, 20), labels=zoo.tokens(1, 20)).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


@pytest.mark.parametrize("change", [halve, train])
def test_what_counts_are_the_weights_that_read(change, tmp_path):
    """Not those of the moment when the cache was made, nor those of the moment when it is saved."""
    path, model, before = tmp_path / "c.safetensors", zoo.build("llama"), zoo.build("llama")
    cache = kvsketch.make_cache(model, SPEC)
    change(model)
    kvsketch.prefill(model, zoo.tokens(1, 120), cache)
    cache.save(path)
    again = zoo.build("llama")
    change(again)
    assert torch.equal(answer(again, kvsketch.load_cache(again, path)), answer(model, cache.fork()))
    with pytest.raises(ValueError, match=OTHER):
        kvsketch.load_cache(before, path)


@pytest.mark.parametrize("spec", ["exact", SPEC])
@pytest.mark.parametrize("change", [halve, train])
def test_a_cache_is_not_saved_for_weights_that_did_not_read_it(change, spec, tmp_path):
    model = zoo.build("llama")
    cache = read(model, spec)
    compressed = [cache.compress(SPEC)] if spec == "exact" else []
    change(model)
    for twin in (cache, cache.fork(), *compressed):
        with pytest.raises(ValueError, match="have changed since this cache began to read"):
            twin.save(tmp_path / "c.safetensors")
    assert not list(tmp_path.iterdir())
    cache.reset()
    kvsketch.prefill(model, zoo.tokens(1, 120), cache)
    cache.save(tmp_path / "c.safetensors")


def test_a_cache_may_outlive_its_model(tmp_path):
    model = zoo.build("llama")
    cache = read(model)
    del model
    cache.save(tmp_path / "c.safetensors")
    again = zoo.build("llama")
    answer(again, kvsketch.load_cache(again, tmp_path / "c.safetensors"))


def test_an_index_is_compared_with_the_weights_that_read(tmp_path):
    model = zoo.build("llama")
    index = make_index(tmp_path / "index", model)
    cache = kvsketch.make_cache(model, f"saap(index={index!r}, window=16)")
    train(model)
    with pytest.raises(ValueError, match="with other weights"):
        kvsketch.prefill(model, zoo.tokens(1, 50), cache)


def test_a_model_in_another_precision_has_the_same_facts():
    model = zoo.build("llama", dtype=torch.bfloat16)
    known = describe_model(model)
    assert describe_model(model.float()) == known
    train(model)
    assert describe_model(model) != known


# -- adapters


def with_adapter(model, seed=0, **options):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False, **options)
    return get_peft_model(model, config)


@pytest.mark.parametrize("attached", ["before", "after"])
def test_adapters_are_right_whether_they_come_before_or_after_the_cache(attached, tmp_path):
    stock = with_adapter(zoo.build("llama"))
    model = zoo.build("llama")
    ids = zoo.tokens(1, 60)
    expected = stock.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    if attached == "before":
        model = with_adapter(model)
        cache = kvsketch.make_cache(model, "exact")
    else:
        cache = kvsketch.make_cache(model, "exact")
        model = with_adapter(model)
    assert torch.equal(
        model.generate(input_ids=ids, past_key_values=cache, max_new_tokens=8, do_sample=False), expected
    )
    cache.reset()
    kvsketch.prefill(model, ids, cache)
    cache.save(tmp_path / "c.safetensors")
    again = with_adapter(zoo.build("llama"))
    loaded = kvsketch.load_cache(again, tmp_path / "c.safetensors")
    assert torch.equal(answer(again, loaded), answer(model, cache))
    for other in (zoo.build("llama"), with_adapter(zoo.build("llama"), seed=1)):
        with pytest.raises(ValueError, match=OTHER):
            kvsketch.load_cache(other, tmp_path / "c.safetensors")
    with again.disable_adapter(), pytest.raises(ValueError, match=OTHER):
        kvsketch.load_cache(again, tmp_path / "c.safetensors")
    kvsketch.detach(again)
    assert again.config._attn_implementation == "sdpa"


def test_a_merged_adapter_is_another_model(tmp_path):
    model = with_adapter(zoo.build("llama"))
    cache = kvsketch.make_cache(model, SPEC)
    merged = model.merge_and_unload()
    kvsketch.prefill(merged, zoo.tokens(1, 120), cache)
    cache.save(tmp_path / "c.safetensors")
    again = with_adapter(zoo.build("llama")).merge_and_unload()
    loaded = kvsketch.load_cache(again, tmp_path / "c.safetensors")
    assert torch.equal(answer(again, loaded), answer(merged, cache))
    with pytest.raises(ValueError, match=OTHER):
        kvsketch.load_cache(zoo.build("llama"), tmp_path / "c.safetensors")


def test_an_adapter_merged_while_the_cache_holds_text_is_noticed(tmp_path):
    model = with_adapter(zoo.build("llama"))
    cache = read(model)
    model.merge_adapter()
    with pytest.raises(ValueError, match="weights, or its adapters, have changed"):
        cache.save(tmp_path / "c.safetensors")
    model.unmerge_adapter()


@pytest.mark.filterwarnings("ignore:Specified to not save vera_A:UserWarning")
def test_what_an_adapter_computes_with_counts_also_where_it_is_not_saved(tmp_path):
    from peft import VeraConfig, get_peft_model

    def drawn_with(key):
        config = VeraConfig(r=4, target_modules=["q_proj"], projection_prng_key=key, save_projection=False)
        model = get_peft_model(zoo.build("llama"), config)
        torch.manual_seed(7)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.copy_(torch.randn_like(parameter))
        return model.eval()

    read(drawn_with(1)).save(tmp_path / "c.safetensors")
    kvsketch.load_cache(drawn_with(1), tmp_path / "c.safetensors")
    with pytest.raises(ValueError, match=OTHER):
        kvsketch.load_cache(drawn_with(2), tmp_path / "c.safetensors")
    model = with_adapter(zoo.build("llama"), lora_dropout=0.1).eval()
    cache = read(model)
    cache.save(tmp_path / "d.safetensors")
    kvsketch.load_cache(with_adapter(zoo.build("llama")).eval(), tmp_path / "d.safetensors")


def test_rows_of_different_adapters_are_refused():
    from peft import LoraConfig

    model = with_adapter(zoo.build("llama")).eval()
    model.add_adapter("other", LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
    cache = kvsketch.make_cache(model, SPEC)
    with pytest.raises(ValueError, match="read the rows of each adapter with a cache of their own"):
        model(zoo.tokens(2, 9), past_key_values=cache, adapter_names=["default", "other"])
    assert cache.seen == 0


def test_adapters_that_put_tokens_before_the_text_are_refused_by_name():
    from peft import PrefixTuningConfig, get_peft_model

    model = get_peft_model(zoo.build("llama"), PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match=r"adapter 'default' puts learnt tokens before the text.*such as LoRA"):
        kvsketch.make_cache(model, SPEC)


def test_a_compiled_model_is_the_model_in_it():
    model = zoo.build("llama")
    assert kvsketch.make_cache(torch.compile(model, backend="eager"), SPEC).model.model() is model


def test_a_copied_model_is_attached_by_itself():
    model = zoo.build("llama")
    kvsketch.attach(model)
    twin = copy.deepcopy(model)
    cache = read(twin)
    with pytest.raises(ValueError, match="made for another model object"):
        model(zoo.tokens(1, 2), past_key_values=cache)
    kvsketch.detach(model)
    answer(twin, cache)
    kvsketch.detach(twin)
    assert not any(module._forward_pre_hooks for module in twin.modules())


def test_what_a_model_is_counts_as_of_the_first_token(tmp_path):
    """A config too; and where its layers are called without the model, which says when a call begins."""
    model = zoo.build("llama")
    cache = kvsketch.prefill(model, zoo.tokens(1, 20), kvsketch.make_cache(model))
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 777.0}
    with pytest.raises(ValueError, match="have changed since this cache began to read"):
        cache.save(tmp_path / "cache.safetensors")
    model = zoo.build("llama")
    cache, inner = kvsketch.make_cache(model), model.model
    hidden = inner.embed_tokens(zoo.tokens(1, 20))
    places = torch.arange(20)[None]
    with torch.no_grad():
        for layer in inner.layers:
            hidden = layer(
                hidden, past_key_values=cache, position_ids=places, position_embeddings=inner.rotary_emb(hidden, places)
            )
        inner.embed_tokens.weight.mul_(2)
    with pytest.raises(ValueError, match="have changed since this cache began to read"):
        cache.save(tmp_path / "cache.safetensors")

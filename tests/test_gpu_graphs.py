"""Steps that are recorded and replayed say what steps say that are not, and leave behind the same cache."""

import copy
import weakref
from contextlib import nullcontext

import pytest
import torch

import kvsketch
from kvsketch.caches.core.config import BLOCK
from kvsketch.huggingface.graphs import LEAST, LOOKED_AT, CudaGraphs, recorded
from kvsketch.huggingface.naming import as_argument
from kvsketch.kernels import native, reading
from kvsketch.kernels.indexed_attention import reference
from made_index import make_index
from recorder import Lists
from uneven import made_profile
from zoo import build, tokens

pytestmark = pytest.mark.usefixtures("no_kernels")
STEPS = 50
SPECS = [
    "exact",
    "uniform(keep=0.5, window=16)",
    "streaming_llm(keep=96)",
    "balancekv(keep=0.25, window=16)",
    "clustergen(keep=0.5)",
    "keydiff(keep=0.25)",
    "kvzip(keep=0.25)",
    "snapkv(keep=100)",
    "kmeans(index=INDEX, probes=4, estimate=True, window=15, staging=16)",
    "saap(index=INDEX, probes=4, window=15, staging=16)",
    "retrieval(top=0.1, window=15)",
    "lsh(kind='magicpig', window=15)",
    "streaming_llm(keep=64, heads='pyramid')",
]

ANEW = {  # how often a step is recorded at most while tokens leave three times and more
    "balancekv(keep=100, window=16)": 1,
    "balancekv(keep=0.25, window=16)": 1,
    "keydiff(keep=0.25)": 1,  # has no weights; of it 8 tokens leave at a time
    "clustergen(keep=0.5)": 2,  # whose window grows
    "saap(index=INDEX, probes=4, window=15, staging=64, full_layers=0)": 1,  # sorted in meanwhile
    "saap(index=INDEX, probes=4, window=15, staging=64)": 3,  # of whose first layer all stay in the window
    "keydiff(keep=0.25, heads=PROFILE)": 2,
}


@pytest.fixture
def no_kernels(monkeypatch):
    """Kernels in C are no operations of torch's, so that nobody can note them.

    What torch does in their place where few of many tokens are read asks how many those are. A GPU does not, and nor
    does the definition.
    """
    monkeypatch.setattr(reading, "indexed_attention", reference.attend)
    with native.off():
        yield


def read(model, spec, rows, tmp_path):
    """A cache that has read rows, the first one shorter if there are several; and the tokens that follow."""
    if "INDEX" in spec:
        spec = spec.replace("INDEX", repr(make_index(tmp_path / "index", model)))
    ids, mask = tokens(rows, 150).to(model.device), torch.ones(rows, 150, dtype=torch.int64, device=model.device)
    mask[0, : 24 * (rows - 1)] = 0
    cache = kvsketch.prefill(model, ids, kvsketch.make_cache(model, spec), attention_mask=mask)
    return cache, mask, tokens(rows, STEPS, seed=5).to(model.device)


def step(model, cache, token, mask=None, **given):
    """The output of a token; and the mask of all, if one was given of those before it."""
    if mask is None:
        places = torch.full_like(token, cache.seen)
        return model(input_ids=token, past_key_values=cache, position_ids=places, **given)
    mask = torch.cat([mask, torch.ones_like(token)], 1)
    places = mask.sum(1, keepdim=True) - 1
    return model(input_ids=token, past_key_values=cache, attention_mask=mask, position_ids=places, **given), mask


def decoded(model, cache, mask, following, graphs=None):
    """The logits of single tokens, one after another."""
    found = []
    with recorded(model, graphs) if graphs else nullcontext(), torch.no_grad():
        for token in following.split(1, 1):
            out, mask = step(model, cache, token, mask)
            found.append(out.logits)
    return torch.cat(found, 1)


def assert_same(cache, other):
    assert (cache.seen, [layer.held.lengths for layer in cache.sketch_layers]) == (
        other.seen, [layer.held.lengths for layer in other.sketch_layers],
    )  # fmt: skip
    for one, two in zip(cache.layers, other.layers, strict=True):
        (tensors, numbers), (others, other_numbers) = one.state(), two.state()
        assert numbers == other_numbers
        assert tensors.keys() == others.keys()
        for name, x in tensors.items():
            if x.is_floating_point():
                torch.testing.assert_close(x, others[name], rtol=1e-3, atol=1e-4, msg=name)
            elif not name.endswith("notes"):  # whose bits are those of sums
                assert torch.equal(x, others[name]), name


def assert_close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "rows"), [(spec, 1) for spec in SPECS if spec not in ANEW] + [(spec, 2) for spec in SPECS[::3]]
)
def test_replayed_steps_are_steps(spec, rows, tmp_path):
    model = build("llama", layers=2)
    cache, mask, following = read(model, spec, rows, tmp_path)
    twin, graphs = cache.fork(), Lists()
    expected = decoded(model, cache, mask, following)
    assert_close(decoded(model, twin, mask, following, graphs), expected)
    assert_same(twin, cache)
    assert graphs.taken + graphs.recorded + graphs.replayed >= STEPS - LEAST
    assert graphs.replayed > STEPS / 2, vars(graphs)


@pytest.mark.parametrize(("spec", "most"), ANEW.items())
def test_a_step_is_recorded_anew_only_where_what_it_reads_has_moved(spec, most, tmp_path):
    """What leaves the window is read where there was room for it."""
    model, graphs = build("llama", layers=2), Lists()
    if "PROFILE" in spec:
        spec = spec.replace("PROFILE", repr(made_profile(tmp_path / "profile.json", model)))
    cache, mask, _ = read(model, spec, 1, tmp_path)
    twin, following = cache.fork(), tokens(1, 3 * BLOCK + 10, seed=5)
    expected = decoded(model, cache, mask, following)
    assert_close(decoded(model, twin, mask, following, graphs), expected)
    assert_same(twin, cache)
    assert graphs.recorded <= most, vars(graphs)
    assert graphs.taken + graphs.recorded + graphs.replayed >= following.shape[1] - LEAST


def test_protected_tokens_that_leave_meanwhile_are_read():
    model, graphs, mask = build("llama", layers=2), Lists(), torch.ones(2, 150, dtype=torch.int64)
    cache = kvsketch.make_cache(model, "keydiff(keep=0.5)", protect=[[(110, 140)], [(5, 9)]])
    cache = kvsketch.prefill(model, tokens(2, 150), cache)
    twin, following = cache.fork(), tokens(2, 60, seed=5)
    expected = decoded(model, cache, mask, following)
    assert_close(decoded(model, twin, mask, following, graphs), expected)
    assert_same(twin, cache)
    assert graphs.replayed > 40, vars(graphs)


@pytest.mark.parametrize("spec", ["exact", "keydiff(keep=0.25)", "balancekv(keep='60KB', window=16)"])
def test_room_for_recorded_steps_is_given_back(spec, tmp_path):
    model = build("llama", layers=2)
    cache, mask, following = read(model, spec, 1, tmp_path)
    twin = cache.fork()
    decoded(model, cache, mask, following)
    with recorded(model, Lists()), torch.no_grad():
        for token in following.split(1, 1):
            step(model, twin, token)
        assert twin.fork().nbytes <= 1.2 * cache.nbytes
        assert twin.nbytes <= (1.2 if "KB" in spec else 12) * cache.nbytes, "a budget in bytes holds meanwhile too"
    assert twin.nbytes <= 1.2 * cache.nbytes


def test_whoever_looks_at_a_cache_finds_it_as_after_any_step(tmp_path):
    model, graphs = build("llama", layers=2), Lists()
    cache, mask, following = read(model, "uniform(keep=0.5, window=16)", 2, tmp_path)
    twin, ones = cache.fork(), torch.ones_like(following)
    with recorded(model, graphs), torch.no_grad():
        for number, token in enumerate(following.split(1, 1)):
            mask = torch.cat([mask, ones[:, :1]], 1)
            given = {"attention_mask": mask, "position_ids": mask.sum(1, keepdim=True) - 1}
            got = model(input_ids=token, past_key_values=twin, **given).logits
            assert_close(got, model(token, past_key_values=cache, **given).logits)
            assert twin.seen == cache.seen
            if number % 8 == 7:
                held = [[layer.entries for layer in one.report().layers] for one in (twin, cache)]
                assert held[0] == held[1]
                assert_same(twin.fork(), cache)
                twin.save(tmp_path / "cache.safetensors")
                assert_same(kvsketch.load_cache(model, tmp_path / "cache.safetensors"), cache)
            if number == 20:
                twin.crop(-2)
                cache.crop(-2)
                mask = mask[:, :-2]
    assert_same(twin, cache)
    assert graphs.replayed > STEPS / 3, vars(graphs)


@pytest.mark.parametrize("beams", [1, 2])
def test_generate_says_the_same(beams, caplog):
    model, ids, said = build("llama", layers=2), tokens(2, 90), []
    options = {"max_new_tokens": 30, "min_new_tokens": 30, "do_sample": False, "num_beams": beams}
    for graphs in (None, Lists()):
        with recorded(model, graphs) if graphs else nullcontext():
            said.append(
                model.generate(ids, past_key_values=kvsketch.make_cache(model, "streaming_llm(keep=64)"), **options)
            )
    assert torch.equal(*said)
    assert graphs.replayed >= 20 if beams == 1 else LOOKED_AT in caplog.text
    assert "forward" not in vars(model)


@pytest.mark.parametrize(
    ("family", "spec", "why"),
    [
        ("llama", "h2o(keep=0.25)", "takes notes after every query"),
        ("llama", "expected_attention(keep=0.25)", "takes notes after every query"),
        ("gemma2", "uniform(keep=0.5)", "transformers' own"),
        ("llama", "streaming_llm(keep=96, heads=PROFILE)", "windows of unequal lengths"),
    ],
)
def test_what_cannot_be_recorded_goes_on_as_it_is(family, spec, why, caplog, tmp_path):
    model = build(family, layers=2)
    if "PROFILE" in spec:
        spec = spec.replace("PROFILE", repr(made_profile(tmp_path / "profile.json", model)))
    cache, mask, following = read(model, spec, 1, tmp_path)
    twin, graphs = cache.fork(), Lists()
    expected = decoded(model, cache, mask, following[:, :5])
    assert torch.equal(decoded(model, twin, mask, following[:, :5], graphs), expected)
    assert vars(graphs) == vars(Lists())
    assert [why in record.getMessage() for record in caplog.records] == [True]


def test_so_do_steps_in_which_a_number_is_asked_for(caplog, tmp_path):
    model, graphs = build("llama", layers=2), Lists()
    cache, mask, following = read(model, "uniform(keep=0.5, window=16)", 1, tmp_path)
    twin = cache.fork()
    expected = decoded(model, cache, mask, following[:, :6])
    asked = model.model.norm.register_forward_hook(lambda module, given, out: out * bool(out.any()))
    assert_close(decoded(model, twin, mask, following[:, :6], graphs), expected)
    asked.remove()
    assert (graphs.taken, graphs.replayed) == (1, 0)
    assert "steps are not recorded" in caplog.text


def test_so_do_steps_whose_attention_asks(monkeypatch, caplog, tmp_path):
    monkeypatch.undo()
    model, graphs = build("llama", layers=2), Lists()
    cache, mask, following = read(model, "saap(index=INDEX, probes=4, window=15, staging=16)", 1, tmp_path)
    twin = cache.fork()
    expected = decoded(model, cache, mask, following)
    assert_close(decoded(model, twin, mask, following, graphs), expected)
    assert_same(twin, cache)
    assert (graphs.taken, graphs.replayed) == (1, 0)
    assert "tolist" in caplog.text


def test_a_cache_that_nobody_has_is_freed(tmp_path):
    model = build("llama", layers=2)
    with recorded(model, Lists()), torch.no_grad():
        cache, _, following = read(model, "uniform(keep=0.5, window=16)", 1, tmp_path)
        gone = weakref.ref(cache)
        for token in following[:, :6].split(1, 1):
            step(model, cache, token)
        del cache
        assert gone() is None


def fail(*given, **options):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("what", "taken"),
    [("open", 0), ("open", 5), ("read", 0), ("read", 1), ("came_one", 0), ("came_one", 1), ("came_one", 5)],
)
def test_an_interruption_is_noticed_wherever_it_comes(what, taken, monkeypatch, tmp_path):
    """In the second layer: as it is opened, as it reads (what is replayed does not), as Python counts."""
    model = build("llama", layers=2)
    cache, mask, following = read(model, "uniform(keep=0.5, window=16)", 1, tmp_path)
    twin, layer = cache.fork(), cache.sketch_layers[1]
    with recorded(model, Lists()), torch.no_grad():
        for token in following[:, :taken].T[..., None]:
            step(model, cache, token)
        if what == "open":
            cache.report()  # closes them
        with monkeypatch.context() as patch:
            patch.setattr(layer.held if what == "open" else layer, what, fail)
            with pytest.raises(KeyboardInterrupt):
                step(model, cache, following[:, taken : taken + 1])
        if what == "open":  # nothing was taken
            found = [step(model, cache, token).logits for token in following[:, taken:12].T[..., None]]
            assert_close(torch.cat(found, 1), decoded(model, twin, mask, following[:, :12])[:, taken:])
        else:
            with pytest.raises(ValueError, match="failed half-way"):
                step(model, cache, following[:, :1])


def test_what_is_refused_always_is_refused_here(tmp_path):
    model = build("llama", layers=2)
    cache, mask, following = read(model, "uniform(keep=0.5, window=16)", 1, tmp_path)
    token = following[:, :1]
    with recorded(model, Lists()), torch.no_grad():
        for _ in range(4):
            step(model, cache, token)
        with pytest.raises(ValueError, match="the attention mask covers 150 tokens"):
            model(input_ids=token, past_key_values=cache, attention_mask=mask)
        with pytest.raises(ValueError, match="does not form attention weights"):
            step(model, cache, token, output_attentions=True)
        with pytest.raises(ValueError, match="being recorded"), recorded(model, Lists()):
            pass
        other = build("llama", layers=2)
        kvsketch.attach(other)
        with recorded(other, Lists()), pytest.raises(ValueError, match="another model"):
            step(other, cache, token)
        step(model, cache, token)
    assert cache.seen == 155


def test_padding_among_new_tokens_is_padding(caplog, tmp_path):
    model = build("llama", layers=2)
    cache, mask, following = read(model, "uniform(keep=0.5, window=16)", 2, tmp_path)
    with recorded(model, Lists()), torch.no_grad():
        for number, token in enumerate(following[:, :6].split(1, 1)):
            there = torch.tensor([[1], [int(number < 3)]])
            mask = torch.cat([mask, there], 1)
            model(
                input_ids=token, past_key_values=cache, attention_mask=mask,
                position_ids=(mask.sum(1, keepdim=True) - 1).clamp_min(0),
            )  # fmt: skip
    assert cache.sketch_layers[1].held.lengths == [132, 153]
    assert "new token is padding" in caplog.text


def test_outputs_stay_what_they_were(tmp_path):
    model = build("llama", layers=2)
    cache, _, following = read(model, "uniform(keep=0.5, window=16)", 1, tmp_path)
    with recorded(model, Lists()), torch.no_grad():
        said = [step(model, cache, token, output_hidden_states=True) for token in following[:, :8].split(1, 1)]
    states = [out.hidden_states[-1] for out in said]
    assert all(not torch.equal(one, states[-1]) for one in states[:-1])
    assert {tuple(out) for out in said} == {("logits", *as_argument(model.forward, None), "hidden_states")}


def test_inference_mode_and_no_grad_take_turns(tmp_path):
    model, graphs = build("llama", layers=2), Lists()
    cache, mask, following = read(model, "kmeans(index=INDEX, probes=4, window=15, staging=16)", 1, tmp_path)
    twin, found = cache.fork(), []
    expected = decoded(model, cache, mask, following[:, :24])
    with recorded(model, graphs):
        for number, token in enumerate(following[:, :24].split(1, 1)):
            with torch.inference_mode() if number // 6 % 2 else torch.no_grad():
                found.append(step(model, twin, token).logits)
    assert_close(torch.cat(found, 1), expected)
    assert_same(twin, cache)
    assert graphs.replayed > 6


def test_a_copy_of_the_model_computes_by_itself(tmp_path):
    model, graphs = build("llama", layers=2), Lists()
    with recorded(model, graphs):
        twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.lm_head.weight.zero_()
        assert not twin(tokens(1, 5)).logits.any()


needs_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


@needs_a_gpu
@pytest.mark.parametrize("spec", SPECS)
def test_on_a_gpu_replayed_steps_are_steps(spec, monkeypatch, tmp_path):
    monkeypatch.undo()
    model = build("llama", layers=2).cuda()
    cache, mask, following = read(model, spec, 2, tmp_path)
    twin, graphs = cache.fork(), CudaGraphs(torch.device("cuda"))
    expected = decoded(model, cache, mask, following)
    assert_close(decoded(model, twin, mask, following, graphs), expected)
    assert_same(twin, cache)
    assert graphs.latest is not None, "some were recorded"


@needs_a_gpu
def test_on_a_gpu_two_caches_take_turns_in_bfloat16(monkeypatch, tmp_path):
    monkeypatch.undo()
    model = build("llama", layers=2).to("cuda", torch.bfloat16)
    specs = ("streaming_llm(keep=96)", "exact")
    caches = [read(model, spec, 1, tmp_path)[0] for spec in specs]
    twins, following = [cache.fork() for cache in caches], tokens(1, STEPS, seed=5).cuda()
    with torch.no_grad(), kvsketch.cuda_graphs(model):
        found = [[step(model, cache, token).logits for cache in caches] for token in following.split(1, 1)]
    with torch.no_grad():
        expected = [[step(model, cache, token).logits for cache in twins] for token in following.split(1, 1)]
    for got, right in zip(zip(*found, strict=True), zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(got, 1), torch.cat(right, 1), rtol=0.1, atol=0.05)


@needs_a_gpu
def test_on_a_gpu_a_step_that_waits_is_left_as_it_is_and_sampling_goes_on(monkeypatch, caplog, tmp_path):
    monkeypatch.undo()
    model = build("llama", layers=2).cuda()
    model.model.norm.register_forward_hook(lambda module, given, out: out * bool(out.any()))
    cache = read(model, "uniform(keep=0.5, window=16)", 1, tmp_path)[0]
    with kvsketch.cuda_graphs(model):
        options = {"do_sample": True, "max_new_tokens": 20, "min_new_tokens": 20}
        model.generate(**cache.new_tokens(tokens(1, 3).cuda()), past_key_values=cache, **options)
    torch.cuda.empty_cache()
    assert torch.multinomial(torch.ones(5, device="cuda"), 2).shape == (2,)
    assert "waits for a number" in caplog.text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there it records")
def test_without_a_gpu_nothing_is_recorded(caplog, tmp_path):
    model = build("llama", layers=2)
    cache, _, following = read(model, "exact", 1, tmp_path)
    with kvsketch.cuda_graphs(model), torch.no_grad():
        step(model, cache, following[:, :1])
    assert "CUDA graphs are for NVIDIA GPUs" in caplog.text

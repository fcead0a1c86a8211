"""Models with our caches on another device, which is only pretended: what they say is what they say on the CPU."""

import copy
from collections import Counter

import pytest
import torch

import fitted
import kvsketch
from kvsketch.evaluation.answers.demo import run_demo
from pretend import pretended
from waiting import Waits
from zoo import FAMILIES, VOCABULARY

SPECS = [
    "exact",
    "uniform(keep=0.25, prefill='streaming', chunk=50)",
    "kvzip(keep=0.25)",
    "h2o(keep=0.25, heads='pyramid', residual=0.1)",
]


@pytest.fixture(scope="module")
def prompts():
    """Two, of which one is shorter."""
    ids = torch.randint(1, VOCABULARY, (2, 150), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    return ids, mask


@pytest.fixture
def there():
    with pretended() as device:
        yield device


def said(model, ids, mask, spec, **options):
    """The tokens, on the CPU, and the cache."""
    cache = kvsketch.make_cache(model, spec)
    given = {"attention_mask": mask, "past_key_values": cache, "max_new_tokens": 6, "do_sample": False} | options
    return model.generate(ids, **given).cpu(), cache


def both(family):
    """A model on the CPU and its copy there."""
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("spec", SPECS)
def test_a_batch_is_answered_as_on_the_cpu(prompts, there, spec):
    model, copied = both("llama")
    copied.to(there)
    expected, _ = said(model, *prompts, spec)
    got, cache = said(copied, *(x.to(there) for x in prompts), spec)
    assert torch.equal(got, expected)
    assert {x.device for x in cache.layers[-1].state()[0].values()} <= {there, torch.device("cpu")}


def test_so_are_sliding_layers_and_softcaps(prompts, there):
    model, copied = both("gemma2")
    copied.to(there)
    expected, _ = said(model, *prompts, "balancekv(keep=0.5)")
    got, _ = said(copied, *(x.to(there) for x in prompts), "balancekv(keep=0.5)")
    assert torch.equal(got, expected)


def test_so_are_beams_forks_files_and_what_is_made_of_an_exact_cache(prompts, there, tmp_path):
    model, copied = both("llama")
    copied.to(there)
    ids, mask = (x.to(there) for x in prompts)
    assert torch.equal(
        said(copied, ids, mask, "uniform(keep=0.5)", num_beams=3)[0],
        said(model, *prompts, "uniform(keep=0.5)", num_beams=3)[0],
    )
    answers = []
    for one, text in ((model, prompts[0][:1]), (copied, ids[:1])):
        exact = kvsketch.prefill(one, text, kvsketch.make_cache(one, "exact(noting='second reading')"), chunk=60)
        smaller = exact.compress("kvzip(keep=0.5)")
        smaller.save(tmp_path / "cache.safetensors")
        loaded = kvsketch.load_cache(one, tmp_path / "cache.safetensors").fork()
        asked = loaded.new_tokens(text[:, :7])
        answers.append(one.generate(**asked, past_key_values=loaded, max_new_tokens=8, do_sample=False).cpu())
    assert torch.equal(*answers)


def test_a_fit_there_is_the_one_on_the_cpu_and_so_is_what_is_looked_up_by_it(there, tmp_path):
    answers, fits = [], []
    for folder, device in ((tmp_path / "cpu", "cpu"), (tmp_path / "there", there)):
        folder.mkdir()
        model = fitted.tiny_model().to(device)
        fitted.fitted(folder, model)
        fits.append(fitted.result_of(folder / "index")[1])
        ids = torch.randint(3, 100, (1, 300), generator=torch.Generator().manual_seed(1)).to(device)
        spec = f"saap(index={str(folder / 'index')!r}, probes=2, window=40, staging=32, full_layers=1)"
        out, cache = said(model, ids, torch.ones_like(ids), spec)
        answers.append(out)
        assert cache.report().looked_up is not None
    assert torch.equal(*answers)
    for file, tensors in fits[0].items():
        for name, own in tensors.items():
            torch.testing.assert_close(fits[1][file][name], own, rtol=1e-3, atol=1e-3)


def test_the_demo_says_there_what_it_says_on_the_cpu():
    plain = next(run_demo(300))
    with pretended() as device:
        found = next(run_demo(300, device=str(device)))
    assert plain.answers == found.answers
    assert sum(answer.right for answer in plain.answers) > len(plain.answers) / 2


@pytest.mark.parametrize("spec", ["exact", "uniform(keep=0.5)", "balancekv(keep=0.25)", "keydiff(keep=0.25)"])
def test_a_prompt_asks_the_device_once_in_each_layer(prompts, there, spec):
    """Whether its numbers are finite. What waits besides is before the first layer, and torch's form of the walk."""
    model, (ids, _) = both("llama")[1].to(there), (x.to(there) for x in prompts)
    with torch.no_grad(), Waits() as waits:
        kvsketch.prefill(model, ids, kvsketch.make_cache(model, spec))
    asked = Counter[str]()
    for line, count in waits.lines.items():
        asked[line.split(":")[0]] += count
    layers = len(model.model.layers)
    assert asked.keys() <= {"before_call.py", "positions.py", "attention.py", "weights.py", "strips.py"}, waits.lines
    assert 2 * layers <= asked["before_call.py"] <= 2 * layers + 1, "an answer is brought, and read"
    assert asked["positions.py"] + asked["attention.py"] <= 3


@pytest.mark.parametrize("layer", [0, 1, -1])
def test_numbers_that_are_none_are_refused_though_the_answer_comes_late(prompts, there, layer):
    model, (ids, _) = both("llama")[1].to(there), (x.to(there) for x in prompts)
    cache, weight = (
        kvsketch.make_cache(model, "balancekv(keep=0.25)"),
        model.model.layers[layer].self_attn.k_proj.weight,
    )
    good, number = weight.detach().clone(), range(len(model.model.layers))[layer]
    with torch.no_grad():
        weight.fill_(float("nan"))
        with pytest.raises(ValueError, match=f"layer {number} was given keys that are NaN or infinite"):
            kvsketch.prefill(model, ids, cache)
        weight.copy_(good)
        if layer:
            with pytest.raises(ValueError, match="failed half-way"):
                kvsketch.prefill(model, ids, cache)
            cache.reset()
        assert cache.seen == 0
        kvsketch.prefill(model, ids[:1], cache)
    assert cache.seen == 150


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("spec", ["exact", "uniform(keep=0.5)", "balancekv(keep=0.5)"])
def test_a_step_of_a_model_asks_the_device_twice_before_its_first_layer_and_then_no_more(prompts, there, spec, padded):
    """Whether its tokens follow on what was read, and whether any are padding: not once for every row or layer."""
    model, (ids, mask) = both("llama")[1].to(there), (x.to(there) for x in prompts)
    cache = kvsketch.make_cache(model, spec)
    with torch.no_grad():
        kvsketch.prefill(model, ids, cache, **({"attention_mask": mask} if padded else {}))
        seen = cache.new_tokens(ids[:, :1])["attention_mask"]
        given = {"attention_mask": seen, "position_ids": seen.cumsum(1)[:, -1:] - 1}
        with Waits() as waits:
            model(ids[:, :1], past_key_values=cache, **given)
    assert {line.split(":")[0] for line in waits.lines} == {"positions.py", "attention.py"}
    assert waits.lines.total() == 2

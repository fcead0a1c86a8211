"""One exact read serves every method: what `compress` gives is what the method would have held itself."""

import pytest
import torch

import kvsketch
import zoo
from kvsketch.caches.core.config import BudgetedConfig
from kvsketch.caches.registry import METHODS
from kvsketch.evaluation.reading import readable_for

LOOKUPS = [
    "lsh(bins=6, window=40, staging=50)",
    "lsh(kind='magicpig', bits=4, tables=9, window=40)",
    "random_buckets(buckets=8, probes=2, window=40, staging=50)",
    "retrieval(top=0.1, window=40)",
]
# No exact cache has what they go by; and there is no profile of these models.
ELSEWHERE = ("tova", "expected_attention", "streaming_heads")
SPECS = [
    f"{name}(keep=0.25)"
    for name, config in METHODS.items()
    if issubclass(config, BudgetedConfig) and name not in ELSEWHERE
]
SPECS += ["exact", "uniform(keep='300KB', window=16)", *LOOKUPS]
# Of the queries that came, not of what is held.
ASKED = ("error", "longest_query", "recall", ".reads")
CASES = [("llama", spec, True) for spec in SPECS] + [("llama", SPECS[-1], False)]
CASES += [(family, SPECS[0], True) for family in ("gemma3", "gpt_oss", "qwen3")]


def read(model, spec, ids, mask):
    return kvsketch.prefill(model, ids, kvsketch.make_cache(model, spec), attention_mask=mask)


def state(cache):
    tensors = {}
    for index, layer in enumerate(cache.sketch_layers):
        found, numbers = layer.state()
        tensors |= {f"{index}.{name}": tensor for name, tensor in found.items() if not name.endswith(ASKED)}
        numbers.pop("measured_at", None)  # the error was measured with queries that are gone
        tensors[f"{index}.numbers"] = repr(numbers)
    return tensors


def counted_bytes(cache):
    """What is noted of a prompt's last queries, which looked up; in a cache that was compressed none have yet."""
    named = [item for layer in cache.sketch_layers for item in layer.state()[0].items()]
    return sum(tensor.nbytes for name, tensor in named if name.endswith(".reads"))


@pytest.mark.parametrize(("family", "spec", "padded"), CASES)
def test_it_holds_what_the_method_holds_after_reading_itself(family, spec, padded):
    model, ids = zoo.build(family, layers=2), zoo.tokens(3, 400)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :150], mask[2, :33] = 0, 0
    alone = read(model, spec, ids, mask)
    shared = read(model, readable_for(kvsketch.parse_spec(spec)), ids, mask).compress(spec)
    expected, got = state(alone), state(shared)
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert value == got[name] if isinstance(value, str) else torch.equal(value, got[name]), name
    if alone.config.holds_back:  # its window shrank in place; that of the other was made as it is
        assert abs(shared.nbytes - alone.nbytes) <= 32 * 12 * 140, "no more than spare room of 12 lanes"
    else:
        assert shared.nbytes == alone.nbytes - counted_bytes(alone)
    assert str(shared.config) == str(alone.config)
    question = zoo.tokens(3, 7, seed=5)
    options = {"max_new_tokens": 40, "do_sample": False}
    answers = [model.generate(**c.new_tokens(question), past_key_values=c, **options) for c in (alone, shared)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("rows", [1, 2])
def test_the_exact_cache_is_left_as_it_was(rows):
    model, ids = zoo.build("llama"), zoo.tokens(rows, 300)
    exact = read(model, "exact", ids, None)
    before = {name: v if isinstance(v, str) else v.clone() for name, v in state(exact).items()}
    small = exact.compress("uniform(keep=0.25)")
    question = zoo.tokens(rows, 5)
    model.generate(**small.new_tokens(question), past_key_values=small, max_new_tokens=50, do_sample=False)
    for name, value in state(exact).items():
        assert value == before[name] if isinstance(value, str) else torch.equal(value, before[name])


def test_a_text_read_in_two_calls_can_be_compressed_too():
    model, ids = zoo.build("llama"), zoo.tokens(2, 300)
    exact = kvsketch.make_cache(model, "exact")
    for part in (ids[:, :111], ids[:, 111:]):
        kvsketch.prefill(model, part, exact)
    assert exact.compress("streaming_llm(keep=128)").get_seq_length() == 300


def test_what_cannot_be_compressed_says_why():
    model = zoo.build("llama")
    cache = read(model, "uniform(keep=0.5)", zoo.tokens(1, 200), None)
    with pytest.raises(
        ValueError, match="only an exact cache can be compressed by another method, this one is uniform"
    ):
        cache.compress("streaming_llm")
    exact = read(model, "exact", zoo.tokens(1, 200), None)
    with pytest.raises(ValueError, match="have it read the text itself"):
        exact.compress("uniform(prefill='streaming')")
    with pytest.raises(ValueError, match="did you mean uniform"):
        exact.compress("unifrm")
    assert kvsketch.make_cache(model, "exact").compress("uniform").get_seq_length() == 0

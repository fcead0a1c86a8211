"""torch.compile sees no graph break between a model's first layer and its last."""

import pytest
import torch

import kvsketch
import zoo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # the compiler warns about itself in many ways
]


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.use_deterministic_algorithms(False)  # torch.empty filled with NaN is no part of a graph
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def filled(model, spec):
    return kvsketch.prefill(model, zoo.tokens(1, 200), kvsketch.make_cache(model, spec))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("spec", ["exact", "uniform(keep=0.5, window=16)", "streaming_llm(keep=128)"])
def test_a_decode_step_has_no_graph_break(family, spec):
    model = zoo.build(family)
    cache = filled(model, spec)
    explained = torch._dynamo.explain(model.forward)(torch.tensor([[5]]), past_key_values=cache)
    assert explained.graph_break_count == 0, explained.break_reasons
    assert explained.graph_count == 1


@pytest.mark.parametrize("spec", ["exact", "uniform(keep=0.5, window=16)"])
def test_compiled_decoding_equals_eager_across_blocks(spec):
    model = zoo.build("llama")
    eager_cache = filled(model, spec)
    compiled_cache = eager_cache.fork()
    step = torch.compile(model.forward, backend="eager", dynamic=True)
    with torch.no_grad():
        for token in zoo.tokens(1, 40, seed=5).split(1, 1):
            expected = model(token, past_key_values=eager_cache).logits
            torch.testing.assert_close(
                step(token, past_key_values=compiled_cache).logits, expected, rtol=1e-4, atol=1e-5
            )
    assert compiled_cache.sketch_layers[0].held.left == eager_cache.sketch_layers[0].held.left

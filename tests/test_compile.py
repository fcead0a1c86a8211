"""torch.compile sees no graph break in a decode step, and decodes the same.

In processes of their own: the tests' run-time shape checks are something that the compiler cannot trace.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SETTING = """
import sys, warnings
import torch, zoo, kvsketch
warnings.filterwarnings("ignore")
torch.set_num_threads(1)
family, spec = sys.argv[1:]
model = zoo.build(family)
cache = kvsketch.prefill(model, zoo.tokens(1, 200), kvsketch.make_cache(model, spec))
"""
COUNT_BREAKS = """
explained = torch._dynamo.explain(model.forward)(torch.tensor([[5]]), past_key_values=cache)
assert explained.graph_break_count == 0, explained.break_reasons
assert explained.graph_count == 1, explained.graph_count
"""
WITH_A_MASK = """
for skip in (0, 30):
    ids = zoo.tokens(2, 200)
    mask = torch.ones_like(ids)
    mask[0, :skip] = 0
    cache = kvsketch.prefill(model, ids, kvsketch.make_cache(model, spec), attention_mask=mask)
    inputs = cache.new_tokens(torch.tensor([[5], [6]]))
    positions = (inputs["attention_mask"].cumsum(1) - 1)[:, -1:]
    with torch.no_grad():
        expected = model(**inputs, position_ids=positions, past_key_values=cache.fork()).logits
        explained = torch._dynamo.explain(model.forward)(**inputs, position_ids=positions, past_key_values=cache.fork())
        assert explained.graph_break_count == 0, explained.break_reasons
        step = torch.compile(model.forward, backend="eager", dynamic=True)
        got = step(**inputs, position_ids=positions, past_key_values=cache).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
"""
DECODE = """
twin = cache.fork()
before = cache.sketch_layers[0].held.left
step = torch.compile(model.forward, backend="eager", dynamic=True)
with torch.no_grad():
    for token in zoo.tokens(1, 40, seed=5).split(1, 1):
        expected = model(token, past_key_values=cache).logits
        torch.testing.assert_close(step(token, past_key_values=twin).logits, expected, rtol=1e-4, atol=1e-5)
layers = [cache.sketch_layers[0].held, twin.sketch_layers[0].held]
assert layers[0].left == layers[1].left
assert layers[0].left > before or spec == "exact", "no block left the window: choose other counts"
"""
SPECS = ["exact", "uniform(keep=0.5, window=16)", "streaming_llm(keep=128)"]
MORE = ["clustergen(keep=160)", "subgen(keep=160, window=16)", "balancekv(keep=160, window=16)"]
pytestmark = pytest.mark.slow


def run(script, family, spec):
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", SETTING + script, family, spec], cwd=here, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("spec", SPECS)
def test_a_decode_step_has_no_graph_break(family, spec):
    run(COUNT_BREAKS, family, spec)


@pytest.mark.parametrize("spec", [*SPECS, *MORE])
def test_a_decode_step_with_a_padding_mask_has_no_graph_break(spec):
    run(WITH_A_MASK, "llama", spec)


@pytest.mark.parametrize("spec", [*SPECS, *MORE])
def test_compiled_decoding_equals_eager_across_blocks(spec):
    run(DECODE, "llama", spec)

"""torch.compile sees no graph break in a decode step, makes few graphs, and decodes the same.

In processes of their own: the tests' run-time shape checks are something that the compiler cannot trace.
"""

import subprocess
import sys
from pathlib import Path

import pytest

SETTING = """
import sys, tempfile, warnings
import torch, zoo, kvsketch
from uneven import made_profile
warnings.filterwarnings("ignore")
torch.set_num_threads(1)

def unbroken(model, **inputs):
    explained = torch._dynamo.explain(model.forward)(**inputs)
    assert explained.graph_break_count == 0, explained.break_reasons
    assert explained.graph_count == 1, explained.graph_count

def compiled(model, *, whole=False):
    torch._dynamo.reset()
    return torch.compile(model.forward, backend="eager", dynamic=True, fullgraph=whole)  # whole: or it is an error
"""
STEP = """
for case in sys.argv[1:]:
    if ": " not in case:
        continue
    family, spec = case.split(": ")
    torch._dynamo.reset()
    model = zoo.build(family, layers=2)  # more would be compiled like these
    with tempfile.TemporaryDirectory() as folder:
        spec = spec.replace("PROFILE", made_profile(folder + "/profile.json", model))
        cache = kvsketch.prefill(model, zoo.tokens(1, 200), kvsketch.make_cache(model, spec))
    unbroken(model, input_ids=torch.tensor([[5]]), past_key_values=cache)
"""
WITH_A_MASK = """
for spec in sys.argv[1:]:
    if ": " in spec:
        continue
    model, ids = zoo.build("llama", layers=1), zoo.tokens(2, 200)
    mask = torch.ones_like(ids)
    mask[0, :30] = 0
    cache = kvsketch.prefill(model, ids, kvsketch.make_cache(model, spec), attention_mask=mask)
    inputs = cache.new_tokens(torch.tensor([[5], [6]]))
    inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1)[:, -1:]
    with torch.no_grad():
        expected = model(**inputs, past_key_values=cache.fork()).logits
        got = compiled(model, whole=True)(**inputs, past_key_values=cache).logits
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
"""
DECODE = """
for spec in sys.argv[1:]:
    model = zoo.build("llama", layers=1)
    cache = kvsketch.prefill(model, zoo.tokens(1, 200), kvsketch.make_cache(model, spec))
    twin, before = cache.fork(), cache.sketch_layers[0].held.left
    step = compiled(model)
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        for own in (cache, twin):
            model(zoo.tokens(1, 1), past_key_values=own)
        for token in zoo.tokens(1, 14, seed=5).split(1, 1):
            expected = model(token, past_key_values=cache).logits
            torch.testing.assert_close(step(token, past_key_values=twin).logits, expected, rtol=1e-4, atol=1e-5)
    layers = [cache.sketch_layers[0].held, twin.sketch_layers[0].held]
    assert layers[0].again is not None, "the short road is open"
    assert layers[1].again is None, "compiled code goes without, and what that was about is nobody's"
    assert layers[0].left == layers[1].left
    assert layers[0].left > before or spec == "exact", "no block left the window: choose other counts"
    # With a block the compiler breaks off once, at the end of the call, and not in the midst of a layer.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 8
"""
pytestmark = pytest.mark.slow


def run(script, *given):
    done = subprocess.run(
        [sys.executable, "-c", SETTING + script, *given],
        cwd=Path(__file__).parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert "recompile_limit" not in done.stderr, "a graph for every length: then nothing is compiled any more"


def test_a_decode_step_has_no_graph_break_with_a_padding_mask_or_without():
    """Masks come with the methods that are named without a family."""
    every = [f"llama: {spec}" for spec in ("exact", "kvzip(keep=160)")]
    unequal = "heads='PROFILE'"
    every += [f"llama: uniform(keep=160, window=16, {unequal})", f"llama: streaming_llm(keep=128, {unequal})"]
    every += [f"{family}: uniform(keep=0.5)" for family in ("gemma2", "gpt_oss", "lfm2")]
    every += ["streaming_llm(keep=128)", "subgen(keep=160, window=16)", "balancekv(keep=160, window=16)"]
    run(STEP + WITH_A_MASK, *every)


@pytest.mark.once
def test_compiled_decoding_equals_eager_across_a_block():
    run(DECODE, "exact", "keydiff(keep=0.5)", "kvzip(keep=160)")

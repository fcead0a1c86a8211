"""What models answer with every spec: prompts in one call and in chunks, padded rows, single steps, second turns.

    python -m golden.rows            in this folder: note down anew what is answered now

Tokens are given, not generated, so that one difference does not make all later ones. Of every answer the largest logit,
its lead and a few logits are noted. Calls have 1 token or 256 and more.
"""

import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

import kvsketch
import zoo
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.evaluation.tasks import TASKS, Setting
from kvsketch.evaluation.tasks.length import Fitter
from kvsketch.huggingface.identity import describe_model
from made_index import make_index
from uneven import made_profile

FILE = Path(__file__).parent / "rows.json"
INDEX = "INDEX"  # stands for the folder of an index made up for the model
PROFILE = "'profile'"  # for a profile made up for it
# Every spec that README and docs name, as they name it; test_golden says so. What they leave out is in MORE.
NAMED = (
    "exact",
    "streaming_llm(keep=0.5)",
    "streaming_llm(keep=0.25)",
    "streaming_llm(keep=0.125)",
    "streaming_llm(keep=4096, prefill='streaming', chunk=2048)",
    "uniform(keep=0.5)",
    "uniform(keep=0.25)",
    "uniform(keep=0.125)",
    "uniform(keep=4096)",
    "uniform(keep=4096, prefill='streaming', chunk=2048)",
    "uniform(weights='none')",
    "clustergen(keep=0.5)",
    "clustergen(keep=0.25)",
    "clustergen(keep=0.125)",
    "clustergen(window=64)",
    "clustergen(weights='none')",
    "clustergen(apart=0)",
    "clustergen(entries='centre')",
    "clustergen(entries='centre', apart=0)",
    "clustergen(keep=0.5, entries='centre', apart=0)",
    "clustergen(entries='centre', apart=0, weights='none')",
    "subgen(keep=0.25)",
    "subgen(growth=1.25)",
    "subgen(keep=4096, delta=1, s=1024, t=2)",
    "balancekv(keep=0.5)",
    "balancekv(keep=0.25)",
    "balancekv(keep=0.125)",
    "balancekv(keep=0.0625)",
    "balancekv(keep=0.25, block=64)",
    "balancekv(keep=0.25, block=128)",
    "balancekv(walk='fair')",
    "balancekv(sharpness=1)",
    "balancekv(keep=0.5, sharpness=1)",
    "balancekv(keep=0.125, sharpness=1)",
    "balancekv(augmented=False)",
    "balancekv(sharpness=1, augmented=False)",
    "balancekv(keep=0.5, sharpness=1, augmented=False)",
    "balancekv(keep=0.0625, sharpness=1, augmented=False)",
    "balancekv(keep=0.25, block=64, sharpness=1, augmented=False)",
    "balancekv(walk='fair', sharpness=1, augmented=False)",
    'balancekv(mode="faithful")',
    "balancekv(keep=0.5, mode='faithful')",
    "balancekv(keep=0.25, mode='faithful')",
    "keydiff(keep=0.25)",
    "keydiff(keep=0.25, heads='profile')",
    "keydiff(keep=0.125, heads='profile')",
    "clustergen(keep=0.25, heads='profile', window=16)",
    "balancekv(keep=0.25, heads='profile', window=16)",
    "uniform(keep=0.25, heads='profile', window=16)",
    "snapkv(keep=0.25)",
    "pyramidkv(keep=0.25)",
    "h2o(keep=0.25)",
    "tova(keep=0.25)",
    "expected_attention(keep=0.25)",
    "kvzip(keep=0.25)",
    "kvzip(keep=0.125)",
    "kvzip(keep=0.125, heads='equal')",
    "kvzip(keep=0.125, residual=0.1)",
    "kvzip(keep=0.25, window=0.25)",
    "kvzip(keep=0.125, window=0.25)",
    "keydiff(keep=0.25, heads='profile', window=0.25)",
    "streaming_heads(keep=0.25, heads='profile')",
    "exact(noting='second reading')",
    "saap(index='INDEX', probes=32)",
    "saap(index='INDEX', probes=64, visit=0.1, estimate=True, prefer='density', window=255)",
    "saap(index='INDEX', estimate=True)",
    "saap(index='INDEX', estimate=True, prefer='density')",
    "kmeans(index='INDEX', rope=True)",
    "kmeans(index='INDEX', estimate=True)",
    "lsh(kind='kdeformer')",
    "lsh(kind='reformer')",
    "lsh(kind='magicpig')",
    "retrieval(top=0.05)",
)
MORE = (
    "streaming_llm(keep=180, sinks=1)",
    "uniform(keep=180, window=40)",
    "uniform(keep='700KB')",
    "uniform(keep=0.25, prefill='streaming', chunk=256)",
    "clustergen(keep=180)",
    "subgen(keep=200, window=16)",
    "subgen(keep=200, window=16, normalizer='clusters', delta=4, t=2)",
    "balancekv(keep=180, window=32)",
    "keydiff(keep=100, heads='pyramid')",
    "keydiff(keep=0.25, weights='mass')",
    "kvzip(keep=100, weights='spread')",
    "snapkv(keep=0.25, heads='threshold', window=16)",
    "h2o(keep=90)",
    "clustergen(heads='profile')",
    "balancekv(keep=180, window=32, sharpness=1, augmented=False)",
    "balancekv(keep=200, mode='faithful', block=64)",
    "saap(index='INDEX', probes=2, window=48, staging=40)",
    "saap(index='INDEX', probes=8, visit=0.1, window=48, staging=40, estimate=True, prefer='density')",
    "saap(index='INDEX', mass=0.6, window=48, staging=40, prefill='streaming', chunk=256)",
    "kmeans(index='INDEX', probes=2, window=48, staging=40)",
    "kmeans(index='INDEX', probes=2, window=48, staging=40, rope=True)",
    "lsh(bins=6, window=48, staging=40)",
    "lsh(kind='reformer', bins=6, window=48, staging=40)",
    "lsh(kind='magicpig', bits=4, tables=9, window=48)",
    "random_buckets(buckets=8, probes=2, window=48, staging=40)",
    "retrieval(top=0.1, window=48)",
)
ELSEWHERE = (  # on models with soft-capping and sliding layers, and with learnt sinks
    "exact",
    "uniform(keep=0.25)",
    "clustergen(keep=0.25)",
    "subgen(keep=200, window=16)",
    "balancekv(keep=0.25)",
    "balancekv(keep=0.25, mode='faithful')",
    "saap(index='INDEX', probes=2, window=48, staging=40, estimate=True)",
    "lsh(bins=6, window=48, staging=40)",
)
ANSWERED = (  # by the embedded model, in words
    "exact",
    "streaming_llm(keep=0.5)",
    "uniform(keep=0.5)",
    "clustergen(keep=0.25)",
    "balancekv(keep=0.5)",
    "random_buckets(buckets=16, probes=8, window=64, staging=64)",
)
LAYERS = 2  # of the models
LENGTHS = (600, 470, 333)  # of the rows of a padded batch
LOOKED_AT = (3, 31, 50, 68, 96)  # tokens of the vocabulary whose logits are noted


def cases() -> list[tuple[str, str]]:
    """Models and specs."""
    return [
        *(("llama", spec) for spec in (*NAMED, *MORE)),
        *((family, spec) for family in ("gemma2", "gpt_oss") for spec in ELSEWHERE),
    ]


def answers(family: str, spec: str, folder: Path) -> list[dict[str, list[float]]]:
    """What a model says at some moments of both texts."""
    model = zoo.build(family, layers=LAYERS)
    model.config.max_position_embeddings = 4096  # some read a prompt twice
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*took the first call for the whole prompt")
        return [*padded(model, made(model, spec, folder)), *chunked(model, made(model, spec, folder))]


def made(model, spec: str, folder: Path) -> kvsketch.SketchCache:
    """A cache, with an index or a profile where the spec wants one."""
    if PROFILE in spec:
        spec = spec.replace(PROFILE, repr(made_profile(folder / "profile.json", model, tokens=600)))
    if INDEX in spec:
        known = describe_model(model)
        index = make_index(folder / known["fingerprint"], model, heads=known["kv_heads"], width=known["head_width"])
        spec = spec.replace(INDEX, index)
    return kvsketch.make_cache(model, spec)


def padded(model, cache) -> Iterator[dict[str, list[float]]]:
    """Three rows of unequal lengths in one call, 36 single steps, a second turn in one call, a step."""
    ids, mask = zoo.tokens(len(LENGTHS), max(LENGTHS)), torch.ones(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        mask[row, :-length] = 0
    yield said(model, cache, ids * mask, mask)
    for number, step in enumerate(zoo.tokens(len(LENGTHS), 36, seed=2).split(1, 1)):
        answer = said(model, cache, step)
        if number in (0, 20, 35):
            yield answer
    yield said(model, cache, zoo.tokens(len(LENGTHS), 300, seed=3))
    yield said(model, cache, zoo.tokens(len(LENGTHS), 1, seed=4))


def chunked(model, cache) -> Iterator[dict[str, list[float]]]:
    """A row in three chunks of 256, steps, a chunk of 256 and a step."""
    for chunk in zoo.tokens(1, 768, seed=5).split(256, 1):
        answer = said(model, cache, chunk)
    yield answer
    for step in zoo.tokens(1, 33, seed=6).split(1, 1):
        answer = said(model, cache, step)
    yield answer
    yield said(model, cache, zoo.tokens(1, 256, seed=7))
    yield said(model, cache, zoo.tokens(1, 1, seed=8))


def said(model, cache, ids, mask=None) -> dict[str, list[float]]:
    """The logits after new tokens, a list for all rows one after another."""
    if cache.seen:
        mask = cache.new_tokens(ids)["attention_mask"]
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :] if mask is not None else None
    with torch.no_grad():
        out = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1)
    logits = out.logits[:, -1].double()
    best = logits.topk(2)
    return {
        "token": best.indices[:, 0].tolist(),
        "lead": [float(f"{x:.4g}") for x in (best.values[:, 0] - best.values[:, 1]).tolist()],
        "logits": [float(f"{x:.6g}") for x in logits[:, LOOKED_AT].flatten().tolist()],
    }


def words(spec: str) -> list[str]:
    """What the embedded model answers on a record of lines, in one batch of questions that come after it was read."""
    model, tokenizer = load_embedded(torch.float32)
    setting = Setting(size=1, wording="compact", questions=6)
    fitter = Fitter(TASKS["lines"], setting, lambda made: len(tokenizer(made.context)["input_ids"]))
    sample = fitter.sample(600, "golden")
    ids = tokenizer(sample.context, return_tensors="pt")["input_ids"]
    cache = kvsketch.prefill(model, ids, kvsketch.make_cache(model, spec))
    said = []
    for question in sample.questions:
        asked = tokenizer(question.prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        twin = cache.fork()
        out = model.generate(**twin.new_tokens(asked), past_key_values=twin, max_new_tokens=8, do_sample=False)
        said.append(tokenizer.decode(out[0, asked.shape[1] :], skip_special_tokens=True))
    return said


def main() -> None:
    """Note down what is answered now."""
    torch.set_num_threads(1)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for family, spec in cases():
            print(family, spec, file=sys.stderr)
            found[f"{family}: {spec}"] = answers(family, spec, Path(folder))
    for spec in ANSWERED:
        found[f"embedded: {spec}"] = words(spec)
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
    FILE.write_text(f"{{\n{rows}\n}}\n")


if __name__ == "__main__":
    main()

"""A model that is spread over two processes answers as in one, whatever the method: each has half of the heads."""

import json
import os
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoModelForCausalLM, LlamaConfig

import kvsketch
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.huggingface.capture import capture
from kvsketch.huggingface.identity import describe_model, fingerprint

PROCESSES = 2
LENGTH, PADDING = 500, 90
SPECS = (
    "exact",
    "uniform(keep=0.25)",  # draws by head
    "uniform(keep=0.25, heads='profile')",
    "streaming_heads(keep=0.25)",
    "balancekv(keep=0.25, heads='pyramid')",
    "subgen(keep=200, window=16)",
    "snapkv(keep='900KB', heads='threshold', window=16)",  # scores of all heads, bytes of all processes
    "kvzip(keep=0.25)",  # a second reading, too
    "clustergen(keep=0.25, heads='profile')",  # windows by head
    "saap(probes=4, window=48, staging=32, mass=0.7)",
    "kmeans(probes=4, window=48, staging=32)",
    "lsh(bins=6, window=48, staging=40)",
    "lsh(kind='magicpig', bits=4, tables=9, window=48)",
    "random_buckets(buckets=8, probes=2, window=48, staging=40)",
)


def ids_and_mask():
    ids = torch.randint(200, 900, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0
    return ids, mask


@torch.no_grad()
def answers(model, spec):
    """Logits at the end of a padded prompt and of two later calls, and what each head holds then."""
    ids, mask = ids_and_mask()
    cache = kvsketch.make_cache(model, spec)
    seen = [model(ids, attention_mask=mask, past_key_values=cache).logits[:, -1]]
    fork = cache.fork()
    for count in (1, 3):
        mask = torch.cat([mask, mask.new_ones(2, count)], 1)
        seen.append(model(ids[:, :count], attention_mask=mask, past_key_values=fork).logits[:, -1])
    counts = [layer.held.count_entries().T.tolist() for layer in fork.sketch_layers]
    report = fork.report()
    return {"logits": torch.stack(seen).tolist(), "entries": counts, "bytes": report.nbytes, "of": report.full_nbytes}


def refusals(model, folder):
    """What is said of files, and of noting what layers see."""
    cache = kvsketch.make_cache(model, "exact")
    with torch.no_grad():
        model(ids_and_mask()[0], past_key_values=cache)
    found = []
    for call in (
        lambda: cache.save(folder / "some.safetensors"),
        lambda: kvsketch.load_cache(model, folder / "whole.safetensors"),
        lambda: capture(model, ids_and_mask()[0][:1]),
    ):
        with pytest.raises(ValueError, match="spread over several") as raised:
            call()
        found.append(str(raised.value))
    return found


def one_of_several(rank, folder):
    """What one process does."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(PROCESSES)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(PROCESSES)}
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=PROCESSES)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = {f"model.{name}": way for name, way in LlamaConfig.base_model_tp_plan.items()}  # without the odd head
        model = AutoModelForCausalLM.from_pretrained(folder, tp_plan=plan, dtype=torch.float32)
    found = {spec: answers(model, spec) for spec in SPECS}
    found["fingerprints"] = [fingerprint(model), describe_model(model)["fingerprint"]]
    found["refused"] = refusals(model, folder)
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def model():
    return load_embedded(torch.float32)[0]


@pytest.fixture(scope="module")
def found(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("spread")
    model.save_pretrained(folder)
    cache = kvsketch.make_cache(model, "exact")
    with torch.no_grad():
        model(ids_and_mask()[0], past_key_values=cache)
    cache.save(folder / "whole.safetensors")
    mp.spawn(one_of_several, (folder,), PROCESSES)
    return [json.loads((folder / f"found-{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.parametrize("spec", SPECS)
def test_answers_and_entries_are_those_of_one_process(found, model, spec):
    alone = answers(model, spec)
    for own in found:
        torch.testing.assert_close(torch.tensor(own[spec]["logits"]), torch.tensor(alone["logits"]), atol=1e-3, rtol=0)
    for number, entries in enumerate(alone["entries"]):
        assert [heads for own in found for heads in own[spec]["entries"][number]] == entries
    assert sum(own[spec]["of"] for own in found) == alone["of"]
    assert sum(own[spec]["bytes"] for own in found) <= 1.05 * alone["bytes"]


def test_the_weights_are_known_to_be_the_same(found, model):
    assert {tuple(own["fingerprints"]) for own in found} == {(fingerprint(model), describe_model(model)["fingerprint"])}


def test_what_needs_all_heads_is_refused_in_a_sentence(found):
    for own in found:
        assert [text.split(" needs ")[0] for text in own["refused"]] == [
            "saving a cache", "a cache from a file", "noting what layers see",
        ]  # fmt: skip

"""Fits so small that a test can make one: a random Llama that reads a few hundred words."""

import json
import random

import torch
import transformers

from kvsketch.evaluation.embedded import load_tokenizer
from kvsketch.files import read_json, read_tensors
from kvsketch.fitting.fit import fit
from kvsketch.fitting.settings import FitSettings, Recipe, ShardSettings

TOKENIZER = load_tokenizer()
WORDS = ("otter", "pyramid", "screen", "motel", "stove", "mouse", "kiln", "inlet", "garden", "river", "window")
LAYERS, KV_HEADS, WIDTH = 3, 2, 16


def tiny_model(seed=0, **given):
    """A Llama whose queries and keys are sharpened, for random ones attend almost uniformly."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=KV_HEADS, head_dim=WIDTH, max_position_embeddings=1024,
        pad_token_id=TOKENIZER.pad_token_id, bos_token_id=TOKENIZER.bos_token_id, eos_token_id=TOKENIZER.eos_token_id,
        **given,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                parameter.mul_(30)
    return model


def sentences(words, seed=0):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) for _ in range(words))


def write_corpus(folder, texts=5, words=45):
    path = folder / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": sentences(words, seed)}) + "\n" for seed in range(texts)))
    return path


def settings(**given):
    """Small ones; those of the shards and of the recipe by their own names."""
    shards = {"apart": 24, "away": 12, "queries": 30}
    recipe = {"steps": 12, "batch": 16}
    shards |= {name: given.pop(name) for name in (*shards, "layers") if name in given}
    recipe |= {name: given.pop(name) for name in (*recipe, "start", "products") if name in given}
    options = {"buckets": 8, "hidden": 10, "iterations": 3, "pool": 100, "held_out": 0.3, "tokens": 120} | given
    return FitSettings(shards=ShardSettings(**shards), recipe=Recipe(**recipe), **options)


def fitted(folder, model=None, chosen=None, **options):
    """A fit in `folder`/index to a corpus beside it."""
    corpus = folder / "corpus.jsonl"
    if not corpus.is_file():
        write_corpus(folder)
    out = options.pop("out", folder / "index")
    chosen = chosen or settings()
    return fit(model or tiny_model(), TOKENIZER, [corpus], out, chosen, name="tiny", **options)


def result_of(folder):
    """All that a fit leaves but its times: numbers to compare bit by bit."""
    description = read_json(folder / "index.json")
    for layer in description["layers"].values():
        del layer["seconds"], layer["file"]  # a file has the times in it
    del description["made_with"]
    tensors = {path.name: read_tensors(path) for path in sorted(folder.glob("*.safetensors"))}
    return description, tensors


def same(one, other):
    """Whether two results are, bit by bit."""
    (described, tensors), (described_too, tensors_too) = one, other
    return (
        described == described_too
        and {name: list(found) for name, found in tensors.items()}
        == {name: list(found) for name, found in tensors_too.items()}
        and all(torch.equal(tensors[file][name], tensors_too[file][name]) for file in tensors for name in tensors[file])
    )

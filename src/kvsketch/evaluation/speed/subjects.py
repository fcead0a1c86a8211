"""The models that are timed whole: a random Llama, and a real one."""

from collections.abc import Callable, Iterator

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.lookup.saap import IndexedConfig
from kvsketch.checkpoints import SMOLLM2, smollm2_folder
from kvsketch.evaluation.board import timed
from kvsketch.evaluation.results.rows import RowsFile, key_of
from kvsketch.evaluation.speed import whole
from kvsketch.evaluation.speed.made import made_up, random_llama
from kvsketch.evaluation.speed.plan import KEY, LLAMA, PIECE, WARM, Plan
from kvsketch.huggingface.identity import describe_model

READS = 3  # times that the real model's prompt is read
Steps = Iterator[tuple[str, int]]
Say = Callable[[str], None]


def run_llama(plan: Plan, rows: RowsFile, say: Say) -> Steps:
    """Time a Llama with random weights at every length; prompts are read if they are not too long."""
    forms = [(tokens, way) for tokens in plan.end_to_end for way in plan.ways]
    labels = [plan.labels(LLAMA, tokens, way, plan.kernels[0]) for tokens, way in forms]
    if all(key_of(row, KEY) in rows.done for row in labels):
        yield LLAMA, len(labels)
        return
    heads = plan.kv_heads * plan.group
    model = random_llama(
        layers=plan.layers, heads=heads, kv_heads=plan.kv_heads, head_dim=plan.width, dtype=plan.precision
    )
    layers = range(plan.layers)
    with made_up(plan.kv_heads, plan.width, layers, plan.index, describe_model(model)) as ready:
        for tokens in plan.end_to_end:
            generator = torch.Generator().manual_seed(1)
            ids = torch.randint(1, 1000, (1, tokens + WARM + plan.rounds), generator=generator)
            following = ids[0, tokens:]
            if tokens <= plan.prompts:
                subject = whole.Subject(LLAMA, model, tokens, following, prompt=ids[:, :tokens])
            else:
                say(
                    f"a prompt of {tokens:,} tokens is not read (--prompts {tokens} would): caches are filled with "
                    f"random numbers, and {PIECE} tokens are read after these"
                )
                piece = torch.randint(1, 1000, (1, PIECE), generator=generator)
                subject = whole.Subject(LLAMA, model, tokens, following, piece=piece)
            yield from whole.run(subject, plan, rows, ready, say)


def run_real(plan: Plan, rows: RowsFile, say: Say) -> Steps:
    """Time smollm2 on a document as long as it can read; the index of it that `saap` needs is made up."""
    try:
        folder = smollm2_folder(say)
    except ValueError as error:
        say(f"the real model is left out: {error}")
        yield "the real model", len(plan.ways)
        return
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=plan.precision, use_safetensors=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = model.config.max_position_embeddings - WARM - plan.rounds - whole.BEFORE - whole.IN_ROW
    document = timed.Plan(methods=(), tokens=tokens, steps=plan.rounds).document(
        lambda text: tokenizer(text)["input_ids"]
    )
    ids = torch.tensor([document])
    subject = whole.Subject(SMOLLM2, model, tokens, ids[0, tokens:], ids[:, :tokens], reads=READS)
    layers, heads, _, width = subject.shape
    with made_up(heads, width, range(layers), plan.index, describe_model(model)) as ready:

        def with_index(config: MethodConfig) -> MethodConfig:  # the package has a profile of its heads
            return ready(config) if isinstance(config, IndexedConfig) else config

        yield from whole.run(subject, plan, rows, with_index, say)

"""Methods side by side on one document, at the same budget."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvsketch.evaluation.session import Timing, answer, read_prompt
from kvsketch.evaluation.stand_in import byte_tokenizer, stand_in_model
from kvsketch.huggingface import Report, make_cache

METHODS = ("exact", "streaming_llm(keep=0.125)", "uniform(keep=0.125)", "uniform(keep=0.125, weights='none')")
QUESTION = "\nWhat was noted in the harbour office? "
NEW_TOKENS = 48
PLACES = ("harbour office", "north gate", "old mill", "signal tower", "market hall", "river lock", "glass house")
PEOPLE = ("the clerk", "a carpenter", "two sailors", "the night guard", "a botanist", "the ferryman", "an apprentice")
DEEDS = ("counted the barrels", "mended a lantern", "copied the ledger", "waited for the tide", "swept the steps")


@dataclass(frozen=True)
class Row:
    """One method's run."""

    method: str
    report: Report
    prefill: Timing
    decode: Timing
    agreement: int  # how many tokens the answer shares with exact attention's before the first other one


def document(characters: int, seed: int = 0) -> str:
    """A text of short sentences, made up on the spot."""
    draw = random.Random(seed)
    sentences: list[str] = []
    length = 0
    while length < characters:
        day = draw.randint(1, 365)
        sentence = f"Day {day}: at the {draw.choice(PLACES)} {draw.choice(PEOPLE)} {draw.choice(DEEDS)}. "
        sentences.append(sentence)
        length += len(sentence)
    return "".join(sentences)[:characters]


def run_demo(tokens: int, advance: Callable[[str], None] | None = None) -> Iterator[Row]:
    """Read a document of so many tokens with every method, and answer the same question."""
    tokenizer = byte_tokenizer()
    prompt = tokenizer(document(tokens), return_tensors="pt")["input_ids"]
    question = tokenizer(QUESTION, return_tensors="pt")["input_ids"]
    model = stand_in_model(dtype=torch.bfloat16, kv_heads=4)
    exact: list[int] = []
    for method in METHODS:
        if advance is not None:
            advance(method)
        cache = make_cache(model, method)
        prefill = read_prompt(model, prompt, cache)
        report = cache.report()
        out, decode = answer(model, question, cache, max_new_tokens=NEW_TOKENS)
        tokens_out = out[0].tolist()
        exact = exact or tokens_out
        yield Row(method, report, prefill, decode, _shared_start(tokens_out, exact))


def _shared_start(one: list[int], other: list[int]) -> int:
    same = [a == b for a, b in zip(one, other, strict=True)]
    return same.index(False) if False in same else len(same)

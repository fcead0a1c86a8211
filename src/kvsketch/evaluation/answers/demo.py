"""Methods side by side on one document, at the same budget."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kvsketch.caches.core.config import BudgetedConfig
from kvsketch.caches.registry import METHODS
from kvsketch.evaluation.answers.session import Timing, answer, read_prompt
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.evaluation.tasks import TASKS, Sample, Setting
from kvsketch.evaluation.tasks.length import Fitter
from kvsketch.huggingface import Report, make_cache

KEEP = 0.25
QUESTIONS = 6
NEW_TOKENS = 12


@dataclass(frozen=True)
class Answer:
    """What a method said about a line, and whether that is right."""

    asked: str
    depth: float
    text: str
    right: bool


@dataclass(frozen=True)
class Row:
    """One method's run."""

    method: str
    report: Report
    prefill: Timing
    decode: Timing
    answers: tuple[Answer, ...]


def demo_methods() -> list[str]:
    """Exact attention, and every method that forgets at the same budget."""
    others = [f"{name}(keep={KEEP})" for name, config in METHODS.items() if issubclass(config, BudgetedConfig)]
    return ["exact", *others]


def demo_document(count: Callable[[Sample], int], tokens: int, seed: int = 0) -> Sample:
    """A record of lines with so many tokens, and questions on lines from its start to its end."""
    fitter = Fitter(TASKS["lines"], Setting(size=1, questions=1), count)
    size = fitter.sample(tokens, "size").context.count("\nline ")
    sample = TASKS["lines"].make(random.Random(seed), Setting(size=size, questions=size))
    ordered = sorted(sample.questions, key=lambda question: question.depth or 0.0)
    places = [round((i + 0.5) * size / QUESTIONS) for i in range(QUESTIONS)]
    return Sample(sample.context, tuple(ordered[place] for place in places))


def run_demo(tokens: int, advance: Callable[[str], None] | None = None) -> Iterator[Row]:
    """Read one record with every method, then ask the same questions; none of them is known when it is read."""
    model, tokenizer = load_embedded(torch.float32)
    sample = demo_document(lambda made: len(tokenizer(made.context)["input_ids"]), tokens)
    prompt = tokenizer(sample.context, return_tensors="pt")["input_ids"]
    for method in demo_methods():
        if advance is not None:
            advance(method)
        cache = make_cache(model, method)
        prefill = read_prompt(model, prompt, cache)
        report = cache.report()
        answers, decoded, seconds = list[Answer](), 0, 0.0
        for question in sample.questions:
            ask = tokenizer(question.prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
            out, decode = answer(model, ask, cache.fork(), max_new_tokens=NEW_TOKENS)
            text = tokenizer.decode(out[0], skip_special_tokens=True)
            name = question.text.rpartition("in line ")[2].split("?")[0]
            right = TASKS["lines"].score(text, question.answers) == 1.0
            answers.append(Answer(name, question.depth or 0.0, text.rstrip(">\n"), right))
            decoded, seconds = decoded + decode.tokens, seconds + decode.seconds
        yield Row(method, report, prefill, Timing(decoded, seconds), tuple(answers))

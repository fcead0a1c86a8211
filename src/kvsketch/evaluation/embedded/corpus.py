"""Texts to fit an index for the embedded model to: documents of its own tasks, with many questions and answers."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvsketch.evaluation.tasks import TASKS, WORDINGS, Sample, Setting
from kvsketch.evaluation.tasks.length import Fitter

ASKED_OF = ("lines", "passkey", "kv", "niah_single", "niah_multikey")
# Numbers for each task and wording; results are measured on other documents.
TEXTS, TOKENS, QUESTIONS, SEED = 8, 3000, 24, 100
FIT: Mapping[str, int] = {"tokens": 4096, "apart": 255, "away": 128, "queries": 256, "buckets": 256, "hidden": 128}


def answered(sample: Sample) -> str:
    """A document, followed by all its questions and right answers."""
    return sample.context + "".join(question.prompt + question.reply for question in sample.questions)


def texts(
    tokenizer: PreTrainedTokenizerBase, task: str, count: int, setting: Setting, tokens: int, seed: int
) -> Iterator[str]:
    """`count` documents of a task with their answers, of about `tokens` tokens each."""
    fitter = Fitter(TASKS[task], setting, lambda made: len(tokenizer(answered(made))["input_ids"]))
    for number in range(count):
        yield answered(fitter.sample(tokens, f"sample/{seed}/{number}"))


def write_corpus(folder: Path, tokenizer: PreTrainedTokenizerBase) -> list[Path]:
    """Write the texts into a file for each task; the files."""
    found = list[Path]()
    settings = [Setting(size=1, questions=QUESTIONS, wording=wording) for wording in WORDINGS]
    for task in ASKED_OF:
        made = [text for setting in settings for text in texts(tokenizer, task, TEXTS, setting, TOKENS, SEED)]
        found.append(folder / f"{task}.jsonl")
        found[-1].write_text("".join(json.dumps({"text": text}) + "\n" for text in made), encoding="utf-8")
    return found

"""Runs tasks on a model with several methods, and makes a row for each answer.

A batch of documents is read once, exactly. Each method then compresses what was read, and is asked; if the question is
known before, a copy of the exact cache reads the question before that. The result is what the method would have had
alone: with `prefill="exact"`, tokens see all earlier tokens of their call. Methods that read in chunks, or need what an
exact cache does not have, read the documents themselves.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvsketch.caches.exact import Exact
from kvsketch.caches.registry import parse_spec
from kvsketch.evaluation.answers.plan import Asked, Cell, Plan
from kvsketch.evaluation.answers.reading import Prompt, Reading
from kvsketch.evaluation.answers.session import padded, split_ids
from kvsketch.evaluation.results.rows import Row
from kvsketch.evaluation.tasks import Sample, Setting, Task
from kvsketch.evaluation.tasks.haystack import Haystack
from kvsketch.evaluation.tasks.length import Fitter
from kvsketch.huggingface import SketchCache, make_cache
from kvsketch.huggingface.naming import as_argument
from kvsketch.huggingface.rereading import check_room_behind
from kvsketch.huggingface.supported import check_context
from kvsketch.huggingface.templates import split_prompt, uses_template

# Always take the likeliest token, whatever the checkpoint's own generation settings are.
GREEDY = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0, "no_repeat_ngram_size": 0}


def read_together(exact: SketchCache, batch: int) -> int:
    """How many prompts to read at once; one where stock's sliding layers would count padding of questions as tokens."""
    return batch if len(exact.sketch_layers) == len(exact.layers) else 1


@dataclass(frozen=True)
class Step:
    """What was just done: the rows that it gave, and how many answers are settled by it."""

    label: str
    rows: list[Row]
    answers: int


class Runner:
    """Answers a plan's prompts."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, plan: Plan) -> None:
        self.model, self.tokenizer, self.plan = model, tokenizer, plan
        self.methods = {str(config): config for config in map(parse_spec, plan.methods)}
        if len(self.methods) < len(plan.methods):
            raise ValueError(f"a method is named twice in {'; '.join(plan.methods)}")
        exact = make_cache(model, Exact())
        now = exact.model.now()
        assert now is not None, "the model is here"
        # This also refuses now, not after hours, an index or a profile that is missing or another model's.
        self.learnt = now.learnt(self.methods.values())
        self.fingerprint = now.fingerprint  # what tells this model from others
        self.batch = read_together(exact, plan.batch)
        self.template = uses_template(tokenizer, plan.raw)
        self._fitters = dict[tuple[str, str], Fitter]()
        self._longest: int | None = None
        for cell in self.plan.cells():
            check_context(model, self._length(cell), "a prompt has")
            if any(config.askings.behind for config in self.methods.values()):
                check_room_behind(model, self._length(cell), "a prompt")
            self._prompt(cell, 0)  # refuses a length that is too short or too long now, not after hours

    def run(self, done: set[tuple[Any, ...]], key: Callable[[Row], tuple[Any, ...]]) -> Iterator[Step]:
        """Rows, for a batch and a method at a time; rows that are done already cost no work."""
        for cell in self.plan.cells():
            for start in range(0, self.plan.prompts, self.batch):
                numbers = range(start, min(start + self.batch, self.plan.prompts))
                everything = [(asked, method) for asked in self.plan.question_modes(cell) for method in self.methods]
                missing = [
                    (asked, method)
                    for asked, method in everything
                    if any(key(self._labels(cell, asked, number, method)) not in done for number in numbers)
                ]
                label = f"{cell.task.name}, {self._length(cell):,} tokens"
                yield Step(f"{label}, read", [], len(numbers) * (len(everything) - len(missing)))
                for rows in self._answer(cell, numbers, missing) if missing else ():
                    yield Step(f"{label}, {rows[0]['method']}", rows, len(rows))

    def labels(self) -> Iterator[Row]:
        """The labels that tell the plan's rows from one another."""
        for cell in self.plan.cells():
            for asked in self.plan.question_modes(cell):
                for number in range(self.plan.prompts):
                    yield from (self._labels(cell, asked, number, method) for method in self.methods)

    def prompts(self) -> Iterator[tuple[Row, Sequence[Asked], Callable[[], Prompt]]]:
        """All prompts: the labels of each, when its question is known, and a function that makes it."""
        for cell in self.plan.cells():
            for number in range(self.plan.prompts if self.plan.question_modes(cell) else 0):
                labels = self._labels(cell, "after", number, "")
                shared = {name: value for name, value in labels.items() if name not in ("asked", "method")}
                yield shared, self.plan.question_modes(cell), partial(self._prompt, cell, number)

    def _length(self, cell: Cell) -> int:
        """Most tokens of a cell's prompts: the length asked for, or that of the file's longest ready prompt."""
        if self.plan.cases is None:
            return cell.length
        if self._longest is None:
            self._longest = max(map(self._count, self.plan.cases[1]))
        return self._longest

    def _answer(self, cell: Cell, numbers: range, missing: list[tuple[Asked, str]]) -> Iterator[list[Row]]:
        prompts = [self._prompt(cell, number) for number in numbers]
        reading = Reading(self.model, prompts, self._pad, [(mode, self.methods[name]) for mode, name in missing])
        for asked, name in missing:
            reading.begin(asked, self.methods[name])  # before the clock starts: the first method would pay for all
            began = time.perf_counter()
            cache = reading.compressed(asked, self.methods[name])
            report = cache.report()
            ask, mask = self._pad([p.question if asked == "after" else p.question[-1:] for p in prompts])
            out = self.model.generate(
                **cache.new_tokens(ask, mask),
                **as_argument(self.model.forward, cache),
                max_new_tokens=self._new_tokens(cell),
                pad_token_id=self._pad_id,
                **GREEDY,
            )
            seconds = time.perf_counter() - began
            looked_up = cache.report().looked_up
            texts = self.tokenizer.batch_decode(out[:, ask.shape[1] :], skip_special_tokens=True)
            yield [
                {
                    **self._labels(cell, asked, number, name),
                    "tokens": len(prompt.context) + len(prompt.question),
                    "at": prompt.depth,
                    "score": cell.task.score(text, prompt.answers),
                    "output": text,
                    "answers": list(prompt.answers),
                    "nbytes": round(report.nbytes / len(prompts)),
                    "full_nbytes": round(report.full_nbytes / len(prompts)),
                    "looked_up": looked_up,  # share of the past read, mean over batch and layers that look up
                    "seconds": round(seconds / len(prompts), 4),  # to compress and to answer
                }
                for number, prompt, text in zip(numbers, prompts, texts, strict=True)
            ]

    def _labels(self, cell: Cell, asked: Asked, number: int, method: str) -> Row:
        return {
            "task": cell.task.name,
            "wording": self.plan.wording,
            "haystack": self.plan.haystack.name,
            "cases": cell.cases,
            "template": self.template,
            "asked": asked,
            "length": self._length(cell),
            "depth": cell.depth,
            "new_tokens": self._new_tokens(cell),
            "sample": self.plan.seed + number,
            "method": method,
        }

    def _prompt(self, cell: Cell, number: int) -> Prompt:
        if self.plan.cases is not None:
            sample = self.plan.cases[1][number]
        else:
            number += self.plan.seed
            fitter = self._fitter(cell.task, self.plan.haystack.of(number))
            sample = fitter.sample(cell.length, f"{cell.length}/{cell.depth}/{number}", cell.depth)
        return self._tokens(sample)

    def _tokens(self, sample: Sample, number: int = 0) -> Prompt:
        """A sample's prompt with one of its questions, in the model's chat template if it has one."""
        question = sample.questions[number]
        before, after = sample.context, question.text
        if self.template:
            before, after = split_prompt(self.tokenizer, before, after)
        context, ask = split_ids(self.tokenizer, before, after + question.opening, special=not self.template)
        return Prompt(context, ask, question.answers, question.depth)

    def _count(self, sample: Sample) -> int:
        prompts = [self._tokens(sample, number) for number in range(len(sample.questions))]
        return max(len(prompt.context) + len(prompt.question) for prompt in prompts)

    def _fitter(self, task: Task, haystack: Haystack) -> Fitter:
        key = task.name, haystack.name
        if key not in self._fitters:
            setting = Setting(size=1, wording=self.plan.wording, haystack=haystack)
            self._fitters[key] = Fitter(task, setting, self._count)
        return self._fitters[key]

    def _new_tokens(self, cell: Cell) -> int:
        return self.plan.max_new_tokens or cell.task.new_tokens

    @property
    def _pad_id(self) -> int:
        for known in (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id):
            if known is not None:
                return int(known)
        return 0  # any number will do: padding is masked

    def _pad(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        ids, mask = padded(rows, self._pad_id)
        return ids.to(self.model.device), mask.to(self.model.device)

"""Methods side by side on two documents: a record in which every line matters, and a few needles in noise."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvsketch.caches.lookup.config import LookupConfig
from kvsketch.caches.registry import parse_spec
from kvsketch.evaluation.answers.session import answer
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.evaluation.tasks import TASKS, Sample, Setting
from kvsketch.evaluation.tasks.length import Fitter
from kvsketch.huggingface import Report, make_cache, prefill
from kvsketch.huggingface.report import LayerReport

QUESTIONS = 6
NEW_TOKENS = 12
# No layer reads everything, and what is always read is small: in long texts, neither would matter.
LOOKS_UP = "saap(probes=64, visit=0.07, prefer='density', window=127, staging=32, full_layers=0)"
METHODS: Mapping[str, str] = {
    "exact": "everything held, everything read",
    "streaming_llm(keep=0.25)": "the latest tokens, a quarter",
    "kvzip(keep=0.25, window=0.25)": "recommended, a quarter",
    "kvzip(keep=0.125)": "recommended, an eighth",
    "kvzip(keep=0.03125)": "too little: a thirty-second",
    LOOKS_UP: "everything held, a tenth read",
}
DOCUMENTS: Mapping[str, str] = {
    "lines": "a dense record: every line is random, and any of them may be asked for",
    "niah_multikey": "four needles in noise: four sentences matter, hundreds do not",
}


@dataclass(frozen=True)
class Answer:
    """What a method answered to a question, and whether that is right."""

    text: str
    right: bool


@dataclass(frozen=True)
class Row:
    """One method on one document."""

    document: str
    method: str
    report: Report  # after the document was read; for methods that look tokens up, after the first answer
    answers: tuple[Answer, ...]

    @property
    def right(self) -> float:
        """The share of right answers."""
        return sum(answer.right for answer in self.answers) / len(self.answers)

    @property
    def holds(self) -> float:
        """Bytes held, over those of a full cache."""
        return self.report.nbytes / self.report.full_nbytes

    @property
    def reads(self) -> float:
        """The share of the tokens seen that a new token reads, the latest ones included; the mean over layers."""
        return fmean(map(self._reads_in, self.report.layers))

    def _reads_in(self, layer: LayerReport) -> float:
        if layer.read is None:
            return min(1.0, layer.nbytes / layer.full_nbytes)
        config = parse_spec(self.method)
        assert isinstance(config, LookupConfig), "only such a method says what it read"
        near = min(1.0, (config.sinks + config.window) / self.report.seen)
        return near + (1 - near) * fmean(layer.read)


def document(task: str, count: Callable[[Sample], int], tokens: int, seed: int = 0) -> Sample:
    """A document of about `tokens` tokens, and questions on it that are spread from its start to its end."""
    setting = Setting(size=1, questions=tokens, wording="compact")  # as many as can be asked
    sample = Fitter(TASKS[task], setting, count).sample(tokens, f"demo/{seed}")
    ordered = sorted(sample.questions, key=lambda question: question.depth or 0.0)
    asked = min(QUESTIONS, len(ordered))
    places = [round((i + 0.5) * len(ordered) / asked - 0.5) for i in range(asked)]
    return Sample(sample.context, tuple(ordered[place] for place in places))


def run_demo(
    tokens: int, advance: Callable[[str], None] = lambda method: None, *, device: str = "cpu"
) -> Iterator[Row]:
    """Read each document with every method, then ask the same questions; none is known while a document is read."""
    model, tokenizer = load_embedded(torch.float32)
    model.to(device)
    for task in DOCUMENTS:
        sample = document(task, lambda made: len(tokenizer(made.context)["input_ids"]), tokens)
        for method in METHODS:
            advance(method)
            yield _run(model, tokenizer, task, sample, method)


def _run(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, task: str, sample: Sample, method: str) -> Row:
    cache = make_cache(model, method)
    prefill(model, tokenizer(sample.context, return_tensors="pt")["input_ids"].to(model.device), cache)
    report, answers = cache.report(), list[Answer]()
    for question in sample.questions:
        ids = tokenizer(question.prompt, return_tensors="pt", add_special_tokens=False)["input_ids"].to(model.device)
        twin = prefill(model, ids[:, :-1], cache.fork(), chunk=1)  # one by one: only then are tokens looked up
        out, _ = answer(model, ids[:, -1:], twin, max_new_tokens=NEW_TOKENS)
        asked = twin.report()
        if report.looked_up is None and asked.looked_up is not None:
            report = asked
        text = tokenizer.decode(out[0], skip_special_tokens=True)
        answers.append(Answer(text.rstrip(">\n"), TASKS[task].score(text, question.answers) == 1.0))
    return Row(task, method, report, tuple(answers))

"""Training batches: documents of the tasks, each with many questions that do not see one another."""

import random
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvsketch.evaluation.tasks import TASKS, Sample, Setting
from kvsketch.evaluation.tasks.ruler import NEEDLES

# How often each task is drawn: mostly those whose answers a model of this size can give.
SHARES: Mapping[str, float] = {
    "lines official": 20,
    "lines": 14,
    "kv": 14,
    "niah_multikey_dense": 8,
    "niah_multikey": 5,
    "niah_multiquery": 12,
    "niah_single": 3,
    "needle": 3,
    "passkey": 5,
    "number_string": 3,
    "niah_multivalue": 4,
    "vt": 7,
    "cwe": 3,
    "fwe": 3,
    "math_find": 3,
}
# Tasks whose documents train better with more than the official few keys: the same text, only denser.
EXTRA_KEYS = {"niah_multikey": 16, "niah_multiquery": 32}
QUESTIONS = 24
IGNORED = -100


@dataclass(frozen=True)
class Batch:
    """Documents, padded at their end, and the questions with their replies, row by row."""

    names: tuple[str, ...]
    context: Int[Tensor, "b c"]
    asked: Int[Tensor, "b q"]
    positions: Int[Tensor, "b q"]
    visible: Bool[Tensor, "b 1 q total"]  # total = c + q
    labels: Int[Tensor, "b q"]  # the token that comes next; IGNORED where it is not a reply's
    weights: Float[Tensor, "b q"]

    @property
    def tokens(self) -> int:
        """How many there are, padding included."""
        return self.context.numel() + self.asked.numel()


class Documents:
    """Makes batches of a length, the same for the same seed and step."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.units = {name: self._tokens_per_unit(name) for name in SHARES}

    def batch(self, step: int, length: int, tokens: int) -> Batch:
        """Rows of about `length` tokens, about `tokens` of them in all."""
        draw = random.Random(f"{self.seed}/{step}")
        rows = max(1, round(tokens / length))
        names = draw.choices(list(SHARES), list(SHARES.values()), k=rows)
        samples = [self._sample(draw, name, length) for name in names]
        contexts = [self._ids(sample.context, special=True) for sample in samples]
        asked = [self._segments(sample) for sample in samples]
        return _pack(tuple(names), contexts, asked, self.tokenizer.pad_token_id)

    def _sample(self, draw: random.Random, name: str, length: int) -> Sample:
        fixed, each = self.units[name]
        task = TASKS[name.split()[0]]
        questions = QUESTIONS if task.dense or length >= 512 else 8
        room = length - fixed - (questions * 12 if task.dense else 40)
        size = max(task.smallest, int(room / each), 2)
        return _make(draw, name, size, questions)

    def _tokens_per_unit(self, name: str) -> tuple[float, float]:
        """Tokens of an empty document, and of each unit in it."""
        counts = {}
        for size in (40, 200):
            made = [_make(random.Random(seed), name, size, 1) for seed in range(4)]
            counts[size] = sum(len(self._ids(sample.context, special=True)) for sample in made) / len(made)
        each = (counts[200] - counts[40]) / 160
        return max(0.0, counts[40] - 40 * each), each

    def _ids(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def _segments(self, sample: Sample) -> list[tuple[list[int], int]]:
        """Each question with its reply: its tokens, and where the reply starts in them."""
        end = self.tokenizer.eos_token_id
        segments = []
        for question in sample.questions:
            ask, reply = self._ids(question.prompt, special=False), self._ids(question.reply, special=False)
            segments.append(([*ask, *reply, end], len(ask)))
        return segments


def _make(draw: random.Random, name: str, size: int, questions: int) -> Sample:
    task_name, _, wording = name.partition(" ")
    task = TASKS[task_name]
    setting = Setting(
        size=size,
        questions=questions,
        wording="official" if wording else "compact",
        invented=draw.choice((0.3, 0.6, 0.9)) if wording else draw.choice((0.0, 0.0, 0.2)),
    )
    most = EXTRA_KEYS.get(task_name)
    if most is None:
        return task.make(draw, setting)
    return task.make(draw, setting, keys=max(NEEDLES, min(most, size // 4)))  # type: ignore[call-arg]


def _pack(
    names: tuple[str, ...], contexts: list[list[int]], asked: list[list[tuple[list[int], int]]], pad: int
) -> Batch:
    rows, width = len(contexts), max(map(len, contexts))
    tail = max(sum(len(ids) - 1 for ids, _ in segments) for segments in asked)
    context = torch.full((rows, width), pad)
    tokens, labels = torch.full((rows, tail), pad), torch.full((rows, tail), IGNORED)
    positions, owner = torch.zeros(rows, tail, dtype=torch.long), torch.full((rows, tail), -1)
    for row, (ids, segments) in enumerate(zip(contexts, asked, strict=True)):
        context[row, : len(ids)] = torch.tensor(ids)
        place = 0
        for number, (segment, reply) in enumerate(segments):
            here = slice(place, place + len(segment) - 1)
            tokens[row, here] = torch.tensor(segment[:-1])
            labels[row, here] = torch.tensor([IGNORED] * (reply - 1) + segment[reply:])
            positions[row, here] = torch.arange(len(ids), len(ids) + len(segment) - 1)
            owner[row, here] = number
            place = here.stop
    lengths = torch.tensor([len(ids) for ids in contexts])
    in_context = (torch.arange(width) < lengths[:, None])[:, None].expand(rows, tail, width)
    same = (owner[:, :, None] == owner[:, None]) & torch.ones(tail, tail, dtype=torch.bool).tril()
    visible = torch.cat([in_context, same], dim=-1)[:, None]
    replies = labels != IGNORED
    # A document with many questions counts for more, but does not drown the others.
    weights = replies / replies.sum(1, keepdim=True).clamp(min=1).sqrt()
    return Batch(names, context, tokens, positions, visible, labels, weights.float())

"""Training batches: documents of the tasks, each with many questions, which do not see one another."""

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from kvsketch.evaluation.tasks import TASKS, Question, Setting
from kvsketch.evaluation.tasks.base import WORDINGS, Wording
from kvsketch.evaluation.tasks.haystack import SENTENCE_END, Grammar, Haystack, Sentences
from kvsketch.evaluation.tasks.ruler import NEEDLES

# How often each task is drawn: mostly tasks that a model of this size can do.
SHARES: Mapping[str, int] = {
    "lines": 14,
    "kv": 15,
    "niah_multikey_dense": 6,
    "niah_multikey_uuid": 3,
    "niah_multikey": 6,
    "niah_multiquery": 16,
    "niah_multivalue": 14,
    "niah_single": 3,
    "niah_single_uuid": 3,
    "needle": 3,
    "passkey": 4,
    "number_string": 4,
    "vt": 6,
    "fwe": 2,
    "math_find": 2,
}
# Tasks that train better with more keys than the few official ones: the same text, but denser.
EXTRA_KEYS = {"niah_multikey": 16, "niah_multiquery": 32, "niah_multivalue": 8, "niah_single_uuid": 8}
TASK_NAMES = tuple(SHARES)
PROMPT_ENDS = ("", "", "", " ", "\n")  # what may end a prompt, in place of its own white space
# Tasks also hidden in a haystack, and how often: so one reading of a document teaches more answers.
ALSO_HIDDEN: Mapping[str, float] = {"passkey": 0.4, "number_string": 0.4, "needle": 0.4, "vt": 0.3}
INVENTED = (0.0, 0.0, 0.3, 0.9)  # shares of made-up words in names
NUMBER = re.compile(r" ?([0-9]|[0-9a-f]{8}-)")
TRIES = 3  # attempts to make a document of the right length
LONGEST_PIECE = 12  # characters; longer pieces come from templates
PROSE = 256  # places in a batch's documents at which the next token is predicted
HIDES_SEVERAL_FROM = 512  # tokens of a document
QUESTIONS = 24  # most on a document's own task; there are more on what else it hides
QUESTION_TOKENS = 128  # most for a document, or a quarter of the document's length if that is more
OTHER_CHARACTERS = ((0xA1, 0x180), (0x391, 0x3CA), (0x410, 0x450), (0x2010, 0x2028), (0x4E00, 0x4E80))
IGNORED, NOBODY = -100, -1


@dataclass(frozen=True)
class Batch:
    """Documents, padded at the end, and questions with their replies, a row for each document."""

    names: tuple[str, ...]  # the task of each document
    context: Int[Tensor, "b c"]
    asked: Int[Tensor, "b q"]
    positions: Int[Tensor, "b q"]
    lengths: Int[Tensor, " b"]  # of the documents
    owner: Int[Tensor, "b q"]  # the number of a token's question in its document; NOBODY in padding
    labels: Int[Tensor, "b q"]  # the next token; IGNORED where that is not part of a reply
    weights: Float[Tensor, "b q"]
    tasks: Int[Tensor, "b q"]  # the task of a reply, by its place in TASK_NAMES
    prose: Int[Tensor, "n 2"]  # rows and places at which a document's next token is predicted

    @property
    def tokens(self) -> int:
        """How many tokens there are, padding included."""
        return self.context.numel() + self.asked.numel()

    @property
    def in_document(self) -> Bool[Tensor, "b c"]:
        """A mask of the documents' tokens, without padding."""
        return torch.arange(self.context.shape[1], device=self.lengths.device) < self.lengths[:, None]

    def visible(self, at: Int[Tensor, "b n"]) -> Bool[Tensor, "b 1 n total"]:
        """What these places of questions see: the document, and their own question up to themselves."""
        document = self.in_document[:, None].expand(-1, at.shape[1], -1)
        same = self.owner.gather(1, at)[:, :, None] == self.owner[:, None]
        before = torch.arange(self.asked.shape[1], device=at.device) <= at[:, :, None]
        return torch.cat([document, same & before], dim=-1)[:, None]

    @property
    def every(self) -> Int[Tensor, "b q"]:
        """All places of the questions, for each row."""
        return torch.arange(self.asked.shape[1], device=self.asked.device).expand(len(self.asked), -1)

    def on(self, device: str) -> "Batch":
        """The same batch on a device."""
        return Batch(self.names, *(getattr(self, field.name).to(device) for field in dataclasses.fields(self)[1:]))


class _Segment(NamedTuple):
    ids: list[int]
    reply: int  # where the reply starts in `ids`
    task: int  # its place in TASK_NAMES


@dataclass(frozen=True)
class Made:
    """A document, and what is asked about it: each question with the name of its task."""

    context: str
    asked: tuple[tuple[str, Question], ...]


class Documents:
    """Makes batches of a given length; the same seed and step give the same batch."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, seed: int, texts: Sequence[Haystack] = ()) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.haystacks = (Grammar(), Grammar(), Jumble(tokenizer), Sentences(), *texts)
        self.units = {
            (name, wording): _tokens_per_unit(tokenizer, name, wording) for name in SHARES for wording in WORDINGS
        }

    def batch(
        self, step: int, length: int, tokens: int, shares: Mapping[str, int] = SHARES, questions: int = QUESTIONS
    ) -> Batch:
        """Documents of about `length` tokens, about `tokens` in all, with at most `questions` of the task on each."""
        draw = random.Random(f"{self.seed}/{step}")
        rows = max(1, round(tokens / length))
        names = draw.choices(list(shares), list(shares.values()), k=rows)
        samples = [self._sample(draw, name, length, questions) for name in names]
        contexts = [self._ids(sample.context, special=True) for sample in samples]
        asked = [self._segments(draw, sample, max(QUESTION_TOKENS, length // 4)) for sample in samples]
        hiding = [row for row, name in enumerate(names) if TASKS[name].hides]
        prose = [
            (row, draw.randrange(len(contexts[row]) - 1)) for row in (draw.choices(hiding, k=PROSE) if hiding else [])
        ]
        return _pack(tuple(names), contexts, asked, prose, self.tokenizer.pad_token_id)

    def _sample(self, draw: random.Random, name: str, length: int, questions: int = QUESTIONS) -> Made:
        wording: Wording = draw.choice(WORDINGS) if length >= HIDES_SEVERAL_FROM or name != "vt" else "compact"
        fixed, each = self.units[name, wording]
        setting = Setting(
            size=max(TASKS[name].smallest, int((length - fixed) / each), 2),
            questions=questions if length >= HIDES_SEVERAL_FROM else questions // 3,
            wording=wording,
            invented=draw.choice(INVENTED),
            haystack=draw.choice(self.haystacks),
        )
        also = [other for other, chance in ALSO_HIDDEN.items() if TASKS[name].hides and draw.random() < chance]
        seed = draw.random()
        for _ in range(TRIES):
            sample = _make(random.Random(seed), name, setting, also if length >= HIDES_SEVERAL_FROM else [])
            tokens = len(self._ids(sample.context, special=True))
            if 0.9 * length <= tokens <= 1.1 * length:
                break
            size = max(TASKS[name].smallest, 2, int(setting.size * length / tokens))
            setting = dataclasses.replace(setting, size=size)
        return sample

    def _ids(self, text: str, *, special: bool) -> list[int]:
        return _ids_of(self.tokenizer, text, special=special)

    def _segments(self, draw: random.Random, made: Made, most: int) -> list[_Segment]:
        """Questions with their replies, in random order, up to `most` tokens and at least one."""
        end = self.tokenizer.eos_token_id
        segments, tokens = list[_Segment](), 0
        for task, question in draw.sample(made.asked, len(made.asked)):
            prompt, answer = _ended(question, draw.choice(PROMPT_ENDS))
            ask, reply = self._ids(prompt, special=False), self._ids(answer, special=False)
            tokens += len(ask) + len(reply)
            if segments and tokens > most:
                break
            segments.append(_Segment([*ask, *reply, end], len(ask), TASK_NAMES.index(task)))
        return segments


@cache
def _tokens_per_unit(tokenizer: PreTrainedTokenizerBase, name: str, wording: Wording) -> tuple[float, float]:
    """The tokens of an empty document of a task, and of each unit added to it."""
    few, many = max(40, TASKS[name].smallest), 200
    counts, setting = {}, Setting(size=1, wording=wording, haystack=Grammar())
    for size in (few, many):
        made = [_make(random.Random(seed), name, dataclasses.replace(setting, size=size), []) for seed in range(4)]
        counts[size] = sum(len(_ids_of(tokenizer, sample.context, special=True)) for sample in made) / len(made)
    each = (counts[many] - counts[few]) / (many - few)
    return max(0.0, counts[few] - few * each), each


def _ids_of(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=special)["input_ids"]
    return ids


class Jumble(Haystack):
    """The tokenizer's pieces in random order, and characters of other scripts: training meets nearly all tokens."""

    name, joint = "jumble", " "

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        special = set(tokenizer.all_special_ids)
        found = (tokenizer.decode([token]) for token in range(len(tokenizer)) if token not in special)
        self.parts = [
            part for part in found if len(part) <= LONGEST_PIECE and "\ufffd" not in part and "\0" not in part
        ]
        self.parts += [chr(code) for block in OTHER_CHARACTERS for code in range(*block) if chr(code).isprintable()]

    def pieces(self, draw: random.Random, count: int) -> list[str]:
        return ["".join(draw.choices(self.parts, k=draw.randint(4, 30))).strip() + "." for _ in range(count)]


class _Given(Haystack):
    """The sentences of a text, as a haystack to hide more in; if another number is wanted, its haystack's pieces."""

    name = "given"

    def __init__(self, text: str, haystack: Haystack) -> None:
        self.joint, self.haystack = haystack.joint, haystack
        parts = re.split(f"(?<=\0){re.escape(self.joint)}", SENTENCE_END.sub("\\g<0>\0", text))
        self.given = [part.replace("\0", "") for part in parts]

    def pieces(self, draw: random.Random, count: int) -> list[str]:
        return self.given if count == len(self.given) else self.haystack.pieces(draw, count)


def _make(draw: random.Random, name: str, setting: Setting, also: Sequence[str]) -> Made:
    """A document of a task, in which other tasks hide things too."""
    most = EXTRA_KEYS.get(name)
    if most is None:
        sample = TASKS[name].make(draw, setting)
    else:
        fewest = NEEDLES if name in ("niah_multikey", "niah_multiquery") else 1
        keys = max(fewest, min(most, setting.size // (16 if name == "niah_multivalue" else 4)))
        sample = TASKS[name].make(draw, setting, keys=keys)  # type: ignore[call-arg]
    context, asked = sample.context, [(name, question) for question in sample.questions]
    for other in also:
        if other != name:
            text = _Given(context, setting.haystack)
            here = dataclasses.replace(setting, size=len(text.given), wording=draw.choice(WORDINGS), haystack=text)
            more = TASKS[other].make(draw, here)
            context = more.context
            asked += [(other, question) for question in more.questions]
    return Made(context, tuple(asked))


def _ended(question: Question, end: str) -> tuple[str, str]:
    """Prompt and reply with `end` as the white space between them; a blank before a number is not repeated."""
    prompt, reply = question.prompt, question.reply
    if end and prompt.endswith(" "):
        prompt, reply = prompt[:-1], f" {reply}" if end == " " else reply
        return (prompt, reply) if end == " " else (prompt + end, reply)
    if end and NUMBER.match(reply):
        reply = reply.lstrip(" ")
    return prompt + end, reply


def _pack(
    names: tuple[str, ...],
    contexts: list[list[int]],
    asked: list[list[_Segment]],
    prose: list[tuple[int, int]],
    pad: int,
) -> Batch:
    rows, width = len(contexts), max(map(len, contexts))
    tail = max(sum(len(segment.ids) - 1 for segment in segments) for segments in asked)
    context = torch.full((rows, width), pad)
    tokens, labels = torch.full((rows, tail), pad), torch.full((rows, tail), IGNORED)
    tasks = torch.zeros(rows, tail, dtype=torch.long)
    positions, owner = torch.zeros(rows, tail, dtype=torch.long), torch.full((rows, tail), NOBODY)
    for row, (ids, segments) in enumerate(zip(contexts, asked, strict=True)):
        context[row, : len(ids)] = torch.tensor(ids)
        place = 0
        for number, segment in enumerate(segments):
            here = slice(place, place + len(segment.ids) - 1)
            tokens[row, here] = torch.tensor(segment.ids[:-1])
            labels[row, here] = torch.tensor([IGNORED] * (segment.reply - 1) + segment.ids[segment.reply :])
            positions[row, here] = torch.arange(len(ids), len(ids) + len(segment.ids) - 1)
            owner[row, here], tasks[row, here] = number, segment.task
            place = here.stop
    lengths = torch.tensor([len(ids) for ids in contexts])
    replies = labels != IGNORED
    # A document with many questions counts more, but not so much that the others count for nothing.
    weights = replies / replies.sum(1, keepdim=True).clamp(min=1).sqrt()
    places = torch.tensor(prose, dtype=torch.long).reshape(-1, 2)
    return Batch(names, context, tokens, positions, lengths, owner, labels, weights.float(), tasks, places)

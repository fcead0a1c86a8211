"""Whole models beside stock and exact: tokens a second while a prompt is read, and in decode steps.

Each way is timed by turns with exact, from caches of the same tokens. Then it takes steps in a row: some methods do
much work, but only every so many tokens, which a median does not show. Rows have no times if exact's first answer is
not stock's.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, ClassVar

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel

from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.core.tokens import NewTokens, Unrotated
from kvsketch.caches.exact import Exact
from kvsketch.evaluation.reading import readable_for
from kvsketch.evaluation.results.rows import Row, RowsFile, key_of
from kvsketch.evaluation.speed.clock import no_room, seconds, summed_up
from kvsketch.evaluation.speed.made import Ready, keys_and_values
from kvsketch.evaluation.speed.plan import EXACT, KEY, STOCK, WARM, Plan
from kvsketch.huggingface import SketchCache, attach, detach, make_cache
from kvsketch.huggingface.identity import describe_model
from kvsketch.huggingface.modules import heads_of
from kvsketch.huggingface.naming import as_argument

Prompt = dict[str, float]  # seconds to read and to compress; or those of a piece, and its tokens
IN_ROW, BEFORE = 64, 32  # steps: whole blocks leave the window; BEFORE are not timed, so that room has grown


@dataclass(frozen=True)
class Subject:
    """A model, the name of its part, the number of tokens in its context, and the tokens of the steps after them.

    `prompt`: the text that is read; None: caches are filled with random keys and values, and `piece` is read after
    them. `reads`: how often a prompt is read.
    """

    part: str
    model: PreTrainedModel
    tokens: int
    next: Int64[Tensor, " m"]
    prompt: Int64[Tensor, "1 n"] | None = None
    piece: Int64[Tensor, "1 p"] | None = None
    reads: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Layers, KV heads, query heads of each, and their width."""
        text = self.model.config.get_text_config(decoder=True)
        heads, width = heads_of(text)
        assert isinstance(heads, int), "alike in all layers"
        assert isinstance(width, int), "alike in all layers"
        return text.num_hidden_layers, heads, text.num_attention_heads // heads, width

    @property
    def full_bytes(self) -> int:
        """The bytes of all keys and values."""
        layers, heads, _, width = self.shape
        return 2 * layers * heads * width * self.tokens * self.model.dtype.itemsize


def run(
    subject: Subject, plan: Plan, rows: RowsFile, ready: Ready, say: Callable[[str], None]
) -> Iterator[tuple[str, int]]:
    """Measure rows that the file lacks, method by method; yields what comes next, and how many rows that settles."""
    what = f"{subject.part}, {subject.tokens:,} tokens"

    def labels(way: str) -> Row:
        return plan.labels(subject.part, subject.tokens, way, plan.kernels[0], subject.shape)

    missing = [way for way in plan.ways if key_of(labels(way), KEY) not in rows.done]
    yield what, len(plan.ways) - len(missing)
    if not missing:
        return
    kind = Filled if subject.prompt is None else Read
    if without := no_room(kind.room * subject.full_bytes):
        say(f"{what} are left out: {without}")
        yield what, len(missing)
        return
    source = kind(subject)
    yield f"{what}, {STOCK}", 0
    error, exact, stock = _steps(source, STOCK, STOCK)
    right = error < plan.apart
    both = ((STOCK, stock), (EXACT, exact))
    rows.add(_row(labels(way), taken, exact, source, way, right) | {"error": error} for way, taken in both)
    yield what, len([way for way in missing if way in (STOCK, EXACT)])
    for way in (way for way in missing if way in plan.configs):
        yield f"{what}, {way}", 0
        try:
            config = ready(plan.configs[way]).for_model(lambda: describe_model(subject.model))
        except ValueError as missed:  # no index or profile of this model
            say(f"{way} is left out of {subject.part}: {missed}")
        else:
            _, exact, own = _steps(source, way, config)
            rows.add([_row(labels(way), own, exact, source, way, right)])
        yield what, 1


class Source(ABC):
    """Where caches come from. `room`: the memory that this takes, in times the bytes of a whole cache."""

    room: ClassVar[int]

    def __init__(self, subject: Subject) -> None:
        self.model, self.subject = subject.model, subject
        self.prompts = dict[str, Prompt]()  # seconds, by way
        self.in_row = dict[str, float]()  # seconds of a step, only of our ways
        self.nbytes = dict[str, int]()

    @abstractmethod
    def cache(self, way: str, config: MethodConfig | str) -> Cache:
        """A cache of this way that holds the subject's tokens; for stock, `config` is the way's name."""

    def end(self, way: str, config: MethodConfig | str, cache: Cache) -> None:
        """Note the bytes of a cache that was timed, before it is released."""
        self.nbytes[way] = _bytes(cache)

    def be_ready_for(self, config: MethodConfig | str) -> None:
        """Attach to the model what this way needs, and nothing of another way."""
        detach(self.model)
        if not isinstance(config, str):
            attach(self.model, before_rotation=config.before_rotation)


class Filled(Source):
    """Caches filled with random keys and values; in memory are exact's, the other one, and a layer being made."""

    room: ClassVar[int] = 3

    def cache(self, way: str, config: MethodConfig | str) -> Cache:
        layers, heads, _, width = self.subject.shape
        detach(self.model)
        made = DynamicCache(config=self.model.config) if isinstance(config, str) else make_cache(self.model, config)
        for layer in range(layers):
            keys, values = keys_and_values(heads, self.subject.tokens, width, self.model.dtype, seed=10 + layer)
            if isinstance(made, SketchCache):
                made.sketch_layers[layer].held.hold(NewTokens(keys, values, None, Unrotated(keys, keys)))
            else:
                made.update(keys, values, layer)
        return made

    def end(self, way: str, config: MethodConfig | str, cache: Cache) -> None:
        """Also read a piece after the tokens, once for each way."""
        super().end(way, config, cache)
        piece = self.subject.piece
        if piece is None or way in self.prompts:
            return
        self.be_ready_for(config)
        taken = seconds(partial(self.model, piece, **as_argument(self.model.forward, cache), logits_to_keep=1))
        self.prompts[way] = {"piece": taken, "piece_tokens": piece.shape[1]}


class Read(Source):
    """Caches that have read a prompt, each in its own way; a reading that several ways share is made once, and kept."""

    room: ClassVar[int] = 6

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        self.whole = dict[Exact, tuple[SketchCache, float]]()
        times: dict[str, list[float]] = {STOCK: [], EXACT: []}
        for _ in range(subject.reads):
            stock, taken = self._timed(STOCK)
            times[STOCK].append(taken)
            exact, taken = self._timed(Exact())
            times[EXACT].append(taken)
        assert isinstance(exact, SketchCache), "ours"
        self.stock = [stock]  # asked for once
        self.whole[Exact()] = (exact, median(times[EXACT]))
        self.prompts = {way: {"reading": median(taken), "compressing": 0.0} for way, taken in times.items()}

    def cache(self, way: str, config: MethodConfig | str) -> Cache:
        if isinstance(config, str):
            return self.stock.pop()
        if config == Exact():
            return self.whole[Exact()][0].fork()
        shared = readable_for(config)
        if shared is None:
            made, taken = self._read(config)
            self.prompts[way] = {"reading": taken, "compressing": 0.0}
            return made
        if shared not in self.whole:
            self.whole = {Exact(): self.whole[Exact()]}  # keeping a whole cache for each would take much memory
            self.whole[shared] = self._read(shared)
        whole, taken = self.whole[shared]
        times = [seconds(partial(whole.compress, config)) for _ in range(self.subject.reads)]
        self.prompts[way] = {"reading": taken, "compressing": median(times)}
        return whole.compress(config)

    def _read(self, config: MethodConfig) -> tuple[SketchCache, float]:
        found = [self._timed(config) for _ in range(self.subject.reads)]
        made = found[-1][0]
        assert isinstance(made, SketchCache), "ours"
        return made, median(taken for _, taken in found)

    def _timed(self, config: MethodConfig | str) -> tuple[Cache, float]:
        detach(self.model)
        made = DynamicCache(config=self.model.config) if isinstance(config, str) else make_cache(self.model, config)
        given = as_argument(self.model.forward, made)
        return made, seconds(partial(self.model, self.subject.prompt, **given, logits_to_keep=1))


@torch.no_grad()
def _steps(source: Source, way: str, config: MethodConfig | str) -> tuple[float, list[float], list[float]]:
    """How far exact's first logits are from this way's, and seconds of exact's steps and of this way's, by turns."""
    model, subject = source.model, source.subject
    both = ((Exact(), source.cache(EXACT, Exact())), (config, source.cache(way, config)))
    taken: tuple[list[float], list[float]] = ([], [])
    error = 0.0
    (argument,) = as_argument(model.forward, None)

    def step(cache: Cache, number: int) -> Any:
        token, place = subject.next[number % len(subject.next)], torch.tensor([[subject.tokens + number]])
        return model(token.view(1, 1), **{argument: cache}, position_ids=place, use_cache=True)

    for number in range(len(subject.next)):
        found = list[Any]()
        for (ours, cache), times in zip(both, taken, strict=True):
            source.be_ready_for(ours)
            began = time.perf_counter()
            found.append(step(cache, number))
            times.append(time.perf_counter() - began)
        if number == 0:
            exact, own = (one.logits[0, -1] for one in found)
            error = float((exact - own).norm() / own.norm())
    for (ours, cache), name in zip(both, (EXACT, way), strict=True):
        if isinstance(cache, SketchCache) and name not in source.in_row:  # each step of stock copies all it has
            source.be_ready_for(ours)
            numbers = range(len(subject.next), len(subject.next) + BEFORE + IN_ROW)
            for number in numbers[:BEFORE]:
                step(cache, number)
            began = time.perf_counter()
            for number in numbers[BEFORE:]:
                step(cache, number)
            source.in_row[name] = (time.perf_counter() - began) / IN_ROW
        source.end(name, ours, cache)
    detach(model)
    return error, taken[0][WARM:], taken[1][WARM:]


def _bytes(cache: Cache) -> int:
    if isinstance(cache, SketchCache):
        return cache.nbytes
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _row(labels: Row, taken: list[float], exact: list[float], source: Source, way: str, right: bool) -> Row:
    """A way's row; without times if exact is wrong."""
    row = labels | {"right": right, "nbytes": source.nbytes[way]}
    if not right:
        return row
    in_row = {"in_row": round(source.in_row[way], 9)} if way in source.in_row else {}
    return row | summed_up(taken) | in_row | {"exact": summed_up(exact)["seconds"]} | source.prompts.get(way, {})

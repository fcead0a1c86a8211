"""The streams of a layer: one, or a few where heads with other budgets have other windows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.attention import Partial
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.core.lanes import Lanes
from kvsketch.caches.core.protecting import ProtectingStream
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.spans import Spans
from kvsketch.caches.core.stream import Stream
from kvsketch.caches.core.tokens import Columns, Seen


class Streams:
    """Streams, each with the KV heads that are in it; all rows are in each of them."""

    def __init__(self, budgets: Sequence[Budget] = ()) -> None:
        """No streams yet, for KV heads with these budgets."""
        self.budgets = list(budgets)
        self.heads = list[list[int]]()
        self.all = list[Stream]()
        self.only: Stream | None = None  # if it is one

    def begin(self, config: MethodConfig, layer: int, spans: Sequence[Spans], first: int = 0) -> None:
        """Have empty streams; `spans` of each row are protected. In the whole model heads are numbered from `first`."""
        method, every = config.new_method(layer), list(range(len(self.budgets)))
        if method is not None:
            method.first_head = first
        kinds = dict.fromkeys(self.budgets) if config.window_by_budget else [None]
        self.heads = [[head for head in every if kind in (None, self.budgets[head])] for kind in kinds]
        numbered = [
            ([[self.budgets[head] for head in heads]] * len(spans), [first + head for head in heads])
            for heads in self.heads
        ]
        if any(spans):
            self.all = [ProtectingStream(config, method, each, spans, own) for each, own in numbered]
        else:
            self.all = [Stream(config, method, each, own) for each, own in numbered]
        self.only = self.all[0] if len(self.all) == 1 else None

    def divided(self, columns: Columns, seen: Seen) -> Iterator[tuple[Stream, Columns, Seen]]:
        """What comes, in parts: that of each stream's heads."""
        for heads, stream in zip(self.heads, self.all, strict=True):
            keys, unrotated = columns.keys[:, heads], None if seen.unrotated is None else seen.unrotated[:, heads]
            grouped = None if seen.queries is None else seen.queries.unflatten(1, (len(self.budgets), -1))
            queries = None if grouped is None else grouped[:, heads].flatten(1, 2)
            own = replace(columns, keys=keys, values=columns.values[:, heads])
            yield stream, own, Seen(keys, unrotated, seen.ranks, queries, seen.ahead)

    def answer(self, asked: Query) -> Answer:
        """The answers of all streams, in the order of the heads; each holds something, or none does."""
        answers = [stream.answer(self._of_heads(asked, n)) for n, stream in enumerate(self.all)]
        parts = [answer.attended for answer in answers if answer.attended is not None]
        if len(parts) < len(answers):
            return Answer(None)

        def together(each: Sequence[Tensor]) -> Tensor:
            found = [x.unflatten(1, (len(own), -1)) for own, x in zip(self.heads, each, strict=True)]
            return torch.cat(found, 1).index_select(1, self._order(found[0].device)).flatten(1, 2)

        return Answer(Partial(together([part.out.float() for part in parts]), together([part.lse for part in parts])))

    def observe(self, asked: Query, whole: Partial) -> None:
        """Commit what was to be noted about an answer, stream by stream."""
        for number, stream in enumerate(self.all):
            if stream.observes:
                part = Partial(*(self._some(x, number) for x in (whole.out, whole.lse)))
                stream.observe(self._of_heads(asked, number), Answer(part), part)

    def _of_heads(self, asked: Query, number: int) -> Query:
        """What the heads of a stream are asked."""
        unrotated = None if asked.unrotated is None else self._some(asked.unrotated, number)
        return replace(asked, queries=self._some(asked.queries, number), unrotated=unrotated, sinks=None)

    def _some(self, x: Tensor, number: int) -> Tensor:
        """The part [b, h'g, …] of something [b, hg, …] for the heads of a stream."""
        index = torch.tensor(self.heads[number], device=x.device)
        return x.unflatten(1, (len(self.budgets), -1)).index_select(1, index).flatten(1, 2)

    def _order(self, device: torch.device) -> Int64[Tensor, " h"]:
        """Where each head is when streams are put one behind the other."""
        return torch.tensor([head for heads in self.heads for head in heads], device=device).argsort()

    # -- reports

    @property
    def pasts(self) -> list[Lanes]:
        """What left the windows, where something did."""
        return [stream.past for stream in self.all if stream.past is not None and not stream.past.empty]

    def by_head(
        self, of_stream: Callable[[Stream], Tensor | None]
    ) -> Float[Tensor, "b h"] | Int64[Tensor, "b h"] | None:
        """Numbers of all streams, in the order of the heads; None where one has none."""
        found = [x for x in map(of_stream, self.all) if x is not None]
        if not found or len(found) < len(self.all):
            return None
        return torch.cat([x.cpu() for x in found], 1)[:, self._order(torch.device("cpu"))]

    def details(self) -> dict[str, float]:
        """What a report should show beside entries and bytes: means over heads."""
        found = [(past.details(), past.heads) for past in self.pasts]
        names = dict.fromkeys(name for details, _ in found for name in details)
        weights = {name: sum(heads for details, heads in found if name in details) for name in names}
        return {name: sum(own.get(name, 0.0) * heads for own, heads in found) / weights[name] for name in names}

    def warning(self) -> str | None:
        """What a user must know about these tokens and this method, in a sentence."""
        return next(filter(None, (past.warning() for past in self.pasts)), None)

    def share_read(self) -> Tensor | None:
        """The share of the past that queries read, per row and KV head; None if none looked up."""
        return self.by_head(lambda stream: None if stream.past is None else stream.past.share_read())

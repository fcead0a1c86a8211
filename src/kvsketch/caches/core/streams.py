"""The streams of a layer: one, or a few if heads with different budgets have different windows."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.caches.core.answers import complete, side_by_side
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.core.lanes import Lanes
from kvsketch.caches.core.part import Heads
from kvsketch.caches.core.protecting import ProtectingStream
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.spans import Spans
from kvsketch.caches.core.storage import listed_on
from kvsketch.caches.core.stream import Stream
from kvsketch.caches.core.tokens import Columns, Seen


class Streams:
    """Streams, each with the KV heads that are in it; all rows are in each of them."""

    def __init__(self, budgets: Sequence[Budget] = ()) -> None:
        """No streams yet, for KV heads with these budgets."""
        self.budgets = list(budgets)
        self.heads = list[list[int]]()
        self.places = dict[torch.device, list[Tensor]]()  # `heads`, on a device
        self.all = list[Stream]()
        self.only: Stream | None = None  # the stream, if there is only one

    def begin(self, config: MethodConfig, layer: int, spans: Sequence[Spans], first: int = 0) -> None:
        """Begin with empty streams; each row's `spans` are protected. `first`: the first head's number in the model."""
        method, every = config.new_method(layer), list(range(len(self.budgets)))
        if method is not None:
            method.first_head = first
        kinds = dict.fromkeys(self.budgets) if config.window_by_budget else [None]
        self.heads = [[head for head in every if kind in (None, self.budgets[head])] for kind in kinds]
        quiet = method is None or not (method.observes or method.takes_notes or method.looks_up)
        assert quiet or len(kinds) == 1, "of heads with windows of their own nothing is noted"
        self.all = []
        for heads in self.heads:
            own = Heads(heads, [first + head for head in heads], len(every))
            budgets = [[self.budgets[head] for head in heads]] * len(spans)
            plain = not any(spans)
            self.all.append(
                Stream(config, method, budgets, own) if plain else ProtectingStream(config, method, budgets, spans, own)
            )
        self.only = self.all[0] if len(self.all) == 1 else None

    def divided(self, columns: Columns, seen: Seen) -> list[tuple[Stream, Columns, Seen]]:
        """What comes, divided among the streams: each gets the part of its heads."""
        if self.only is not None:
            return [(self.only, columns, seen)]
        device = columns.keys.device
        if device not in self.places:
            self.places[device] = [listed_on(device, heads) for heads in self.heads]
        own = (
            replace(columns, keys=columns.keys.index_select(1, each), values=columns.values.index_select(1, each))
            for each in self.places[device]
        )
        return [(stream, part, Seen(part.keys, None, seen.ranks)) for stream, part in zip(self.all, own, strict=True)]

    # -- reading

    def answer(self, asked: Query, found: Answer | None = None, *, lse: bool = True) -> Answer:
        """Attention over windows and pasts, or over what is looked up; nothing changes. `found`: what `look` says."""
        return complete(self.look(asked) if found is None else found, asked, len(self.budgets), lse=lse)

    def look(self, asked: Query) -> Answer:
        """The same, except that windows and entries are still to be read: those of all streams in one call."""
        if self.only is not None:
            found, window = self.only.look(asked), self.only.of_window()
        else:
            found = Answer(None, unread=side_by_side([stream.look(asked) for stream in self.all]))
            window = tuple(part for stream in self.all for part in stream.of_window())
        return Answer(found.attended, found.estimated, found.read, (*found.unread, window)) if window else found

    # -- reports

    @property
    def pasts(self) -> list[Lanes]:
        """The pasts of the streams in which something left the window."""
        return [stream.past for stream in self.all if stream.past is not None and not stream.past.empty]

    def by_head(
        self, of_stream: Callable[[Stream], Tensor | None]
    ) -> Float[Tensor, "b h"] | Int64[Tensor, "b h"] | None:
        """Numbers of all streams, in the order of the heads; None if a stream has none."""
        found = [x for x in map(of_stream, self.all) if x is not None]
        if not found or len(found) < len(self.all):
            return None
        order = torch.tensor([head for heads in self.heads for head in heads], device="cpu").argsort()
        return torch.cat([x.cpu() for x in found], 1)[:, order]

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

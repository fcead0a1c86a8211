"""A layer's state: as tensors and JSON, and which states may come from a file."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.caches.core.allocation import budgets_of
from kvsketch.caches.core.budget import MOST, Budget, most_share
from kvsketch.caches.core.buffers import Window
from kvsketch.caches.core.config import BudgetedConfig, MethodConfig, equal_until_read
from kvsketch.caches.core.lanes import Lanes
from kvsketch.caches.core.part import HeadPart
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.shares import THRESHOLD
from kvsketch.caches.core.spans import Spans, read_spans
from kvsketch.caches.core.storage import listed_on, with_prefix
from kvsketch.caches.core.streams import Streams

NUMBERS = ("seen", "lengths", "ragged", "measured_at")  # of a layer, beside its streams


class LayerState:
    """What a layer holds, and how that goes to a file and comes back; `layer.py` has what happens to it."""

    def __init__(self, config: MethodConfig, layer: int) -> None:
        self.config, self.layer = config, layer
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.seen = 0  # tokens per row, padding included: the logical length
        self.lengths: list[int] = []  # real tokens per row
        self.counted: tuple[list[int], Tensor] | None = None  # `lengths`, and the same on the device
        # While only the device counts tokens: how many had been seen before, and the rank of the next one.
        self.opened: int | None = None
        self.next_rank: Int64[Tensor, "b 1"] | None = None
        self.next_rank_kept: Int64[Tensor, "b 1"] | None = None  # the tensor that is `next_rank` whenever there is one
        self.ragged = False  # whether rows may have unequal lengths
        self.spans: list[Spans] = []  # the protected tokens of each row
        self.heads = 0  # KV heads
        self.part = HeadPart()  # which of the model's heads these are
        self.streams = Streams()  # where tokens go
        self.started = False  # whether any token came
        self.kind: tuple[int, int, torch.dtype] | None = None  # KV heads, width and precision of keys
        self.error: Float[Tensor, "b hg"] | None = None  # relative error of the answers, per query head
        self.recall: Float[Tensor, "b hg"] | None = None  # share of the attention mass that was looked up
        self.last_asked: Query | None = None  # the last queries of a prompt that is held back
        self.measured_at = 0  # tokens seen when the error was measured
        self.row_shares: list[list[float]] | None = None  # shares of each row's KV heads, if the prompt has set them

    def begin(self, rows: int, budgets: list[Budget], spans: Sequence[Spans] | None = None) -> None:
        """Begin with empty streams; protected tokens of a row are taken off `budgets`, which are those of KV heads."""
        self.lengths, self.heads = [0] * rows, len(budgets)
        self.streams, self.started = Streams(budgets), True
        self.spans = [Spans()] * rows if spans is None else list(spans)
        self.streams.begin(self.config, self.layer, self.spans, self.part.first)
        # If windows follow from budgets, rows with unequal numbers of protected tokens have unequal windows.
        self.ragged = bool(self.config.window_by_budget or self.config.latest) and len(set(self.spans)) > 1
        for stream in self.streams.all:
            stream.window.ragged = self.ragged

    def add(self, tokens: Sequence[int], there: int | Int64[Tensor, "b 1"]) -> None:
        """Count new tokens of each row; `there`: the same numbers, on the device."""
        before, self.lengths = self.lengths, [length + more for length, more in zip(self.lengths, tokens, strict=True)]
        noted, self.counted = self.counted, None
        if noted is not None and noted[0] == before and not noted[1].is_cpu:  # on a CPU it is as easily made anew
            self.counted = self.lengths, noted[1] + there

    def came_one(self) -> None:
        """Count one token that came in every row."""
        self.seen, self.lengths = self.seen + 1, [length + 1 for length in self.lengths]
        for stream in self.streams.all:
            stream.may_come -= 1

    def lengths_on(self, device: torch.device) -> Int64[Tensor, "b 1"]:
        """How many tokens rows have, on a device; kept there: to copy a list there waits for all that is under way."""
        if self.counted is None or self.counted[0] != self.lengths or self.counted[1].device != device:
            self.counted = self.lengths, listed_on(device, self.lengths)[:, None]
        return self.counted[1]

    def share(self, row_shares: list[list[float]]) -> None:
        """Divide each row's budget by these shares of its KV heads, in all processes, before anything has left."""
        assert self.streams.only is not None, "heads have the same window"
        self.row_shares = row_shares
        here = self.part.first, self.heads
        self.streams.only.share([budgets_of(self.budgets[0], shares, *here) for shares in row_shares])

    def map_rows(self, rows: list[int]) -> None:
        """Row i becomes what row `rows[i]` was."""
        if not self.started:
            return
        for stream in self.streams.all:
            stream.map_rows(rows)
        self.last_asked = None  # it was asked by other rows
        self.lengths = [self.lengths[row] for row in rows]
        self.spans = [self.spans[row] for row in rows]
        self.row_shares = None if self.row_shares is None else [self.row_shares[row] for row in rows]
        index = torch.tensor(rows, device="cpu")
        self.error, self.recall = (
            None if x is None else x.index_select(0, index.to(x.device)) for x in (self.error, self.recall)
        )

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that `restore` needs, as tensors and as JSON; the tensors of a stream under its number."""
        if not self.started:
            return {}, {}
        tensors, streams = dict[str, Tensor](), list[dict[str, Any]]()
        for number, (heads, stream) in enumerate(zip(self.streams.heads, self.streams.all, strict=True)):
            own, about = stream.state()
            tensors |= {f"{number}.{name}": tensor for name, tensor in own.items()}
            streams.append(about | {"heads": heads})
        measured = {"error": self.error, "recall": self.recall}
        tensors |= {name: tensor for name, tensor in measured.items() if tensor is not None}
        numbers = {name: getattr(self, name) for name in NUMBERS}
        if any(self.spans):
            numbers["protected"] = [[list(span) for span in own.each] for own in self.spans]
        budgets = [[budget.fraction, budget.fixed, budget.least, budget.share] for budget in self.budgets]
        return tensors, numbers | {"budgets": budgets, "row_shares": self.row_shares, "streams": streams}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any]) -> None:
        """Restore what `state` gave."""
        self.reset()
        if not numbers:
            return
        check_layer(tensors, numbers, self.config.sinks)
        budgets = restored_budgets(numbers["budgets"], self.config)
        self.begin(len(numbers["lengths"]), budgets, restored_spans(numbers, budgets, self.config.sinks))
        if self.ragged > numbers["ragged"]:
            raise ValueError("rows whose windows have unequal lengths, which the file's numbers call equal")
        if numbers["row_shares"] is not None:
            self.share(checked_shares(numbers["row_shares"], self.config, len(numbers["lengths"]), self.heads))
        streams = numbers["streams"]
        if self.streams.heads != [one["heads"] for one in streams]:
            raise ValueError(f"streams of heads {[one['heads'] for one in streams]!s:.60}")
        for name in NUMBERS:
            setattr(self, name, numbers[name])
        for number, stream in enumerate(self.streams.all):
            stream.restore(with_prefix(tensors, f"{number}."), streams[number], ragged=self.ragged)
        self.error, self.recall = tensors.get("error"), tensors.get("recall")
        self.kind = (self.heads, self.window.keys.view.shape[3], self.window.keys.view.dtype)
        self._check_that_it_answers()

    def _check_that_it_answers(self) -> None:
        """Refuse parts that do not fit together: with them, not even an empty set of queries can be answered."""
        held = self.window.columns
        rows, width = held.keys.shape[0], held.keys.shape[3]
        asked = Query(held.keys.new_zeros(rows, self.heads, 0, width), 1.0, in_full=True)
        found = self.streams.answer(asked).attended
        if found is not None and found.out.shape != (rows, self.heads, 0, held.values.shape[3]):
            raise ValueError(f"answers of shape {tuple(found.out.shape)}")

    # -- reports

    @property
    def budgets(self) -> list[Budget]:
        """The budget of each KV head."""
        return self.streams.budgets

    @property
    def window(self) -> Window:
        """The window of the first heads; of all heads if they have the same."""
        return self.streams.all[0].window

    @property
    def past(self) -> Lanes | None:
        """What left the window of the first heads; of all heads if they have the same window."""
        return self.streams.all[0].past if self.started else None

    @property
    def left(self) -> list[int]:
        """Tokens of each row that left the window."""
        return [max(gone) for gone in zip(*(stream.left for stream in self.streams.all), strict=True)]

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return sum(stream.nbytes for stream in self.streams.all)

    def count_entries(self) -> Tensor | None:
        """Entries held per row and KV head."""
        return self.streams.by_head(lambda stream: stream.count_entries()) if self.started else None


def restored_budgets(given: list[list[Any]], config: MethodConfig) -> list[Budget]:
    """The budgets of all heads, which follow from the config unless bytes were divided or shares were measured."""
    keep, floor, least = config.budget_given, config.floor(), config.least_entries()
    found = [replace(Budget(*one), latest=config.latest) for one in given]
    if not found:
        raise ValueError("no heads")
    for budget in found:
        if isinstance(keep, float):
            right = (budget.fraction, budget.fixed, budget.least) == (keep, None, floor)
        else:
            right = budget.fraction is None and type(budget.fixed) is int
            right = right and least == budget.least <= (budget.fixed or 0) <= MOST
            right = right and (isinstance(keep, str) or budget.fixed == keep)
        right = right and type(budget.share) is float and 0 <= budget.share <= most_share(keep) * (1 + 1e-9)
        if not right or (budget.share != 1 and equal_until_read(config)):
            raise ValueError(f"a budget of {budget!s:.80} for {config!s:.80}")
    return found


def restored_spans(numbers: dict[str, Any], budgets: list[Budget], sinks: int) -> list[Spans] | None:
    """The protected tokens of each row, which must leave every lane what it needs; None if nothing is said of them."""
    if "protected" not in numbers:
        return None
    spans = list(read_spans(numbers["protected"]).rows)
    written = [[list(span) for span in own.each] for own in spans]
    most = max(own.beside(sinks) for own in spans)
    room = all(budget.fixed is None or budget.fixed >= budget.least + most for budget in budgets)
    if written != numbers["protected"] or len(spans) != len(numbers["lengths"]) or not room:
        raise ValueError(f"protected tokens {numbers['protected']!s:.80} of {len(numbers['lengths'])} rows")
    return spans


def checked_shares(given: Any, config: MethodConfig, rows: int, heads: int) -> list[list[float]]:
    """These shares, if they are ones that a prompt can have set."""
    keep = config.budget_given
    most = most_share(keep) * (1 + 1e-9)
    right = isinstance(config, BudgetedConfig) and config.heads == THRESHOLD and isinstance(given, list)
    right = right and len(given) == rows and all(isinstance(row, list) and len(row) == heads for row in given)
    if not right or not all(type(share) is float and 0 <= share <= most for row in given for share in row):
        raise ValueError(f"shares {given!s:.80} for {rows} × {heads} KV heads of {config!s:.80}")
    return given


def check_layer(tensors: dict[str, Tensor], numbers: dict[str, Any], sinks: int) -> None:
    """Refuse a state that no layer can be in."""
    lengths, seen = numbers["lengths"], numbers["seen"]
    if not all(map(_is_count, (*lengths, seen, numbers["measured_at"]))) or max(lengths, default=0) > seen:
        raise ValueError(f"rows of {lengths!s:.60} tokens, {seen} seen")
    if not lengths or type(numbers["ragged"]) is not bool or not numbers["streams"]:
        raise ValueError(f"{len(lengths)} rows in {len(numbers['streams'])} streams")
    first = tensors["0.keys"]
    kinds = {name: x.dtype for name, x in tensors.items() if name.rpartition(".")[2] in ("keys", "values", "pairs")}
    if not first.is_floating_point() or set(kinds.values()) != {first.dtype}:
        raise ValueError(f"keys and values of several types: {kinds}")
    for number, stream in enumerate(numbers["streams"]):
        _check_window([tensors[f"{number}.{name}"] for name in ("keys", "values", "ranks")], stream, lengths, sinks)
    measured = [tensors[name] for name in ("error", "recall") if name in tensors]
    if any(x.ndim != 2 or len(x) != len(lengths) or not x.is_floating_point() for x in measured):
        raise ValueError("errors that do not belong to these rows")


def _check_window(tensors: list[Tensor], stream: dict[str, Any], lengths: list[int], sinks: int) -> None:
    """Refuse a window that has other tokens than those that are not in the past."""
    keys, values, ranks = tensors
    left, rows = stream["left"], len(lengths)
    shaped = keys.ndim == values.ndim == 4 and keys.shape[:3] == values.shape[:3] and keys.dtype == values.dtype
    if not shaped or ranks.shape != keys.shape[::2][:2] or ranks.dtype != torch.int64 or len(keys) != rows:
        raise ValueError(f"keys {tuple(keys.shape)}, values {tuple(values.shape)} and ranks {tuple(ranks.shape)}")
    if keys.shape[1] != len(stream["heads"]):
        raise ValueError(f"{keys.shape[1]} heads, and not those numbered {stream['heads']!s:.60}")
    if len(left) != rows or not all(map(_is_count, left)):
        raise ValueError(f"rows of {lengths!s:.60} tokens, {left!s:.60} of them not in the window")
    for row, (length, gone) in enumerate(zip(lengths, left, strict=True)):
        there = ranks[row][ranks[row] >= 0].tolist()
        whole = gone <= length and len(there) == length - gone  # else there may be no memory for the list below
        if not whole or there != [*range(min(sinks, length)), *range(sinks + gone, length)]:
            raise ValueError(
                f"row {row} has {length} tokens, {gone} of which left the window, which does not hold just the others"
            )


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number <= MOST

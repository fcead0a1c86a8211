"""What a layer remembers of the tokens that left its window: lanes, which may hold different numbers of entries.

A lane is one KV head of one row of the batch. Lanes that have the same budget, and got the same number of tokens in
every call, lie together in a bundle: dense tensors that torch reads in place. So a row that is shorter than others, or
a head with another budget, is nothing special to a method: it sees the lanes of a bundle, and no padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.caches.core.answers import complete, in_rows, joined, side_by_side
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.method import Holding, Method
from kvsketch.caches.core.part import Heads
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.storage import listed_on, with_prefix
from kvsketch.caches.core.tokens import Arriving, Columns
from kvsketch.kernels.places import chosen, chosen_of, in_front
from kvsketch.kernels.sources import Entries


@dataclass
class Bundle:
    """Some KV heads of some rows, and what they hold. Lanes are counted row by row."""

    rows: list[int]
    heads: list[int]  # counted from 0 among the heads of `Lanes`
    budget: Budget
    holding: Holding
    count: int = 0  # tokens that came to each lane
    whole: bool = False  # whether these are all lanes that there are, in order
    placed: list[int] = field(default_factory=list)  # the heads' places in the layer
    named: list[int] = field(default_factory=list)  # and their numbers in the whole model
    at: dict[torch.device, tuple[Tensor, ...]] = field(default_factory=dict)  # all four lists, as tensors
    numbers: dict[torch.device, Tensor] = field(default_factory=dict)  # the lanes' numbers, see `numbered`
    part: Entries | None = None  # the holding's weighted tokens as a query reads them; made once

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return len(self.rows) * len(self.heads)

    def of(self, x: Tensor) -> Tensor:
        """The part [l, …] of something [b, h, …] that belongs to these lanes."""
        if self.whole:
            return x[0] if len(self.rows) == 1 else x.flatten(0, 1)
        if len(self.rows) == 1 and self.heads == [*range(self.heads[0], self.heads[-1] + 1)]:
            return x[self.rows[0], self.heads[0] : self.heads[-1] + 1]  # a view, without a copy
        rows, heads, _, _ = self._index(x.device)
        return x[rows, heads].flatten(0, 1)

    def query(self, query: Query, heads: int) -> Query:
        """The queries that these lanes answer, as those of one row whose KV heads are the lanes."""
        if self.whole and len(self.rows) == 1:
            return query
        queries = query.queries.unflatten(1, (heads, -1))
        return replace(query, queries=self.of(queries).flatten(0, 1)[None], unrotated=None, ranks=None, sinks=None)

    def lane_heads(self, device: torch.device) -> Int64[Tensor, " l"]:
        """The number of each lane's KV head in the whole model."""
        rows, _, _, named = self._index(device)
        return named.expand(len(rows), -1).flatten()

    def weighted(self, here: int) -> Entries:
        """All that the lanes hold, if attention over it is the answer; see `numbered`."""
        held = self.holding.weighted
        assert held is not None, "entries with weights"
        if self.part is None or self.part.tokens is not held:
            self.part = self.numbered(Entries(held), here)
        return self.part

    def numbered(self, part: Entries, here: int) -> Entries:
        """Entries of these lanes, with the lanes' numbers in a batch that has `here` KV heads."""
        if self.whole and len(self.heads) == here:
            return part
        device = part.tokens.keys.device
        if device not in self.numbers:
            rows, _, placed, _ = self._index(device)
            self.numbers[device] = (rows * here + placed).flatten()
        return Entries(part.tokens, self.numbers[device], part.segments, part.pairs, part.choice)

    def _index(self, device: torch.device) -> tuple[Tensor, ...]:
        if device not in self.at:
            every = listed_on(device, [*self.rows, *self.heads, *self.placed, *self.named])
            rows, *of_heads = every.split([len(self.rows), *[len(self.heads)] * 3])
            self.at[device] = (rows[:, None], *(x[None] for x in of_heads))
        return self.at[device]


class Lanes:
    """All lanes of a layer."""

    def __init__(self, method: Method, budgets: Sequence[Sequence[Budget]], of_layer: Heads | None = None) -> None:
        """`budgets`: what the lane of each KV head of each row may hold; `of_layer`: which heads, if not all."""
        self.method, self.heads = method, len(budgets[0])
        self.of_layer = Heads.every(self.heads) if of_layer is None else of_layer
        self.bundles = list[Bundle]()
        alike = dict[tuple[Budget, ...], list[int]]()
        for row, own in enumerate(budgets):
            alike.setdefault(tuple(own), []).append(row)
        for each, rows in alike.items():
            for budget in dict.fromkeys(each):
                heads = [head for head, own in enumerate(each) if own == budget]
                self.bundles.append(Bundle(rows, heads, budget, method.new_holding(budget)))
        self._note_order(len(budgets))

    def _note_order(self, rows: int) -> None:
        """Note where each lane is when the bundles are put one after another."""
        heads = self.heads
        self.rows = rows
        lanes = [row * heads + head for bundle in self.bundles for row in bundle.rows for head in bundle.heads]
        place = {lane: i for i, lane in enumerate(lanes)}
        self.order = [place[lane] for lane in range(rows * heads)]
        for bundle in self.bundles:
            bundle.whole, bundle.at, bundle.numbers, bundle.part = len(self.bundles) == 1, {}, {}, None
            bundle.placed = [self.of_layer.places[head] for head in bundle.heads]
            bundle.named = [self.of_layer.numbers[head] for head in bundle.heads]
        self._order_at = dict[torch.device, Tensor]()

    @property
    def empty(self) -> bool:
        """Whether no token has come yet."""
        return not any(bundle.count for bundle in self.bundles)

    @property
    def counts(self) -> list[int]:
        """Tokens that came, per row."""
        found = {row: bundle.count for bundle in self.bundles for row in bundle.rows}
        return [found[row] for row in range(self.rows)]

    # -- writing

    def write(self, tokens: Columns, counts: Sequence[int], few: Sequence[bool]) -> None:
        """Take tokens that leave the window, after which `counts` have come in all. Rank -1: not a token of this row.

        `few` says for each row whether its call had a few tokens.
        """
        added = [count - before for count, before in zip(counts, self.counts, strict=True)]
        self._divide([(count, own and count > 0) for count, own in zip(added, few, strict=True)])
        todo = list[tuple[Holding, Arriving]]()
        for bundle in self.bundles:
            count = added[bundle.rows[0]]
            if count:
                todo.append((bundle.holding, self._arriving(bundle, tokens, count, few=few[bundle.rows[0]])))
                bundle.count += count
        self.method.write(todo)

    def _divide(self, added: Sequence[tuple[int, bool]]) -> None:
        """Divide bundles so that all rows of each get the same number of tokens, in the same kind of call."""
        divided = list[Bundle]()
        for bundle in self.bundles:
            parts = dict[tuple[int, bool], list[int]]()
            for place, row in enumerate(bundle.rows):
                parts.setdefault(added[row], []).append(place)
            divided += [bundle] if len(parts) == 1 else [self._with_rows(bundle, own) for own in parts.values()]
        if len(divided) > len(self.bundles):
            self.bundles = divided
            self._note_order(self.rows)

    def _with_rows(self, bundle: Bundle, places: Sequence[int], rows: Sequence[int] | None = None) -> Bundle:
        """A bundle with only the rows at these places, under the numbers `rows` if these are given."""
        holding = self.method.new_holding(bundle.budget)
        if bundle.count:
            holding.restore(bundle.holding.tensors(), bundle.holding.numbers(), bundle.count)
            heads = len(bundle.heads)
            lanes = torch.tensor([place * heads + head for place in places for head in range(heads)], device="cpu")
            holding.select(lanes, bundle.count)
        kept = [bundle.rows[place] for place in places] if rows is None else list(rows)
        return Bundle(kept, bundle.heads, bundle.budget, holding, bundle.count)

    @staticmethod
    def _arriving(bundle: Bundle, tokens: Columns, count: int, *, few: bool) -> Arriving:
        """The tokens of a bundle's lanes, holes between them closed."""
        keys, values = bundle.of(tokens.keys), bundle.of(tokens.values)
        notes = None if tokens.notes is None else bundle.of(tokens.notes)
        if tokens.count > count:
            real = tokens.ranks[bundle.rows] >= 0
            index = in_front(real)[:, :count].repeat_interleave(len(bundle.heads), 0)
            keys, values = chosen_of((keys, values), index)
            notes = None if notes is None else chosen(notes, index)
        return Arriving(keys, values, bundle.count, bundle.lane_heads, notes, few=few)

    def forget_parts(self) -> None:
        """Forget the parts whose entries have been replaced: they would keep the old ones alive."""
        for bundle in self.bundles:
            if bundle.part is not None and bundle.part.tokens is not bundle.holding.weighted:
                bundle.part = None

    # -- while steps are recorded

    def open(self, *, anew: bool) -> None:
        """Prepare to be read by recorded steps."""
        for bundle in self.bundles:
            if bundle.count:
                bundle.holding.open(anew=anew)

    def close(self) -> None:
        """Be as before `open`."""
        for bundle in self.bundles:
            if bundle.count:
                bundle.holding.close()

    def marks(self) -> object:
        """Where the tensors that a step reads lie, and which lanes they belong to."""
        return [
            (bundle.rows, bundle.heads, bundle.whole, bundle.holding.marks() if bundle.count else None)
            for bundle in self.bundles
        ]

    def without_room(self) -> None:
        """Give back the room that only recorded steps need."""
        for bundle in self.bundles:
            if bundle.count:
                bundle.holding.without_room()

    def read_beside(self) -> list[object]:
        """Tensors that say which lanes a bundle has: made once, and a recorded step reads them where they are."""
        return [
            *((bundle.part, dict(bundle.at), dict(bundle.numbers)) for bundle in self.bundles),
            dict(self._order_at),
        ]

    # -- reading

    def answer(self, query: Query) -> Answer:
        """Attention over what is held, or over what is looked up; nothing changes."""
        return complete(self.look(query), query, self.heads)

    def look(self, query: Query) -> Answer:
        """The same, except that some entries may still have to be read."""
        wanted = not query.in_full and any(bundle.holding.wants_asking for bundle in self.bundles)
        asked = self.method.ask(query, self.heads) if wanted else None
        found = [(bundle, self._ask(bundle, query, asked)) for bundle in self.bundles]
        sources = side_by_side([answer for _, answer in found])
        answer = found[0][1]
        if len(found) > 1:
            answers = [(bundle.lanes, answer) for bundle, answer in found]
            answer = joined(answers, query, self.heads, self._order(query.queries.device))
        answer = in_rows(answer, self.rows)
        return Answer(answer.attended, answer.estimated, answer.read, sources)

    def _ask(self, bundle: Bundle, query: Query, asked: Tensor | None) -> Answer:
        """The answer of a bundle's lanes, as KV heads of one row; what is still to be read has its lanes' numbers."""
        if not bundle.count:
            return Answer(None)
        if bundle.holding.weighted is not None:
            return Answer(None, unread=((bundle.weighted(self.of_layer.here),),))
        answer = bundle.holding.answer(bundle.query(query, self.heads), None if asked is None else bundle.of(asked))
        # Where answers of bundles are joined, their counts of what was read are copied, and must be known by then.
        parts = [part if bundle.whole else part.chosen() for (part,) in answer.unread]
        unread = tuple((bundle.numbered(part, self.of_layer.here),) for part in parts)
        return Answer(answer.attended, answer.estimated, answer.read, unread)

    def _order(self, device: torch.device) -> Int64[Tensor, " l"]:
        if device not in self._order_at:
            self._order_at[device] = listed_on(device, self.order)
        return self._order_at[device]

    def observe(self, query: Query, answer: Answer, lse: Float[Tensor, "b hg q"] | None) -> None:
        """Let lanes take note of queries that were answered; `lse` is over everything that the queries saw."""
        for bundle in self.bundles:
            if bundle.count:
                asked = bundle.query(query, self.heads)
                read = None if answer.read is None else self._real_reads(bundle, query, answer.read)
                own = None if lse is None else bundle.of(lse.unflatten(1, (self.heads, -1))).flatten(0, 1)[None]
                bundle.holding.observe(asked, read, own)

    @staticmethod
    def _real_reads(bundle: Bundle, query: Query, read: Int64[Tensor, "b h q"]) -> Int64[Tensor, "1 l q"]:
        """How much each query read; -1 for padding."""
        if query.padded and query.ranks is not None:
            read = read.masked_fill(query.ranks[:, None] < 0, -1)
        return read if bundle.whole and len(bundle.rows) == 1 else bundle.of(read)[None]

    # -- rows, reports, files

    def map_rows(self, rows: Sequence[int]) -> None:
        """Row i becomes what row `rows[i]` was."""
        moved = list[Bundle]()
        for bundle in self.bundles:
            place = {row: i for i, row in enumerate(bundle.rows)}
            new = [i for i, row in enumerate(rows) if row in place]
            if new:
                moved.append(self._with_rows(bundle, [place[rows[i]] for i in new], new))
        self.bundles = moved
        self._note_order(len(rows))

    def count_entries(self) -> Int64[Tensor, "b h"]:
        """Entries of each lane."""
        return self._by_lane([bundle.holding.count_entries() if bundle.count else 0 for bundle in self.bundles]).long()

    def _by_lane(self, of_bundles: Sequence[Tensor | int]) -> Float[Tensor, "b h"]:
        """Numbers of all lanes, given bundle by bundle: one for each lane, or the same for all."""
        found = [
            torch.as_tensor(x, dtype=torch.float64, device="cpu").expand(b.lanes)
            for b, x in zip(self.bundles, of_bundles, strict=True)
        ]
        return torch.cat(found)[torch.tensor(self.order, device="cpu")].view(self.rows, -1)

    @property
    def nbytes(self) -> int:
        """Bytes of memory held, spare room included."""
        return sum(bundle.holding.nbytes for bundle in self.bundles if bundle.count)

    def details(self) -> dict[str, float]:
        """What a report should show beside entries and bytes: means over lanes."""
        found = dict[str, tuple[float, int]]()
        for bundle in self.bundles:
            for name, value in bundle.holding.details(bundle.count).items() if bundle.count else ():
                total, weight = found.get(name, (0.0, 0))
                found[name] = (total + value * bundle.lanes, weight + bundle.lanes)
        return {name: total / weight for name, (total, weight) in found.items()}

    def warning(self) -> str | None:
        """What a user must know about these tokens and this method."""
        return next(filter(None, (bundle.holding.warning() for bundle in self.bundles if bundle.count)), None)

    def share_read(self) -> Float[Tensor, "b h"] | None:
        """The share of the past that queries read, over all queries that looked up; None if none did."""
        shares = [bundle.holding.share_read() if bundle.count else None for bundle in self.bundles]
        if all(share is None for share in shares):
            return None
        return self._by_lane([0 if share is None else share for share in shares])

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the state, those of a bundle under its number."""
        return {
            f"{number}.{name}": tensor
            for number, bundle in enumerate(self.bundles)
            for name, tensor in (bundle.holding.tensors() if bundle.count else {}).items()
        }

    def numbers(self) -> list[dict[str, Any]]:
        """All other state, as JSON: one table for each bundle."""
        return [
            {"rows": bundle.rows, "heads": bundle.heads, "count": bundle.count, "numbers": bundle.holding.numbers()}
            for bundle in self.bundles
        ]

    def restore(self, tensors: dict[str, Tensor], numbers: list[dict[str, Any]]) -> None:
        """Restore what `tensors` and `numbers` gave, for the same rows and heads."""
        wanted = sorted((row, head) for row in range(self.rows) for head in range(self.heads))
        lanes = [(row, head) for one in numbers for row in one["rows"] for head in one["heads"]]
        counts = [one["count"] for one in numbers]
        in_order = all(one[name] == sorted(one[name]) for one in numbers for name in ("rows", "heads"))
        if any(type(one["numbers"]) is not dict for one in numbers):
            raise ValueError("the numbers of a bundle are no table")
        if not in_order or sorted(lanes) != wanted or any(type(count) is not int or count < 0 for count in counts):
            raise ValueError(
                f"bundles of {lanes!s:.60} with {counts!s:.60} tokens, for {self.rows} × {self.heads} lanes"
            )
        known = {(row, head): own.budget for own in self.bundles for row in own.rows for head in own.heads}
        self.bundles = []
        for number, one in enumerate(numbers):
            budgets = {known[row, head] for row in one["rows"] for head in one["heads"]}
            if len(budgets) != 1:
                raise ValueError(f"a bundle of heads {one['heads']!s:.60} with several budgets")
            budget = budgets.pop()
            holding = self.method.new_holding(budget)
            if one["count"]:
                holding.restore(with_prefix(tensors, f"{number}."), one["numbers"], one["count"])
            self.bundles.append(Bundle(list(one["rows"]), list(one["heads"]), budget, holding, one["count"]))
        self._note_order(self.rows)

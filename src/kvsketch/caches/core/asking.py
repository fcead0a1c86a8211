"""How much attention tokens get from some queries, as notes that stay with the tokens; some methods choose by them.

Which queries are asked (`Asking.queries`) is independent of what a method makes of the answer. A note is a sum, a mean
or the largest of the weights that a token got; it is made while queries are answered, and comes with the token when the
token leaves the window.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.attention import NO_MASS, WeightedTokens, fold_groups, logits_of
from kvsketch.caches.core.query import Query
from kvsketch.kernels import native
from kvsketch.kernels.native import weights as in_c
from kvsketch.kernels.native.attention import MOST_QUERIES
from kvsketch.kernels.weighted_attention.reference import LOGITS_AT_ONCE

WINDOW, CONTEXT, SECOND, QUESTIONS = "window", "context", "second reading", "questions"
ASKED_AT_ONCE = 4096  # queries that are copied for C at a time
IN_CACHE, FEW = 1 << 21, 16  # most logits of a strip on a CPU, as it is gone over several times; or FEW queries if more
FEW_ROWS = 16  # for no more queries of a group in a call than this, torch computes the weights
SUM, MEAN, MAX, LAST = "sum", "mean", "max", "last"
IN_C = {SUM: in_c.ADDED, MEAN: in_c.ADDED, MAX: in_c.LARGEST, LAST: in_c.INSTEAD}
NOBODYS = torch.iinfo(torch.int32).max  # the rank of a token that no query sees
Notes = Int64[Tensor, "b h n t"]  # the bits of float64: what was noted, and for a mean the number of its weights
Weights = Float[Tensor, "b h n t"]


@dataclass(frozen=True)
class Asking:
    """Which queries say how much a token matters, and what is noted of their weights.

    `queries` "window": those of the last `last` tokens of a call; "context": all of a call. "second reading" and
    "questions": for a prompt, the queries of its second reading or of questions that are read after it; for later
    text, all queries that come while a token is in the window.
    """

    queries: str
    noted: str
    last: int = 0

    @property
    def behind(self) -> bool:
        """Whether texts read after a prompt ask about its tokens, and not the prompt's own queries."""
        return self.queries in (SECOND, QUESTIONS)

    @property
    def width(self) -> int:
        """Numbers in a note."""
        return 2 if self.noted == MEAN else 1

    def none(self, keys: Float[Tensor, "b h n d"]) -> Notes:
        """Empty notes, for tokens about which nothing was noted yet."""
        return torch.zeros(*keys.shape[:3], self.width, dtype=torch.int64, device=keys.device)

    def wanted(self, ranks: Int64[Tensor, "b q"], *, one: bool) -> Bool[Tensor, "b q"]:
        """Which queries of a call are asked; `one`: the call is a single token of every row."""
        if self.queries != WINDOW or one:
            return ranks >= 0
        return (ranks >= 0) & (ranks > ranks.amax(1, keepdim=True) - self.last)

    def with_more(self, notes: Notes, more: Weights, asked: Bool[Tensor, " b"] | None = None) -> Notes:
        """Notes that take in these weights; those of rows in which no query was asked stay as they were."""
        before = weights(notes)
        if self.noted == MAX:
            after = torch.maximum(before, more)
        elif self.noted == LAST:
            after = more if asked is None else torch.where(asked[:, None, None, None], more, before)
        else:
            after = before + more
        return bits(after)

    def score(self, notes: Int64[Tensor, "*b n t"]) -> Float[Tensor, "*b n"]:
        """How much a token matters."""
        noted = weights(notes)
        return noted[..., 0] / noted[..., 1].clamp_min(1) if self.noted == MEAN else noted[..., 0]


@dataclass(frozen=True)
class Askings:
    """Several askings at once: a token's note has the numbers of each, one after another."""

    each: tuple[Asking, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.each)

    def __iter__(self) -> Iterator[tuple[Asking, slice]]:
        """Each asking, with where its numbers are in a note."""
        start = 0
        for asking in self.each:
            yield asking, slice(start, start + asking.width)
            start += asking.width

    @property
    def width(self) -> int:
        """Numbers in a note."""
        return sum(asking.width for asking in self.each)

    @property
    def behind(self) -> bool:
        """Whether texts read after a prompt ask about its tokens."""
        return any(asking.behind for asking in self.each)

    @property
    def second(self) -> bool:
        """Whether one of these texts is the prompt again."""
        return any(asking.queries == SECOND for asking in self.each)

    @property
    def by_questions(self) -> bool:
        """Whether questions are read after the prompt."""
        return any(asking.queries == QUESTIONS for asking in self.each)

    def none(self, keys: Float[Tensor, "b h n d"]) -> Notes:
        """Empty notes, for tokens about which nothing was noted yet."""
        return torch.zeros(*keys.shape[:3], self.width, dtype=torch.int64, device=keys.device)

    def of(self, notes: Int64[Tensor, "*b n t"], some: "Askings") -> Int64[Tensor, "*b n o"] | None:
        """The numbers of `some` of these in the notes of all; None if `some` is empty."""
        places = dict(self)
        return torch.cat([notes[..., places[own]] for own in some.each], -1) if some else None

    def check(self, notes: Int64[Tensor, "b h n t"], keys: Float[Tensor, "b h n d"]) -> None:
        """Refuse what cannot have been noted about tokens with these keys."""
        shaped = notes.dtype == torch.int64 and notes.shape == (*keys.shape[:3], self.width)
        if not shaped or not bool((weights(notes).isfinite() & (weights(notes) >= 0)).all()):
            raise ValueError(f"notes of shape {tuple(notes.shape)} that are not {self.width} numbers from 0 on")


def weights(notes: Int64[Tensor, "*b t"]) -> Float[Tensor, "*b t"]:
    """The numbers in notes."""
    return notes.view(torch.float64)


def bits(noted: Float[Tensor, "*b t"]) -> Int64[Tensor, "*b t"]:
    """Numbers as notes."""
    return noted.contiguous().view(torch.int64)


def attention_got(
    asking: Asking,
    query: Query,
    lse: Float[Tensor, "b hg q"],
    keys: Float[Tensor, "b h n d"],
    ranks: Int64[Tensor, "b n"] | None = None,
    wanted: Bool[Tensor, "b q"] | None = None,
) -> Weights:
    """The attention that each token got from queries; `lse`: their log denominators over all that they saw.

    With `ranks` (of the tokens; those of queries are in `query`) tokens are seen by later queries alone, and those of
    rank -1 by none. `wanted`: which queries ask (default: all). In strips: nothing grows with the square of the length.
    """
    noted = torch.zeros(*keys.shape[:3], asking.width, dtype=torch.float64, device=keys.device)
    if not keys.shape[2] or _in_c(asking, noted, query, lse, keys, ranks, wanted):
        return noted
    for start, part, logs in log_weights(query, lse, keys):
        seen = _seen(part, ranks, None if wanted is None else wanted[:, start : start + part.queries.shape[2]])
        if seen is not None:
            seen = seen.repeat(1, logs.shape[2] // seen.shape[1], 1)[:, None]
            logs.masked_fill_(~seen, NO_MASS)
        if asking.noted == MAX:
            torch.maximum(noted[..., 0], logs.amax(2).exp_().double(), out=noted[..., 0])
            continue
        noted[..., 0] += logs.exp_().sum(2, dtype=torch.float64)
        if asking.noted == MEAN:
            noted[..., 1] += logs.shape[2] if seen is None else seen.sum(2)
    return noted


def _in_c(
    asking: Asking,
    noted: Weights,
    query: Query,
    lse: Float[Tensor, "b hg q"],
    keys: Float[Tensor, "b h n d"],
    ranks: Int64[Tensor, "b n"] | None,
    wanted: Bool[Tensor, "b q"] | None,
) -> bool:
    """Do what `attention_got` does, in C; False if C cannot, and then nothing was noted."""
    rows, heads, count, _ = keys.shape
    queries = query.queries.shape[2]
    group = query.queries.shape[1] // heads
    on_cpu = noted.device.type == "cpu" and query.softcap is None and not torch.compiler.is_compiling()
    if not on_cpu or group * queries <= FEW_ROWS or native.library_for(query.queries, keys) is None:
        return False
    seen = None  # which queries see which tokens: ranks of tokens, and of queries
    if ranks is not None or wanted is not None:
        own = keys.new_zeros(rows, queries, dtype=torch.int64) if ranks is None else query.ranks_in_row
        own = own if wanted is None else own.masked_fill(~wanted, -1)
        held = own.new_zeros(rows, count) if ranks is None else ranks.masked_fill(ranks < 0, NOBODYS)
        seen = held.int(), own.int()
    how = in_c.LARGEST if asking.noted == MAX else in_c.ADDED
    for start in range(0, queries, ASKED_AT_ONCE):
        stop = min(start + ASKED_AT_ONCE, queries)
        asked = fold_groups(query.queries[:, :, start:stop], heads)
        less = lse.detach()[:, :, start:stop].reshape(rows, heads, -1)
        by_these = None if seen is None else (seen[0], seen[1][:, start:stop])
        if not in_c.add_many(noted[..., 0], asked, keys, less, query.scale, by_these, how=how):
            assert not start, "what can be done with some queries can be with all"
            return False
    if asking.noted == MEAN:
        before = 0 if seen is None else torch.searchsorted(seen[1].sort(1).values, seen[0])[:, None]
        noted[..., 1] += group * (queries - before)
    return True


def note_one(
    asking: Asking, query: Query, lse: Float[Tensor, "b hg 1"], keys: Float[Tensor, "b h n d"], noted: Weights
) -> bool:
    """Update notes in C for a single query that sees all tokens; False if C cannot, and then they stay as they were."""
    if noted.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    queries = fold_groups(query.queries, keys.shape[1]).flatten(0, 1)
    return in_c.add_weights(
        where_noted(asking, keys, noted), queries, lse.reshape(len(queries), -1), query.scale, query.softcap
    )


def where_noted(asking: Asking, keys: Float[Tensor, "b h n d"], noted: Weights) -> in_c.Noting:
    """Where C notes the attention that tokens get from single queries, which see all of them."""
    rows, heads, count, _ = keys.shape
    got = noted[..., 0].view(rows * heads, count)
    return in_c.Noting(got, keys.flatten(0, 1), how=IN_C[asking.noted], counted=asking.noted == MEAN)


def add_weights(got: Float[Tensor, "l n"], query: Query, lse: Float[Tensor, "1 lg q"], tokens: WeightedTokens) -> None:
    """Add to `got` the attention that every entry got from queries; `lse`: the queries' log denominators."""
    keys, mass = tokens.keys[0], None if tokens.log_mass is None else tokens.log_mass[0]
    few = query.queries.shape[1] * query.queries.shape[2] <= MOST_QUERIES * len(keys)
    if few and got.device.type == "cpu":
        queries, less = (fold_groups(x, len(keys))[0] for x in (query.queries, lse[..., None]))
        if in_c.add_weights(in_c.Noting(got, keys, mass), queries, less[..., 0], query.scale, query.softcap):
            return
    for _, _, logs in log_weights(query, lse, tokens.keys, tokens.log_mass):
        got.add_(logs.exp_().sum(2)[0])


def log_weights(
    query: Query,
    lse: Float[Tensor, "b hg q"],
    keys: Float[Tensor, "b h n d"],
    log_mass: Float[Tensor, "b h n"] | None = None,
) -> Iterator[tuple[int, Query, Float[Tensor, "b h gq n"]]]:
    """For each strip of queries: its first query's number, the strip, and logs of the weights that tokens get from it.

    The logs of one strip are overwritten by the next.
    """
    count = query.queries.shape[2]
    # A single query is a strip however many tokens there are: compiled code must not depend on that.
    strip = 1 if count == 1 else _strip(len(keys) * query.queries.shape[1] * keys.shape[2], keys.device)
    rows = min(strip, count) * query.queries.shape[1] // keys.shape[1]
    plain = query.softcap is not None or count < FEW or keys.device.type != "cpu"
    product = None if plain else _Product(keys, log_mass, rows)
    for start in range(0, count, strip):
        part = query.part(start, start + strip)
        less = fold_groups(lse[:, :, start : start + strip, None], keys.shape[1])
        if product is not None:
            yield start, part, product.log_weights(part, less)
            continue
        logs = logits_of(part.queries, keys, part.scale, part.softcap)
        yield start, part, (logs if log_mass is None else logs + log_mass[:, :, None]).sub_(less)


class _Product:
    """Logs of weights as one product of matrices: under each key stand a one and the log of the token's mass.

    What is added to logits is added within the product, whose result always goes to the same memory: on a CPU, to go
    over the logits once more, or to write to fresh memory, takes as long as the product. (On a GPU it does not, and a
    product may have fewer bits than what is added to it.)
    """

    @torch.no_grad()
    def __init__(self, keys: Float[Tensor, "b h n d"], log_mass: Float[Tensor, "b h n"] | None, most: int) -> None:
        """`most`: how many rows of queries may come at a time."""
        precise = keys.to(torch.promote_types(keys.dtype, torch.float32)).transpose(-1, -2)
        mass = precise.new_zeros(keys.shape[:3]) if log_mass is None else log_mass.to(precise.dtype)
        self.keys = torch.cat([precise, precise.new_ones(*mass.shape[:2], 1, mass.shape[2]), mass[:, :, None]], 2)
        self.room = self.keys.new_empty(mass.shape[0] * mass.shape[1], most, mass.shape[2])

    @torch.no_grad()
    def log_weights(self, query: Query, less: Float[Tensor, "b h gq 1"]) -> Float[Tensor, "b h gq n"]:
        """Logs of the weights that these queries give; `less`: their log denominators."""
        rows, heads, count, _ = less.shape
        asked = fold_groups(query.queries, heads).to(self.keys.dtype) * query.scale
        asked = torch.cat([asked, -less.to(asked.dtype), torch.ones_like(asked[..., :1])], 3)
        found = self.room[:, :count]
        torch.bmm(asked.flatten(0, 1), self.keys.flatten(0, 1), out=found)
        return found.unflatten(0, (rows, heads))


def _strip(logits: int, device: torch.device) -> int:
    """How many queries to take at a time, if each has so many logits."""
    strip = max(1, LOGITS_AT_ONCE // max(1, logits))
    return min(strip, max(FEW, IN_CACHE // max(1, logits))) if device.type == "cpu" else strip


def _seen(
    part: Query, ranks: Int64[Tensor, "b n"] | None, wanted: Bool[Tensor, "b q"] | None
) -> Bool[Tensor, "b q n"] | None:
    """Which tokens are seen by which of the queries that ask; None: all by all."""
    if ranks is None:
        return None if wanted is None else wanted[:, :, None]
    assert part.ranks is not None, "queries have ranks where tokens have"
    seen = (ranks[:, None] <= part.ranks[:, :, None]) & (ranks >= 0)[:, None]
    return seen if wanted is None else seen & wanted[:, :, None]

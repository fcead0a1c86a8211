"""Locality-sensitive hashing: the one-head forms are `algorithms/lsh.py`; what Saap compares with (appendix B).

`kdeformer` and `reformer` sort keys by a code and cut them into bins of equally many keys; a query reads the bin that
its own code falls into. Here every sorted run of the past is cut by itself. `magicpig` reads keys that share a bucket
with the query in at least two tables. Each head draws its own directions. Every query of a group reads what any of them
finds.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.algorithms.lsh import MOST_BITS, gray_rank, number_of
from kvsketch.caches.core.checks import check_choice, check_count, check_seed
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.storage import storage_bytes
from kvsketch.caches.core.tokens import Seen
from kvsketch.caches.lookup.config import SortedConfig
from kvsketch.caches.lookup.store import Index, Lookup, Store
from kvsketch.kernels.draws import uniforms
from kvsketch.kernels.sources import Segments

KINDS = ("kdeformer", "reformer", "magicpig")
COLLISIONS = 2  # of MagicPIG
MOST_PARTS = 1 << 16  # bins, or tables


@dataclass(frozen=True, kw_only=True)
class LSH(SortedConfig):
    """Keeps everything and reads the keys that random directions put together with the query.

    `bins` (kdeformer, reformer): into how many parts keys are cut. `bits`: how many directions a code (kdeformer) or a
    table (magicpig) has; reformer has 2^bits directions. `tables`: how many magicpig has.
    """

    name: ClassVar[str] = "lsh"

    kind: str = "kdeformer"
    bins: int = 64
    bits: int = 10
    tables: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("kind", self.kind, KINDS)
        for name in ("bins", "bits", "tables"):
            check_count(name, getattr(self, name), least=1, most=MOST_PARTS)
        most = 20 if self.kind == "reformer" else MOST_BITS  # a million directions; or the bits of one number
        if self.bits > most:
            raise ValueError(f"bits of {self.kind} must be at most {most}, got {self.bits}")
        check_seed(self.seed)

    def new_method(self, layer: int) -> Lookup:
        return HashedLookup(self, layer)


class Directions:
    """Random directions of every head of a layer, drawn when they are first asked for; and the codes they give."""

    def __init__(self, config: LSH, layer: int) -> None:
        self.config, self.layer = config, layer
        self.drawn: Float[Tensor, "h r d"] | None = None

    def codes(self, x: Float[Tensor, "b h n d"], heads: int, first: int = 0) -> Int64[Tensor, "b h n t"]:
        """The codes of keys, or of queries."""
        config = self.config
        products = x.detach().float() @ self._of(heads, x, first).mT
        if config.kind == "reformer":
            return products.argmax(3, keepdim=True)
        if config.kind == "kdeformer":
            return gray_rank(products > 0)[..., None]
        return number_of((products > 0).unflatten(3, (config.tables, config.bits)))

    def _of(self, heads: int, like: Tensor, first: int = 0) -> Float[Tensor, "h r d"]:
        if self.drawn is None:
            config = self.config
            count = {"kdeformer": config.bits, "reformer": 1 << config.bits, "magicpig": config.tables * config.bits}
            head, number, place = (
                torch.arange(size, device=like.device) for size in (heads, count[config.kind], like.shape[3])
            )
            where = (config.seed, self.layer, (first + head)[:, None, None], number[:, None], place)
            radius, angle = (uniforms(*where, half) for half in range(2))  # two numbers give a normal one
            self.drawn = ((-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * math.pi * angle)).float()
        return self.drawn


class HashedLookup(Lookup):
    """Labels keys, and finds them for queries, by codes."""

    def __init__(self, config: LSH, layer: int) -> None:
        self.config, self.directions = config, Directions(config, layer)

    def note(self, seen: Seen) -> Int64[Tensor, "b h n t"]:
        return self.directions.codes(seen.keys, seen.keys.shape[1], self.first_head)

    def ask(self, query: Query, heads: int) -> Int64[Tensor, "b h q gt"]:
        """The codes of all queries of a group, one after the other."""
        asking = query.queries.unflatten(1, (heads, -1))
        codes = self.directions.codes(asking.flatten(2, 3), heads, self.first_head)
        return codes.unflatten(2, asking.shape[2:4]).transpose(2, 3).flatten(3)

    def new_index(self) -> Index:
        config = self.config
        return Tables(config.tables) if config.kind == "magicpig" else Bins(config.bins, config.staging)


class Bins(Index):
    """Runs, in the order of codes, are cut into bins of equally many keys; a query reads the bin of its own code."""

    def __init__(self, bins: int, staging: int) -> None:
        self.bins, self.staging = bins, staging
        self.codes: list[tuple[int, Int64[Tensor, "l n"]]] = []  # where each run begins, and its codes
        self.ready = False  # there are no runs yet

    def find(self, store: Store, query: Query, asked: Int64[Tensor, "l q g"] | None) -> Answer:
        if not self.codes:
            return store.read_places(query, None)
        assert asked is not None
        found: Segments | None = None
        for start, codes in self.codes:
            count = codes.shape[1]
            place = torch.searchsorted(codes, asked.flatten(1)).view_as(asked)
            number = (place.clamp_max(count - 1) * self.bins // count).sort(2).values
            again = torch.cat([torch.zeros_like(number[..., :1], dtype=torch.bool), number.diff(dim=2) == 0], 2)
            begin, end = (-(-(number + more) * count // self.bins) for more in (0, 1))  # rounded up
            here = Segments((begin + start)[None], ((end - begin) * ~again)[None])
            found = here if found is None else found.join(here)
        return store.read_places(query, found)

    def sorted_in(self, store: Store) -> None:
        self.codes, self.ready = list(store.labels_of_runs()), True

    @property
    def nbytes(self) -> int:
        return storage_bytes(codes for _, codes in self.codes)


class Tables(Index):
    """Keys with their bucket in every table; a query reads the keys that share enough of its buckets."""

    def __init__(self, tables: int) -> None:
        self.tables = tables

    def find(self, store: Store, query: Query, asked: Int64[Tensor, "l q gt"] | None) -> Answer:
        assert asked is not None
        labels, codes = store.labels.view, asked.unflatten(2, (-1, self.tables))

        def visible(start: int, stop: int) -> Bool[Tensor, "1 l q n"]:
            own = codes[:, start:stop]  # [l, q, g, t]
            together = torch.zeros(*own.shape[:3], store.count, dtype=torch.int16, device=labels.device)
            for table in range(self.tables):
                together += own[..., None, table] == labels[:, None, None, :, table]
            return (together >= COLLISIONS).any(2)[None]

        return store.read_where(query, visible)

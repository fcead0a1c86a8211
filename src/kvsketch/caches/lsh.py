"""Locality-sensitive hashing: the one-head forms are `algorithms/lsh.py`; what Saap compares with (appendix B).

`kdeformer` and `reformer` sort keys by a code and cut them into bins of as many keys; a query reads the bin that its
own code falls into. Here every sorted run of the past is cut by itself. `magicpig` reads keys that share a bucket with
the query in two tables at least. Directions are drawn for every head. Queries of a group read what each of them finds.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.algorithms.draws import uniforms
from kvsketch.algorithms.lsh import MOST_BITS, gray_rank, number_of
from kvsketch.caches.base import check_choice, check_count, check_seed
from kvsketch.caches.budget import Budget
from kvsketch.caches.masked import MaskedPast
from kvsketch.caches.question import Arriving, LookedUp, LookupPast, Question
from kvsketch.caches.rows_in_step import RowsInStep
from kvsketch.caches.slots import SlotsPast
from kvsketch.caches.sorted_runs import SortedConfig, SortedPast
from kvsketch.caches.storage import storage_bytes
from kvsketch.kernels.indexed_attention import Segments

KINDS = ("kdeformer", "reformer", "magicpig")
COLLISIONS = 2  # of MagicPIG
MOST_PARTS = 1 << 16  # bins, or tables


@dataclass(frozen=True, kw_only=True)
class LSH(SortedConfig):
    """Keeps everything and reads the keys that random directions put together with the query.

    `bins` (kdeformer, reformer): into how many parts keys are cut. `bits`: directions of a code (kdeformer), of a table
    (magicpig), or 2^bits directions (reformer). `tables`: of magicpig.
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
        most = 20 if self.kind == "reformer" else MOST_BITS  # a million directions; or bits of a number
        if self.bits > most:
            raise ValueError(f"bits of {self.kind} must be at most {most}, got {self.bits}")
        check_seed(self.seed)

    def new_past(self, budget: Budget, layer: int) -> LookupPast:
        directions = Directions(self, layer)  # all rows of a layer share them
        return RowsInStep(lambda: self._slots_by(directions))

    def slots(self, layer: int) -> SlotsPast:
        return self._slots_by(Directions(self, layer))

    def _slots_by(self, directions: "Directions") -> SlotsPast:
        return MagicPigPast(self, directions) if self.kind == "magicpig" else BinsPast(self, directions)


class Directions:
    """Random directions of every head of a layer, drawn when they are first asked for; and the codes they give."""

    def __init__(self, config: LSH, layer: int) -> None:
        self.config, self.layer = config, layer
        self.drawn: Float[Tensor, "h r d"] | None = None

    def codes(self, x: Float[Tensor, "b h n d"], heads: int) -> Int64[Tensor, "b h n t"]:
        """The codes of keys, or of a group's queries."""
        config = self.config
        products = x.detach().float() @ self._of(heads, x).mT
        if config.kind == "reformer":
            return products.argmax(3, keepdim=True)
        if config.kind == "kdeformer":
            return gray_rank(products > 0)[..., None]
        return number_of((products > 0).unflatten(3, (config.tables, config.bits)))

    def _of(self, heads: int, like: Tensor) -> Float[Tensor, "h r d"]:
        if self.drawn is None:
            config = self.config
            count = {"kdeformer": config.bits, "reformer": 1 << config.bits, "magicpig": config.tables * config.bits}
            head, number, place = (
                torch.arange(size, device=like.device) for size in (heads, count[config.kind], like.shape[3])
            )
            where = (config.seed, self.layer, head[:, None, None], number[:, None], place)
            radius, angle = (uniforms(*where, half) for half in range(2))  # two numbers give a normal one
            self.drawn = ((-2 * torch.log1p(-radius)).sqrt() * torch.cos(2 * math.pi * angle)).float()
        return self.drawn


class BinsPast(SortedPast):
    """Keys in the order of their codes."""

    def __init__(self, config: LSH, directions: Directions) -> None:
        super().__init__(config.staging)
        self.config, self.directions = config, directions
        self.codes: list[tuple[int, Int64[Tensor, "b h n"]]] = []  # where each run begins, and its codes

    def label(self, arriving: Arriving) -> Int64[Tensor, "b h n t"]:
        return self.directions.codes(arriving.keys, arriving.keys.shape[1])

    def find(self, question: Question) -> LookedUp:
        if not self.runs:
            return self.read_places(question, None)
        heads, queries = self.keys.shape[1], question.queries.shape[2]
        asking = question.queries.unflatten(1, (heads, -1)).flatten(2, 3)
        codes = self.directions.codes(asking, heads)[..., 0]
        found: Segments | None = None
        for start, labels in self.codes:
            count, bins = labels.shape[2], self.config.bins
            number = torch.searchsorted(labels, codes).clamp_max(count - 1) * bins // count
            number = number.unflatten(2, (-1, queries)).transpose(2, 3).sort(3).values  # [b, h, q, g]
            again = torch.cat([torch.zeros_like(number[..., :1], dtype=torch.bool), number.diff(dim=3) == 0], 3)
            begin, end = (-(-(number + more) * count // bins) for more in (0, 1))  # rounded up
            here = Segments(begin + start, (end - begin) * ~again)
            found = here if found is None else found.join(here)
        return self.read_places(question, found)

    def sorted_in(self) -> None:
        self.codes = list(self.labels_of_runs())

    @property
    def nbytes(self) -> int:
        return super().nbytes + storage_bytes(codes for _, codes in self.codes)


class MagicPigPast(MaskedPast):
    """Keys with their bucket in every table."""

    def __init__(self, config: LSH, directions: Directions) -> None:
        super().__init__()
        self.config, self.directions = config, directions

    def label(self, arriving: Arriving) -> Int64[Tensor, "b h n t"]:
        return self.directions.codes(arriving.keys, arriving.keys.shape[1])

    def visible(self, question: Question) -> Bool[Tensor, "b h q n"]:
        heads = self.keys.shape[1]
        asking = question.queries.unflatten(1, (heads, -1)).flatten(2, 3)
        codes = self.directions.codes(asking, heads)
        labels = self.labels.view
        together = torch.zeros(*codes.shape[:3], labels.shape[2], dtype=torch.int16, device=labels.device)
        for table in range(self.config.tables):
            together += codes[:, :, :, None, table] == labels[:, :, None, :, table]
        return (together >= COLLISIONS).unflatten(2, (-1, question.queries.shape[2])).any(2)

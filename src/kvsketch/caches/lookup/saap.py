"""Saap: the method's one-head form is `algorithms/saap.py`; what it has learnt comes from `kvsketch fit`."""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.caches.core.checks import check_choice, check_number
from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.core.query import Query
from kvsketch.caches.core.tokens import Seen, without_history
from kvsketch.caches.lookup.buckets import BucketLookup
from kvsketch.caches.lookup.config import BucketedConfig
from kvsketch.caches.lookup.key_index import KeyIndex, LayerIndex, find_index, read_index
from kvsketch.caches.lookup.store import Lookup
from kvsketch.kernels.buckets import assign
from kvsketch.kernels.routing import expect
from kvsketch.kernels.sources import Classifier

PREFERENCES = ("mass", "density")


@dataclass(frozen=True, kw_only=True)
class IndexedConfig(BucketedConfig):
    """`index`: the folder that `kvsketch fit` made for the model; left out, the index found for that model."""

    index: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.index, str):
            raise ValueError(f"index must be the name of a folder, got {self.index!r}")
        _ = self.folder  # is found now: a program may change its directory later

    @cached_property
    def folder(self) -> Path:
        """The folder, seen from where the program was when the config was made; `index` stays as it was given."""
        return Path(self.index).absolute()

    @cached_property
    def learnt(self) -> KeyIndex:
        """The index that is in the folder."""
        if not self.index:
            raise ValueError(
                f'{self.name} looks things up in an index: {self.name}(index="FOLDER"), made by kvsketch fit'
            )
        return read_index(self.folder)

    def for_model(self, facts: Callable[[], dict[str, Any]], *, held: bool = False) -> MethodConfig:
        if self.index or "learnt" in vars(self):
            self.learnt.check_model(facts())
            return self
        found = copy(self)  # the same config, but for where its index is
        vars(found)["learnt"] = find_index(self.name, facts())
        return found

    def source_digest(self) -> str | None:
        return self.learnt.digest

    def with_full_paths(self) -> MethodConfig:
        return replace(self, index=str(self.folder.resolve())) if self.index else self

    def looks_up_in(self, layer: int) -> bool:
        """Whether the layer was fitted: `kvsketch fit` leaves out layers whose queries do not look far."""
        return layer in self.learnt.layers


@dataclass(frozen=True, kw_only=True)
class Saap(IndexedConfig):
    """Keeps everything and reads the buckets that a learned classifier expects the answer in.

    `mass`: buckets are visited until the classifier expects this share of a query's attention in them.
    `prefer="mass"`, as published, visits the buckets where it expects most; `prefer="density"` those where it expects
    most for each token that has to be read: an empty bucket then never comes before one with tokens.
    """

    name: ClassVar[str] = "saap"
    before_rotation: ClassVar[bool] = True

    mass: float | None = None
    prefer: str = "mass"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mass is not None:
            check_number("mass", self.mass, above=0, below=1)
        check_choice("prefer", self.prefer, PREFERENCES)

    def new_method(self, layer: int) -> Lookup:
        return SaapLookup(self, layer)


class SaapLookup(BucketLookup):
    """Buckets of keys before rotation, chosen by the classifier of queries before rotation."""

    has_router = True

    def __init__(self, config: Saap, layer: int) -> None:
        self.config, self.layer = config, layer
        self.ready: tuple[tuple[torch.device, torch.dtype], LayerIndex] | None = None
        self.mass, self.per_token = config.mass, config.prefer == "density"
        super().__init__(config, config.learnt.buckets)

    def _learnt(self, at: Tensor, heads: int) -> LayerIndex:
        """What was learnt for this process's heads, on `at`'s device and in its dtype; kept, as every step needs it."""
        if self.ready is None or self.ready[0] != (at.device, at.dtype):
            learnt = self.config.learnt.layer(self.layer, at.device, at.dtype, (self.first_head, heads))
            self.ready = ((at.device, at.dtype), learnt)
        return self.ready[1]

    def note(self, seen: Seen) -> Int64[Tensor, "b h n t"]:
        return nearest(needed(seen.unrotated, self.config), self._learnt(seen.keys, seen.keys.shape[1]).centroids)

    def ask(self, query: Query, heads: int) -> Float[Tensor, "b h q *g c"]:
        asking = without_history(needed(query.unrotated, self.config))
        return expect(asking, self.router(query.queries, heads), heads)

    def router(self, query: Float[Tensor, "b hg q d"], heads: int) -> Classifier:
        return self._learnt(query, heads).classifier


def nearest(keys: Float[Tensor, "b h n d"], centroids: Float[Tensor, "h c d"]) -> Int64[Tensor, "b h n 1"]:
    """The bucket of every key; all rows of the batch share a head's centroids."""
    rows, _, count, _ = keys.shape
    lanes = keys.transpose(0, 1).flatten(1, 2)
    return assign(lanes, centroids).unflatten(1, (rows, count)).transpose(0, 1)[..., None]


def needed(unrotated: Tensor | None, config: BucketedConfig) -> Tensor:
    """Queries or keys before rotation; refused where there are none."""
    if unrotated is None:
        raise ValueError(
            f"{config.name} files keys as they are before rotation, and nobody noted those here: an exact cache holds "
            "them rotated. Have a cache of this method read the text itself"
        )
    return unrotated

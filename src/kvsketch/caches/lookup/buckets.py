"""Buckets of a store's runs: every token is in one, and the queries of a group say together which ones they visit.

Three limits say how many: `probes` buckets, `visit` tokens, `mass` of what the router expects; the first one reached
applies. With an estimate, each bucket that is not visited is represented by one weighted entry: its mean key and mean
value, with its count as weight.
"""

from abc import abstractmethod
from dataclasses import replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.attention import WeightedTokens
from kvsketch.attention import weighted_attention as attend_visible
from kvsketch.caches.core.buffers import marks_of, written
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.storage import storage_bytes
from kvsketch.caches.lookup.config import BucketedConfig
from kvsketch.caches.lookup.store import Index, Lookup, Store
from kvsketch.kernels.groups import sums_of_groups
from kvsketch.kernels.routing import visit
from kvsketch.kernels.sources import Choice, Entries, Limits


class BucketLookup(Lookup):
    """A method whose labels are buckets, and whose queries expect more of some than of others."""

    mass: float | None = None  # which share of all that is expected is enough; None: there is no such limit
    per_token = False  # whether a bucket's score is to be shared among its tokens before buckets are compared

    def __init__(self, config: BucketedConfig, buckets: int) -> None:
        assert not isinstance(config.visit, str), "the config has made a number of it"
        self.buckets, self.staging, self.estimate = buckets, config.staging, config.estimate
        self.limits = Limits(config.probes, config.visit, self.mass, self.per_token)

    @abstractmethod
    def ask(self, query: Query, heads: int) -> Float[Tensor, "b h q *g c"]:
        """How much the queries of a group expect of every bucket: together, or logits of each (`routing.expect`)."""

    def check_notes(self, notes: Int64[Tensor, "... n t"]) -> None:
        if notes.numel() and not 0 <= int(notes.min()) <= int(notes.max()) < self.buckets:
            raise ValueError(f"labels from {int(notes.min())} to {int(notes.max())} of {self.buckets} buckets")

    def new_index(self) -> "Buckets":
        return Buckets(self)


class Buckets(Index):
    """Where every bucket of every run begins."""

    def __init__(self, method: BucketLookup) -> None:
        self.method, self.staging, self.number = method, method.staging, method.buckets
        self.edges: Int64[Tensor, "l r c_1"] | None = None  # where each run's buckets begin, and where it ends
        self.sizes: Int64[Tensor, "l c"] | None = None  # tokens in every bucket, in all runs together
        self.means: tuple[Tensor, Tensor] | None = None  # of keys and values, by bucket: [l, c, d]
        self.counted: Int64[Tensor, "l c"] | None = None  # tokens in those means
        self.ready = False  # there are no runs yet

    def find(self, store: Store, query: Query, asked: Float[Tensor, "l q *g c"] | None) -> Answer:
        """Attention over the visited buckets and the staging, and an estimate of the other buckets."""
        if not self.ready:
            return store.read_places(query, None)
        assert self.sizes is not None
        assert self.edges is not None
        assert asked is not None
        estimates = self.means is not None
        runs, read, left = visit(asked, self.sizes, self.edges, self.method.limits, store.staged, left=estimates)
        if left is None:
            return store.read_runs(runs, read)
        if not query.apart and query.queries.shape[2] == 1:  # one call reads the estimate with the rest
            return store.read_runs(runs, read, Entries(self._means(left[:, 0])))
        runs = runs.made() if isinstance(runs, Choice) else runs  # and so is `left`
        tokens, unvisited = self._means(self.sizes.float().log()), left[None] > -torch.inf
        estimated = attend_visible(query.queries, tokens, query.scale, visible=unvisited, softcap=query.softcap)
        return replace(store.read_runs(runs, read), estimated=estimated)

    def _means(self, log_sizes: Float[Tensor, "l c"]) -> WeightedTokens:
        """The means of the buckets as entries, with these weights."""
        assert self.means is not None
        keys, values = self.means
        return WeightedTokens(keys[None], values[None], log_sizes[None])

    def check(self, labels: Int64[Tensor, "l n t"]) -> None:
        self.method.check_notes(labels)

    def sort_in(self, store: Store, start: int, stop: int) -> None:
        """Add these tokens to the means of their buckets."""
        if not self.method.estimate:
            return
        labels = store.labels.view[:, start:stop, 0]
        new = torch.zeros(len(labels), self.number, dtype=torch.int64, device=labels.device)
        new.scatter_add_(1, labels, torch.ones_like(labels))
        old = torch.zeros_like(new) if self.counted is None else self.counted
        self.counted = old + new
        share = (new.float() / (old + new).clamp_min(1))[..., None]
        means = list[Tensor]()
        for number, held in enumerate((store.keys, store.values)):
            x = held[:, start:stop].float()
            total = sums_of_groups(x, labels, self.number)
            before = torch.zeros_like(total) if self.means is None else self.means[number]
            means.append(before + (total / new.clamp_min(1)[..., None] - before) * share)
        old_keys, old_values = self.means or (None, None)
        self.means = (written(old_keys, means[0]), written(old_values, means[1]))

    def sorted_in(self, store: Store) -> None:
        """Find where buckets begin now."""
        numbers = torch.arange(self.number + 1, device=store.labels.view.device)
        edges = [
            torch.searchsorted(labels, numbers.expand(len(labels), -1).contiguous()) + start
            for start, labels in store.labels_of_runs()
        ]
        self.edges = written(self.edges, torch.stack(edges, 1))
        self.sizes = written(self.sizes, self.edges.diff(dim=2).sum(1))
        self.ready = self.method.limits.probes > 0 or self.means is not None

    def marks(self) -> object:
        return self.ready, marks_of(self.edges, self.sizes, *(self.means or ()))

    @property
    def nbytes(self) -> int:
        return storage_bytes([self.edges, self.sizes, self.counted, *(self.means or ())])

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(("key_means", "value_means"), self.means or (), strict=False))

    def restore(self, tensors: dict[str, Tensor]) -> None:
        if not tensors:
            return
        means = (tensors["key_means"], tensors["value_means"])
        if self.sizes is None or any(x.ndim != 3 or x.shape[:2] != self.sizes.shape for x in means):
            raise ValueError(f"means of shapes {[tuple(x.shape) for x in means]} of {self.number} buckets")
        self.means, self.counted, self.ready = means, self.sizes.clone(), True

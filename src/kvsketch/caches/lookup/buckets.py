"""Buckets of a store's runs: every token is in one, and every query says which ones it visits, with its group.

Three limits say how many: `probes` buckets, `visit` tokens, `mass` of what the router expects; the first that is
reached holds. With an estimate each bucket that is not visited stands in as one weighted entry: its mean key and mean
value, with its count as weight.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.attention import WeightedTokens
from kvsketch.attention import weighted_attention as attend_visible
from kvsketch.caches.core.buffers import marks_of, written
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.storage import storage_bytes
from kvsketch.caches.lookup.config import BucketedConfig
from kvsketch.caches.lookup.store import Index, Lookup, Store
from kvsketch.kernels import routes
from kvsketch.kernels.groups import sums_of_groups
from kvsketch.kernels.sources import Entries, Limits, Segments


@dataclass(frozen=True)
class Visited:
    """Buckets in the order of their score, and which of them are visited."""

    buckets: Int64[Tensor, "b h q l"]
    taken: Bool[Tensor, "b h q l"]

    def among(self, count: int) -> Bool[Tensor, "b h q {count}"]:
        """Which of all buckets are visited."""
        found = torch.zeros(*self.buckets.shape[:3], count, dtype=torch.bool, device=self.taken.device)
        return found.scatter_(3, self.buckets, self.taken)


def choose(
    scores: Float[Tensor, "b h q c"],
    sizes: Int64[Tensor, "b h c"],
    limits: Limits,
) -> Visited:
    """The buckets with the largest scores, or the largest ones for each of their tokens, until a limit is reached."""
    size = sizes[:, :, None].expand_as(scores)
    worth = (scores / size).masked_fill(size == 0, 0.0) if limits.per_token else scores
    best = worth.topk(min(limits.probes, scores.shape[3]), dim=3).indices
    taken = torch.ones_like(best, dtype=torch.bool)
    if limits.visit is not None:
        visit = limits.visit
        most = visit * sizes.sum(2)[:, :, None, None] if isinstance(visit, float) else visit
        taken &= size.gather(3, best).cumsum(3) <= most
    if limits.mass is not None:
        expected = scores.gather(3, best)
        taken &= expected.cumsum(3) - expected < limits.mass  # those before it were not enough
    taken[..., :1].fill_(True)  # of no columns, if there are no probes
    return Visited(best, taken)


class BucketLookup(Lookup):
    """A method whose labels are buckets, and whose queries expect more of some than of others."""

    mass: float | None = None  # the share of what is expected that is enough; None: there is no such limit
    per_token = False  # whether a bucket's score is to be shared among its tokens before buckets are compared

    def __init__(self, config: BucketedConfig, buckets: int) -> None:
        assert not isinstance(config.visit, str), "the config has made a number of it"
        self.buckets, self.staging, self.estimate = buckets, config.staging, config.estimate
        self.limits = Limits(config.probes, config.visit, self.mass, self.per_token)

    @abstractmethod
    def ask(self, query: Query, heads: int) -> Float[Tensor, "b h q c"]:
        """How much the queries of a group expect of every bucket, together."""

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
        self.sizes: Int64[Tensor, "l c"] | None = None  # tokens in every bucket of the runs
        self.means: tuple[Tensor, Tensor] | None = None  # of keys and values, by bucket: [l, c, d]
        self.counted: Int64[Tensor, "l c"] | None = None  # tokens in those means
        self.ready = False  # there are no runs yet

    def find(self, store: Store, query: Query, asked: Float[Tensor, "l q c"] | None) -> Answer:
        """Attention over the visited buckets and the staging, and an estimate of the other buckets."""
        if not self.ready:
            return store.read_places(query, None)
        assert self.sizes is not None
        assert self.edges is not None
        assert asked is not None
        limits, estimates = self.method.limits, self.means is not None
        apart = query.apart or query.queries.shape[2] > 1
        if not (estimates and apart):  # one call reads the estimate with the rest
            found = routes.visit(asked, self.sizes, self.edges, limits, store.staged, left=estimates)
            if found is not None:
                runs, read, others = found
                more = () if others is None else (Entries(self._means(others[:, 0])),)
                return store.read_runs(runs, read, *more)
        visited = choose(asked[None], self.sizes[None], limits)
        answer = store.read_places(query, self._places_of(visited))
        if not estimates:
            return answer
        tokens, unvisited = self._means(self.sizes.float().log()), ~visited.among(self.number)
        estimated = attend_visible(query.queries, tokens, query.scale, visible=unvisited, softcap=query.softcap)
        return replace(answer, estimated=estimated)

    def _means(self, log_sizes: Float[Tensor, "l c"]) -> WeightedTokens:
        """What stands in for buckets, with these weights."""
        assert self.means is not None
        keys, values = self.means
        return WeightedTokens(keys[None], values[None], log_sizes[None])

    def _places_of(self, visited: Visited) -> Segments:
        """The visited buckets in every run."""
        assert self.edges is not None
        wide = self.edges[None, :, None].expand(-1, -1, visited.buckets.shape[2], -1, -1)
        numbers = visited.buckets[:, :, :, None].expand(*wide.shape[:4], -1)
        begin = wide.gather(4, numbers)
        length = (wide.gather(4, numbers + 1) - begin) * visited.taken[:, :, :, None]
        return Segments(begin.flatten(3), length.flatten(3))

    def check(self, labels: Int64[Tensor, "l n t"]) -> None:
        self.method.check_notes(labels)

    def sort_in(self, store: Store, start: int, stop: int) -> None:
        """Move the means of the buckets to where these tokens make them."""
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

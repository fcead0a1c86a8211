"""A past of buckets: every token is in one, and every query says which ones it visits, with the others of its group.

Three limits say how many: `probes` buckets, `visit` tokens, `mass` of what the router expects; the first that is
reached holds. With `estimate` each bucket that is not visited stands in as one weighted entry: its mean key and mean
value, with its count as weight.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.attention import Partial, WeightedTokens
from kvsketch.attention import weighted_attention as attend_visible
from kvsketch.caches.base import check_count
from kvsketch.caches.question import LookedUp, Question
from kvsketch.caches.sorted_runs import SortedConfig, SortedPast
from kvsketch.caches.storage import storage_bytes
from kvsketch.kernels.indexed_attention import Segments


@dataclass(frozen=True, kw_only=True)
class BucketedConfig(SortedConfig):
    """`visit`: at most so many tokens (2048), or such a share of the past (0.05); the best bucket is always visited."""

    probes: int = 32
    visit: int | float | str | None = None
    estimate: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("probes", self.probes, least=0)
        if self.visit is not None:
            object.__setattr__(self, "visit", _checked_visit(self.visit))
        if not isinstance(self.estimate, bool):
            raise ValueError(f"estimate must be True or False, got {self.estimate!r}")


def _checked_visit(visit: object) -> int | float:
    """The number that a limit of tokens names."""
    wrong = f"visit must be a number of tokens such as 2048, or a share of the past such as 0.05, got {visit!r}"
    if isinstance(visit, str):
        try:
            visit = int(visit) if visit.strip().isdigit() else float(visit)
        except ValueError:
            raise ValueError(wrong) from None
    if isinstance(visit, bool) or not isinstance(visit, int | float):
        raise ValueError(wrong)
    if isinstance(visit, int):
        check_count("visit", visit, least=1)
    elif not 0 < visit <= 1:
        raise ValueError(wrong)
    return visit


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
    probes: int,
    visit: int | float | None = None,
    mass: float | None = None,
    per_token: bool = False,
) -> Visited:
    """The buckets with the largest scores, or the largest ones for each of their tokens, until a limit is reached."""
    size = sizes[:, :, None].expand_as(scores)
    worth = (scores / size).masked_fill(size == 0, 0.0) if per_token else scores
    best = worth.topk(min(probes, scores.shape[3]), dim=3).indices
    taken = torch.ones_like(best, dtype=torch.bool)
    if visit is not None:
        most = visit * sizes.sum(2)[:, :, None, None] if isinstance(visit, float) else visit
        taken &= size.gather(3, best).cumsum(3) <= most
    if mass is not None:
        expected = scores.gather(3, best)
        taken &= expected.cumsum(3) - expected < mass  # those before it were not enough
    taken[..., :1] = True  # of no columns, if there are no probes
    return Visited(best, taken)


class BucketedPast(SortedPast):
    """Buckets of all rows and KV heads."""

    def __init__(self, config: BucketedConfig, buckets: int) -> None:
        super().__init__(config.staging)
        self.config, self.buckets = config, buckets
        self.edges: Int64[Tensor, "b h r c_1"] | None = None  # where each run's buckets begin, and where it ends
        self.sizes: Int64[Tensor, "b h c"] | None = None  # tokens in every bucket of the runs
        self.means: tuple[Tensor, Tensor] | None = None  # of keys and values, by bucket: [b, h, c, d]
        self.counted: Int64[Tensor, "b h c"] | None = None  # tokens in those means

    def check_labels(self, labels: Int64[Tensor, "b h n t"]) -> None:
        if labels.numel() and not 0 <= int(labels.min()) <= int(labels.max()) < self.buckets:
            raise ValueError(f"labels from {int(labels.min())} to {int(labels.max())} of {self.buckets} buckets")

    @abstractmethod
    def scores(self, question: Question) -> Float[Tensor, "b h q c"]:
        """How much the queries of a group expect of every bucket, together."""

    @property
    def mass(self) -> float | None:
        """The share of what is expected that is enough; None: there is no such limit."""
        return None

    @property
    def per_token(self) -> bool:
        """Whether a bucket's score is to be shared among its tokens before buckets are compared."""
        return False

    def find(self, question: Question) -> LookedUp:
        sizes = self.sizes
        if sizes is None or (self.config.probes == 0 and self.means is None):
            return self.read_places(question, None)
        assert not isinstance(self.config.visit, str)
        limits = (self.config.probes, self.config.visit, self.mass)
        visited = choose(self.scores(question), sizes, *limits, per_token=self.per_token)
        found = self.read_places(question, self._places_of(visited))
        if self.means is None:
            return found
        return replace(found, rest=self._estimate(question, ~visited.among(self.buckets), sizes, self.means))

    def _places_of(self, visited: Visited) -> Segments:
        """The visited buckets in every run."""
        assert self.edges is not None
        wide = self.edges[:, :, None].expand(-1, -1, visited.buckets.shape[2], -1, -1)
        numbers = visited.buckets[:, :, :, None].expand(*wide.shape[:4], -1)
        begin = wide.gather(4, numbers)
        length = (wide.gather(4, numbers + 1) - begin) * visited.taken[:, :, :, None]
        return Segments(begin.flatten(3), length.flatten(3))

    @staticmethod
    def _estimate(
        question: Question,
        unvisited: Bool[Tensor, "b h q c"],
        sizes: Int64[Tensor, "b h c"],
        means: tuple[Tensor, Tensor],
    ) -> Partial:
        """The other buckets, each as one token that counts as often as it has tokens; empty ones count nothing."""
        tokens = WeightedTokens(*means, sizes.float().log())
        return attend_visible(question.queries, tokens, question.scale, visible=unvisited, softcap=question.softcap)

    def count_in(self, start: int, stop: int) -> None:
        """Move the means of the buckets to where these tokens make them."""
        if not self.config.estimate:
            return
        labels = self.labels.view[:, :, start:stop, 0]
        new = torch.zeros(*labels.shape[:2], self.buckets, dtype=torch.int64, device=labels.device)
        new.scatter_add_(2, labels, torch.ones_like(labels))
        old = torch.zeros_like(new) if self.counted is None else self.counted
        self.counted = old + new
        share = (new / (old + new).clamp_min(1))[..., None]
        means = list[Tensor]()
        for number, held in enumerate((self.keys, self.values)):
            x = held[:, :, start:stop].float()
            total = x.new_zeros(*new.shape, x.shape[3])
            total.scatter_add_(2, labels[..., None].expand_as(x), x)
            before = torch.zeros_like(total) if self.means is None else self.means[number]
            means.append(before + (total / new.clamp_min(1)[..., None] - before) * share)
        self.means = (means[0], means[1])

    def sorted_in(self) -> None:
        numbers = torch.arange(self.buckets + 1, device=self.labels.view.device)
        edges = [
            torch.searchsorted(labels, numbers.expand(*labels.shape[:2], -1).contiguous()) + start
            for start, labels in self.labels_of_runs()
        ]
        self.edges = torch.stack(edges, 2)
        self.sizes = self.edges.diff(dim=3).sum(2)

    @property
    def nbytes(self) -> int:
        return super().nbytes + storage_bytes([self.edges, self.sizes, self.counted, *(self.means or ())])

    def tensors(self) -> dict[str, Tensor]:
        found = super().tensors()
        return found | dict(zip(("key_means", "value_means"), self.means or (), strict=False))

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        self.edges = self.sizes = None
        super().restore(tensors, numbers)
        if "key_means" in tensors:
            self.means, self.counted = (tensors["key_means"], tensors["value_means"]), self.sizes

"""ClusterGen, the practical cache of the SubGen papers: k clusters of the older tokens, and the latest ones.

Papers: SubGen (arXiv:2402.06082), section 3.2, and ClusterGen. One head: `algorithms/kcenter.py`.
"""

from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from kvsketch.caches.core.budget import Budget, seen_when
from kvsketch.caches.core.checks import check_choice, check_count, check_number
from kvsketch.caches.core.chooser import Chooser, Held, Kept
from kvsketch.caches.core.config import BLOCK, WEIGHTS, BudgetedConfig
from kvsketch.caches.core.tokens import Arriving
from kvsketch.kernels.directions import towards
from kvsketch.kernels.groups import sums_of_groups
from kvsketch.kernels.kcenter import k_center
from kvsketch.kernels.pairs import cheapest_pairs
from kvsketch.kernels.places import chosen, chosen_of, in_front

ENTRIES = ("mean", "centre")
LATEST = 64  # how many tokens the least budget has room for, whatever it is spent on


@dataclass(frozen=True, kw_only=True)
class ClusterGen(BudgetedConfig):
    """Keeps the latest tokens and, of the others, clusters of keys (greedy k-center) and tokens that stay alone.

    Half of the budget goes to the latest tokens, as in the papers' experiments, or `window` tokens. A cluster is held
    as the mean of its tokens and counts as all of them; in the share `apart` of the room tokens stay alone, those whose
    keys point away from all others. As published, a centre stands for its cluster and counts as one token:
    `entries="centre"`, `weights="none"`, `apart=0`.
    """

    name: ClassVar[str] = "clustergen"

    window: int | None = None
    weights: str = "count"
    entries: str = "mean"
    apart: float | int = 0.5

    def __post_init__(self) -> None:
        if self.window is not None:
            check_count("window", self.window, least=1)
        check_choice("weights", self.weights, WEIGHTS)
        check_choice("entries", self.entries, ENTRIES)
        if self.apart != 0:
            check_number("apart", self.apart, above=0, below=1)
        super().__post_init__()

    @property
    def window_by_budget(self) -> bool:  # type: ignore[override]
        return self.window is None

    def floor(self) -> int:
        # Half of the budget is for all but the latest tokens; of that half they take a block where they run over.
        return self.sinks + (max(LATEST, self.sinks + BLOCK) if self.window is None else self.window)

    def window_size(self, budget: Budget, count: int) -> int | None:
        return budget.entries(count) // 2 if self.window is None else self.window

    def new_method(self, layer: int) -> Chooser:
        return Centres(self)

    def room(self, budget: Budget, count: int) -> int:
        """How many entries the budget leaves when `count` tokens have left the window."""
        if budget.capacity is not None:
            return budget.capacity - self._exact(budget, 0) - BLOCK  # the window may run over by one block
        least = self.sinks + count
        seen = seen_when(count, lambda seen: self._exact(budget, seen), most=2 * least + budget.least)
        return budget.entries(seen) - self._exact(budget, seen)

    def _exact(self, budget: Budget, seen: int) -> int:
        window = self.window_size(budget, seen)
        assert window is not None
        return self.sinks + window


class Centres(Chooser):
    """Clusters of tokens: a key and a value for each, the number of its tokens, and how far those may be from it.

    What arrives together is clustered together, as the papers do with a prompt. Where calls have a few tokens each,
    clustering everything anew at every call would add up errors: clusters are then joined pair by pair, and become
    means.
    """

    def __init__(self, config: ClusterGen) -> None:
        self.config = config
        self.per_entry = {"sizes": torch.int32, "reach": torch.float32}

    def choose(self, held: Held, new: Arriving, budget: Budget) -> Kept:
        """Reduce the clusters held and the new tokens together to the number of entries that there is room for."""
        pool = held.with_new(new)
        pool.per_entry["sizes"][:, held.count :] = 1
        count = self._entries_for(pool.count, max(1, self.config.room(budget, new.after)), new.count)
        if count == pool.count:
            return Kept(None, 0, self._weights(pool.per_entry["sizes"]), pool=pool, per_entry=pool.per_entry)
        every = Clusters(pool.keys, pool.values, pool.per_entry["sizes"], pool.per_entry["reach"])
        alone = int(self.config.apart * count)
        apart, rest = every.split(away_from_mean(every, alone)) if alone else (None, every)
        found = _joined(rest, count - alone) if new.few else _clustered(rest, count - alone, self.config.entries)
        if apart is not None:
            found = apart.and_(found)
        about = {"sizes": found.sizes, "reach": found.reach}
        return Kept(None, 0, self._weights(found.sizes), made=(found.keys, found.values), per_entry=about)

    def _weights(self, sizes: Int32[Tensor, "l k"]) -> Float[Tensor, "l k"] | None:
        return sizes.double().log().float() if self.config.weights == "count" else None

    @staticmethod
    def _entries_for(number: int, room: int, new: int) -> int:
        """How many of `number` candidates to keep: all that fit.

        Where fewer tokens come than an eighth of the room, an eighth of it is made free for the next ones, so that
        clustering costs each token as much as reading the cache a few times, and not 32 times more.
        """
        if number <= room:
            return number
        return room if new > room // 8 else room - room // 8

    def details(self, held: Held, count: int) -> dict[str, float]:
        """How many tokens an entry stands for, and how far the farthest of them may be."""
        if not held.count:
            return {}
        sizes, reach = held.per_entry["sizes"], held.per_entry["reach"]
        return {"tokens per entry": int(sizes.sum()) / sizes.numel(), "reach": float(reach.max())}


@dataclass(frozen=True)
class Clusters:
    """Clusters of the lanes of a bundle. No token of a cluster is farther than `reach` from its entry."""

    keys: Float[Tensor, "l n d"]
    values: Float[Tensor, "l n e"]
    sizes: Int32[Tensor, "l n"]
    reach: Float[Tensor, "l n"]

    @property
    def count(self) -> int:
        return self.keys.shape[1]

    def at(self, index: Int64[Tensor, "l m"]) -> "Clusters":
        """The clusters with these numbers."""
        keys, values = chosen_of((self.keys, self.values), index)
        return Clusters(
            keys,
            values,
            self.sizes.gather(1, index),
            self.reach.gather(1, index),
        )

    def split(self, first: Int64[Tensor, "l m"]) -> "tuple[Clusters, Clusters]":
        """The clusters with these numbers, and the rest in their order."""
        rest = torch.ones_like(self.sizes, dtype=torch.bool).scatter(1, first, False)
        return self.at(first), self.at(in_front(rest)[:, : self.count - first.shape[1]])

    def and_(self, other: "Clusters") -> "Clusters":
        """These clusters and then the others."""
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))
        return Clusters(*(torch.cat(pair, 1) for pair in pairs))


def away_from_mean(clusters: Clusters, count: int) -> Int64[Tensor, "l m"]:
    """The single tokens whose keys point away from the mean of all keys so far, in their order.

    The mean is over the keys that are held, each as often as the tokens it stands for.
    """
    keys, sizes = clusters.keys.double(), clusters.sizes.double()
    mean = torch.einsum("lnd,ln->ld", keys, sizes / sizes.sum(1, keepdim=True))
    order = towards(keys, mean).masked_fill(clusters.sizes > 1, torch.inf).sort(dim=1, stable=True).indices
    return order[:, :count].sort(dim=1).values


def _clustered(clusters: Clusters, count: int, entries: str) -> Clusters:
    """`count` clusters of these, by k-center; each entry is the centre, or the mean of all of the cluster's tokens."""
    found = k_center(clusters.keys[None], torch.tensor([count], device=clusters.keys.device))
    order = found.centres[0].sort(1)
    owner = order.indices.argsort(1).gather(1, found.nearest[0])  # the place of each one's centre among the centres
    nothing = torch.zeros_like(clusters.sizes[:, :count])
    sizes = nothing.scatter_add(1, owner, clusters.sizes)
    if entries == "mean":
        keys, values = (means(x, owner, clusters.sizes, sizes) for x in (clusters.keys, clusters.values))
        distance = (clusters.keys - chosen(keys, owner)).float().norm(dim=2)
    else:
        keys, values = chosen_of((clusters.keys, clusters.values), order.values)
        distance = found.distance[0]
    reach = torch.zeros_like(nothing, dtype=clusters.reach.dtype)
    reach = reach.scatter_reduce(1, owner, (clusters.reach + distance).to(reach.dtype), "amax")
    return Clusters(keys, values, sizes, reach)


def means(
    x: Float[Tensor, "l n d"], owner: Int64[Tensor, "l n"], sizes: Int32[Tensor, "l n"], total: Int32[Tensor, "l k"]
) -> Float[Tensor, "l k d"]:
    """Means of each owner's vectors, each as often as its size; in float32 at least. A single vector stays as it is."""
    precise = torch.promote_types(x.dtype, torch.float32)
    shares = sizes.to(precise) / total.gather(1, owner)
    return sums_of_groups(x * shares[..., None], owner, total.shape[1]).to(x.dtype)


def _joined(clusters: Clusters, count: int) -> Clusters:
    """`count` clusters, joined pair by pair (see `kernels/pairs.py`): the mean of both lies where the first was.

    The means of keys and of values, weighted by sizes, are those of all tokens of both clusters: nothing drifts.
    """
    keys, values, reach, n = clusters.keys, clusters.values, clusters.reach, clusters.sizes.long()
    while bool(((excess := (n > 0).sum(1) - count) > 0).any()):
        other, first = cheapest_pairs(keys, n, excess)
        lane, one = first.nonzero(as_tuple=True)
        two = other[lane, one]
        total = n[lane, one] + n[lane, two]
        share = (n[lane, two].double() / total)[:, None]
        far = (keys[lane, two].double() - keys[lane, one].double()).norm(dim=1)
        ends = reach[lane, one] + far * share[:, 0], reach[lane, two] + far * (1 - share[:, 0])
        put = lane, one
        reach = reach.index_put(put, torch.maximum(*ends).to(reach.dtype))
        keys, values = (
            x.index_put(put, x[lane, one].double().lerp(x[lane, two].double(), share).to(x.dtype))
            for x in (keys, values)
        )
        n = n.index_put(put, total).index_put((lane, two), torch.zeros_like(total))
    return Clusters(keys, values, n.int(), reach).at(in_front(n > 0)[:, :count])  # lanes have joined other pairs

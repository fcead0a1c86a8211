"""ClusterGen, the practical cache of the SubGen papers: k centres of the older tokens, and the latest ones.

Papers: SubGen (arXiv:2402.06082), section 3.2, and ClusterGen. One head: `algorithms/kcenter.py`.
"""

from bisect import bisect_left
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.checks import check_choice, check_count
from kvsketch.caches.core.chooser import Chooser, Entries, Kept
from kvsketch.caches.core.config import BLOCK, WEIGHTS, BudgetedConfig
from kvsketch.caches.core.storage import chosen, in_front
from kvsketch.caches.core.tokens import Arriving
from kvsketch.kernels.kcenter import Clustering, k_center
from kvsketch.kernels.pairs import cheapest_pairs

LATEST = 64  # tokens that the least budget has room for, whatever it is spent on


@dataclass(frozen=True, kw_only=True)
class ClusterGen(BudgetedConfig):
    """Keeps the latest tokens and those of the others whose keys are spread widest (greedy k-center).

    Half of the budget goes to the latest tokens, as in the papers' experiments, or `window` tokens.
    `weights="none"` is as published: a centre counts as one token. By default it counts as its cluster.
    """

    name: ClassVar[str] = "clustergen"

    window: int | None = None
    weights: str = "count"

    def __post_init__(self) -> None:
        if self.window is not None:
            check_count("window", self.window, least=1)
        check_choice("weights", self.weights, WEIGHTS)
        super().__post_init__()

    @property
    def window_by_budget(self) -> bool:  # type: ignore[override]
        return self.window is None

    def floor(self) -> int:
        # Half of the budget is for all but the latest tokens, and a block of that, where they run over, for those too.
        return self.sinks + (max(LATEST, self.sinks + BLOCK) if self.window is None else self.window)

    def window_size(self, budget: Budget, count: int) -> int | None:
        return budget.entries(count) // 2 if self.window is None else self.window

    def new_method(self, layer: int) -> Chooser:
        return Centres(self)

    def room(self, budget: Budget, count: int) -> int:
        """How many centres the budget leaves when `count` tokens have left the window."""
        if budget.fixed is not None:
            return budget.fixed - self._exact(budget, 0) - BLOCK  # the window may run over by one block
        least = self.sinks + count
        seen = bisect_left(range(2 * least + budget.least), count, key=lambda n: n - self._exact(budget, n))
        return budget.entries(seen) - self._exact(budget, seen)

    def _exact(self, budget: Budget, seen: int) -> int:
        window = self.window_size(budget, seen)
        assert window is not None
        return self.sinks + window


class Centres(Chooser):
    """Entries in the order of the stream, the number of tokens each stands for, and how far those may be.

    What arrives together is clustered together, as the papers do with a prompt. Where calls have a few tokens each,
    clustering all anew at every call adds up its errors: clusters are joined pair by pair then, and become means.
    """

    def __init__(self, config: ClusterGen) -> None:
        self.config = config
        self.per_entry = {"sizes": torch.int32, "reach": torch.float32}

    def choose(self, held: Entries, new: Arriving, budget: Budget) -> Kept:
        """Reduce the centres held and the new tokens together to the number of centres that there is room for."""
        pool = held.with_new(new)
        sizes, reach = pool.per_entry["sizes"], pool.per_entry["reach"]
        sizes[:, held.count :] = 1
        count = self._centres_for(pool.count, max(1, self.config.room(budget, new.after)), new.count)
        index: Tensor | None = None
        if count < pool.count and new.few:
            return self._joined(pool.keys, pool.values, sizes, reach, count)
        if count < pool.count:
            found = _clustering(pool.keys, count)
            index = found.centres.sort(1).values
            owner = found.centres.gather(1, found.nearest)
            sizes = torch.zeros_like(sizes).scatter_add(1, owner, sizes).gather(1, index)
            far = torch.zeros_like(reach).scatter_reduce(1, owner, reach + found.distance, "amax")
            reach = far.gather(1, index)
        return Kept(index, 0, self._weights(sizes), pool=pool, per_entry={"sizes": sizes, "reach": reach})

    def _weights(self, sizes: Int32[Tensor, "l k"]) -> Float[Tensor, "l k"] | None:
        return sizes.double().log().float() if self.config.weights == "count" else None

    def _joined(
        self,
        keys: Float[Tensor, "l n d"],
        values: Float[Tensor, "l n e"],
        sizes: Int32[Tensor, "l n"],
        reach: Float[Tensor, "l n"],
        count: int,
    ) -> Kept:
        """So many clusters, joined pair by pair (see `kernels/pairs.py`): the mean of both, where the first was.

        Means of keys and of values, weighted by sizes, are those of all tokens of both: nothing drifts.
        """
        n = sizes.long()
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
        index = in_front(n > 0)[:, :count]  # lanes have joined other pairs
        sizes, reach = n.gather(1, index).int(), reach.gather(1, index)
        made = chosen(keys, index), chosen(values, index)
        return Kept(None, 0, self._weights(sizes), made=made, per_entry={"sizes": sizes, "reach": reach})

    @staticmethod
    def _centres_for(number: int, room: int, new: int) -> int:
        """How many of `number` candidates to keep: all that fit.

        Where fewer come than an eighth of the room, an eighth of it is made free for the next ones, so that
        clustering costs each of them as much as reading the cache a few times, and not 32 times more.
        """
        if number <= room:
            return number
        return room if new > room // 8 else room - room // 8

    def details(self, held: Entries, count: int) -> dict[str, float]:
        """How many tokens a centre stands for, and how far the farthest of them may be."""
        if not held.count:
            return {}
        sizes, reach = held.per_entry["sizes"], held.per_entry["reach"]
        return {"tokens per centre": float(sizes.sum() / sizes.numel()), "reach": float(reach.max())}


def _clustering(keys: Float[Tensor, "l n d"], count: int) -> Clustering:
    """So many centres for every lane."""
    found = k_center(keys[None], torch.tensor([count], device=keys.device))
    return Clustering(found.centres[0], found.nearest[0], found.distance[0])

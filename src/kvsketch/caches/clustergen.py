"""ClusterGen, the practical cache of the SubGen papers: k centres of the older tokens, and the latest ones.

Papers: SubGen (arXiv:2402.06082), section 3.2, and ClusterGen. One head: `algorithms/kcenter.py`.
"""

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar

import torch
from jaxtyping import Float, Int32, Int64
from torch import Tensor

from kvsketch.attention import WeightedTokens
from kvsketch.caches.base import (
    BLOCK,
    WEIGHTS,
    BudgetedConfig,
    EntriesPast,
    LeavingTokens,
    Past,
    check_choice,
    check_count,
)
from kvsketch.caches.budget import Budget
from kvsketch.caches.storage import in_front, made_of
from kvsketch.kernels.kcenter import Clustering, k_center


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

    def least_entries(self) -> int:
        if self.window is None:
            return 2 * (self.sinks + 2 * BLOCK)
        return self.sinks + self.window + 2 * BLOCK

    def window_size(self, budget: Budget, count: int) -> int | None:
        return budget.entries(count) // 2 if self.window is None else self.window

    def new_past(self, budget: Budget, layer: int) -> Past:
        return ClusterGenPast(lambda count: self.room(budget, count), self.weights)

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


@dataclass(frozen=True)
class Centres:
    """Tokens in the order of the stream, the number of tokens each stands for, and how far those may be."""

    keys: Float[Tensor, "b h k d"]
    values: Float[Tensor, "b h k e"]
    sizes: Int32[Tensor, "b h k"]  # 0 marks an empty slot; the same ones for all heads of a row
    reach: Float[Tensor, "b h k"]

    @property
    def number(self) -> Int64[Tensor, " b"]:
        """Centres of each row."""
        return (self.sizes[:, 0] > 0).sum(1)

    def join(self, tokens: LeavingTokens) -> "Centres":
        """These and the new tokens, each of which stands for itself."""
        sizes = (tokens.ranks >= 0).int()[:, None].expand(-1, tokens.keys.shape[1], -1)
        return Centres(
            torch.cat([self.keys, tokens.keys], 2),
            torch.cat([self.values, tokens.values], 2),
            torch.cat([self.sizes, sizes], 2),
            torch.cat([self.reach, torch.zeros_like(sizes, dtype=self.reach.dtype)], 2),
        )

    def select(self, index: Int64[Tensor, "b h k"]) -> "Centres":
        """The slots with these numbers; -1 selects an empty one."""
        at = index.clamp_min(0)
        return Centres(
            self.keys.gather(2, at[..., None].expand(-1, -1, -1, self.keys.shape[3])),
            self.values.gather(2, at[..., None].expand(-1, -1, -1, self.values.shape[3])),
            self.sizes.gather(2, at).masked_fill(index < 0, 0),
            self.reach.gather(2, at),
        )

    def pack(self) -> "Centres":
        """No more slots than the fullest row needs."""
        width = int(self.number.max())
        if width == self.sizes.shape[2]:
            return self
        return self.select(in_front(self.sizes != 0)[:, :, :width])

    def gather(self, found: Clustering) -> "Centres":
        """Only the centres that were found, each with the sizes of all that is nearest to it."""
        owner = found.centres.clamp_min(0).gather(2, found.nearest)
        far = torch.where(self.sizes > 0, self.reach + found.distance, 0.0)
        merged = Centres(
            self.keys,
            self.values,
            torch.zeros_like(self.sizes).scatter_add(2, owner, self.sizes),
            torch.zeros_like(self.reach).scatter_reduce(2, owner, far, "amax"),
        )
        last = self.sizes.shape[2]
        in_order = found.centres.masked_fill(found.centres < 0, last).sort(2).values
        return merged.select(in_order.masked_fill(in_order == last, -1))


class ClusterGenPast(EntriesPast):
    """Centres of all rows and heads. What is written together is clustered together, as the papers do with a prompt."""

    def __init__(self, room: Callable[[int], int], weights: str) -> None:
        """`room(count)` centres may be held when `count` tokens were written."""
        self.room, self.weights = room, weights
        self.counts: list[int] = []  # tokens written, per row
        self.centres: Centres | None = None

    def write(self, tokens: LeavingTokens) -> None:
        """Reduce the centres held and the new tokens together to as many centres as there is room for."""
        before, self.counts = self.counts or [0] * len(tokens.counts), list(tokens.counts)
        held = _no_centres(tokens) if self.centres is None else self.centres
        pool = held.join(tokens).pack()
        wanted = [
            self._centres_for(number, count, count - earlier)
            for number, count, earlier in zip(pool.number.tolist(), self.counts, before, strict=True)
        ]
        counts = torch.tensor(wanted, device=pool.keys.device)
        if bool((counts < pool.number).any()):
            pool = pool.gather(k_center(pool.keys, counts, pool.sizes[:, 0] > 0))
        self.centres = pool

    def _centres_for(self, number: int, count: int, new: int) -> int:
        """How many of `number` candidates to keep: all that fit.

        Where tokens come a few at a time, an eighth of the room is made free for the next ones, so that
        clustering costs each of them as much as reading the cache a few times, and not 32 times more.
        """
        room = self.room(count)
        if number <= room:
            return number
        return room if new > room // 8 else room - room // 8

    def entries(self) -> WeightedTokens | None:
        """The centres, each with the log of the number of tokens it stands for."""
        if self.centres is None:
            return None
        sizes = self.centres.sizes if self.weights == "count" else self.centres.sizes.clamp_max(1)
        return WeightedTokens(self.centres.keys, self.centres.values, sizes.double().log().float())

    def count_entries(self) -> Int64[Tensor, "b h"] | None:
        return None if self.centres is None else (self.centres.sizes > 0).sum(2)

    def details(self) -> dict[str, float]:
        """How many tokens a centre stands for, and how far the farthest of them may be."""
        if self.centres is None:
            return {}
        sizes = self.centres.sizes
        return {"tokens per centre": float(sizes.sum() / (sizes > 0).sum()), "reach": float(self.centres.reach.max())}

    def tensors(self) -> dict[str, Tensor]:
        if self.centres is None:
            return {}
        return {field.name: getattr(self.centres, field.name) for field in fields(Centres)}

    def numbers(self) -> dict[str, list[int]]:
        return {"counts": self.counts}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        self.counts = list(numbers["counts"])
        self.centres = made_of(Centres, tensors) if tensors else None


def _no_centres(like: LeavingTokens) -> Centres:
    keys, values = like.keys[:, :, :0], like.values[:, :, :0]
    return Centres(keys, values, keys[..., 0].int(), keys[..., 0].float())

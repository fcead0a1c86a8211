"""SubGen's clusters of keys for all rows and heads, with a bounded memory: UpdateSoftmaxNormalizer, lines 11-23.

One head: `algorithms/subgen.py`. Within a block, keys that found clusters are taken one after another, in all lanes
together; everything else happens at once. No step looks at anything that was dropped.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int32, Int64
from torch import Tensor

from kvsketch.algorithms.subgen import grown
from kvsketch.caches.core.tokens import Arriving
from kvsketch.caches.forgetting.subgen.slots import Draws, Slots
from kvsketch.kernels.distances import squared_distances, squared_norms

KEY, MERGE = 0, 2  # what random numbers are drawn for


@dataclass
class Clusters(Slots):
    """Slots for m clusters of every lane; the first `number` are in use."""

    representatives: Float[Tensor, "l m d"]
    samples: Float[Tensor, "l m t d"]
    sizes: Int32[Tensor, "l m"]
    reach: Float[Tensor, "l m"]  # no key of the cluster is farther from its representative
    number: Int64[Tensor, " l"]
    delta: Float[Tensor, " l"]
    growths: Int64[Tensor, " l"]  # how often δ grew

    @classmethod
    def none(cls, like: Float[Tensor, "l n d"], t: int, delta: float) -> "Clusters":
        """No slots yet, for keys like these."""
        lanes, device = len(like), like.device
        return cls(
            representatives=like.new_zeros(lanes, 0, like.shape[2]),
            samples=like.new_zeros(lanes, 0, t, like.shape[2]),
            sizes=torch.zeros(lanes, 0, dtype=torch.int32, device=device),
            reach=torch.zeros(lanes, 0, dtype=torch.float32, device=device),
            number=torch.zeros(lanes, dtype=torch.int64, device=device),
            delta=torch.full((lanes,), delta, dtype=torch.float64, device=device),
            growths=torch.zeros(lanes, dtype=torch.int64, device=device),
        )

    def make_slots(self, count: int) -> None:
        """Have at least `count` slots."""
        self.resize(dict.fromkeys(("representatives", "samples", "sizes", "reach"), count))

    def shrink(self, room: int, growth: float, least: float) -> None:
        """Let δ fall by a step in the lanes that have more than an eighth of their room to spare.

        Existing clusters keep their reach; later keys found more clusters.
        """
        spare = (room - self.number) * 8 > room
        self.delta = torch.where(spare, (self.delta / growth).clamp_min(least), self.delta)

    def take(self, block: Arriving, room: int, growth: float, draws: Draws) -> None:
        """Give every key to the nearest cluster, or let it found one; each lane may have `room` clusters."""
        keys = block.keys.double()
        lane = torch.arange(len(keys), device=keys.device)
        position = torch.arange(keys.shape[1], device=keys.device)
        distance, cluster = self._nearest(keys)
        found = torch.zeros_like(self.number)  # tokens before this one have a cluster
        counted = torch.zeros_like(self.number)  # and those before this one are counted into it
        while True:
            founds = (distance > self.delta[:, None]) & (position >= found[:, None])
            going = founds.any(1)
            if not bool(going.any()):
                break
            token = founds.long().argmax(1)
            full = going & (self.number >= room)
            if bool(full.any()):
                between = (position >= counted[:, None]) & (position < token[:, None])
                self._count(block, distance, cluster, full[:, None] & between, draws)
                counted = torch.where(full, token, counted)
                self._make_room(full, block.ranks[token], growth, draws)
                nearer = self._nearest(keys)
                changed = full[:, None] & (position >= token[:, None])
                distance = torch.where(changed, nearer[0], distance)
                cluster = torch.where(changed, nearer[1], cluster)
                continue
            founder = keys[lane, token][:, None]
            self.representatives[lane[going], self.number[going]] = block.keys[lane[going], token[going]]
            to_new = _distances(keys, founder)[..., 0]
            nearer_to_it = going[:, None] & (position >= token[:, None]) & (to_new < distance)
            distance = torch.where(nearer_to_it, to_new, distance)
            cluster = torch.where(nearer_to_it, self.number[:, None], cluster)
            self.number += going
            found = torch.where(going, token + 1, found)
        self._count(block, distance, cluster, position >= counted[:, None], draws)

    def _nearest(self, keys: Float[Tensor, "l n d"]) -> tuple[Float[Tensor, "l n"], Int64[Tensor, "l n"]]:
        """Every key's distance from the nearest representative, and the number of its cluster. Line 12."""
        representatives = self.representatives
        size = representatives.shape[1]
        distances = _distances(keys, representatives.double())
        empty = torch.arange(size, device=keys.device) >= self.number[:, None]
        distance, cluster = distances.masked_fill_(empty[:, None], math.inf).min(2)
        return distance, cluster

    def _count(
        self, block: Arriving, distance: Tensor, cluster: Tensor, counted: Bool[Tensor, "l n"], draws: Draws
    ) -> None:
        """Count tokens into their clusters, whose samples adopt each with probability 1/n. Lines 14-18."""
        same = (cluster[:, :, None] == cluster[:, None]) & counted[:, None]  # [l, n, n]: token, earlier token
        sizes, samples = self.sizes, self.samples
        n = sizes.gather(1, cluster) + same.tril().sum(2)
        drawn = draws.numbers(block.ranks[None], KEY, samples.shape[2])
        adopts = counted[..., None] & (drawn * n[..., None] < 1)  # [l, n, t]
        again = (same.triu(1)[..., None] & adopts[:, None]).any(2)  # a later token adopts the same slot
        lane, token, slot = (adopts & ~again).nonzero(as_tuple=True)
        samples[lane, cluster[lane, token], slot] = block.keys[lane, token]
        sizes.scatter_add_(1, cluster, counted.int())
        far = distance.masked_fill(~counted, 0).float()
        self.reach.scatter_reduce_(1, cluster, far, "amax")

    def _make_room(self, full: Bool[Tensor, " l"], ranks: Int64[Tensor, " l"], growth: float, draws: Draws) -> None:
        """Let δ grow until clusters merge, in the lanes that are full. See `algorithms/subgen.make_room`."""
        most = int(self.number.max())
        drawn = draws.numbers(ranks[:, None], MERGE, most * self.samples.shape[2])[:, 0].unflatten(1, (most, -1))
        for lane in full.nonzero()[:, 0].tolist():
            self._merge(lane, drawn[lane].cpu(), growth)

    def _merge(self, lane: int, drawn: Float[Tensor, "m t"], growth: float) -> None:
        """In one lane: a cluster within δ of an older one that stays joins the nearest that stays."""
        number, delta = self.number, self.delta
        count = int(number[lane])
        x = self.representatives[lane, :count]
        distances = _distances(x[None].double(), x[None].double())[0].cpu().fill_diagonal_(math.inf)
        new_delta, times = grown(float(delta[lane]), float(distances.min()), growth)
        stays = _independent(distances <= new_delta)
        kept = stays.nonzero()[:, 0]
        joins = (~stays).nonzero()[:, 0]
        into = kept[distances[joins][:, kept].argmin(1)]
        samples, sizes, reach = (tensor[lane, :count] for tensor in (self.samples, self.sizes, self.reach))
        # The bookkeeping of many small steps happens on the CPU; keys move once.
        n, far = sizes.tolist(), reach.double().tolist()
        # The cluster whose sample each slot has in the end.
        source = torch.arange(count, device="cpu")[:, None].repeat(1, samples.shape[1])
        for i, j in zip(joins.tolist(), into.tolist(), strict=True):
            n[j] += n[i]
            far[j] = max(far[j], far[i] + float(distances[i, j]))
            adopts = drawn[i] * n[j] < n[i]
            source[j, adopts] = i
        slot = torch.arange(samples.shape[1], device="cpu")
        moved = samples[source[kept].to(x.device), slot.to(x.device)]
        where = kept.to(x.device)
        for tensor, rows in (
            (x, x[where]),
            (samples, moved),
            (sizes, torch.tensor(n, dtype=sizes.dtype, device="cpu")[kept].to(x.device)),
            (reach, torch.tensor(far, dtype=torch.float32, device="cpu")[kept].to(x.device)),
        ):
            tensor[: len(kept)] = rows
            tensor[len(kept) :] = 0
        number[lane], delta[lane] = len(kept), new_delta
        self.growths[lane] += times


def _distances(points: Float[Tensor, "l n d"], others: Float[Tensor, "l m d"]) -> Float[Tensor, "l n m"]:
    return squared_distances(points, squared_norms(points), others, squared_norms(others)).sqrt_()


def _independent(near: Bool[Tensor, "m m"]) -> Bool[Tensor, " m"]:
    """The clusters that stay: in their order, each that is not near an earlier one that stays."""
    matrix = near.numpy()
    stays, covered = torch.zeros_like(near[0]), matrix[0] & False
    for i in range(len(matrix)):
        if not covered[i]:
            stays[i] = True
            covered |= matrix[i]
    return stays

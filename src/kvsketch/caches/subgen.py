"""SubGen with a bounded memory, for all rows and heads: the one-head form is `algorithms/subgen.py`.

Tokens are taken in blocks. Within a block the tokens that found clusters come one after another, all
heads together; everything else happens at once. No step looks at anything that was dropped.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from kvsketch.algorithms.draws import uniforms
from kvsketch.algorithms.sampling import Plan
from kvsketch.attention import NO_MASS, Partial, WeightedTokens
from kvsketch.caches.base import BLOCK, LeavingTokens, Past, WindowedConfig, check_count
from kvsketch.caches.budget import Budget
from kvsketch.caches.exact_first import ExactFirst, columns
from kvsketch.caches.storage import storage_bytes
from kvsketch.kernels.distances import squared_distances, squared_norms
from kvsketch.kernels.weighted_attention import log_normalizer, weighted_attention

KEY, VALUE, MERGE = range(3)  # what a number is drawn for: the last part of its address but one
NORMALIZERS = ("larger", "clusters")


@dataclass(frozen=True, kw_only=True)
class SubGen(WindowedConfig):
    """Samples values for the numerator and clustered keys for the denominator of attention (SubGen, Algorithm 1).

    `s` value samples, `t` key samples for every cluster, clusters of radius `delta`; clusters take what `s`
    leaves of the budget. Without `delta` every key is a cluster until there is no room for more. Where there is
    none, `delta` grows by the factor `growth` and clusters merge; the paper's inspiration has 2, which merges more.
    """

    name: ClassVar[str] = "subgen"

    delta: float | int | None = None
    s: int | None = None
    t: int = 1
    growth: float | int = 1.25
    normalizer: str = "larger"
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("t", self.t, least=1)
        check_count("seed", self.seed, least=0)
        if self.s is not None:
            check_count("s", self.s, least=1)
        if self.delta is not None and not (
            isinstance(self.delta, int | float) and not isinstance(self.delta, bool) and 0 < self.delta < math.inf
        ):
            raise ValueError(f"delta must be a positive number, got {self.delta!r}")
        growth = self.growth
        if isinstance(growth, bool) or not isinstance(growth, int | float) or not 1 < growth < math.inf:
            raise ValueError(f"growth must be a number above 1, got {growth!r}")
        if self.normalizer not in NORMALIZERS:
            raise ValueError(f"normalizer must be one of {', '.join(NORMALIZERS)}, got {self.normalizer!r}")
        super().__post_init__()

    def least_entries(self) -> int:
        return self.exact_entries() + self._first_entries()

    def _unit(self) -> int:
        """Entries by which a fraction makes room: a quarter of them are two clusters at least."""
        return max(BLOCK, 4 * (1 + self.t))

    def _first_entries(self) -> int:
        """Entries of the past before a fraction makes room for more."""
        return self._unit() + (0 if self.s is None else self.s)

    def new_past(self, budget: Budget, layer: int) -> Past:
        return ExactFirst(lambda count: self._room(budget, count), lambda: SubGenPast(self, budget, layer))

    def _room(self, budget: Budget, count: int) -> int:
        if budget.fixed is not None:
            return budget.fixed - self.exact_entries()
        exact = self.sinks + self.window
        return budget.entries(count + exact) - exact

    def sizes(self, budget: Budget, key_share: float) -> "Sizes":
        """What the budget is spent on; `key_share` is the part of an entry that is its key.

        Three quarters go to value samples unless `s` says otherwise. A fraction makes room for a few entries at a
        time. Sampled values of the past cannot come back, so each such stratum has samples of its own; clusters
        can be founded at any time, and have all the room together.
        """
        cluster = key_share * (1 + self.t)  # entries: a representative and its samples
        if budget.fixed is not None:
            room = budget.fixed - self.exact_entries()
            s = room * 3 // 4 if self.s is None else self.s
            return Sizes(Plan(s), Plan(max(2, int((room - s) / cluster))), self.t)
        assert budget.fraction is not None
        exact = self.sinks + self.window
        first = max(BLOCK, math.ceil((self._first_entries() + exact) / budget.fraction) - exact)
        period = math.ceil(self._unit() / budget.fraction)
        if self.s is not None:
            return Sizes(Plan(self.s), Plan(max(2, int(self._unit() / cluster)), first, period), self.t)
        s = self._unit() * 3 // 4
        return Sizes(Plan(s, first, period), Plan(max(2, int((self._unit() - s) / cluster)), first, period), self.t)


@dataclass(frozen=True)
class Sizes:
    """Value samples and clusters that there is room for, and key samples of a cluster."""

    samples: Plan
    clusters: Plan
    t: int


@dataclass(frozen=True)
class Block:
    """A few tokens of every head, one head after the other: l = b·h."""

    keys: Float[Tensor, "l n d"]
    values: Float[Tensor, "l n e"]
    ranks: Int64[Tensor, "l n"]  # -1 where a head has fewer

    @property
    def valid(self) -> Bool[Tensor, "l n"]:
        """Where there is a token."""
        return self.ranks >= 0


class SubGenPast(Past):
    """Clusters of keys and samples of values, for all rows and heads."""

    def __init__(self, config: SubGen, budget: Budget, layer: int) -> None:
        self.config, self.budget, self.layer = config, budget, layer
        self.counts: list[int] = []  # tokens written, per row
        self.heads = 0
        self.sizes = Sizes(Plan(0), Plan(0), 0)
        self.held: dict[str, Tensor] = {}  # by name, each [b, h, ...]: see `_begin`
        self.log_size: Tensor | None = None  # [b, h, m·t]: log n/t of every key sample
        self.log_value: Tensor | None = None  # [b, h, s]: log μ/(s‖v‖²) of every value sample
        self.longest_query: Tensor | None = None  # of those asked so far, times the scale: the paper's r

    # -- writing

    def write(self, tokens: LeavingTokens) -> None:
        """Update clusters and samples, each head with draws of its own. Lines 4-6."""
        if not self.held:
            self._begin(tokens)
        self.counts = list(tokens.counts)
        self._grow()
        for block in _blocks(tokens):
            self._assign(block)
            self._sample(block)
        self._weigh()

    def _begin(self, like: LeavingTokens) -> None:
        rows, self.heads, _, width = like.keys.shape
        wide = like.values.shape[-1]
        self._set_sizes(width, wide)
        device, lanes = like.keys.device, (rows, self.heads)
        self.held = {
            "representatives": like.keys.new_zeros(*lanes, 0, width),
            "key_samples": like.keys.new_zeros(*lanes, 0, self.config.t, width),
            "cluster_sizes": torch.zeros(*lanes, 0, dtype=torch.int64, device=device),
            "reach": torch.zeros(*lanes, 0, dtype=torch.float64, device=device),
            "clusters": torch.zeros(lanes, dtype=torch.int64, device=device),
            "delta": torch.full(lanes, self.config.delta or 0.0, dtype=torch.float64, device=device),
            "growths": torch.zeros(lanes, dtype=torch.int64, device=device),
            "sample_keys": like.keys.new_zeros(*lanes, 0, width),
            "sample_values": like.values.new_zeros(*lanes, 0, wide),
            "sample_norms": torch.zeros(*lanes, 0, dtype=torch.float64, device=device),
            "mass": torch.zeros(*lanes, 0, dtype=torch.float64, device=device),
        }

    def _set_sizes(self, width: int, wide: int) -> None:
        self.sizes = self.config.sizes(self.budget, width / (width + wide))

    def _grow(self) -> None:
        """Have the slots that the longest row may need; those of the others stay empty."""
        last = max(max(self.counts) - 1, 0)
        strata = self.sizes.samples.stratum_of(last)[0] + 1
        samples = strata * self.sizes.samples.slots
        clusters = (self.sizes.clusters.stratum_of(last)[0] + 1) * self.sizes.clusters.slots
        wanted = {"mass": strata} | dict.fromkeys(
            ("representatives", "key_samples", "cluster_sizes", "reach"), clusters
        )
        wanted |= dict.fromkeys(("sample_keys", "sample_values", "sample_norms"), samples)
        for name, slots in wanted.items():
            tensor = self.held[name]
            more = slots - tensor.shape[2]
            if more > 0:
                self.held[name] = F.pad(tensor, (0, 0) * (tensor.ndim - 3) + (0, more))

    def _lanes(self, name: str) -> Tensor:
        """A tensor of the state with rows and heads as one dimension: a view, to be written through."""
        tensor = self.held[name]
        return tensor.view(-1, *tensor.shape[2:])

    def _draw(self, ranks: Int64[Tensor, "l n"], kind: int, count: int) -> Float[Tensor, "l n count"]:
        """`count` numbers for every token, by its address."""
        head = (torch.arange(len(ranks), device=ranks.device) % self.heads)[:, None, None]
        number = torch.arange(count, device=ranks.device)
        return uniforms(self.config.seed, self.layer, head, ranks[:, :, None], kind, number)

    # -- clusters: UpdateSoftmaxNormalizer

    def _assign(self, block: Block) -> None:
        """Give every token to the nearest cluster, or let it found one. Lines 11-23."""
        keys, valid = block.keys.double(), block.valid
        lane = torch.arange(len(keys), device=keys.device)
        position = torch.arange(keys.shape[1], device=keys.device)
        clusters, delta = self._lanes("clusters"), self._lanes("delta")
        plan = self.sizes.clusters
        room = (_strata(plan, block.ranks.clamp_min(0)) + 1) * plan.slots  # [l, n]
        distance, cluster = self._nearest(keys)
        counted = torch.zeros_like(clusters)  # tokens before this one are in their cluster's samples
        start = torch.zeros_like(clusters)  # tokens before this one have their cluster
        while True:
            founds = valid & (distance > delta[:, None]) & (position >= start[:, None])
            going = founds.any(1)
            if not bool(going.any()):
                break
            token = founds.long().argmax(1)
            full = going & (clusters >= room[lane, token])
            if bool(full.any()):
                before = full[:, None] & (position >= counted[:, None]) & (position < token[:, None])
                self._count(block, distance, cluster, valid & before)
                counted = torch.where(full, token, counted)
                self._make_room(full.nonzero()[:, 0].tolist(), block.ranks[lane, token])
                nearer = self._nearest(keys)
                changed = full[:, None] & (position >= token[:, None])
                distance = torch.where(changed, nearer[0], distance)
                cluster = torch.where(changed, nearer[1], cluster)
                continue
            self._lanes("representatives")[lane[going], clusters[going]] = block.keys[lane[going], token[going]]
            to_new = (keys - keys[lane, token][:, None]).norm(dim=2)
            nearer = going[:, None] & (position >= token[:, None]) & (to_new < distance)
            distance = torch.where(nearer, to_new, distance)
            cluster = torch.where(nearer, clusters[:, None], cluster)
            clusters += going
            start = torch.where(going, token + 1, start)
        self._count(block, distance, cluster, valid & (position >= counted[:, None]))

    def _nearest(self, keys: Float[Tensor, "l n d"]) -> tuple[Float[Tensor, "l n"], Int64[Tensor, "l n"]]:
        """Every key's distance from the nearest representative, and the number of its cluster. Line 12."""
        representatives = self._lanes("representatives").double()
        size = representatives.shape[1]
        if size == 0:
            far = torch.full_like(keys[..., 0], math.inf)
            return far, torch.zeros_like(far, dtype=torch.int64)
        squared = squared_distances(keys, squared_norms(keys), representatives, squared_norms(representatives))
        empty = torch.arange(size, device=keys.device) >= self._lanes("clusters")[:, None]
        distance, cluster = squared.masked_fill_(empty[:, None], math.inf).min(2)
        return distance.sqrt(), cluster

    def _count(self, block: Block, distance: Tensor, cluster: Tensor, counted: Bool[Tensor, "l n"]) -> None:
        """Count tokens into their clusters, whose samples adopt each with probability 1/n. Lines 14-18."""
        same = (cluster[:, :, None] == cluster[:, None]) & counted[:, None]  # [l, n, n]: token, earlier token
        sizes = self._lanes("cluster_sizes")
        n = sizes.gather(1, cluster) + (same.tril()).sum(2)
        adopts = counted[..., None] & (self._draw(block.ranks, KEY, self.config.t) * n[..., None] < 1)  # [l, n, t]
        later = same.triu(1).to(adopts.dtype)
        again = (later[..., None] & adopts[:, None]).any(2)  # a later token adopts the same slot
        lane, token, slot = (adopts & ~again).nonzero(as_tuple=True)
        self._lanes("key_samples")[lane, cluster[lane, token], slot] = block.keys[lane, token]
        sizes.scatter_add_(1, cluster, counted.long())
        self._lanes("reach").scatter_reduce_(1, cluster, distance.masked_fill(~counted, 0), "amax")

    def _make_room(self, lanes: list[int], ranks: Int64[Tensor, " l"]) -> None:
        """Let δ grow until clusters merge, for the heads that have no room. See `algorithms/subgen.make_room`."""
        most = int(self._lanes("clusters").max())
        drawn = self._draw(ranks[:, None], MERGE, most * self.config.t)[:, 0].unflatten(1, (most, -1))
        for lane in lanes:
            self._merge(lane, drawn[lane])

    def _merge(self, lane: int, drawn: Float[Tensor, "m t"]) -> None:
        number = int(self._lanes("clusters")[lane])
        representatives = self._lanes("representatives")[lane, :number]
        wide = representatives.double()[None]
        norms = squared_norms(wide)
        distances = squared_distances(wide, norms, wide, norms)[0].sqrt().fill_diagonal_(math.inf)
        delta, growths = _grown(float(self._lanes("delta")[lane]), float(distances.min()), float(self.config.growth))
        stays = _independent(distances <= delta)
        kept = stays.nonzero()[:, 0]
        into = torch.zeros_like(stays, dtype=torch.int64)
        into[~stays] = kept[distances[~stays][:, kept].argmin(1)]
        samples, sizes = self._lanes("key_samples")[lane, :number], self._lanes("cluster_sizes")[lane, :number]
        originals, reach = samples.clone(), self._lanes("reach")[lane, :number]
        for i in (~stays).nonzero()[:, 0].tolist():
            sizes[into[i]] += sizes[i]
            reach[into[i]] = torch.maximum(reach[into[i]], reach[i] + distances[i, into[i]])
            adopts = drawn[i] * sizes[into[i]] < sizes[i]
            samples[into[i], adopts] = originals[i, adopts]
        for rows in (representatives, samples, sizes, reach):
            rows[: len(kept)] = rows[kept]
            rows[len(kept) :] = 0
        self._lanes("clusters")[lane] = len(kept)
        self._lanes("delta")[lane] = delta
        self._lanes("growths")[lane] += growths

    # -- values: UpdateMatrixProduct

    def _sample(self, block: Block) -> None:
        """Let each value sample adopt each token with probability ‖v‖² / (μ + ‖v‖²). Lines 24-28, and line 6."""
        plan = self.sizes.samples
        strata = _strata(plan, block.ranks)
        norms = block.values.double().square().sum(2)
        drawn = self._draw(block.ranks, VALUE, plan.slots)
        first = strata[:, 0].clamp_min(0)  # of each head; a head without tokens has no valid ones
        for offset in range(2):  # a block is no longer than a stratum: it lies in two of them at most
            stratum = first + offset
            here = block.valid & (strata == stratum[:, None])
            if bool(here.any()):
                self._sample_stratum(block, stratum, norms.masked_fill(~here, 0), drawn)

    def _sample_stratum(
        self, block: Block, stratum: Int64[Tensor, " l"], norms: Float[Tensor, "l n"], drawn: Float[Tensor, "l n s"]
    ) -> None:
        """Tokens whose norm is given as 0 are of another stratum, or have values of zero: never adopted."""
        mass = self._lanes("mass")
        lane = torch.arange(len(norms), device=norms.device)
        known = stratum < mass.shape[1]  # a shorter row may not have it yet
        at = stratum.clamp_max(mass.shape[1] - 1)
        totals = torch.cat([mass[lane, at][:, None], norms], 1).cumsum(1)
        mass[lane, at] = torch.where(known, totals[:, -1], mass[lane, at])
        adopts = drawn * totals[:, 1:, None] < norms[..., None]
        token = torch.where(adopts, torch.arange(norms.shape[1], device=norms.device)[:, None], -1).amax(1)  # [l, s]
        lanes, slots = (token >= 0).nonzero(as_tuple=True)
        tokens = token[lanes, slots]
        slots = slots + stratum[lanes] * self.sizes.samples.slots
        self._lanes("sample_keys")[lanes, slots] = block.keys[lanes, tokens]
        self._lanes("sample_values")[lanes, slots] = block.values[lanes, tokens]
        self._lanes("sample_norms")[lanes, slots] = norms[lanes, tokens]

    # -- reading: QueryStreamAttn

    def _weigh(self) -> None:
        """The logarithms of the weights in lines 29 and 30; -inf where a slot is empty."""
        slots = self.sizes.samples.slots
        mass = self.held["mass"].repeat_interleave(slots, 2)
        norms = self.held["sample_norms"]
        self.log_value = (mass / (slots * norms)).log().masked_fill(norms == 0, NO_MASS).float()
        sizes = self.held["cluster_sizes"].repeat_interleave(self.config.t, 2)
        self.log_size = (sizes / self.config.t).log().float()

    def attend(self, query: Float[Tensor, "b hg q d"], scale: float, softcap: float | None) -> Partial | None:
        """z / τ. Lines 29-31, in logarithms.

        The weights of z alone estimate the denominator as well, since E[μ / (s‖v‖²)] = 1. `normalizer="larger"`
        divides by the larger of the two estimates, so that no answer is longer than the longest value; "clusters"
        is the paper's.
        """
        if self.log_value is None or self.log_size is None:
            return None
        longest = query.detach().float().norm(dim=-1).max() * scale
        self.longest_query = longest if self.longest_query is None else torch.maximum(self.longest_query, longest)
        samples = WeightedTokens(self.held["sample_keys"], self.held["sample_values"], self.log_value)
        z = weighted_attention(query, samples, scale, softcap=softcap)
        log_tau = log_normalizer(query, self.held["key_samples"].flatten(2, 3), self.log_size, scale, softcap=softcap)
        if self.config.normalizer == "larger":
            log_tau = torch.maximum(log_tau, z.lse)
        share = torch.exp(z.lse - log_tau).nan_to_num(nan=0.0, posinf=torch.finfo(torch.float32).max)
        return Partial(share[..., None] * z.out, log_tau)

    # -- state

    def count_entries(self) -> Int64[Tensor, "b h"] | None:
        """Value samples and clusters with their samples, of the slots that are not empty."""
        if not self.held:
            return None
        width = self.held["sample_keys"].shape[-1]
        share = width / (width + self.held["sample_values"].shape[-1])
        keys = self.held["clusters"] * (1 + self.config.t)
        return (self.held["sample_norms"] > 0).sum(2) + (keys * share).ceil().long()

    def details(self) -> dict[str, float]:
        """Clusters, their δ, how often it grew; and by what factor, as a logarithm, keys of a cluster may differ."""
        if not self.held:
            return {}
        clusters, delta = self.held["clusters"].double().mean(), self.held["delta"].mean()
        return {
            "clusters": float(clusters),
            "delta": float(delta),
            "times grown": float(self.held["growths"].double().mean()),
            "log spread": self._log_spread(),
        }

    def _log_spread(self) -> float:
        """The theorem's 2δr, with the longest query so far as r and what the clusters reach in place of δ; a mean."""
        if self.longest_query is None:
            return 0.0
        return float(2 * self.held["reach"].amax(2).mean() * self.longest_query)

    def warning(self) -> str | None:
        """Where the condition of the theorem fails by far, and with it what it promises."""
        if not self.held or self._log_spread() <= math.log(self.config.t) + 1:
            return None
        return (
            "keys do not cluster at this budget, and SubGen's error bound says nothing: keys of one cluster may differ "
            "in weight by more than the e^(2δr) that t samples cover (log spread); give more budget, or use clustergen"
        )

    @property
    def nbytes(self) -> int:
        return storage_bytes([*self.held.values(), self.log_size, self.log_value])

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.held)

    def numbers(self) -> dict[str, list[int]]:
        return {"counts": self.counts}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        self.counts, self.held = list(numbers["counts"]), {name: t.contiguous() for name, t in tensors.items()}
        if self.held:
            self.heads = self.held["mass"].shape[1]
            self._set_sizes(self.held["sample_keys"].shape[-1], self.held["sample_values"].shape[-1])
            self._weigh()


def _blocks(tokens: LeavingTokens) -> Iterator[Block]:
    """The tokens of every head in order, BLOCK at a time; holes between them are closed first."""
    heads, count = tokens.keys.shape[1:3]
    keys, values, ranks = tokens.keys, tokens.values, tokens.ranks
    if bool((ranks < 0).any()):
        index = (ranks < 0).long().sort(dim=1, stable=True).indices
        keys, values, ranks = columns(keys, index), columns(values, index), ranks.gather(1, index)
        count = int((ranks >= 0).sum(1).max())
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    lanes = ranks.repeat_interleave(heads, 0)
    for start in range(0, count, BLOCK):
        part = slice(start, min(start + BLOCK, count))
        yield Block(keys[:, part], values[:, part], lanes[:, part])


def _strata(plan: Plan, ranks: Int64[Tensor, "l n"]) -> Int64[Tensor, "l n"]:
    """The stratum of each token."""
    if plan.first is None:
        return torch.zeros_like(ranks)
    later = torch.div(ranks - plan.first, plan.period, rounding_mode="floor")
    return torch.where(ranks < plan.first, 0, 1 + later)


def _grown(delta: float, closest: float, growth: float) -> tuple[float, int]:
    """δ grown until two clusters at the distance `closest` merge, and how often; from 0 it begins with that."""
    delta = delta or closest / growth
    growths = 0
    while delta < closest:
        delta *= growth
        growths += 1
    return delta, growths


def _independent(near: Bool[Tensor, "m m"]) -> Bool[Tensor, " m"]:
    """The clusters that stay: in their order, each that is not near one that stays."""
    matrix = near.cpu().numpy()
    stays, covered = torch.zeros(len(near), dtype=torch.bool), matrix[0] & False
    for i in range(len(matrix)):
        if not covered[i]:
            stays[i] = True
            covered |= matrix[i]
    return stays.to(near.device)

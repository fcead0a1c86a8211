"""SubGen for all rows and heads, with a bounded memory: the one-head form is `algorithms/subgen.py`.

`clusters.py` has what the denominator needs, `value_samples.py` what the numerator needs.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from kvsketch.algorithms.sampling import Plan
from kvsketch.attention import Partial, WeightedTokens, fold_groups
from kvsketch.caches.base import (
    BLOCK,
    LeavingTokens,
    Past,
    WindowedConfig,
    check_choice,
    check_count,
    check_number,
    check_seed,
)
from kvsketch.caches.budget import Budget
from kvsketch.caches.clusters import Clusters
from kvsketch.caches.exact_first import ExactFirst
from kvsketch.caches.lanes import Draws, blocks
from kvsketch.caches.storage import made_of, storage_bytes, with_prefix
from kvsketch.caches.value_samples import ValueSamples
from kvsketch.kernels.weighted_attention import log_normalizer, weighted_attention

NORMALIZERS = ("larger", "clusters")
# Bytes beside keys and values: a sample's norm and weight; a cluster's size and reach; the weight of a key sample.
SAMPLE_EXTRA, CLUSTER_EXTRA, KEY_EXTRA = 8, 8, 4
ELEMENT = 2  # bytes of half precision; the same for all, so that precision does not decide what is sampled


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
    growth: float | int = 1.05
    normalizer: str = "larger"
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("t", self.t, least=1, most=1 << 16)
        check_seed(self.seed)
        if self.s is not None:
            check_count("s", self.s, least=1)
        if self.delta is not None:
            check_number("delta", self.delta, above=1e-30, below=1e30)  # far from where distances over it overflow
        check_number("growth", self.growth, above=1.0001, below=1e6)
        check_choice("normalizer", self.normalizer, NORMALIZERS)
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
        return ExactFirst(lambda count: self.room(budget, count), lambda: SubGenPast(self, budget, layer))

    def sizes(self, budget: Budget, width: int, wide: int) -> "Sizes":
        """What the budget is spent on, for keys and values of these widths.

        Three quarters go to value samples unless `s` says otherwise. A fraction makes room for a few entries at a
        time. Sampled values of the past cannot come back, so each such stratum has samples of its own; clusters
        can be founded at any time, and have all the room together.
        """
        entry, key = ELEMENT * (width + wide), ELEMENT * width  # bytes
        sample = entry + SAMPLE_EXTRA
        cluster = key + CLUSTER_EXTRA + self.t * (key + KEY_EXTRA)

        def split(entries: int, s: int | None) -> tuple[int, int]:
            """Samples and clusters that fit."""
            samples = entries * 3 * entry // (4 * sample) if s is None else s
            return samples, max(2, (entries * entry - samples * sample) // cluster)

        if budget.fixed is not None:
            s, m = split(self.room(budget, 0), self.s)
            return Sizes(Plan(s), Plan(m))
        assert budget.fraction is not None
        strata = self.strata(budget.fraction, self._first_entries(), self._unit())
        if self.s is None:
            s, m = split(self._unit(), None)
            return Sizes(Plan(s, *strata), Plan(m, *strata))
        return Sizes(Plan(self.s), Plan(split(self._unit(), 0)[1], *strata))


@dataclass(frozen=True)
class Sizes:
    """Value samples and clusters that there is room for."""

    samples: Plan
    clusters: Plan


class SubGenPast(Past):
    """Clusters of keys and samples of values, for all rows and heads."""

    def __init__(self, config: SubGen, budget: Budget, layer: int) -> None:
        self.config, self.budget, self.layer = config, budget, layer
        self.counts: list[int] = []  # tokens written, per row
        self.clusters: Clusters | None = None
        self.samples: ValueSamples | None = None
        self.log_size: Tensor | None = None  # [b, h, m·t]: log n/t of every key sample
        self.log_value: Tensor | None = None  # [b, h, s]: log μ/(s‖v‖²) of every value sample
        self.longest_query: Tensor | None = None  # [b, h]: r of what was asked so far, times the scale

    def write(self, tokens: LeavingTokens) -> None:
        """Update clusters and samples, each head with draws of its own. Lines 4-6."""
        if self.clusters is None or self.samples is None:
            self.clusters = Clusters.none(tokens.keys, self.config.t, float(self.config.delta or 0))
            self.samples = ValueSamples.none(tokens.keys, tokens.values)
        self.counts = list(tokens.counts)
        sizes = self._sizes()
        ends = [max(count - 1, 0) for count in self.counts]
        # A call may use all the clusters there is room for at its end: δ would be learnt on a few otherwise.
        rooms = [(sizes.clusters.stratum_of(end)[0] + 1) * sizes.clusters.slots for end in ends]
        self.clusters.make_slots(max(rooms))
        self.samples.make_slots(sizes.samples.stratum_of(max(ends))[0] + 1, sizes.samples.slots)
        heads = tokens.keys.shape[1]
        room = torch.tensor(rooms, device=tokens.keys.device).repeat_interleave(heads)
        draws = Draws(self.config.seed, self.layer, heads)
        for block in blocks(tokens):
            self.clusters.take(block, room, float(self.config.growth), draws)
            self.samples.take(block, sizes.samples, draws)
        self._weigh()

    def _sizes(self) -> Sizes:
        assert self.samples is not None
        keys, values = self.samples.keys, self.samples.values
        return self.config.sizes(self.budget, keys.shape[3], values.shape[3])

    def _weigh(self) -> None:
        """The logarithms of the weights in lines 29 and 30; -inf where a slot is empty."""
        assert self.clusters is not None
        assert self.samples is not None
        self.log_value = self.samples.log_weights()
        t = self.config.t
        self.log_size = (self.clusters.sizes.repeat_interleave(t, 2).double() / t).log().float()

    def attend(self, query: Float[Tensor, "b hg q d"], scale: float, softcap: float | None) -> Partial | None:
        """z / τ. Lines 29-31, in logarithms.

        The weights of z alone estimate the denominator as well, since E[μ / (s‖v‖²)] = 1. `normalizer="larger"`
        divides by the larger of the two estimates, so that no answer is longer than the longest value; "clusters"
        is the paper's, cut off where numbers of this precision end.
        """
        if self.clusters is None or self.samples is None or self.log_value is None or self.log_size is None:
            return None
        self._note_longest(query, scale)
        entries = WeightedTokens(self.samples.keys, self.samples.values, self.log_value)
        z = weighted_attention(query, entries, scale, softcap=softcap)
        keys = self.clusters.samples.flatten(2, 3)
        log_tau = log_normalizer(query, keys, self.log_size, scale, softcap=softcap)
        if self.config.normalizer == "larger":
            log_tau = torch.maximum(log_tau, z.lse)
        longest = math.log(torch.finfo(query.dtype).max) / 2
        share = torch.exp((z.lse - log_tau).clamp_max(longest)).nan_to_num(nan=0.0)  # NaN: neither has any mass
        return Partial(share[..., None] * z.out, log_tau)

    def _note_longest(self, query: Tensor, scale: float) -> None:
        assert self.clusters is not None
        if query.shape[2] == 0:
            return
        norms = fold_groups(query.detach().float(), self.clusters.number.shape[1]).norm(dim=3)
        longest = norms.amax(2) * scale
        self.longest_query = longest if self.longest_query is None else torch.maximum(self.longest_query, longest)

    # -- reports

    def count_entries(self) -> Int64[Tensor, "b h"] | None:
        """Value samples that are taken, and clusters with their samples by the bytes of their keys."""
        if self.clusters is None or self.samples is None:
            return None
        width, wide = self.samples.keys.shape[3], self.samples.values.shape[3]
        keys = self.clusters.number * (1 + self.config.t)
        return (self.samples.norms > 0).sum(2) + (keys * width / (width + wide)).ceil().long()

    def details(self) -> dict[str, float]:
        """Clusters, their δ, how often it grew; and by what factor, as a logarithm, keys of a cluster may differ."""
        if self.clusters is None:
            return {}
        found = {
            "clusters": float(self.clusters.number.double().mean()),
            "delta": float(self.clusters.delta.mean()),
            "times grown": float(self.clusters.growths.double().mean()),
        }
        spread = self._log_spread()
        return found if spread is None else found | {"log spread": spread}

    def _log_spread(self) -> float | None:
        """The theorem's 2δr: δ is what clusters reach, r the longest query so far; a mean over heads."""
        if self.clusters is None or self.longest_query is None:
            return None
        return float((2 * self.clusters.reach.amax(2) * self.longest_query).mean())

    def warning(self) -> str | None:
        """Where the condition of the theorem fails by far, and with it what it promises."""
        spread = self._log_spread()
        if spread is None or spread <= math.log(self.config.t) + 1:
            return None
        return (
            "keys do not cluster at this budget, and SubGen's error bound says nothing: keys of one cluster may differ "
            "in weight by more than the e^(2δr) that t samples cover (log spread); give more budget, or use clustergen"
        )

    @property
    def nbytes(self) -> int:
        parts = [part.tensors().values() for part in (self.clusters, self.samples) if part is not None]
        return storage_bytes([*(tensor for part in parts for tensor in part), self.log_size, self.log_value])

    # -- state

    def tensors(self) -> dict[str, Tensor]:
        if self.clusters is None or self.samples is None:
            return {}
        found = {f"clusters.{name}": tensor for name, tensor in self.clusters.tensors().items()}
        found |= {f"samples.{name}": tensor for name, tensor in self.samples.tensors().items()}
        return found if self.longest_query is None else found | {"longest_query": self.longest_query}

    def numbers(self) -> dict[str, list[int]]:
        return {"counts": self.counts}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, list[int]]) -> None:
        self.counts, self.longest_query = list(numbers["counts"]), tensors.get("longest_query")
        self.clusters = self.samples = None
        if tensors:
            self.clusters = made_of(Clusters, _part(tensors, "clusters."))
            self.samples = made_of(ValueSamples, _part(tensors, "samples."))
            self._weigh()


def _part(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Those whose names begin so; as blocks of memory of their own, to be written to."""
    return {name: tensor.contiguous() for name, tensor in with_prefix(tensors, prefix).items()}

"""SubGen for the lanes of a bundle, with a bounded memory: the one-head form is `algorithms/subgen.py`.

`clusters.py` has what the denominator needs, `value_samples.py` what the numerator needs. SubGen is never exact by
itself, so tokens are held exactly for as long as they fit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor

from kvsketch.algorithms.sampling import Plan
from kvsketch.attention import Partial, WeightedTokens, fold_groups
from kvsketch.caches.core.buffers import Growing
from kvsketch.caches.core.config import BLOCK
from kvsketch.caches.core.method import Holding
from kvsketch.caches.core.query import Answer, Query
from kvsketch.caches.core.storage import made_of, storage_bytes, tensors_of, with_prefix
from kvsketch.caches.core.tokens import Arriving
from kvsketch.caches.forgetting.subgen.clusters import Clusters
from kvsketch.caches.forgetting.subgen.slots import Draws
from kvsketch.caches.forgetting.subgen.value_samples import ValueSamples
from kvsketch.kernels.weighted_attention import log_normalizer, weighted_attention


@dataclass(frozen=True)
class Sizes:
    """Value samples and clusters that there is room for."""

    samples: Plan
    clusters: Plan


@dataclass(frozen=True)
class Told:
    """The algorithm's parameters, and the source of its random numbers."""

    t: int
    delta: float
    growth: float
    normalizer: str
    seed: int
    layer: int


class SubGenHolding(Holding):
    """Tokens while they fit; then clusters of keys and samples of values."""

    def __init__(self, told: Told, room: Callable[[int], int], sizes: Callable[[int, int], Sizes]) -> None:
        """`room(count)` tokens fit when `count` have come; `sizes` takes the widths of keys and of values."""
        self.told, self.room, self.sizes = told, room, sizes
        self.exact = (Growing(dim=1), Growing(dim=1))  # keys and values, while they fit
        self.clusters: Clusters | None = None
        self.samples: ValueSamples | None = None
        self.log_size: Tensor | None = None  # [l, m·t]: log n/t of every key sample
        self.log_value: Tensor | None = None  # [l, s]: log μ/(s‖v‖²) of every value sample
        self.longest_query: Tensor | None = None  # [l]: r, the longest query so far, times the scale

    def write(self, new: Arriving) -> None:
        """Hold the tokens; when there is no room any more, cluster and sample all of them in their order."""
        if self.clusters is not None:
            self._update(new)
            return
        for grown, came in zip(self.exact, (new.keys, new.values), strict=True):
            grown.append(came)
        if new.after > self.room(new.after):
            keys, values = (grown.view for grown in self.exact)
            self._update(Arriving(keys, values, 0, new.heads_on, few=new.few))
            self.exact = (Growing(dim=1), Growing(dim=1))

    def _update(self, new: Arriving) -> None:
        """Update clusters and samples, each head with draws of its own. Lines 4-6."""
        if self.clusters is None or self.samples is None:
            self.clusters = Clusters.none(new.keys, self.told.t, self.told.delta)
            self.samples = ValueSamples.none(new.keys, new.values)
        sizes, end = self.sizes(new.keys.shape[2], new.values.shape[2]), new.after - 1
        # A call may use all clusters that there is room for at its end; otherwise δ would be learnt on a few.
        room = (sizes.clusters.stratum_of(end)[0] + 1) * sizes.clusters.slots
        self.clusters.make_slots(room)
        self.samples.make_slots(sizes.samples.stratum_of(end)[0] + 1, sizes.samples.slots)
        draws = Draws(self.told.seed, self.told.layer, new.heads)
        for start in range(0, new.count, BLOCK):
            block = new.part(start, min(start + BLOCK, new.count))
            if new.few:  # unlearn how δ grew while there was less room
                self.clusters.shrink(room, self.told.growth, self.told.delta)
            self.clusters.take(block, room, self.told.growth, draws)
            self.samples.take(block, sizes.samples, draws)
        self._weigh()

    def _weigh(self) -> None:
        """The logarithms of the weights in lines 29 and 30; -inf where a slot is empty."""
        assert self.clusters is not None
        assert self.samples is not None
        self.log_value = self.samples.log_weights()
        t = self.told.t
        self.log_size = (self.clusters.sizes.repeat_interleave(t, 1).double() / t).log().float()

    # -- reading

    def answer(self, query: Query, asked: Tensor | None) -> Answer:
        """z / τ. Lines 29-31, in logarithms.

        The weights of z alone estimate the denominator as well, since E[μ / (s‖v‖²)] = 1. `normalizer="larger"`
        divides by the larger of the two estimates, so that no answer is longer than the longest value;
        `"clusters"` is the paper's form, cut off where numbers of this precision end.
        """
        queries, scale, softcap = query.queries, query.scale, query.softcap
        if self.clusters is None:
            held = WeightedTokens(*(grown.view[None] for grown in self.exact))
            return Answer(weighted_attention(queries, held, scale, softcap=softcap))
        assert self.samples is not None
        assert self.log_value is not None
        assert self.log_size is not None
        entries = WeightedTokens(self.samples.keys[None], self.samples.values[None], self.log_value[None])
        z = weighted_attention(queries, entries, scale, softcap=softcap)
        keys = self.clusters.samples.flatten(1, 2)[None]
        log_tau = log_normalizer(queries, keys, self.log_size[None], scale, softcap=softcap)
        if self.told.normalizer == "larger":
            log_tau = torch.maximum(log_tau, z.lse)
        longest = math.log(torch.finfo(queries.dtype).max) / 2
        share = torch.exp((z.lse - log_tau).clamp_max(longest)).nan_to_num(nan=0.0)  # NaN: neither has any mass
        return Answer(Partial(share[..., None] * z.out, log_tau))

    def observe(self, query: Query, read: Tensor | None, lse: Tensor | None) -> None:
        """Note the longest query that clusters have answered: the theorem's bound depends on it."""
        if query.queries.shape[2] == 0 or self.clusters is None:
            return
        norms = fold_groups(query.queries.detach().float(), len(self.clusters.number))[0].norm(dim=2)
        longest = norms.amax(1) * query.scale
        self.longest_query = longest if self.longest_query is None else torch.maximum(self.longest_query, longest)

    # -- reports

    def count_entries(self) -> int | Int64[Tensor, " l"]:
        """Value samples in use, and the clusters' keys (representatives and samples), counted by their bytes."""
        if self.clusters is None or self.samples is None:
            return self.exact[0].length
        width, wide = self.samples.keys.shape[2], self.samples.values.shape[2]
        keys = self.clusters.number * (1 + self.told.t)
        return (self.samples.norms > 0).sum(1) + (keys * width / (width + wide)).ceil().long()

    def details(self, count: int) -> dict[str, float]:
        """Clusters, their δ, how often it grew; and the log of the factor by which a cluster's keys may differ."""
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
        """The theorem's 2δr: δ is how far clusters reach, r the longest query so far; a mean over heads."""
        if self.clusters is None or self.longest_query is None:
            return None
        return float((2 * self.clusters.reach.amax(1) * self.longest_query).mean())

    def warning(self) -> str | None:
        """A warning if the theorem's condition fails by far, and with it the theorem's bound."""
        spread = self._log_spread()
        if spread is None or spread <= math.log(self.told.t) + 1:
            return None
        return (
            "keys do not cluster at this budget, and SubGen's error bound says nothing: keys of one cluster may differ "
            "in weight by more than the e^(2δr) that t samples cover (log spread); give more budget, or use clustergen"
        )

    # -- state

    @property
    def nbytes(self) -> int:
        exact = [grown.buffer for grown in self.exact]
        return storage_bytes([*exact, *self.tensors().values(), self.log_size, self.log_value])

    def tensors(self) -> dict[str, Tensor]:
        if self.clusters is None or self.samples is None:
            return {"keys": self.exact[0].view, "values": self.exact[1].view}
        found = tensors_of(self.clusters, "clusters.") | tensors_of(self.samples, "samples.")
        return found if self.longest_query is None else found | {"longest_query": self.longest_query}

    def restore(self, tensors: dict[str, Tensor], numbers: dict[str, Any], count: int) -> None:
        self.longest_query = tensors.get("longest_query")
        clusters, samples = (with_prefix(tensors, prefix) for prefix in ("clusters.", "samples."))
        self.clusters = self.samples = None
        if "keys" in tensors:
            keys, values = tensors["keys"], tensors["values"]
            shaped = keys.ndim == values.ndim == 3 and keys.shape[:2] == values.shape[:2] == (len(keys), count)
            if not shaped or count > self.room(count):
                raise ValueError(f"{count} tokens came, and keys of {tuple(keys.shape)} are held exactly")
            self.exact = (Growing(1, keys), Growing(1, values))
            return
        # Each in one block of memory, to be written to.
        self.clusters = made_of(Clusters, {name: x.contiguous() for name, x in clusters.items()})
        self.samples = made_of(ValueSamples, {name: x.contiguous() for name, x in samples.items()})
        if len(self.clusters.number) != len(self.samples.mass):
            raise ValueError(f"clusters of {len(self.clusters.number)} lanes, samples of {len(self.samples.mass)}")
        self._weigh()

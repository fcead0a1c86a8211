"""SubGen: its options. What it holds is in `holding.py`."""

from dataclasses import dataclass
from typing import ClassVar

from kvsketch.algorithms.sampling import Plan
from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.checks import check_choice, check_count, check_number, check_seed
from kvsketch.caches.core.config import BLOCK, WindowedConfig
from kvsketch.caches.core.method import Holding, Method
from kvsketch.caches.forgetting.subgen.holding import Sizes, SubGenHolding, Told

NORMALIZERS = ("larger", "clusters")
# Bytes beside keys and values: a sample's norm and weight; a cluster's size and reach; the weight of a key sample.
SAMPLE_EXTRA, CLUSTER_EXTRA, KEY_EXTRA = 8, 8, 4
ELEMENT = 2  # bytes of half precision; the same for all, so that precision does not decide what is sampled


@dataclass(frozen=True, kw_only=True)
class SubGen(WindowedConfig):
    """Samples values for the numerator and clustered keys for the denominator of attention (SubGen, Algorithm 1).

    There are `s` value samples, and `t` key samples for every cluster of radius `delta`; clusters take what `s` leaves
    of the budget. Without `delta`, every key is a cluster until there is no room for more. Whenever there is none,
    `delta` grows by the factor `growth` and clusters merge; the algorithm that inspired the paper's has 2, which
    merges more.
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

    def floor(self) -> int:
        return super().floor() + self.first_entries()

    def unit(self) -> int:
        """Entries that a fraction makes room for at a time: a quarter of them are at least two clusters."""
        return max(BLOCK, 4 * (1 + self.t))

    def first_entries(self) -> int:
        """Entries of the past before a fraction makes room for more."""
        return self.unit() + (0 if self.s is None else self.s)

    def new_method(self, layer: int) -> Method:
        return ClustersAndSamples(self, layer)

    def sizes(self, budget: Budget, width: int, wide: int) -> Sizes:
        """What the budget is spent on, for keys and values of these widths.

        Three quarters go to value samples unless `s` says otherwise. If the budget is a fraction, room for a few
        entries is made at a time, for each stratum of tokens. Values that are gone cannot be sampled later, so each
        stratum has samples of its own; clusters can be founded at any time, and share all the room.
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
        strata = self.strata(budget, self.first_entries(), self.unit())
        if self.s is None:
            s, m = split(self.unit(), None)
            return Sizes(Plan(s, *strata), Plan(m, *strata))
        return Sizes(Plan(self.s), Plan(split(self.unit(), 0)[1], *strata))


class ClustersAndSamples(Method):
    """SubGen in one layer."""

    observes = frozenset({"queries"})

    def __init__(self, config: SubGen, layer: int) -> None:
        self.config, self.layer = config, layer

    def new_holding(self, budget: Budget) -> Holding:
        config = self.config
        told = Told(
            config.t, float(config.delta or 0), float(config.growth), config.normalizer, config.seed, self.layer
        )
        return SubGenHolding(
            told, lambda count: config.room(budget, count), lambda width, wide: config.sizes(budget, width, wide)
        )

"""What the study of selectivity measures: methods that look tokens up, each with its knob at several settings."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from benchmarks.selectivity.attention_span import Cut
from benchmarks.selectivity.random_tokens import RandomTokens

from kvsketch.caches.core.checks import check_count
from kvsketch.caches.lookup.config import BucketedConfig, LookupConfig
from kvsketch.caches.lookup.key_index import KeyIndex
from kvsketch.caches.lookup.lsh import LSH
from kvsketch.caches.lookup.random_buckets import RandomBuckets
from kvsketch.caches.lookup.saap import IndexedConfig
from kvsketch.caches.registry import METHODS, parse_spec, read_call
from kvsketch.evaluation.layers.plan import Prompt
from kvsketch.evaluation.results.rows import Row, name_with_digest

# What a measurement depends on, besides the model.
KEY = ("prompt", "tokens", "layer", "method", "index", "knob", "seed", "sinks", "window", "asking")
WINDOW_ALONE = "streaming_llm"  # the method that looks nothing up
SET_BY_STUDY = ("index", "sinks", "window", "full_layers", "prefill", "chunk", "staging", "seed")
KNOBS = ("probes", "bins", "tables", "top")  # of which each method has one


@dataclass(frozen=True)
class Trial:
    """A method with its knob at one setting; without a config: sinks and window alone."""

    method: str  # the spec without the options that the study sets
    knob: int = 0
    config: LookupConfig | None = None
    index: str | None = None
    aim: float | None = None  # the share of the past that the setting was chosen for

    @property
    def seed(self) -> int | None:
        """The seed of the method's random numbers."""
        return getattr(self.config, "seed", None)

    @property
    def buckets(self) -> int | None:
        """Into how many buckets the past is put, if it is."""
        return None if not isinstance(self.config, BucketedConfig) else buckets_of(self.config)


@dataclass(frozen=True, kw_only=True)
class Study:
    """Which methods are measured, how much of the past each aims to read, and with which indexes.

    MagicPIG's knob does not say how much it reads, so its numbers of tables are given.
    """

    methods: Sequence[str]
    indexes: Sequence[KeyIndex]
    cut: Cut
    rates: Sequence[float] = (1 / 128, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)
    tables: Sequence[int] = (2, 5, 10, 20, 50, 100, 200)
    seeds: int = 3

    def __post_init__(self) -> None:
        check_count("seeds", self.seeds, least=1)
        for name in ("methods", "rates", "tables"):
            if not getattr(self, name):
                raise ValueError(f"the study has no {name}: name at least one")
        for rate in self.rates:
            if not 0 < rate <= 1:
                raise ValueError(f"a rate is the share of the past that is read, above 0 and up to 1, got {rate:g}")
        for tables in self.tables:
            check_count("tables", tables, least=1)
        method, times = Counter(name_of(read_method(spec)) for spec in self.methods).most_common(1)[0]
        if times > 1:
            raise ValueError(f"{method} is named twice: give each method once")

    def trials(self, past: int) -> list[Trial]:
        """All trials in a layer whose past has so many tokens."""
        found = [Trial(WINDOW_ALONE)]
        for spec in self.methods:
            named = name_of(read_method(spec))
            for config, index in self._with_indexes(read_method(spec), read_call(spec)[1]):
                for knob, setting, aim in self._settings(config, past):
                    changed: dict[str, Any] = {knob: setting}
                    seeded = self._seeded(replace(config, **changed))
                    found += [Trial(named, setting, one, index, aim) for one in seeded]
        return found

    def past(self, prompt: Prompt) -> int:
        """How many tokens of a text can be looked up."""
        past = self.cut.past(prompt.ids.shape[1])
        return past.stop - past.start

    def labels(self, prompt: Prompt, layer: int, trial: Trial) -> Row:
        """What tells a row from all others."""
        values = (prompt.name, prompt.ids.shape[1], layer, trial.method, trial.index, trial.knob, trial.seed)
        return dict(zip(KEY, (*values, *self.cut.labels.values()), strict=True))

    def _with_indexes(
        self, config: LookupConfig, options: Collection[str]
    ) -> Iterator[tuple[LookupConfig, str | None]]:
        """A config for each index if the method has one; there are as many random buckets as the first index has."""
        if isinstance(config, IndexedConfig):
            for index in self.indexes:
                yield replace(config, index=str(index.folder)), index_name(index)
        elif isinstance(config, RandomBuckets) and "buckets" not in options:
            yield replace(config, buckets=self.indexes[0].buckets), index_name(self.indexes[0])
        else:
            yield config, None

    def _settings(self, config: LookupConfig, past: int) -> list[tuple[str, int, float | None]]:
        """The knob's name and each of its settings once, with the share of the past that it aims to read."""
        if isinstance(config, LSH) and config.kind == "magicpig":
            return [("tables", tables, None) for tables in dict.fromkeys(self.tables)]
        aims = dict[tuple[str, int], float]()
        for rate in self.rates:
            aims.setdefault(setting_for(config, rate, past), rate)
        return [(knob, setting, aim) for (knob, setting), aim in aims.items()]

    def _seeded(self, config: LookupConfig) -> list[LookupConfig]:
        if not hasattr(config, "seed"):
            return [config]
        seeds: list[dict[str, Any]] = [{"seed": seed} for seed in range(self.seeds)]
        return [replace(config, **seed) for seed in seeds]


def setting_for(config: LookupConfig, rate: float, past: int) -> tuple[str, int]:
    """The knob's name, and the setting at which a method reads about this share of a past."""
    if isinstance(config, LSH):
        return "bins", round(1 / rate)
    if isinstance(config, BucketedConfig):
        return "probes", max(1, round(rate * buckets_of(config)))
    return "top", max(1, round(rate * past))


def buckets_of(config: BucketedConfig) -> int:
    """Into how many buckets a method puts the past."""
    if isinstance(config, IndexedConfig):
        return config.learnt.buckets
    assert isinstance(config, RandomBuckets), "there are no other buckets"
    return config.buckets


def index_name(index: KeyIndex) -> str:
    """The folder's name, with a digest of the index's description."""
    return name_with_digest(index.folder.name, repr(index.description).encode())


def name_of(config: LookupConfig) -> str:
    """The spec with only the options that make it another method; the kind of hashing is always named."""
    changed = [
        f"{f.name}={getattr(config, f.name)!r}"
        for f in fields(config)
        if f.name not in (*SET_BY_STUDY, *KNOBS) and (getattr(config, f.name) != f.default or f.name == "kind")
    ]
    return f"{config.name}({', '.join(changed)})" if changed else config.name


def read_method(spec: str) -> LookupConfig:
    """A spec's config, refused if it sets what the study sets."""
    name, options = read_call(spec)
    config = RandomTokens() if name == RandomTokens.name and not options else parse_spec(spec)
    if not isinstance(config, LookupConfig):
        there = [known for known, kind in METHODS.items() if issubclass(kind, LookupConfig)]
        raise ValueError(f"{spec} looks nothing up. Methods that do: {', '.join([*there, RandomTokens.name])}")
    taken = [option for option in options if option in (*SET_BY_STUDY, *KNOBS)]
    if taken:
        raise ValueError(f"the study sets {', '.join(taken)} itself: leave it out of {spec!r}")
    return config

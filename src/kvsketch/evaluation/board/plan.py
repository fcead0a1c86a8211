"""Which specs a board compares: methods, each with every way to share a budget among heads, at every budget."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvsketch.caches.core.config import BudgetedConfig
from kvsketch.caches.core.profile import PROFILE
from kvsketch.caches.core.shares import EQUAL, PYRAMID, THRESHOLD
from kvsketch.caches.exact import Exact
from kvsketch.caches.registry import METHODS, chosen_method, parse_spec, read_call

HEADS = (EQUAL, PROFILE, THRESHOLD)
LOOKED_UP = (
    "saap(index={index!r}, window=255, probes=128, visit={part!r}, estimate=True, prefer='density')",
    "kmeans(index={index!r}, window=255, probes=128, visit={part!r}, estimate=True)",
)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What is to be compared. A method named with a budget, or with `heads`, is compared with just that."""

    methods: Sequence[str] = ()  # if none is named: all that forget, and the one recommended for each budget
    heads: Sequence[str] = HEADS
    keeps: Sequence[float] = (0.5, 0.25, 0.125, 0.0625)
    index: str | None = None  # Saap's, if methods that look tokens up are to be compared too

    def __post_init__(self) -> None:
        for keep in self.keeps:
            if not 0 < keep <= 1:
                raise ValueError(f"a board compares fractions of a full cache, above 0 and up to 1, got {keep:g}")
        for way in self.heads:
            if way not in (*HEADS, PYRAMID) and not way.endswith(".json"):
                raise ValueError(f"heads must be among {', '.join((*HEADS, PYRAMID))}, or a profile, got {way!r}")
        if not self.keeps or not self.heads:
            raise ValueError("name at least one fraction to keep and one way to share it among heads")
        for spec in self.methods:
            config = parse_spec(spec)
            if isinstance(config, Exact):
                raise ValueError("exact is what all others are compared with: leave it out")
            if isinstance(config, BudgetedConfig) and not isinstance(config.keep, float):
                raise ValueError(f"a board compares fractions of a full cache, got {spec}")


@dataclass(frozen=True)
class Chosen:
    """The specs, and those left out because the model has no profile for them."""

    specs: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)


def chosen(choice: Choice, facts: Callable[[], Mapping[str, Any]]) -> Chosen:
    """The specs that are compared on a model that these facts describe."""
    found, known = Chosen(), dict(facts())
    named = choice.methods or [name for name, config in METHODS.items() if issubclass(config, BudgetedConfig)]
    for spec in named:
        config, given = parse_spec(spec), read_call(spec)[1]
        if not isinstance(config, BudgetedConfig):
            found.specs.append(str(config))
            continue
        for variant in _variants(config, given, choice):
            try:
                variant.check_model(lambda: known)
            except ValueError:
                if "heads" in given:  # a spec that was asked for by name is not left out silently
                    raise
                found.left_out.append(str(variant))
            else:
                found.specs.append(str(variant))
    if not choice.methods and THRESHOLD in choice.heads:  # the recommended method shares by threshold
        recommended = [str(chosen_method(None, keep)) for keep in choice.keeps]
        found.specs.extend(spec for spec in recommended if spec not in found.specs)
    if choice.index is not None:
        parts = [form.format(index=choice.index, part=keep) for keep in choice.keeps for form in LOOKED_UP]
        found.specs.extend(str(parse_spec(part)) for part in parts)
    for spec in found.specs:
        if found.specs.count(spec) > 1:
            raise ValueError(f"{spec} is named twice: name each method once")
    return found


def _variants(config: BudgetedConfig, given: Mapping[str, Any], choice: Choice) -> Iterator[BudgetedConfig]:
    """A method with every budget and every way to share it that it allows.

    A method whose name stands for another one with a pyramid keeps the pyramid.
    """
    fixed = "heads" in given or type(config).heads == PYRAMID
    for keep in [config.keep] if "keep" in given else choice.keeps:
        for heads in [config.heads] if fixed else choice.heads:
            if heads == THRESHOLD and not config.comparable:
                continue
            try:
                yield replace(config, keep=keep, heads=heads)
            except ValueError:
                if fixed:
                    raise  # otherwise the method refuses this way to share: leave it out

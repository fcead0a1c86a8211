"""A profile: how unequally the KV heads of a model use what they have seen, measured once, in a file of JSON.

For some fractions `keep` it says which part of the tokens between sinks and window each head holds if one threshold
decides for all heads. `kvsketch profile` measures it; `heads="profile"` and `heads="FILE"` divide budgets by it.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvsketch.caches.core.belonging import first_of_model
from kvsketch.caches.core.budget import Budget, Keep
from kvsketch.caches.core.shares import Shares, filled
from kvsketch.files import DamagedError, digest_of, read_json, user_cache, write_json

FORMAT = 1
UNKNOWN = 0.25  # a number of entries, or of bytes, is divided as this fraction is
PROFILE = "profile"  # the profile that there is for the model
SHIPPED = Path(__file__).parent.parent.parent / "assets" / "profiles"
HOW = (
    "Make one: kvsketch profile MODEL --texts BOOK; for the model inside the package kvsketch profile. It is found by "
    "itself from then on; one that lies elsewhere, as with --out FILE, is named: heads='FILE'"
)


@dataclass(frozen=True)
class Profile:
    """What was measured."""

    path: Path
    model: Mapping[str, Any]  # what there is to know about the model
    keeps: Sequence[float]  # from the largest to the smallest
    parts: Mapping[int, Sequence[Sequence[float]]]  # for each layer and head, one part for each of `keeps`

    @property
    def digest(self) -> str:
        """A digest that is different if anything else was measured."""
        return digest_of({"keeps": self.keeps, "parts": {str(layer): heads for layer, heads in self.parts.items()}})[
            :16
        ]

    def shares(self, budget: Budget) -> Shares:
        """Shares of a budget with this mean; between measured fractions they are interpolated by the logarithm."""
        keep, keeps = self._keep_of(budget), (1.0, *self.keeps)  # with room for all, every head holds all
        every = {layer: [(1.0, *head) for head in heads] for layer, heads in self.parts.items()}
        place = next(i for i in range(1, len(keeps)) if keeps[i] <= keep)
        above, below = keeps[place - 1], keeps[place]
        weight = math.log(keep / below) / math.log(above / below)
        wanted = {
            layer: [weight * head[place - 1] + (1 - weight) * head[place] for head in heads]
            for layer, heads in every.items()
        }
        widths = self.model["head_width"]
        sizes = {layer: widths[layer] for layer in wanted} if isinstance(widths, list) else None
        return filled(wanted, 1 / keep, sizes)  # a larger share is more tokens than there are

    def _keep_of(self, budget: Budget) -> float:
        """The fraction whose shares are used; which fraction a number of entries will turn out to be is not known."""
        if budget.fraction is None:
            return max(UNKNOWN, self.keeps[-1])
        self.check_keep(budget.fraction)
        return budget.fraction

    def check_keep(self, keep: Keep) -> None:
        """Refuse a fraction smaller than all that were measured."""
        if isinstance(keep, float) and keep < self.keeps[-1]:
            raise ValueError(
                f"the profile {self.path} was measured down to keep={self.keeps[-1]:g}, and does not cover "
                f"keep={keep:g}. {HOW}, with --keep {keep:g},..."
            )

    def check_model(self, facts: Mapping[str, Any]) -> None:
        """Refuse a model that this was not measured on."""
        for name in facts:
            if facts[name] != self.model.get(name):
                shown = "weights" if name == "fingerprint" else name
                raise ValueError(
                    f"the profile {self.path} was measured on another model: its {shown} are "
                    f"{self.model.get(name)!s:.60}, those of this model {facts[name]!s:.60}. {HOW}"
                )


def find_profile(heads: str, facts: Mapping[str, Any]) -> Profile:
    """The profile that `heads` names, which must be the model's."""
    if heads != PROFILE:
        found = read_profile(heads)
        found.check_model(facts)
        return found
    own = own_profile(facts)
    return first_of_model(
        [own, *sorted(SHIPPED.glob("*.json"))],
        read_profile,
        facts,
        f"heads={PROFILE!r} wants a profile of this model, and there is none, neither in kvsketch nor at {own}. {HOW}",
    )


def own_profile(facts: Mapping[str, Any]) -> Path:
    """Where a user's profile of a model is, unless it was written elsewhere."""
    return user_cache() / "profiles" / f"{facts['fingerprint'][:32]}.json"


def read_profile(path: str | Path) -> Profile:
    """The profile in a file; it is read again only when the file has changed."""
    path = Path(path).absolute()
    if not path.is_file():
        raise ValueError(f"there is no profile {path}. {HOW}")
    state = os.stat(path)
    return _read(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=16)
def _read(path: Path, changed: int, size: int) -> Profile:
    try:
        known = read_json(path)
    except DamagedError as error:
        raise ValueError(f"{error}. Put back the profile that was there. {HOW}") from error
    if known.get("format") != FORMAT or known.get("kind") != PROFILE:
        raise ValueError(f"{path} is no profile of format {FORMAT}, the one this version reads. {HOW}")
    if not _describes_a_profile(known):
        raise ValueError(
            f"{path} is not the description of a profile: for each head, one part from 0 to 1 for each keep. {HOW}"
        )
    parts = {int(layer): heads for layer, heads in known["layers"].items()}
    return Profile(path, known["model"], tuple(known["keeps"]), parts)


def _describes_a_profile(about: Mapping[str, Any]) -> bool:
    """Whether everything is there, and can have been measured."""
    try:
        model, tokens, keeps, layers = (about[name] for name in ("model", "tokens", "keeps", "layers"))
        heads = [head for own in layers.values() for head in own]
        right = {"fingerprint", "kv_heads", "head_width"} <= model.keys() and all(map(str.isdecimal, layers))
        right = right and type(tokens) is int and tokens > 0 and keeps == sorted(set(keeps), reverse=True)
        right = right and all(type(keep) is float and 0 < keep < 1 for keep in keeps)
        right = right and all(type(part) is float and 0 <= part <= 1 for head in heads for part in head)
        right = right and all(len(head) == len(keeps) for head in heads)
        there = {int(layer): len(own) for layer, own in layers.items()}
        known = model["kv_heads"]
        right = right and all(n == (known[i] if isinstance(known, list) else known) for i, n in there.items())
        return right and bool(heads and keeps) and all(map(any, zip(*heads, strict=True)))
    except (KeyError, TypeError, AttributeError, IndexError):
        return False


def write_profile(path: Path, description: Mapping[str, Any]) -> None:
    """Write what was measured, as `read_profile` reads it."""
    write_json(path, {"format": FORMAT, "kind": PROFILE, **description})

"""How much a cache may hold: a fraction of the tokens seen, a number of entries, or bytes."""

import re
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
Keep = float | int | str
LOOSEST = 1.5
MOST = 1 << 40  # entries; and bytes times a million: more than there is memory for anywhere


@dataclass(frozen=True)
class Budget:
    """What a KV head may hold for `count` tokens of a row: `entries(count)`, never less than `least`.

    `share` is the head's share of what heads have beyond that, as a multiple of the mean: the sum over heads is the
    same as if all had 1. `beside` tokens are held in addition and not counted in `count`, but belong to the budget and
    to the tokens seen. `latest` is the part of the mean beyond `least` that every head has, whatever its share.
    """

    fraction: float | None  # of the tokens seen
    fixed: int | None  # or so many entries
    least: int
    share: float = 1.0
    beside: int = 0
    latest: float = 0.0

    def entries(self, count: int) -> int:
        """Entries that may be held per row and KV head once `count` tokens were seen."""
        whole = self._mean(count)
        if self.share == 1:
            return int(whole)
        least = self.least + self.of_all(count)
        return int(least + self.share * (whole - least))

    def of_all(self, count: int) -> float:
        """What every head has beyond `least`."""
        return self.latest * (self._mean(count) - self.least)

    def beyond(self, count: int) -> float:
        """What heads have on average beyond what every head has."""
        return self._mean(count) - self.least - self.of_all(count)

    def _mean(self, count: int) -> float:
        """What heads have on average."""
        if self.fixed is not None:
            return float(self.fixed - self.beside)
        assert self.fraction is not None
        return float(max(self.fraction * (count + self.beside) - self.beside, self.least))

    @property
    def capacity(self) -> int | None:
        """The most entries that there will ever be, if that is known."""
        return None if self.fixed is None else self.entries(0)


def most_share(keep: Keep) -> float:
    """The largest share that a head may have; with a number of entries, or bytes, it may have any.

    What all heads hold in any case is taken off their mean. In a long text that is little, and a head that holds
    everything has 1 / keep of what is left; in a short text it has more. The limit is not much higher, as room would be
    wasted when the text goes on.
    """
    return LOOSEST / keep if isinstance(keep, float) else float(MOST)


def seen_when(left: int, exact: Callable[[int], int], most: int) -> int:
    """The least number of tokens seen when `left` of them have left, if `exact(seen)` stay; below `most`."""
    return bisect_left(range(most), left, key=lambda seen: seen - exact(seen))


def plain(keep: Keep) -> Keep:
    """A budget in Python's own numbers: numpy's look the same, but are not read back from a spec."""
    if isinstance(keep, bool) or not isinstance(keep, Real):
        return keep
    return int(keep) if isinstance(keep, Integral) else float(keep)


def check_keep(keep: Keep) -> None:
    """Refuse what cannot be a budget."""
    expected = 'a fraction in (0, 1] such as 0.25, a number of entries such as 4096, or bytes such as "512MB"'
    if isinstance(keep, bool) or not isinstance(keep, float | int | str):
        raise ValueError(f"keep must be {expected}, got {keep!r}")
    if isinstance(keep, str):
        parse_bytes(keep)
    elif isinstance(keep, int) and keep > MOST:
        raise ValueError(f"keep must be at most {MOST:,} entries, got {keep!s:.40}")
    elif (isinstance(keep, float) and not 1 / MOST <= keep <= 1.0) or keep <= 0:
        raise ValueError(f"keep must be {expected}, got {keep!r}")


def parse_bytes(text: str) -> int:
    """The number of bytes in "512MB", "1.5 GiB" or "4096 B"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]+)\s*", text)
    units = {unit.lower(): size for unit, size in UNITS.items()}
    if found is None or found[2].lower() not in units:
        raise ValueError(
            f"keep={text[:60]!r} is not a size: expected a number and one of {', '.join(UNITS)}, as in '512MB'; a "
            "fraction or a number of entries has no quotes, as in keep=0.25 for a quarter"
        )
    size = float(found[1]) * units[found[2].lower()]
    if size > MOST * 10**6:
        raise ValueError(f"keep={text[:40]!r} is more memory than there is: expected at most {MOST * 10**6:,} bytes")
    if size < 1:
        raise ValueError(f"keep={text!r} is no memory at all: expected at least one byte")
    return int(size)


def fixed_entries(keep: Keep, layer_bytes: int | None, entry_bytes: int) -> int | None:
    """The number of entries per row and head that `keep` fixes; None if it is a fraction.

    `layer_bytes` is the layer's share of a budget in bytes, `entry_bytes` what one entry of all rows and heads takes.
    """
    if isinstance(keep, str):
        assert layer_bytes is not None, "a budget in bytes needs the layer's share"
        return layer_bytes // entry_bytes
    return None if isinstance(keep, float) else keep

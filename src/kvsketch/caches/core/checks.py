"""Refusals of options, in the words that all methods use."""

import math
from collections.abc import Collection

from kvsketch.caches.core.budget import MOST


def check_choice(name: str, value: str, choices: Collection[str]) -> None:
    """Refuse anything but one of the choices."""
    if value not in tuple(choices):  # a tuple: what cannot be hashed is refused as well
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def check_seed(seed: int) -> None:
    """Refuse anything but a whole number that addresses of random numbers can begin with."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 1 << 63:
        raise ValueError(f"seed must be a whole number from 0 to 2⁶³ - 1, got {seed!r}")


def check_count(name: str, value: int, *, least: int, most: int = MOST) -> None:
    """Refuse anything but a whole number of at least `least`, and no more than there can be."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r:.60}")
    if value > most:
        raise ValueError(f"{name} must be at most {most:,}, got {value!s:.40}")


def check_number(name: str, value: float | int, *, above: float | int, below: float | int = math.inf) -> None:
    """Refuse anything but a number between these two bounds, which are left out."""
    try:
        right = not isinstance(value, bool) and isinstance(value, int | float) and above < float(value) < below
    except OverflowError:
        right = False
    if not right:
        least = "a positive number" if above == 0 else f"a number above {above:g}"
        most = "" if below == math.inf else f" {'and ' if above else ''}below {below:g}"
        raise ValueError(f"{name} must be {least}{most}, got {value!r}")

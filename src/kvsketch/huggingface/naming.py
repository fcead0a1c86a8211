"""Under which name models take a cache: `past_key_values`, and `cache` since transformers 5.24."""

import inspect
from collections.abc import Callable, Container, Mapping
from typing import Any

from transformers import Cache

NEW, OLD = "cache", "past_key_values"


def cache_in(given: Mapping[str, Any]) -> Any:
    """The cache among a call's arguments, or in an output, whatever its name is; None if there is none."""
    every = (given.get(NEW), given.get(OLD), *given.values())  # given two, models take the first of these
    return next((value for value in every if isinstance(value, Cache)), None)


def as_argument(forward: Callable[..., Any], cache: Any) -> dict[str, Any]:
    """A cache as the argument that `forward` takes; with the other name transformers warns."""
    return named(cache, inspect.signature(forward).parameters)


def named(cache: Any, known: Container[str]) -> dict[str, Any]:
    """A cache under that one of its two names which is among the known ones."""
    return {NEW if NEW in known else OLD: cache}

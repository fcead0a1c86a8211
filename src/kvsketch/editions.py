"""The models inside the package: names of its editions, and their folders in `assets`."""

from collections.abc import Mapping

EMBEDDED = "embedded"  # what is meant where no model is named
EDITIONS: Mapping[str, str] = {
    EMBEDDED: "second",
    "embedded-first": "first",
}  # the first is for what was measured on it

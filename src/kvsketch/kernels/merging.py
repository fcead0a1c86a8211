"""Answers from some of the tokens each, put together: `attention.merge`, in C where that can be."""

from kvsketch.attention import Partial, merge
from kvsketch.kernels.native import merge as in_c


def merge_into(first: Partial, *others: Partial) -> Partial:
    """Attention over the union of the parts' tokens; it may be written over the first one, which is the caller's own.

    In the precision of the parts then, and rounded once. What torch makes of a few thousand answers goes to fresh
    memory three times, which takes a CPU as long as finding them.
    """
    parts = (first, *others)
    return first if len(parts) > 1 and in_c.merge_into(parts) else merge(*parts)

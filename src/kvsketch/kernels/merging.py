"""Answers from some of the tokens each, put together: `attention.merge`, in C where they are long."""

from kvsketch.attention import Partial, merge
from kvsketch.kernels.native import merge as in_c


def merge_into(first: Partial, *others: Partial) -> Partial:
    """Attention over the union of the parts' tokens; it may be written over the first one, which is the caller's own.

    What torch makes of a few thousand answers goes to fresh memory three times, which takes a CPU as long as finding
    them.
    """
    for number, other in enumerate(others):
        if not in_c.merge_into(first, other):
            return merge(first, *others[number:])
    return first

"""Merging answers that each come from some of the tokens: `attention.merge`, in C where that is possible."""

from kvsketch.attention import Partial, merge
from kvsketch.kernels.native import merge as in_c


def merge_into(first: Partial, *others: Partial) -> Partial:
    """Attention over the union of the parts' tokens; it may be written over the first part, which is the caller's own.

    It then has the precision of the parts, rounded once. To merge a few thousand answers, torch goes to fresh memory
    three times, which takes a CPU as long as finding them.
    """
    parts = (first, *others)
    return first if len(parts) > 1 and in_c.merge_into(parts) else merge(*parts)

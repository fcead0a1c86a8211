"""The methods that are recommended, see docs/methods.md."""

from kvsketch.caches.core.budget import Keep

RECOMMENDED = "kvzip(keep=0.25, window=0.25)"  # where questions come later, and the text may go on
TIGHT = "kvzip(keep=0.125)"  # where less is held, which latest tokens would take away from what questions look for
AMPLE = 0.25  # of all tokens: there is room for both
READ_ONCE = "keydiff(keep=0.25)"  # and the prompt cannot be read a second time


def recommended(keep: Keep) -> str:
    """The method for a budget."""
    return RECOMMENDED if isinstance(keep, float) and keep >= AMPLE else TIGHT

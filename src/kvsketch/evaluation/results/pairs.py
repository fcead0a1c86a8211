"""Whether two methods differ, from pairs of results that differ only in the method."""

import math
from collections.abc import Sequence

LEVEL = 0.05  # a difference that is likelier than this may be chance
EXACTLY = 12  # for up to so many differences all signs are tried; for more, a normal distribution is assumed


def chance(differences: Sequence[float]) -> float:
    """How likely it is that the differences add up to this much or more, on either side, if signs were random.

    Fewer than six differences that are not zero can never be told from chance at 1 in 20.
    """
    there = [difference for difference in differences if difference]
    total = abs(math.fsum(there))
    if not there:
        return 1.0
    if len(there) > EXACTLY:
        return math.erfc(total / math.sqrt(2 * math.fsum(difference**2 for difference in there)))
    sums = [0.0]
    for difference in there:
        sums = [sign * difference + so_far for so_far in sums for sign in (1, -1)]
    least = total * (1 - 1e-9)  # rounding, which depends on a sum's order, must not decide
    return sum(abs(one) >= least for one in sums) / len(sums)

"""Whether two methods differ, by pairs that differ in nothing but the method."""

import math
from collections.abc import Sequence

LEVEL = 0.05  # what is likelier than this may be chance
EXACTLY = 12  # so many differences are counted out; more are taken for normal


def chance(differences: Sequence[float]) -> float:
    """How likely it is that differences add up to so much, on either side, if each sign had been drawn at random.

    Fewer than six that are not zero can never be told from chance at 1 in 20.
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
    least = total * (1 - 1e-9)  # the order of a sum must not decide
    return sum(abs(one) >= least for one in sums) / len(sums)

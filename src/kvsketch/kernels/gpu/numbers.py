"""Numbers as kernels take them."""

import triton
import triton.language as tl  # noqa: F401 (Triton's interpreter looks for it)


@triton.jit
def plain(number):
    """A number that changes from step to step comes as 2n + 3: for 1, or multiples of 16, Triton makes kernels anew."""
    return (number - 3) // 2

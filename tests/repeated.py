"""Whether tests of kernels in C run once more, for a sanitizer or another processor: sizes are smaller then."""

import os

AGAIN = "KVSKETCH_TESTED_ONCE_MORE"
ONCE_MORE = AGAIN in os.environ

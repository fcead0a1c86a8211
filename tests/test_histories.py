"""Whatever happens to a cache, in whatever order: see histories.py. `make soak` plays 2,000 others."""

import pytest

from histories import SPECS, play


@pytest.mark.parametrize("spec", SPECS)
def test_whatever_happens(spec):
    play(spec, histories=2)

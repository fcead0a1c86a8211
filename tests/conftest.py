"""Every test runs with new memory full of NaN, so that a buffer read before it is written shows at once."""

import os
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

torch.set_num_threads(1)  # one worker a core: two threads each would wait for one another


@pytest.fixture(autouse=True)
def _uninitialised_memory_is_nan() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = filled
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _global_random_state_is_untouched() -> Iterator[None]:
    """No test depends on another's draws, and nothing leaks out."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield

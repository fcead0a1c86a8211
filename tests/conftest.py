"""Every test runs with new memory full of NaN, so that a buffer read before it is written shows at once."""

import os
import signal
from collections.abc import Iterator

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import jaxtyping
import pytest
import torch

torch.set_num_threads(1)  # one worker a core: two threads each would wait for one another
signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it, children too


class SomeCalls(type(jaxtyping.config)):
    """Shapes and types of a test's first calls are checked, and those of some of the others.

    To check them all takes longer than all else.
    """

    FIRST, ONE_IN = 100, 397
    calls = 0

    @property
    def jaxtyping_disable(self) -> bool:
        self.calls += 1
        return self.calls > self.FIRST and self.calls % self.ONE_IN != 0

    @jaxtyping_disable.setter
    def jaxtyping_disable(self, value: bool) -> None:
        raise AttributeError("how many calls are checked is set here")


jaxtyping.config.__class__ = SomeCalls
decorated = jaxtyping.jaxtyped


def _unless_inside_another(*given: object, **options: object) -> object:
    """Functions inside others are left as they are: their checks would be compiled at every call of the outer one."""
    decorate = decorated(*given, **options)
    return decorate if given else lambda made: made if "<locals>" in made.__qualname__ else decorate(made)


jaxtyping.jaxtyped = _unless_inside_another


@pytest.fixture(autouse=True)
def _the_same_calls_are_checked_in_every_run() -> None:
    jaxtyping.config.calls = 0


@pytest.fixture
def as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is checked: what is refused is refused by the library."""
    monkeypatch.setattr(SomeCalls, "jaxtyping_disable", property(lambda config: True))
    assert jaxtyping.config.jaxtyping_disable, "the object's own setting goes before a class's that is no property"


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

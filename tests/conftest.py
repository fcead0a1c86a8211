"""Every test runs with new memory full of NaN, so that a buffer read before it is written shows at once."""

import ctypes
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial, wraps
from typing import ClassVar

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # on a GPU products are the same every time with it
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # or Triton 3.9 warns, and warnings are errors here

import jaxtyping
import pytest
import torch

from pretend import pretended

if importlib.util.find_spec("triton") is not None and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # as it is when it is imported, so are its own functions for good
    import triton.language  # noqa: F401

    del os.environ["TRITON_INTERPRET"]

torch.set_num_threads(1)  # one worker a core: two threads each would wait for one another
signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started in the background ignores it, children too


class Checked:
    """Shapes and types are checked at every function's first call of a test, and at some of the others.

    To check them all takes longer than all else. Functions inside others are left as they are: what checks them would
    be compiled at every call of the outer one.
    """

    ONE_IN = 199
    calls: ClassVar[dict[Callable, int]] = {}
    off = False

    @classmethod
    def sometimes(cls, plain: Callable, check: Callable) -> Callable:
        """What checks is made when it is first wanted: a run of some tests never calls most functions."""
        made: list[Callable] = []

        @wraps(plain)
        def call(*args: object, **options: object) -> object:
            number = cls.calls.get(plain, 0)
            cls.calls[plain] = number + 1
            if number % cls.ONE_IN or cls.off:
                return plain(*args, **options)
            if not made:
                made.append(check(plain))
            return made[0](*args, **options)

        return call

    @classmethod
    def decorated(cls, made: Callable | type, check: Callable) -> Callable | type:
        """A function or a class as it is imported; of a class its constructor, if the checker takes it."""
        if "<locals>" in made.__qualname__:
            return made
        if not isinstance(made, type):
            return cls.sometimes(made, check)
        plain = vars(made).get("__init__")
        if plain is not None and (checked := check(made).__init__) is not plain:
            made.__init__ = cls.sometimes(plain, lambda _: checked)
        return made


def _jaxtyped(*given: object, **options: object) -> object:
    check = jaxtyped(*given, **options)
    return check if given else partial(Checked.decorated, check=check)


jaxtyped = jaxtyping.jaxtyped
jaxtyping.jaxtyped = _jaxtyped


@pytest.fixture(autouse=True)
def _the_same_calls_are_checked_in_every_run() -> None:
    Checked.calls.clear()


@pytest.fixture
def as_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call is checked: what is refused is refused by the library."""
    monkeypatch.setattr(Checked, "off", True)


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


NUMBERS = {
    "float32": (torch.float32, -1),
    "float16": (torch.float16, -1),
    "bfloat16": (torch.bfloat16, -1),
    "bfloat16 in pairs": (torch.bfloat16, 0),
    "bfloat16 in tiles": (torch.bfloat16, 1),
}


@pytest.fixture(params=NUMBERS)
def numbers(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """A kind of numbers; bfloat16 as kernels in C multiply it here, and in the ways of other processors."""
    from kvsketch.kernels import native

    dtype, tiles = NUMBERS[request.param]
    library = native.library()
    assert library is not None, "there is something to ask"
    try:
        in_tiles = library.kvs_ask_tiles(ctypes.c_int64(tiles))
        assert tiles < 0 or in_tiles == (tiles and library.kvs_pairs())
        yield dtype
    finally:
        library.kvs_ask_tiles(ctypes.c_int64(-1))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", default="cpu", help="where the contract is tested: cpu, cuda or pretended")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Where the contract is tested."""
    wanted = request.config.getoption("--device")
    with pretended() if wanted == "pretended" else nullcontext(torch.device(wanted)) as found:
        yield found

"""Kernels compiled, as they would be launched, for a GPU that this machine lacks, and what they need on it."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvsketch.attention import WeightedTokens
from kvsketch.kernels import gpu
from kvsketch.kernels.routing.rounded import ByColumn
from kvsketch.kernels.sources import Classifier, Entries, Limits, Segments, Staged

TARGET, PROCESSORS, SHARED = 90, 132, 232_448  # compute capability 9.0: H100 and H200
OPTIONS = {"num_warps", "num_stages", "launch_pdl"}
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.float64: "fp64",
}


def compiled() -> Iterator[str]:
    """A line for each kernel and kind of call, for 8 KV heads × 128 in bfloat16 with four query heads each."""
    import kvsketch.kernels.gpu.attend as of_attention
    import kvsketch.kernels.gpu.attend_many as of_prompts
    import kvsketch.kernels.gpu.choice as of_choices
    import kvsketch.kernels.gpu.draws as of_draws
    import kvsketch.kernels.gpu.route as of_routes
    import kvsketch.kernels.gpu.walk as of_walks
    from kvsketch.kernels.balanced_walk import walk_in_triton
    from kvsketch.kernels.draws import in_triton as drawn_in_triton
    from kvsketch.kernels.gpu import attention, many_queries
    from kvsketch.kernels.routing import in_triton as routing

    on_hopper = {
        "processors": lambda device: PROCESSORS,
        "shared_memory": lambda device: SHARED,
        "early": lambda device: {"EARLY": True, "launch_pdl": True},
    }
    with patch.multiple(gpu, **on_hopper):
        for name, (query, parts, softcap) in _steps().items():
            call = partial(attention._attended, query, parts, 8, 0.1, softcap)
            yield f"attend, {name}: {_needs(*_launched(of_attention, 'attend', call))}"
        for name, (many, tokens, causal, valid) in _prompts().items():
            call = partial(many_queries._attended, many, tokens, 0.1, None, causal, valid)
            yield f"prompt, {name}: {_needs(*_launched(of_prompts, 'attend_many', call))}"
        query = torch.empty(1, 32, 1, 128, dtype=torch.bfloat16)
        weights = torch.empty(8, 128, 1024, dtype=torch.bfloat16), torch.empty(8, 1024, 1024, dtype=torch.bfloat16)
        bias = torch.empty(8, 1, 1024, dtype=torch.bfloat16)
        by = Classifier((weights[0], bias), (weights[1], bias))
        whole = torch.empty(8, 1024, 1024, dtype=torch.int8), torch.empty(8, 1024), torch.empty(8, 1024)
        known = ByColumn(*whole, torch.empty(8, 2))
        for kind, form in (("", None), (" in bytes", known)):
            last = "last" if form is None else "last_in_bytes"
            call = partial(routing._logits, query, by, 8, form)
            for name, other in (("inner", last), (last, "inner")):
                with patch.object(of_routes, other, _Launches([])):
                    needs = _needs(*_launched(of_routes, name, call))
                yield f"classifier{kind}, 1,024 units and buckets, {name} layer: {needs}"
        sizes, edges = torch.zeros(8, 1024, dtype=torch.int64), torch.zeros(8, 1, 1025, dtype=torch.int64)
        for kind, scores in (("", torch.empty(8, 1, 1024)), (", by logits", torch.empty(8, 1, 4, 1024))):
            call = partial(
                routing._visited, scores, sizes, edges, Limits(32), Staged.on(sizes.device, 9, 9), left=False
            )
            yield f"choice of 32 buckets{kind}: {_needs(*_launched(of_choices, 'visit', call))}"
    keys, index = torch.empty(8, 16_384, 128, dtype=torch.bfloat16), torch.zeros(8, 16_384, dtype=torch.int64)
    given = torch.empty(8, 64, 256, dtype=torch.float64), torch.full((8, 64), 256), 0.1, 0.25
    launched = _launched(of_walks, "keep_half", lambda: walk_in_triton._kept(keys, keys, index, *given))
    yield f"walk, blocks halved: {_needs(*launched)}"
    address = (1, 2, torch.zeros(8, 1, 1, dtype=torch.int64), 3, torch.zeros(32, 256, dtype=torch.int64))
    call = partial(drawn_in_triton._drawn, address, (8, 32, 256), address[2].device)
    yield f"draws: {_needs(*_launched(of_draws, 'draw', call))}"
    yield from _choosing()
    yield from _centres()


def _choosing() -> Iterator[str]:
    """The kernels of methods that choose among tokens."""
    import kvsketch.kernels.gpu.directions as of_directions
    import kvsketch.kernels.gpu.places as of_places
    from kvsketch.kernels.directions import in_triton as directed
    from kvsketch.kernels.places import in_triton as placed

    keys, mean = torch.empty(8, 16_384, 128, dtype=torch.bfloat16), torch.empty(8, 128, dtype=torch.float64)
    index, there = torch.zeros(8, 4096, dtype=torch.int64), torch.ones(8, 16_384, dtype=torch.bool)
    calls: dict[str, tuple[Any, Callable[[], Any]]] = {
        "copy": (of_places, partial(placed._copied, keys, index)),
        "number": (of_places, partial(placed._numbered, there)),
        "least": (of_places, partial(placed._least, torch.empty(8, 16_384, dtype=torch.float64), 2048)),
        "towards": (of_directions, partial(directed._towards, keys, mean)),
        "total": (of_directions, partial(directed._total, keys)),
    }
    for name, (module, call) in calls.items():
        yield f"choosing, {name}: {_needs(*_launched(module, name, call))}"


def _centres() -> Iterator[str]:
    """The kernels of k-center, each as in its first launch."""
    import kvsketch.kernels.gpu.centres as of_centres
    from kvsketch.kernels.kcenter import in_triton

    names = ("squares", "between", "choose", "approach", "measure")
    for width in (128, 256):
        points, valid = torch.empty(8, 131_072, width, dtype=torch.bfloat16), torch.ones(8, 131_072, dtype=torch.bool)
        given = points, torch.zeros(8, 131_072), torch.full((8,), 1024), valid, 1024, in_triton.CANDIDATES
        for name in names:
            call = (
                partial(in_triton._norms, points, valid) if name == "squares" else partial(in_triton._clustered, *given)
            )
            with ExitStack() as patches:
                for other in set(names) - {name}:
                    patches.enter_context(patch.object(of_centres, other, _Launches([])))
                yield f"k-center, {name}, {width} wide: {_needs(*_launched(of_centres, name, call))}"


def _entries(
    dtype: torch.dtype, width: int = 128, *, weights: int = 0, rows: int = 1, heads: int = 8
) -> WeightedTokens:
    keys = torch.empty(rows, heads, 8192, width, dtype=dtype)
    mass, value = (torch.empty(rows, heads, 8192) if weights > number else None for number in range(2))
    return WeightedTokens(keys, keys, mass, value)


def _runs(queries: int = 1) -> Segments:
    return Segments(*(torch.zeros(1, 8, queries, 32, dtype=torch.int64) for _ in range(2)))


def _steps() -> dict[str, tuple[torch.Tensor, list[Entries], float | None]]:
    """Queries, entries and softcaps of decode steps by name; only shapes and types count."""
    half, single, other = torch.bfloat16, torch.float32, torch.float16
    plain, weighted = _entries(half), _entries(half, weights=1)
    kinds: dict[str, tuple[int, list[Entries], float | None]] = {
        "exact": (1, [Entries(plain)], None),
        "weighted": (1, [Entries(weighted)], None),
        "weighted and a window": (1, [Entries(weighted), Entries(plain)], None),
        "runs and a window": (1, [Entries(plain, segments=_runs()), Entries(plain)], None),
        "runs, a window and means in float32": (
            1, [Entries(plain, segments=_runs()), Entries(_entries(single, weights=1)), Entries(plain)], None,
        ),
        "two weights, a softcap": (1, [Entries(_entries(half, weights=2))], 30.0),
        "some lanes": (1, [Entries(_entries(half, weights=1, heads=5), lanes=torch.arange(5)), Entries(plain)], None),
        "heads with four budgets, and a window": (
            1, [Entries(plain), *(Entries(_entries(half, heads=2), torch.arange(2)) for _ in range(4))], None,
        ),
        "three queries": (3, [Entries(weighted), Entries(plain)], None),
        "runs of three queries": (3, [Entries(plain, segments=_runs(3)), Entries(plain)], None),
        "thirty queries": (30, [Entries(weighted)], None),
        "float16": (1, [Entries(_entries(other, weights=1))], None),
        "float32": (1, [Entries(_entries(single, weights=1))], None),
        "256 wide": (1, [Entries(_entries(half, 256, weights=1))], None),
    }  # fmt: skip
    return {
        name: (torch.empty(1, 32, queries, parts[0].tokens.keys.shape[3], dtype=parts[0].tokens.keys.dtype), parts, cap)
        for name, (queries, parts, cap) in kinds.items()
    }


def _prompts() -> dict[str, tuple[torch.Tensor, WeightedTokens, bool, torch.Tensor | None]]:
    """Prompts by name: queries, entries, whether they are causal, and which tokens are not padding."""
    half, there = torch.bfloat16, torch.ones(1, 8192, dtype=torch.bool)
    kinds = {
        "causal": (_entries(half), True, None),
        "causal, padded": (_entries(half), True, there),
        "weighted": (_entries(half, weights=1), False, None),
        "weighted, float16": (_entries(torch.float16, weights=1), False, None),
        "weighted, float32": (_entries(torch.float32, weights=1), False, None),
        "weighted, 256 wide": (_entries(half, 256, weights=1), False, None),
    }
    return {
        name: (torch.empty(1, 32, 8192, tokens.keys.shape[3], dtype=tokens.keys.dtype), tokens, causal, valid)
        for name, (tokens, causal, valid) in kinds.items()
    }


class _Launches:
    """Stands in for a kernel, and notes the arguments of its launches."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *given, **options: self.seen.append((given, options))


def _launched(module: Any, name: str, call: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The kernel that a call would launch, with its arguments and options; it does not run."""
    kernel, seen = getattr(module, name), list[Any]()
    with patch.object(module, name, _Launches(seen)):
        call()
    [(given, options)] = seen
    return kernel, given, options


def _needs(kernel: Any, given: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Registers, shared memory, spilled bytes, and the instructions that multiply."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    known = {(kernel.arg_names.index(name),): value for name, value in options.items() if name not in OPTIONS}
    even: dict[tuple[int, ...], Any] = {}
    names = kernel.arg_names[: len(given)]
    types = {
        name: _kind(one, (place,), known, even) for place, (name, one) in enumerate(zip(names, given, strict=True))
    }
    types |= {name: "constexpr" for name in options if name not in OPTIONS}
    source = ASTSource(kernel, types, known, even)
    made = triton.compile(
        source, target=GPUTarget("cuda", TARGET, 32), options={name: options[name] for name in OPTIONS & options.keys()}
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, spilled = (int(found) for found in re.search(r"REG:(\d+) STACK:(\d+)", usage).groups())
    products = {name: len(re.findall(rf"{name}\b", made.asm["ptx"])) for name in ("wgmma.mma_async", "mma.sync")}
    shown = ", ".join(f"{count} {name}" for name, count in products.items() if count)
    return f"{registers} registers, {made.metadata.shared:,} bytes shared, {spilled} spilled; {shown}"


def _kind(one: Any, place: tuple[int, ...], known: dict[Any, Any], even: dict[Any, Any]) -> Any:
    """The type of an argument for Triton: a 1 is compiled in as a constant, and divisibility by 16 is used."""
    if isinstance(one, tuple):
        return tuple(_kind(each, (*place, number), known, even) for number, each in enumerate(one))
    if isinstance(one, float):
        return "fp32"
    if isinstance(one, Tensor):
        if one.data_ptr() % 16 == 0:
            even[place] = [["tt.divisibility", 16]]
        return f"*{NAMES[one.dtype]}"
    if one == 1:
        known[place] = 1
        return "constexpr"
    if one % 16 == 0:
        even[place] = [["tt.divisibility", 16]]
    return "i32" if abs(one) < 1 << 31 else "i64"

"""Kernels compiled for a GPU that is not here, as they would be launched on it, and what they need there."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from kvsketch.attention import WeightedTokens
from kvsketch.kernels import gpu
from kvsketch.kernels.sources import Entries, Segments

TARGET, PROCESSORS = 90, 132  # compute capability 9.0: H100 and H200
OPTIONS = {"num_warps", "num_stages"}
NAMES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64", torch.int32: "i32", torch.int8: "i8"}


def compiled() -> Iterator[str]:
    """A line for each kernel and kind of call: for 8 KV heads × 128 in bfloat16, four query heads each."""
    import kvsketch.kernels.gpu.attend as of_attention
    import kvsketch.kernels.gpu.attend_many as of_prompts
    import kvsketch.kernels.gpu.route as of_routes
    import kvsketch.kernels.gpu.walk as of_walks
    from kvsketch.kernels.balanced_walk import walk_in_triton
    from kvsketch.kernels.gpu import attention, many_queries, routing

    query = torch.empty(1, 32, 1, 128, dtype=torch.bfloat16)
    with patch.object(gpu, "processors", lambda device: PROCESSORS):
        for name, parts in _steps().items():
            kernel, *launch = _launched(of_attention, "attend", lambda: attention._attended(query, parts, 8, 0.1, None))  # noqa: B023
            yield f"attend, {name}: {_needs(kernel, *launch)}"
    many = torch.empty(1, 32, 8192, 128, dtype=torch.bfloat16)
    weighted = _steps()["weighted"][0].tokens
    for name, tokens, causal in (("causal", replace(weighted, log_mass=None), True), ("weighted", weighted, False)):
        call = partial(many_queries._attended, many, tokens, 0.1, None, causal, None)
        yield f"prompt, {name}: {_needs(*_launched(of_prompts, 'attend_many', call))}"
    weights = torch.empty(8, 128, 1024, dtype=torch.bfloat16), torch.empty(8, 1024, 1024, dtype=torch.bfloat16)
    bias = torch.empty(8, 1, 1024, dtype=torch.bfloat16)
    call = partial(routing._classified, query, [(weights[0], bias), (weights[1], bias)], 8)
    yield f"classifier, 1,024 units and buckets: {_needs(*_launched(of_routes, 'classify', call))}"
    sizes, edges = torch.zeros(8, 1024, dtype=torch.int64), torch.zeros(8, 1, 1025, dtype=torch.int64)
    call = partial(
        routing._visited, torch.empty(8, 1, 1024), sizes, edges, 32, 0, (0.0, 0.0), False, (9, 9), left=False
    )
    yield f"choice of 32 buckets: {_needs(*_launched(of_routes, 'visit', call))}"
    blocks = torch.empty(4096, 256, 128, dtype=torch.bfloat16)
    given = torch.empty(4096, 256), torch.full((4096,), 256), 0.1, 0.25
    launched = _launched(of_walks, "keep_half", lambda: walk_in_triton._kept(blocks, blocks, *given))
    yield f"walk, blocks halved: {_needs(*launched)}"


def _steps() -> dict[str, list[Entries]]:
    """What steps read: only shapes count."""
    keys, weights = torch.empty(1, 8, 8192, 128, dtype=torch.bfloat16), torch.zeros(1, 8, 8192)
    runs = Segments(*(torch.zeros(1, 8, 1, 32, dtype=torch.int64) for _ in range(2)))
    plain, weighted = WeightedTokens(keys, keys, None), WeightedTokens(keys, keys, weights)
    return {
        "exact": [Entries(plain)],
        "weighted": [Entries(weighted)],
        "weighted and a window": [Entries(weighted), Entries(plain)],
        "runs and a window": [Entries(plain, segments=runs), Entries(plain)],
    }


def _launched(module: Any, name: str, call: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The kernel that a call launches, and with what: it is not run."""
    kernel, seen = getattr(module, name), list[Any]()

    class Launches:
        def __class_getitem__(cls, grid: Any) -> Callable[..., None]:
            return lambda *given, **options: seen.append((given, options))

    with patch.object(module, name, Launches):
        call()
    [(given, options)] = seen
    return kernel, given, options


def _needs(kernel: Any, given: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Registers, shared memory, bytes that are spilled, and which instructions multiply."""
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
    """The type of an argument as Triton takes it: a 1 is compiled in, and sixteens are made use of."""
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

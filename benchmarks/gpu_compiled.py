"""Kernels compiled for a GPU that is not here, and what they need there."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TARGET = 90  # compute capability 9.0: H100 and H200
PART = {"exact": 0, "weighted": 1, "runs": 8 * (1 + 6)}  # what a part has, as `attention.py` says it


def compiled() -> Iterator[str]:
    """A line for each kernel and kind of call: a step of 8 KV heads × 128 in bfloat16, four query heads each."""
    from kvsketch.kernels.gpu.attend import attend
    from kvsketch.kernels.gpu.walk import keep_half

    for kinds in (("exact",), ("weighted",), ("runs", "weighted")):
        has = [PART[kind] for kind in kinds]
        types = dict.fromkeys(("query", "out"), "*bf16") | dict.fromkeys(("lse", "sums", "tops"), "*fp32")
        types |= {"done": "*i32", "pointers": tuple(map(_pointers, has)), "strides": (("i32",) * 10,) * len(has)}
        types |= {"sizes": (("i32",) * 4,) * len(has)}
        types |= dict.fromkeys(("query_row", "query_head", "query_step"), "i32")
        types |= dict.fromkeys(("scale", "softcap"), "fp32")
        known = {
            "HEADS": 8, "GROUP": 4, "QUERIES": 1, "BY_QUERY": False, "WIDTH": 128, "VALUE_WIDTH": 128,
            "PARTS": len(has), "HAS": tuple(has), "SOFTCAP": False, "ROWS": 16, "AT_ONCE": 64, "KEY_BLOCK": 128,
            "VALUE_BLOCK": 128, "SPLITS": 33, "SPLIT_BLOCK": 64,
        }  # fmt: skip
        even = [(name,) for name in ("query", "out", "lse", "sums", "tops", "done", "query_row", "query_head")]
        even += [("pointers", part, place) for part in range(len(has)) for place in range(7)]
        even += [("strides", part, place) for part in range(len(has)) for place in range(6)]
        yield f"attend, {' and '.join(kinds)}: {_needs(attend, types, known, even, warps=4, stages=3)}"
    types = dict.fromkeys(("keys", "values"), "*bf16") | dict.fromkeys(("chances", "rooms"), "*fp32")
    types |= {"sizes": "*i64", "kept": "*i8"} | dict.fromkeys(("scale", "gain", "ones"), "fp32")
    types |= dict.fromkeys(("key_block", "key_step", "value_block", "value_step", "count"), "i32")
    known = {"WIDTH": 128, "VALUE_WIDTH": 128, "KEY_BLOCK": 128, "VALUE_BLOCK": 128, "STRIP": 64}
    even = [(name,) for name in types if name not in ("scale", "gain", "ones")]
    yield f"walk, blocks halved: {_needs(keep_half, types, known, even, warps=8, stages=2)}"


def _pointers(has: int) -> tuple[str, ...]:
    weights = ["*fp32" if has & bit else "*bf16" for bit in (1, 2)]
    return ("*bf16", "*bf16", *weights, "*i64" if has & 4 else "*bf16", *(["*i64" if has >= 8 else "*bf16"] * 2))


def _needs(kernel: Any, types: dict[str, Any], known: dict[str, Any], even: list[Any], warps: int, stages: int) -> str:
    """Registers, shared memory, bytes that are spilled, and which instructions multiply."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    place = {name: number for number, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        types | dict.fromkeys(known, "constexpr"),
        {(place[name],): value for name, value in known.items()},
        {(place[name], *inner): [["tt.divisibility", 16]] for name, *inner in even},
    )
    made = triton.compile(
        source, target=GPUTarget("cuda", TARGET, 32), options={"num_warps": warps, "num_stages": stages}
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

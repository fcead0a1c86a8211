"""Builds a wheel with compiled kernels if the environment has `KVSKETCH_WHEEL=native`: `make wheel`.

Otherwise a wheel contains only sources and is for every machine; kernels are compiled when they are first needed. A
wheel with compiled kernels is for one kind of machine, which needs no compiler. Kernels are called through ctypes and
use neither Python's nor torch's interface, so one wheel serves every version of both.

This is a hook of hatch because one compiler command for each level of instructions is all there is to do; CMake and
scikit-build-core would add a second way to build the same files.
"""

import os
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SWITCH, NATIVE = "KVSKETCH_WHEEL", "native"


class Kernels(BuildHookInterface):
    """Compiles the kernels for every level of instructions, and puts them where the package looks for them."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        wanted = os.environ.get(SWITCH, "")
        if not wanted or version == "editable":
            return
        if wanted != NATIVE:
            raise ValueError(f"{SWITCH} is {wanted!r}, and must be {NATIVE}, or not be set")
        sys.path.insert(0, str(Path(self.root) / "src"))
        try:
            from kvsketch.kernels.native import build
        except ImportError as error:
            raise RuntimeError(
                f"compiling kernels for a wheel needs {error.name}: install what kvsketch needs, and build with "
                "--no-build-isolation"
            ) from error
        finally:
            sys.path.pop(0)
        places = build.places()
        if not places:
            raise RuntimeError(f"no levels of instructions are known for this kind of machine: leave {SWITCH} out")
        self.scratch = tempfile.TemporaryDirectory()
        for place, level in places.items():
            for file in build.build_into(Path(self.scratch.name) / place, level.flags).parent.iterdir():
                target = build.PREBUILT.relative_to(build.PREBUILT.parents[3]) / place / file.name
                build_data["force_include"][str(file)] = str(target)
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if hasattr(self, "scratch"):
            self.scratch.cleanup()

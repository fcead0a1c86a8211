"""How the kernels are compiled, where they are put, and what is checked before they are loaded.

The name of a build's folder is made from all that the build depends on: the sources, the compiler, the flags and the
machine's instructions. So no old build is ever used, and one cache serves several machines. A library is loaded only
if it is the file that the build wrote, and only from a folder that nobody else can write to.

A wheel may contain builds, one for every level of `LEVELS` (`make wheel`): then no compiler is needed, and the best
build for the machine is taken, if it was made from these sources.
"""

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from kvsketch.files import private, replacing, user_cache

HERE = Path(__file__).parent
SOURCE = HERE / "kernels.c"
PREBUILT = HERE / "built"
FLAGS = (  # and $CFLAGS
    *("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-fopenmp"),
    "-Werror=implicit-function-declaration",  # a missing function is found before loading
)
SECONDS = 120
LIBRARY, DIGEST, SOURCES = "kernels.so", "kernels.sha256", "sources.sha256"
V3 = frozenset({"avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"})
V4 = V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}


class Level(NamedTuple):
    """Machines that a build in a wheel is for: the instructions they need, in Linux's words, and the flags."""

    needs: frozenset[str]
    flags: tuple[str, ...]


LEVELS = {  # by machine, the best first
    "x86_64": {
        "v4-bf16": Level(V4 | {"avx512_bf16", "avx512_vnni"}, ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni")),
        "v4": Level(V4, ("-march=x86-64-v4",)),
        "v3": Level(V3, ("-march=x86-64-v3",)),
        "any": Level(frozenset(), ("-march=x86-64",)),
    },
    "aarch64": {"any": Level(frozenset(), ("-march=armv8-a",))},
}
NATIVE = ("-march=native",)


class CannotBuildError(Exception):
    """There are no compiled kernels, and why."""


def built() -> Path:
    """The compiled kernels, which are compiled now if they are not there yet."""
    for place in fitting_places():
        if _is_right(PREBUILT / place) and _reads(PREBUILT / place / SOURCES, _digest_of_sources()):
            return PREBUILT / place / LIBRARY
    compiler = _compiler()
    folder = user_cache() / "kernels" / _key(compiler)
    if not _is_right(folder):
        build_into(folder)
    if not _is_right(folder):
        raise CannotBuildError(f"{folder / LIBRARY} changed right after it was written")
    return folder / LIBRARY


def _compiler() -> list[str]:
    """The command of the C compiler that the user named, or else of one that is installed."""
    named = _words("CC")
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if found := shutil.which(command[0]):
            return [found, *command[1:]]
    raise CannotBuildError(f"there is no C compiler ({named[0] if named else 'cc'}); install gcc or clang")


def _flags(machine: tuple[str, ...]) -> list[str]:
    """How to compile for a machine: the user's flags come last, and so take precedence."""
    return [*FLAGS, *machine, *_words("CFLAGS")]


def _words(variable: str) -> list[str]:
    """The words of an environment variable, split as a shell would."""
    try:
        return shlex.split(os.environ.get(variable, ""))
    except ValueError as error:
        raise CannotBuildError(
            f"{variable} is {os.environ[variable]!r}, which cannot be split as a shell would: {error}"
        ) from error


def _run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """A command's exit status and output, whatever characters that has."""
    return subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=SECONDS, check=False)


def _key(compiler: list[str]) -> str:
    """A name for all that a build for this machine depends on."""
    try:
        version = _run([*compiler, "--version"])
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotBuildError(f"{' '.join(compiler)} does not run: {error}") from error
    parts = [*_flags(NATIVE), *compiler, version.stdout, platform.machine(), *_processor(), _digest_of_sources()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:24]


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in HERE.iterdir() if path.suffix in (".c", ".h", ".inc")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _processor() -> list[str]:
    """What the machine's processor is and can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.processor()]
    return sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})


def places() -> dict[str, Level]:
    """Where a wheel for this kind of machine has its builds, below `PREBUILT`; the best first."""
    machine = platform.machine()
    return {f"{sys.platform}-{machine}-{name}": level for name, level in LEVELS.get(machine, {}).items()}


def fitting_places() -> list[str]:
    """The places whose builds run on this machine."""
    can = {word for line in _processor() for word in line.split()}
    return [place for place, level in places().items() if level.needs <= can]


def build_into(folder: Path, machine: tuple[str, ...] = NATIVE) -> Path:
    """The kernels, compiled anew into this folder, with these flags for the machine."""
    _compile(_compiler(), folder, machine)
    return folder / LIBRARY


def _compile(compiler: list[str], folder: Path, machine: tuple[str, ...]) -> None:
    """Write the library and its digest; each appears whole, even if others do the same at the same time."""
    try:
        private(folder)
        if open_to_others := _open_to_others(folder):
            raise CannotBuildError(f"others can write to {open_to_others}: make it yours alone (chmod go-w)")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / LIBRARY
            command = [*compiler, *_flags(machine), str(SOURCE), "-o", str(made), "-lm"]
            done = _run(command)
            if done.returncode:
                raise CannotBuildError(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")
            content = made.read_bytes()
        digest, sources = hashlib.sha256(content).hexdigest(), _digest_of_sources()
        for name, whole in ((LIBRARY, content), (DIGEST, digest.encode()), (SOURCES, sources.encode())):
            with replacing(folder / name) as file:
                os.fchmod(file.fileno(), 0o644)
                file.write(whole)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotBuildError(f"the kernels cannot be compiled into {folder}: {error}") from error


def _is_right(folder: Path) -> bool:
    """Whether there is a library with the digest that lies beside it; refuses a folder that others can write to."""
    if not (folder / LIBRARY).exists() or not (folder / DIGEST).exists():
        return False
    if open_to_others := _open_to_others(folder):
        raise CannotBuildError(f"others can write to {open_to_others}, so what is there is not loaded (chmod go-w)")
    return _reads(folder / DIGEST, hashlib.sha256((folder / LIBRARY).read_bytes()).hexdigest())


def _reads(path: Path, wanted: str) -> bool:
    """Whether a file is there with this content; anything else may be in its place."""
    return path.is_file() and path.read_bytes().strip() == wanted.encode()


def _open_to_others(folder: Path) -> Path | None:
    """The part of the library's path that somebody else could replace: other users' files and folders, or open ones."""
    if not hasattr(os, "getuid"):
        return None
    inside = [path for name in (LIBRARY, DIGEST) if (path := folder / name).exists()]
    real = folder.resolve()
    for path in (*inside, real, *real.parents):
        about = path.stat()
        open_to_all = about.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not about.st_mode & stat.S_ISVTX
        if about.st_uid not in (0, os.getuid()) or open_to_all:
            return path
    return None

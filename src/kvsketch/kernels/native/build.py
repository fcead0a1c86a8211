"""How the kernels are compiled, where they are put, and what is checked before they are loaded.

A build lies in a folder whose name says all that it depends on: the sources, the compiler, the flags and the machine's
instructions. So nothing old is ever used, and one folder serves several machines. It is loaded only if the file is the
one that the build wrote, and only from a folder that nobody else can write to.

Wheels carry no binaries: a build takes a second, and needs nothing but a C compiler. One that is built elsewhere and
brought along (`PREBUILT`) is taken if it was made from these sources, for this machine's instructions.
"""

import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kvsketch.files import replacing, user_cache

HERE = Path(__file__).parent
SOURCE = HERE / "kernels.c"
PREBUILT = HERE / "built"
FLAGS = (
    "-std=gnu11",
    "-O3",
    "-march=native",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-fopenmp",
)  # and $CFLAGS
SECONDS = 120
LIBRARY, DIGEST = "kernels.so", "kernels.sha256"


class CannotBuildError(Exception):
    """There are no compiled kernels, and why."""


def built() -> Path:
    """The compiled kernels, which are compiled now if they are not there yet."""
    compiler = _compiler()
    key = _key(compiler)
    for folder in (PREBUILT / key, user_cache() / "kernels" / key):
        if (folder / LIBRARY).exists() and (folder / DIGEST).exists() and _is_right(folder):
            return folder / LIBRARY
    _compile(compiler, folder)
    if not _is_right(folder):
        raise CannotBuildError(f"{folder / LIBRARY} is not what was just written there")
    return folder / LIBRARY


def build_into(folder: Path) -> Path:
    """The kernels, compiled anew into this folder: to see how long that takes."""
    _compile(_compiler(), folder)
    return folder / LIBRARY


def _compiler() -> str:
    """The C compiler that the user named, or that there is."""
    wanted = os.environ.get("CC", "").split()[:1] or ["cc", "gcc", "clang"]
    for command in wanted:
        if found := shutil.which(command):
            return found
    raise CannotBuildError(f"there is no C compiler ({', '.join(wanted)}); install gcc or clang")


def _flags() -> list[str]:
    """How to compile: what the user adds comes last, and so holds."""
    return [*FLAGS, *shlex.split(os.environ.get("CFLAGS", ""))]


def _key(compiler: str) -> str:
    """A name for all that a build depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=SECONDS, check=False)
    parts = [*_flags(), compiler, version.stdout, platform.machine(), *_instructions()]
    digest = hashlib.sha256("\n".join(parts).encode())
    for path in sources():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def sources() -> list[Path]:
    """The files in C, in a fixed order."""
    return sorted(path for path in HERE.iterdir() if path.suffix in (".c", ".h", ".inc"))


def _instructions() -> Iterator[str]:
    """What the machine's processor can do, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        yield platform.processor()
        return
    yield from sorted({line for line in lines if line.startswith(("flags", "Features", "model name"))})


def _compile(compiler: str, folder: Path) -> None:
    """Write the library and its digest; each appears whole, whoever else does the same at the same time."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if open_to_others := _open_to_others(folder):
            raise CannotBuildError(f"others can write to {open_to_others}: make it yours alone (chmod go-w)")
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / LIBRARY
            command = [compiler, *_flags(), str(SOURCE), "-o", str(made), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
            if done.returncode:
                raise CannotBuildError(f"{' '.join(command)} failed: {done.stderr.strip()[-300:]}")
            content = made.read_bytes()
        for name, whole in ((LIBRARY, content), (DIGEST, hashlib.sha256(content).hexdigest().encode())):
            with replacing(folder / name) as file:
                file.write(whole)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotBuildError(f"the kernels cannot be compiled into {folder}: {error}") from error


def _is_right(folder: Path) -> bool:
    """Whether the library is the one whose digest lies beside it; refuses a folder that others can write to."""
    if open_to_others := _open_to_others(folder):
        raise CannotBuildError(f"others can write to {open_to_others}, so what is there is not loaded (chmod go-w)")
    content, digest = (folder / LIBRARY).read_bytes(), (folder / DIGEST).read_text()
    return hashlib.sha256(content).hexdigest() == digest.strip()


def _open_to_others(folder: Path) -> Path | None:
    """What of the way to the library somebody else could exchange: other users' files and folders, or open ones."""
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

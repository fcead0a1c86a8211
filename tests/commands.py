"""The command line, run in this process: what a user sees, without the seconds that a new process needs for torch."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import kvsketch
from kvsketch.cli import main

SOURCE = Path(kvsketch.__file__).parent.parent


@dataclass(frozen=True)
class Done:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        """Its notes in one line, as a terminal may have wrapped them."""
        return " ".join(self.stderr.replace("│", " ").split())


def run(*arguments, text: str | bytes = "", columns: int = 80, main=main) -> Done:
    """Run `kvsketch`, or another command, with these arguments and this standard input."""
    content = text.encode() if isinstance(text, str) else text
    interrupted = signal.getsignal(signal.SIGINT)
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        patch.object(sys, "argv", ["kvsketch", *map(str, arguments)]),
        patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(content))),
        patch.dict(os.environ, {"COLUMNS": str(columns)}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        except Exception:
            code = 1
            traceback.print_exc()
        finally:
            signal.signal(signal.SIGINT, interrupted)
    return Done(code, out.getvalue(), err.getvalue())


def refused(done: Done, message: str) -> None:
    """It ended as bad input ends: with a line that says so, and nothing else."""
    assert message in done.said, done.stderr
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def process(*arguments, **options) -> subprocess.Popen:
    """The same in a process of its own, for what only a process can show."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-m", "kvsketch", *map(str, arguments)], env=environment, **options)


def finished(*arguments, **options) -> Done:
    """The same, when it has ended."""
    one = process(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)
    out, err = one.communicate(timeout=120)
    return Done(one.returncode, out, err)

"""How a command ends: well, with one line on what was wrong and exit code 2, or with 130 after Ctrl-C.

This module is loaded before all others, so it imports nothing heavy.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from itertools import pairwise
from types import FrameType
from typing import Any, TextIO

WRONG, STOPPED = 2, 130  # exit codes
LONG = (
    "fit",
    "profile",
    "train-demo",
)  # go on where they were stopped, and say so here; a bench says it with its report
LONGEST = 1000  # letters of an error message: a spec may have thousands
NO_MEMORY = ("out of memory", "allocate memory", "DefaultCPUAllocator")  # parts of torch's messages


@contextmanager
def ending() -> Iterator[None]:
    """Run a command in the body, and end the process as it should end."""
    stop_at_once()
    _mend_streams()
    try:
        try:
            _check_arguments()
            yield
        finally:
            sys.stdout.flush()  # so that a full disk raises here, where it can still be reported
    except BaseException as error:
        stop_at_once()  # also while Python itself shuts down
        if was_stopped(error) or (isinstance(error, SystemExit) and error.code == STOPPED):  # typer's form of it
            _say_that_it_goes_on()
            sys.exit(STOPPED)
        said = _explained(error)
        if said is None:
            raise
        _say(said)
        sys.exit(WRONG)


# -- Ctrl-C


def stop_at_once() -> None:
    """From now on Ctrl-C ends the process at once: there is nothing to put in order.

    An exception while modules are imported and models are loaded would be printed, or replaced by another one, by
    whatever library it passes through. Where Ctrl-C is ignored, as under nohup, it stays so.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _stop)


def stop_in_order() -> None:
    """From now on Ctrl-C is an exception again: there is work to report, or a bar to remove from the terminal."""
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def was_stopped(error: BaseException | None) -> bool:
    """Whether an exception comes from Ctrl-C; libraries turn it into other exceptions."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


def _stop(number: int, frame: FrameType | None) -> None:
    os._exit(STOPPED)


def _say_that_it_goes_on() -> None:
    """Say of the commands in `LONG` that they have kept what was done before Ctrl-C."""
    if sys.argv[1:2] and sys.argv[1] in LONG:
        from kvsketch.cli.notes import say

        with suppress(OSError):
            say("stopped; the same command goes on from here")


# -- what was wrong


def _check_arguments() -> None:
    """Refuse arguments that are no text: they could not be written to a file beside what was measured."""
    for argument in sys.argv[1:]:
        if any("\ud800" <= letter <= "\udfff" for letter in argument):
            raise ValueError(
                f"the argument {argument!r:.60} is no text in UTF-8: use a terminal that writes UTF-8, and "
                "rename files whose names are not in UTF-8"
            )


def _explained(error: BaseException) -> str | None:
    """What to say of an error that is not a bug of ours; None for one that is."""
    if hasattr(error, "format_message"):  # from typer: the command was called wrongly
        return _called_wrongly(error)
    if isinstance(error, ValueError | OSError):
        return str(error)
    known = isinstance(error, RuntimeError) and any(part in str(error) for part in NO_MEMORY)
    if known or isinstance(error, MemoryError):
        what = (str(error).splitlines() or ["for what was asked"])[0]
        return f"there is not enough memory ({what:.200}). Read less at a time (--chunk, --batch), or a shorter text"
    return None


def _called_wrongly(error: Any) -> str:
    """What is wrong, what was given, and where to look."""
    given = [*sys.argv[1:], ""]
    names = getattr(getattr(error, "param", None), "opts", ())
    came = [value for name, value in pairwise(given) if name in names]
    came += [part.partition("=")[2] for part in given if part.partition("=")[0] in names and "=" in part]
    got = f", got {came[-1]!r:.60}" if came else ""
    command = error.ctx.command_path if getattr(error, "ctx", None) else "kvsketch"
    said = error.format_message().strip().removesuffix(".")
    end = "" if said.endswith("?") and not got else "."
    return f"{said}{got}{end} See {command} --help" if said else ""  # typer has no message where it has shown the help


def _say(text: str) -> None:
    from kvsketch.cli.notes import notes, say

    line = " ".join(text.splitlines())
    if len(line) > LONGEST:
        line = f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"
    with suppress(OSError):
        if line:
            notes.print("error: ", style="red", end="")
            say(line)
    for stream in (sys.stdout, sys.stderr):
        _give_up_what_cannot_be_written(stream)


# -- streams


def _mend_streams() -> None:
    """Replace closed streams by empty ones; a letter that a terminal cannot show must not end a command."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # libraries write there without a check
            setattr(sys, name, open(os.devnull, "r+", encoding="utf-8"))  # noqa: SIM115 (for as long as we run)
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error has it


def _give_up_what_cannot_be_written(stream: TextIO) -> None:
    """Send to nowhere what cannot be written: Python would try again at its end, and print a long error."""
    try:
        stream.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

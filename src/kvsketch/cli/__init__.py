"""The command line: one file for each command."""

import sys

import kvsketch
from kvsketch.cli.ending import ending


def main() -> None:
    """Run the command line; bad input ends with one line and exit code 2, Ctrl-C with 130."""
    with ending():
        if sys.argv[1:] == ["--version"]:  # at once: programs ask for it
            print(f"kvsketch {kvsketch.__version__}")
            return
        from kvsketch.cli.commands import app

        sys.exit(
            app(prog_name="kvsketch", standalone_mode=False)
        )  # mistakes come as exceptions, which `ending` prints as one line

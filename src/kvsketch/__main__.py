"""`python -m kvsketch` is the command line."""

from kvsketch.cli import main

main()

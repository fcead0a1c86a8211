"""The labels that make two rows of a board the same."""

from kvsketch.evaluation.results.rows import KEY

SAME_PROMPT = tuple(name for name in KEY if name != "method")
SPEED_KEY = ("text", "tokens", "steps", "turns", "method")
FITTED_KEY = ("text", "tokens", "together", "method")
EXACT = "exact"  # the method that holds everything, in all packages

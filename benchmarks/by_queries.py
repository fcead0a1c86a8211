"""What a second reading is worth, on the embedded model: `python benchmarks/by_queries.py OUT [--samples N]`.

Questions come after compression. `kvzip` with one threshold over all heads and by a profile; `keydiff` by a profile.
Profiles are measured on other tasks than those that are asked, and no choice was made on these documents. Rows go to
OUT, where an interrupted run continues; means go to docs/results/by-queries.jsonl.
"""

from by_head import run_and_print

KEEPS = {"records": (0.25, 0.125), "needles": (0.25, 0.125, 0.05)}
SEED = 1000
FORMS = ("kvzip(keep={0})", "kvzip(keep={0}, heads={1!r})", "keydiff(keep={0}, heads={1!r})")


def specs(part: str, profile: str) -> list[str]:
    """All methods at the budgets of a part of the tasks."""
    return [form.format(keep, profile) for keep in KEEPS[part] for form in FORMS]


if __name__ == "__main__":
    run_and_print("by-queries", __doc__, specs, 200, "--seed", SEED)

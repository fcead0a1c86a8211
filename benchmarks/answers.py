"""What methods do to the embedded model's answers: `python benchmarks/answers.py OUT`.

Runs the benchmarks below, with their rows in OUT, where an interrupted run continues. Then writes their means to
docs/results/answers.jsonl, draws docs/figures/answers-bytes-after.png and prints the tables.
"""

import argparse
from pathlib import Path

from asking import FIGURES, bench, sum_up_into
from common import RESULTS
from kvsketch.cli.options import REPLY
from kvsketch.evaluation.answers.pictures import draw_scores
from kvsketch.evaluation.answers.summary import Mean

SUMMARY = RESULTS / "answers.jsonl"
KEEPS = (0.5, 0.25, 0.125)
FORMS = ("kvzip(keep={})", "keydiff(keep={}, heads='profile')", "streaming_llm(keep={})", "uniform(keep={})")
METHODS = ["exact", *(form.format(keep) for form in FORMS for keep in KEEPS)]
LOOKED_UP = {
    "lines": ["lines"],
    "infinite": ["passkey", "kv"],
    "ruler": ["niah_single", "niah_multikey", "niah_multiquery"],
}
PROMPTS = {1000: 50, 2000: 50, 4000: 25}  # how many prompts of each length


def run(out: Path) -> None:
    given = ("--methods", "; ".join(METHODS), "--batch", 25)
    for length, samples in PROMPTS.items():
        for suite, tasks in LOOKED_UP.items():
            short = ("--max-new-tokens", REPLY) if suite == "ruler" else ()  # else 128 where nothing is found
            own = ("--tasks", ",".join(tasks), "--lengths", length, "--samples", samples)
            bench(suite, out, *own, *given, *short)


def sum_up(out: Path) -> None:
    means = sum_up_into(SUMMARY, out)
    picture, *_ = draw_scores([mean for mean in means if mean.asked == "after"], out)  # against bytes
    picture.path.rename(FIGURES / f"answers-{picture.path.name}")
    for asked in ("after", "before"):
        print_table({(mean.task, mean.length, mean.method): mean for mean in means if mean.asked == asked}, asked)


def print_table(means: dict[tuple[str, int, str], Mean], asked: str) -> None:
    """Print tasks and lengths down and budgets across, with the methods in their order in each cell."""
    print(f"\nQuestion known {asked} compression; " + ", ".join(form.partition("(")[0] for form in FORMS))
    print("| | tokens | n | all held |", " | ".join(f"{keep:g}" for keep in KEEPS), "|")
    print("|---|---|---|---|" + "---|" * len(KEEPS))
    forms = [[METHODS[0]], *([form.format(keep) for form in FORMS] for keep in KEEPS)]
    for task in (name for tasks in LOOKED_UP.values() for name in tasks):
        for length in sorted({cell[1] for cell in means if cell[0] == task}):
            held = [[means.get((task, length, method)) for method in methods] for methods in forms]
            shown = (" / ".join(f"{mean.score:.2f}" if mean else "" for mean in some) for some in held)
            first = next(mean for some in held for mean in some if mean)
            print(f"| `{task}` | {first.tokens:,.0f} | {first.count} |", " | ".join(shown), "|")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only-sum-up", action="store_true")
    given = parser.parse_args()
    if not given.only_sum_up:
        run(given.out)
    sum_up(given.out)

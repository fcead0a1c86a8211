"""Predictions of smollm2 after 4,096 tokens of novels: `python benchmarks/real_text.py [OUT]`.

OUT has rows of `kvsketch bench text smollm2`; those that are missing in docs/results/text-smollm2-4096.jsonl are added
to it. A table and a figure are made from the windows that all methods have.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from common import RESULTS, published
from kvsketch.caches.registry import parse_spec
from kvsketch.evaluation.results.names import TEXTS
from kvsketch.evaluation.results.panels import save
from kvsketch.evaluation.results.rows import Row, key_of, read_rows, with_checksum
from kvsketch.evaluation.texts.pictures import divergence_picture
from kvsketch.evaluation.texts.plan import KEY
from kvsketch.evaluation.texts.summary import Mean, compare, summarise

FILE = RESULTS / "text-smollm2-4096.jsonl"
KEEPS, BASELINE = (0.5, 0.25, 0.125, 0.0625), "uniform"
WINDOW = ("text", "start")
NAMED = (  # methods with names in the picture, which has no room for all
    *("kvzip(window=0.25)", "keydiff(heads='profile', window=0.25)", "clustergen", "kvzip", "streaming_llm"),
    *("balancekv", "snapkv", BASELINE),
)


def add(out: Path) -> None:
    """Append the rows that are missing, after a line for each of their runs."""
    known = {key_of(row, KEY) for row in read_rows(FILE, KEY)[1]}
    runs, rows = read_rows(out / TEXTS, KEY)
    new = [row for row in rows if key_of(row, KEY) not in known]
    lines = [{"run": run} for run in published(runs)] if new else []
    with FILE.open("ab") as file:
        file.write(b"".join(map(with_checksum, [*lines, *new])))


def spec_of(method: str, keep: float) -> str:
    return str(replace(parse_spec(method), keep=keep))


def of_all(rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """The rows of windows that every method has, and the methods without their budgets."""
    windows = dict[str, set[tuple[object, ...]]]()
    for row in rows:
        windows.setdefault(row["method"], set()).add(key_of(row, WINDOW))
    common = set.intersection(*windows.values())
    plain = spec_of(BASELINE, KEEPS[0])
    assert plain in windows, "what the others are compared with"
    families = {str(replace(parse_spec(method), keep=0.25)).replace("keep=0.25, ", "").replace("(keep=0.25)", "")
                for method in windows}  # fmt: skip
    return [row for row in rows if key_of(row, WINDOW) in common], sorted(families)


def print_table(rows: Sequence[Row], means: Mapping[str, Mean], names: Sequence[str]) -> None:
    """Print methods down, budgets across: divergence, and its ratio to that of `uniform`."""
    print(f"n = {len({key_of(row, WINDOW) for row in rows})}\n| |", " | ".join(f"keep {keep:g}" for keep in KEEPS), "|")
    print("|---|" + "---|" * len(KEEPS))
    for name in names:
        cells = []
        for keep in KEEPS:
            mean, ratio = means[spec_of(name, keep)], compare(rows, spec_of(name, keep), spec_of(BASELINE, keep))
            assert ratio is not None, "they have the same windows"
            ends = (short(number) for number in (ratio.mean, ratio.low, ratio.high))
            paired = "" if name == BASELINE else " ({} [{}, {}])".format(*ends)
            cells.append(f"{mean.kl:.3f}".lstrip("0") + paired)
        print(f"| `{name}` |", " | ".join(cells), "|")
    for keep in KEEPS:
        shares = [means[spec_of(name, keep)].share for name in names]
        print(f"keep {keep:g}: {min(shares):.1%} to {max(shares):.1%} of the bytes")


def print_words(means: Mapping[str, Mean], names: Sequence[str]) -> None:
    """Print how often the likeliest token is the full cache's, and the perplexity of the text; budgets across."""
    plain = means[spec_of(BASELINE, KEEPS[0])].exact_perplexity
    print(f"perplexity with everything held: {plain:.2f}\n|" + " |" * (len(KEEPS) + 1))
    for name in names:
        here = [means[spec_of(name, keep)] for keep in KEEPS]
        cells = (f"{f'{mean.agree:.3f}'.lstrip('0')}, {mean.perplexity:.2f}" for mean in here)
        print(f"| `{name}` |", " | ".join(cells), "|")


def short(number: float) -> str:
    """A number below ten with two decimals, a larger one with one, as in the tables."""
    return f"{number:.2f}".lstrip("0") if number < 10 else f"{number:.1f}"


def main(out: Path | None) -> None:
    if out is not None:
        add(out)
    rows, names = of_all(read_rows(FILE, KEY)[1])
    means = {mean.method: mean for mean in summarise(rows)}
    names.sort(key=lambda name: means[spec_of(name, 0.25)].kl)  # by increasing divergence at a quarter
    print_table(rows, means, names)
    print_words(means, names)
    shown = [means[spec_of(name, keep)] for name in names for keep in KEEPS]
    count = len({key_of(row, WINDOW) for row in rows})
    title = f"SmolLM2-135M, 128 tokens after 4,096, {count} windows of 3 novels"
    picture = divergence_picture(shown, title, [name for name in names if name not in NAMED])
    save(picture, RESULTS.parent / "figures" / "text-smollm2.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, nargs="?")
    main(parser.parse_args().out)

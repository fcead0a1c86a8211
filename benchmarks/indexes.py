"""Several indexes of the same layers beside each other: `python -m benchmarks.indexes OUT INDEX [INDEX ...]`.

OUT has the rows of `python -m benchmarks.selectivity MODEL --index INDEX --index INDEX ...`. A line for each index and
layer goes to docs/results/indexes-smollm2.jsonl: recall of the attention to the past, and error, with 5 and 10 % of the
past read, and the lead of the classifier over k-means with an interval over texts. A figure with a curve for each
number of buckets (Saap, Figure 10) goes to docs/figures; tables are printed.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.real_keys import DOCS, OTHERS, READS, difference, of_texts, rows_of
from benchmarks.selectivity.pictures import buckets_picture
from benchmarks.selectivity.plan import index_name

from kvsketch.caches.lookup.key_index import KeyIndex, read_index
from kvsketch.evaluation.results.panels import save
from kvsketch.evaluation.results.provenance import provenance
from kvsketch.evaluation.results.rows import Row

WAYS = ("saap", *OTHERS)
MEASURES = ("recall", "error", "mse")


def lines_of(index: KeyIndex, rows: Sequence[Row]) -> Iterator[Row]:
    """A line for each layer of an index."""
    settings, name = index.description["settings"], index_name(index)
    about: Row = {"buckets": index.buckets, "hidden": settings["hidden"], "recipe": settings["recipe"]}
    for layer in index.layers:
        here = [row for row in rows if row["layer"] == layer and row["index"] == name]
        line = {**about, "layer": layer, "texts": len({row["prompt"] for row in here})}
        line["held_out"] = index.description["layers"][str(layer)]["held_out"]
        for share in READS:
            for measure in MEASURES:
                found = of_texts(here, share, measure)
                line[f"{measure} at {share:g}"] = {way: fmean(texts.values()) for way, texts in found.items()}
                line[f"{measure} at {share:g}, saap less"] = {
                    other: difference(found["saap"], found[other]) for other in OTHERS
                }
        yield line


def print_table(lines: Sequence[Row], share: float) -> None:
    """Print recall / error of each way, and the classifier's recall minus that of k-means before rotation."""
    print(f"\n{100 * share:g} % read\n| layer | buckets | hidden, steps |", " | ".join(WAYS), "| less k-means |")
    print("|---|" + "---|" * (len(WAYS) + 3))
    for line in sorted(lines, key=lambda line: line["layer"]):
        recalls, errors = (line[f"{measure} at {share:g}"] for measure in ("recall", "error"))
        cells = [f"{recalls[way]:.3f} / {errors[way]:.3f}" for way in WAYS]
        mean, half = line[f"recall at {share:g}, saap less"]["kmeans"]
        fitted = f"{line['hidden']:,}, {line['recipe']['steps']:,}"
        print(f"| {line['layer']} | {line['buckets']:,} | {fitted} | {' | '.join(cells)} | {mean:+.3f} ± {half:.3f} |")


def main(out: Path, folders: Sequence[Path]) -> None:
    rows, indexes = rows_of(out, "lookups"), [read_index(folder) for folder in folders]
    lines = [line for index in indexes for line in lines_of(index, rows)]
    text = "".join(json.dumps(line) + "\n" for line in ({"run": provenance(), "reads": READS}, *lines))
    (DOCS / "results" / "indexes-smollm2.jsonl").write_text(text, encoding="utf-8")
    alike = {index_name(index) for index in indexes if index.description["settings"]["recipe"]["start"] == "clusters"}
    figure = buckets_picture([row for row in rows if row["index"] in alike])
    save(figure, DOCS / "figures" / "lookup-buckets-smollm2.png")
    for share in READS:
        print_table(lines, share)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("indexes", type=Path, nargs="+")
    given = parser.parse_args()
    main(given.out, given.indexes)

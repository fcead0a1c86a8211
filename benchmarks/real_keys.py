"""How looking up works in every layer of a real model: `python -m benchmarks.real_keys OUT`.

OUT has a folder for each kind of text, with the rows of `python -m benchmarks.selectivity`: books, and other texts of a
kind that the index was not fitted to. A line for each kind and layer goes to docs/results/real-keys.jsonl, with means
over texts and intervals of differences between ways to look up. Figures go to docs/figures; a table is printed.
"""

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, stdev

from benchmarks.selectivity import key_pictures
from benchmarks.selectivity import pictures as lookup_pictures
from benchmarks.selectivity.plan import WINDOW_ALONE
from benchmarks.selectivity.study import KEYS
from benchmarks.selectivity.summary import at_read, label, summarise
from matplotlib.figure import Figure
from scipy.stats import t as students

from kvsketch.evaluation.results.panels import COLOURS, panels_for, save
from kvsketch.evaluation.results.provenance import provenance
from kvsketch.evaluation.results.rows import Row, read_rows

DOCS = Path(__file__).parent.parent / "docs"
READS = (0.05, 0.1)
WAYS = ("saap", "kmeans", "kmeans(rope=True)", "retrieval", "random_tokens")
OTHERS = ("kmeans", "kmeans(rope=True)")  # the classifier is compared with these
SHOWN = (0, 1, 3, 8, 14, 20, 25, 29)  # layers in figures that have a panel for each layer
HEADS = ((3, 0), (14, 0), (25, 0))


def rows_of(folder: Path, part: str) -> list[Row]:
    path = folder / f"{part}.jsonl"
    return read_rows(path, KEYS[part])[1] if path.is_file() else []


def of_texts(rows: Sequence[Row], share: float, measure: str) -> dict[str, dict[str, float]]:
    """The measure for every way and text of one layer, where this share of the past is read."""
    found: dict[str, dict[str, float]] = {}
    for prompt in dict.fromkeys(row["prompt"] for row in rows):
        for (_, method, _), points in summarise(row for row in rows if row["prompt"] == prompt).items():
            value = points[0].value(measure) if method == WINDOW_ALONE else at_read(points, share, measure)
            if value is not None:
                found.setdefault(method, {})[prompt] = value
    return found


def difference(one: dict[str, float], other: dict[str, float]) -> tuple[float, float] | None:
    """Mean difference over the texts that both have, and half its 95 % interval by Student's distribution."""
    pairs = [one[text] - other[text] for text in one.keys() & other.keys()]
    if len(pairs) < 2:
        return None
    return fmean(pairs), float(students.ppf(0.975, len(pairs) - 1)) * stdev(pairs) / math.sqrt(len(pairs))


def summaries(kind: str, folder: Path) -> Iterator[Row]:
    """A line for each layer."""
    lookups, spans, apart = (rows_of(folder, part) for part in ("lookups", "spans", "separations"))
    for layer in sorted({row["layer"] for row in spans}):
        here = [[row for row in rows if row["layer"] == layer] for rows in (lookups, spans, apart)]
        tops = [share for row in here[1] for share in row["top_shares"]]
        line: Row = {"kind": kind, "layer": layer, "texts": len(here[1]), "past": here[1][0]["past"]}
        line |= {"top": here[1][0]["top"], "top_share": fmean(tops), "least_head": min(tops)}
        line |= {"past_share": fmean(share for row in here[1] for share in row["past_shares"])}
        if fixed := [share for row in here[1] for share in row.get("fixed_shares", ())]:
            line["fixed_share"] = fmean(fixed)
        for share in READS:
            errors, recalls = (of_texts(here[0], share, measure) for measure in ("error", "recall"))
            line[f"error at {share:g}"] = {way: fmean(texts.values()) for way, texts in errors.items()}
            line[f"recall at {share:g}"] = {way: fmean(texts.values()) for way, texts in recalls.items()}
            for name, found in (("error", errors), ("recall", recalls)):
                line[f"{name} at {share:g}, saap less"] = {
                    other: difference(found["saap"], found[other])
                    for other in OTHERS
                    if {"saap", other} <= found.keys()
                }
        yield line | _separation(here[2])


def _separation(rows: Sequence[Row]) -> Row:
    if not rows:
        return {}
    found: Row = {name: fmean(x for row in rows for x in row[name]) for name in SEPARATIONS}
    for when in ("before rotation", "after rotation"):
        found[when] = {name: fmean(x for row in rows for x in row[when][name]) for name in rows[0][when]}
    return found


SEPARATIONS = ("negative", "bucket_distance", "largest_share")


def by_layer_picture(lines: Sequence[Row]) -> Figure:
    """Recall in every layer, with a panel for each kind of text and share that is read, and a curve for each way."""
    kinds = list(dict.fromkeys(line["kind"] for line in lines))
    figure, panels = panels_for(len(kinds) * len(READS), columns=len(READS), width=5.2)
    for number, axes in enumerate(panels):
        kind, share = kinds[number // len(READS)], READS[number % len(READS)]
        here = [line for line in lines if line["kind"] == kind]
        for way, colour in zip(WAYS, COLOURS, strict=False):
            points = [(line["layer"], line[f"recall at {share:g}"].get(way, math.nan)) for line in here]
            axes.plot(*zip(*points, strict=True), "o-", color=colour, lw=1.3, ms=3, label=label(way))
        axes.plot([line["layer"] for line in here], [line["top_share"] for line in here], ":", color="#9a9a9a",
                  lw=1.4, label=f"the largest {here[0]['top']} keys")  # fmt: skip
        axes.set_ylim(0, 1.03)
        axes.set_title(f"{kind}, {100 * share:g} % read, {here[0]['texts']} texts", loc="left", fontsize=10)
        axes.set_xlabel("layer")
        axes.set_ylabel("share of attention to the past")
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="upper center", bbox_to_anchor=(0.5, 0.0), ncols=3, fontsize=8, frameon=False)
    return figure


def draw(out: Path, lines: Sequence[Row]) -> None:
    """Draw all figures; those with a panel for each layer show only a few layers."""
    figures = {"lookup-layers": by_layer_picture(lines)}
    books = out / "books"
    lookups = [row for row in rows_of(books, "lookups") if row["layer"] in SHOWN]
    indexes = list(dict.fromkeys(row["index"] for row in lookups if row["index"]))
    figures["lookup-recall"] = lookup_pictures.lookups_picture(lookups, indexes, "recall")
    figures["lookup-selectivity"] = lookup_pictures.lookups_picture(lookups, indexes)
    figures["lookup-spans"] = key_pictures.spans_picture(rows_of(books, "spans"))
    figures["lookup-separations"] = key_pictures.separations_picture(rows_of(books, "separations"))
    if spreads := {(row["layer"], row["head"]): row for row in reversed(rows_of(books, "spreads"))}:
        figures["lookup-spreads"] = key_pictures.spreads_picture([spreads[head] for head in HEADS if head in spreads])
    if sizes := rows_of(books, "sizes"):
        figures["lookup-sizes"] = key_pictures.sizes_picture(sizes)
    for name, figure in figures.items():
        save(figure, DOCS / "figures" / f"{name}-smollm2.png")


def print_table(lines: Sequence[Row], share: float = READS[0]) -> None:
    names = " | ".join(label(way) for way in WAYS)
    print(f"\n| layer | top | fixed | past / all | window alone, error | {names} | less k-means | less rotated |")
    print("|---|" + "---|" * (len(WAYS) + 6))
    for line in lines:
        errors, recalls = line[f"error at {share:g}"], line[f"recall at {share:g}"]
        cells = [
            f"{line['top_share']:.2f}",
            f"{line.get('fixed_share', math.nan):.2f}",
            f"{line['past_share']:.2f}",
            f"{errors.get(WINDOW_ALONE, math.nan):.3f}",
        ]
        cells += [f"{recalls.get(way, math.nan):.2f} / {errors.get(way, math.nan):.3f}" for way in WAYS]
        found = line[f"recall at {share:g}, saap less"]
        cells += ["{:+.3f} ± {:.3f}".format(*found[other]) if found.get(other) else "" for other in OTHERS]
        print(f"| {line['layer']} | {' | '.join(cells)} |")


def main(out: Path) -> None:
    kinds = [kind for kind in ("books", "code") if (out / kind).is_dir()]
    lines = [line for kind in kinds for line in summaries(kind, out / kind)]
    about = {"run": provenance(), "reads": READS}
    text = "".join(json.dumps(line) + "\n" for line in (about, *lines))
    (DOCS / "results" / "real-keys.jsonl").write_text(text, encoding="utf-8")
    draw(out, lines)
    for kind in kinds:
        for share in READS:
            print(f"\n{kind}, {100 * share:g} % read: recall / error")
            print_table([line for line in lines if line["kind"] == kind], share)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    main(parser.parse_args().out)

"""The tables that the command prints."""

from collections.abc import Iterator, Sequence
from statistics import fmean

from benchmarks.selectivity.attention_span import FIXED
from benchmarks.selectivity.plan import WINDOW_ALONE
from benchmarks.selectivity.summary import Curve, Point, at_read, label, summarise, with_first_index
from rich.console import Group

from kvsketch.cli.bench_error_tables import table_of
from kvsketch.evaluation.results.rows import Row

READS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
NOTE = (
    "Errors are relative, Frobenius norms over the queries and heads of a layer. Sinks and window are read in full; "
    "shares are of the tokens that left them. Between two settings of a method: straight lines over the logarithm of "
    "what is read. Deviation of bucket sizes: over their mean; in brackets half the sum of what a bucket's shares of "
    "keys differ by from those of the training texts. Queries and keys told apart: by the nearer of their means; "
    "cosine of the means, and their distance over both spreads; negative products; half the sum of what a bucket's "
    "shares of queries and of keys differ by; the most queries in one bucket. Means over texts, seeds and heads."
)


def tables(rows: dict[str, list[Row]], indexes: Sequence[str]) -> Iterator[Group]:
    """Errors and recalls where equally much is read, spans, separations, sizes of buckets."""
    curves = with_first_index(summarise(rows["lookups"]), indexes)
    for layer in sorted({layer for layer, _, _ in curves}):
        here = {curve: points for curve, points in curves.items() if curve[0] == layer}
        yield table_of(
            f"layer {layer}: relative error where so much of the past is read", "method", _cells(here, "error")
        )
        yield table_of(f"layer {layer}: recall of the attention to the past", "method", _cells(here, "recall"))
    yield _spans(rows["spans"])
    yield _separations(rows["separations"])
    if rows["sizes"]:
        yield _sizes(rows["sizes"])


def _cells(curves: dict[Curve, list[Point]], measure: str) -> dict[tuple[str, str], str]:
    cells = dict[tuple[str, str], str]()
    for (_, method, _), points in curves.items():
        if method == WINDOW_ALONE:
            cells[label(method), "0 %"] = f"{points[0].value(measure):.3f}"
        for share in READS:
            found = at_read(points, share, measure)
            cells[label(method), f"{100 * share:g} %"] = "" if found is None else f"{found:.3f}"
    return cells


def _spans(rows: Sequence[Row]) -> Group:
    """The top keys' share of the attention to the past, and the past's share of all attention, by layer."""
    cells = dict[tuple[str, str], str]()
    for layer in sorted({row["layer"] for row in rows}):
        heads = [share for row in rows if row["layer"] == layer for share in row["top_shares"]]
        whole = [share for row in rows if row["layer"] == layer for share in row["past_shares"]]
        cells[str(layer), f"top {rows[0]['top']}"] = f"{fmean(heads):.1%}"
        cells[str(layer), "least head"] = f"{min(heads):.1%}"
        fixed = [share for row in rows if row["layer"] == layer for share in row.get("fixed_shares", ())]
        cells[str(layer), f"{FIXED} fixed keys"] = f"{fmean(fixed):.1%}" if fixed else ""
        cells[str(layer), "past / all"] = f"{fmean(whole):.1%}"
    return table_of("attention to the past: the share of its largest keys", "layer", cells)


def _separations(rows: Sequence[Row]) -> Group:
    """How far queries are from keys, by layer: before rotation, and where a column says so also after it."""
    cells = dict[tuple[str, str], str]()
    for layer in sorted({row["layer"] for row in rows}):
        here = [row for row in rows if row["layer"] == layer]
        for column, name in (("told apart", "accuracy"), ("cosine", "cosine"), ("distance", "distance")):
            means = [fmean(x for row in here for x in row[f"{when} rotation"][name]) for when in ("before", "after")]
            cells[str(layer), f"{column}, after"] = "{:.2f}, {:.2f}".format(*means)
        for column, name in (("negative", "negative"), ("buckets", "bucket_distance"), ("largest", "largest_share")):
            cells[str(layer), column] = f"{fmean(x for row in here for x in row[name]):.2f}"
    return table_of("queries and keys: how far they are apart", "layer", cells)


def _sizes(rows: Sequence[Row]) -> Group:
    """Deviations and distances by layer, number of buckets and rotation."""
    cells = dict[tuple[str, str], str]()
    for row in sorted(rows, key=lambda row: (row["buckets"], row["layer"], row["rotated"])):
        line = f"{row['layer']}, {row['buckets']}, {'after' if row['rotated'] else 'before'}"
        for kind, found in row["kinds"].items():
            means = [fmean(x for heads in found[name] for x in heads) for name in ("deviations", "distances")]
            cells[line, kind] = "{:.2f} ({:.2f})".format(*means)
    return table_of(f"deviation of bucket sizes, {rows[0]['keys']:,} keys", "layer, buckets, rotation", cells)

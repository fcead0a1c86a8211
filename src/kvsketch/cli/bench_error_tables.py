"""The tables of `kvsketch bench error`."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvsketch.evaluation.layers.summary import compare, name_of, pool_norms, rate_name, summarise
from kvsketch.evaluation.results.rows import Row, name_without_digest

COMPARED, BASELINE = "balancekv", "uniform"  # the errors of the first are divided by those of the second
NOTE = (
    "Relative errors are Frobenius norms over the last queries and all heads of a layer. All methods have room for the "
    "same number of entries: the rate's share of the middle, to the nearest 32. ¹ Geometric mean over pairs of the "
    "same prompt and seed; the interval is that of a normal distribution of the logarithms, and for these texts."
)


def tables(rows: Sequence[Row], norms: Sequence[Row]) -> Iterator[Group]:
    """Tables of errors and times of every layer, of ratios to a weighted uniform sample, and of norms."""
    rows = sorted(rows, key=lambda row: (row["layer"], -row["rate"]))
    found = summarise(rows)
    compared = [name for name in dict.fromkeys(row["method"] for row in rows) if name.startswith(COMPARED)]
    ratios = {name: compare(rows, name, BASELINE) for name in compared}
    for layer in dict.fromkeys(place[0] for place in found):
        here = {(name_of(curve), rate_name(rate)): e for (at, curve, rate), e in found.items() if at == layer}
        errors = {place: str(e) for place, e in here.items()}
        seconds = {place: f"{1000 * e.seconds:.1f}" for place, e in here.items()}
        yield table_of(f"layer {layer}: relative error ± standard deviation over seeds", "method", errors)
        yield table_of(f"layer {layer}: milliseconds to compress, median", "method", seconds)
        for name in compared:
            cells = {
                (rate_name(rate), f"block {block}"): str(ratio)
                for (at, (_, block), rate), ratio in ratios[name].items()
                if at == layer
            }
            if cells:
                yield table_of(f"layer {layer}: error of {name} / of {BASELINE} [95 % interval¹]", "rate", cells)
    yield _norms_table(norms)


def table_of(title: str, corner: str, cells: Mapping[tuple[str, str], str]) -> Group:
    """A table of cells, by line and column, below a title that may be wider than it."""
    columns = dict.fromkeys(column for _, column in cells)
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    table.add_column(corner, overflow="fold")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for line in dict.fromkeys(line for line, _ in cells):
        table.add_row(line, *(cells.get((line, column), "") for column in columns))
    return Group(Text(f"\n{title}", style="bold"), table)


def _norms_table(norms: Sequence[Row]) -> Group:
    """A line for each prompt, over all layers."""
    headings = {"queries": "queries", "keys": "keys - mean", "values": "values"}
    cells = dict[tuple[str, str], str]()
    for prompt, tokens in dict.fromkeys((row["prompt"], row["tokens"]) for row in norms):
        pooled = pool_norms([row for row in norms if row["prompt"] == prompt])
        line = f"{name_without_digest(prompt)}, {tokens:,} tokens"
        cells |= {(line, heading): str(pooled[name]) for name, heading in headings.items()}
    return table_of("norms over all layers, heads and tokens: mean ± half of its 95 % interval", "prompt", cells)

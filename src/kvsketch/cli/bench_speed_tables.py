"""The tables of `kvsketch bench speed`."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Group
from rich.table import Table
from rich.text import Text

from kvsketch.cli.app import size_for_people

if TYPE_CHECKING:
    from kvsketch.evaluation.results.rows import Row
    from kvsketch.evaluation.speed.plan import Plan

WIDEST = 24  # letters of a method in a line of a table; the rest goes to the next line
NOTE = (
    "ms: median of a step, and the 5th and 95th percentile. Read: bytes of keys, values, weights and router that a "
    "step reads; of memory: those over its time, as a share of the speed at which much memory was read right before "
    "it. × exact: time of exact with the same kernels over this time, in the same turns (of stock and two "
    "products: with the default kernels). Stock is the call of transformers; folded, with the queries of a group "
    "together; neither adds the new token to a cache. Of whole models decoded/s and × exact are of 64 steps in a row, "
    "with all that is done only every so many tokens (stock's are of the median). A piece: caches were filled with "
    "random keys and values, and prompt/s is for the tokens that were read after that."
)


def tables(rows: "Sequence[Row]", plan: "Plan") -> Iterator[Group]:
    """A table of one layer for each length, one of break-even, and one for each whole model and length."""
    from kvsketch.evaluation.speed.plan import BUILD, LAYER
    from kvsketch.evaluation.speed.summary import parts_of

    for row in (row for row in rows if row["part"] == BUILD):
        yield Group(Text(f"\nthe kernels in C are compiled in {row['seconds']:.1f} s, once", style="bold"))
    places = parts_of(rows)
    for part, tokens in places:
        here = [row for row in rows if (row["part"], row["tokens"]) == (part, tokens)]
        if part == LAYER:
            yield _layer(here, tokens, plan)
    if any(part == LAYER for part, _ in places):
        yield _break_even(rows)
    for part, tokens in places:
        if part not in (BUILD, LAYER):
            here = [row for row in rows if (row["part"], row["tokens"]) == (part, tokens)]
            yield _whole(here, f"{part}, {tokens:,} tokens")


def _layer(rows: "Sequence[Row]", tokens: int, plan: "Plan") -> Group:
    speeds = sorted(row["memory"] for row in rows if row["right"])
    title = f"one layer, {tokens:,} tokens, {plan.dtype}, threads: {plan.threads}"
    if speeds:
        title += f"; memory is read at {speeds[0] / 1e9:.1f} to {speeds[-1] / 1e9:.1f} GB/s"
    table = _table("kernels", "ms", "5 to 95 %", "read", "of memory", "× exact")
    for row in rows:
        cells = [row["method"], row["kernel"]]
        if not row["right"]:
            table.add_row(*cells, "wrong", _wrong(row))
            continue
        ratio = "" if row["exact"] is None else f"{row['exact'] / row['seconds']:.2f}"
        cells += [_ms(row["seconds"]), f"{_ms(row['low'])} to {_ms(row['high'])}", size_for_people(row["read"])]
        table.add_row(*cells, f"{row['share']:.0%}", ratio)
    return Group(Text(f"\n{title}", style="bold"), table)


def _break_even(rows: "Sequence[Row]") -> Group:
    from kvsketch.evaluation.speed.summary import break_even

    table = _table("kernels", "faster than exact from")
    for one in break_even(rows):
        said = f"not up to {one.longest:,}" if one.tokens is None else f"{one.tokens:,} tokens"
        table.add_row(one.method, one.kernel, said)
    return Group(Text("\nbreak-even, of the lengths above", style="bold"), table)


def _whole(rows: "Sequence[Row]", title: str) -> Group:
    table = _table("ms", "decoded/s", "× exact", "prompt/s", "+ compress", "held")
    for row in rows:
        held = size_for_people(row["nbytes"])
        if not row["right"]:
            table.add_row(row["method"], "exact is wrong", "", "", "", "", held)
            continue
        each = float(row["in_row"] if "in_row" in row else row["seconds"])
        cells = [row["method"], _ms(row["seconds"]), f"{1 / each:.2f}", f"{row['exact'] / each:.2f}"]
        if "reading" in row:
            whole = row["reading"] + row["compressing"]
            cells += [f"{row['tokens'] / whole:,.0f}", f"{row['compressing']:.2f} s"]
        elif "piece" in row:
            cells += [f"{row['piece_tokens'] / row['piece']:,.0f}", "a piece"]
        else:
            cells += ["", ""]
        table.add_row(*cells, held)
    return Group(Text(f"\n{title}: tokens a second", style="bold"), table)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("method", overflow="fold", max_width=WIDEST)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=heading != "5 to 95 %")
    return table


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g}" if seconds < 1 else f"{1e3 * seconds:,.0f}"


def _wrong(row: "Row") -> str:
    """How wrong an answer is: its worst error, as a multiple of plain torch's."""
    names = [name.removesuffix("_error") for name in row if name.endswith("_error") and not name.startswith("plain_")]
    worst = max(names, key=lambda name: row[f"{name}_error"] / max(row[f"plain_{name}_error"], 1e-300))
    return f"{row[f'{worst}_error'] / max(row[f'plain_{worst}_error'], 1e-300):.1f} × plain"

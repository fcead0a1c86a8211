"""Figures drawn from the rows in docs/results and nothing else: `python benchmarks/figures.py`."""

import json
import math
from pathlib import Path
from statistics import linear_regression

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from common import RESULTS

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
STOCK, OURS, OTHERS = "#9a9a9a", "#0b6e75", ("#d1495b", "#edae49", "#30638e")
GIB, MIB = 2**30, 2**20


def rows(name: str) -> list[dict]:
    """The latest row for each setting."""
    latest: dict[tuple, dict] = {}
    for line in (RESULTS / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        latest[(row.get("method") or row.get("way"), row["n"], row["heads"], row["kv_heads"])] = row
    return list(latest.values())


def plain_axes(width: float = 7.2, height: float = 3.6):
    figure, axes = plt.subplots(figsize=(width, height), dpi=150)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save(figure, name: str) -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(FIGURES / f"{name}.png")
    plt.close(figure)


def label_ends(axes, ends: list[tuple[float, float, str, str]], gap: float = 0.055) -> None:
    """Write each line's name to the right of its last point, (x, y, name, colour), with room between the names."""
    to_axes = axes.transData + axes.transAxes.inverted()
    lowest = -1.0
    for x, y, name, colour in sorted(ends, key=lambda end: end[1]):
        place, height = to_axes.transform((x, y))
        lowest = max(height, lowest + gap)
        axes.text(place + 0.012, lowest, name, color=colour, va="center", fontsize=9, transform=axes.transAxes)


def long_prompt() -> None:
    """Resident memory against tokens read."""
    figure, axes = plain_axes()
    colours, ends = iter(OTHERS), []
    for row in rows("long_prompt"):
        tokens, growth = zip(*row["resident_growth"], strict=True)
        name = row["way"].split("(")[0] + _kept(row["way"])
        colour = STOCK if name.startswith("stock") else OURS if name.startswith("uniform") else next(colours)
        axes.plot([t / 1000 for t in tokens], [g / MIB for g in growth], color=colour, lw=2)
        ends.append((tokens[-1] / 1000, growth[-1] / MIB, name, colour))
    axes.set_xlim(0, 270)
    axes.set_xticks(range(0, 201, 50))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("thousand tokens read")
    axes.set_ylabel("memory above start (MiB)")
    axes.set_title("Memory while a long prompt is read in chunks", loc="left")
    label_ends(axes, ends)
    save(figure, "long_prompt")


def _kept(way: str) -> str:
    return f", keep {way.split('keep=')[1].split(',')[0].rstrip(')')}" if "keep=" in way else ""


def memory() -> None:
    """Peak memory while 32k tokens are read, and the bytes that the cache holds afterwards."""
    found = sorted(rows("memory"), key=lambda row: row["peak_growth_bytes"])
    figure, axes = plain_axes(height=3.4)
    names = [row["way"] for row in found]
    peaks = [row["peak_growth_bytes"] / GIB for row in found]
    caches = [row["cache_bytes"] / GIB for row in found]
    colours = [STOCK if name.startswith("stock") else OTHERS[1] if name == "kvpress" else OURS for name in names]
    axes.barh(names, peaks, color=colours, alpha=0.4)
    axes.barh(names, caches, color=colours)
    for place, (peak, cache) in enumerate(zip(peaks, caches, strict=True)):
        axes.text(peak + 0.01, place, f"{peak:.2f}   cache {cache:.2f}", va="center", fontsize=8)
    axes.set_xlim(0, max(peaks) * 1.25)
    axes.set_xlabel("GiB above start: peak while reading (light), cache afterwards (dark)")
    axes.set_title(f"Reading {found[0]['n']:,} tokens", loc="left")
    save(figure, "memory")


def decode() -> None:
    """Decode speed against context length, for a model with grouped queries."""
    figure, axes = plain_axes()
    found = [row for row in rows("decode") if row["kv_heads"] < row["heads"]]
    colours, ends = iter(OTHERS), []
    for method in dict.fromkeys(row["method"] for row in found):
        points = sorted((row["n"], row["tokens_per_second"]) for row in found if row["method"] == method)
        colour = STOCK if method == "stock" else OURS if method == "exact" else next(colours)
        axes.plot(*zip(*points, strict=True), color=colour, lw=2, marker="o", ms=4)
        ends.append((*points[-1], method, colour))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    counts = sorted({row["n"] for row in found})
    axes.set_xticks(counts, [f"{n:,}" for n in counts])
    axes.set_yticks([0.5, 1, 2, 5, 10, 20, 50], ["0.5", "1", "2", "5", "10", "20", "50"])
    axes.minorticks_off()
    axes.set_xlim(counts[0] / 1.2, counts[-1] * 8)
    label_ends(axes, ends)
    axes.set_xlabel("tokens in context")
    axes.set_ylabel("tokens per second")
    heads = f"{found[0]['heads']} query heads, {found[0]['kv_heads']} KV heads"
    axes.set_title(f"Decoding on two CPU cores ({heads})", loc="left")
    save(figure, "decode")


def training() -> None:
    """Shares of right reply tokens while the embedded model is trained."""
    found = [json.loads(line) for line in (RESULTS / "training.jsonl").read_text().splitlines()]
    figure, axes = plain_axes(height=4.2)
    last = {name: value for row in found for name, value in row["accuracy"].items()}  # some tasks end early
    for name in sorted(last, key=lambda name: -last[name]):
        known = [row for row in found if name in row["accuracy"]]
        looked_up = last[name] > 0.9
        axes.plot(
            [row["tokens"] / 1e6 for row in known],
            [row["accuracy"][name] for row in known],
            color=OURS if looked_up else OTHERS[1],
            lw=1.2,
            alpha=0.7,
        )
    groups: dict[bool, list[str]] = {}
    for name, value in last.items():
        groups.setdefault(value > 0.9, []).append(name)
    end = found[-1]["tokens"] / 1e6
    axes.set_xlim(0, end * 1.35)
    axes.set_ylim(-0.03, 1.03)
    label_ends(axes, [(end, last[name], name, OTHERS[1]) for name in groups.get(False, [])])
    label_ends(axes, [(end, 0.93, f"{len(groups[True])} tasks of looking up", OURS)])
    longest, finishing = found[0]["length"], False
    for row in found:
        if row["length"] > longest or (row["length"] < longest and not finishing):
            finishing = row["length"] < longest  # lengths only grow before that
            longest, at = max(longest, row["length"]), row["tokens"] / 1e6
            text = "the hardest tasks, all lengths" if finishing else f"{row['length']:,}"
            axes.axvline(at, color=STOCK, lw=0.6, zorder=0)
            axes.text(at, -0.02, f" {text}", color=STOCK, fontsize=7, rotation=90, va="bottom")
    axes.set_xlabel("million tokens trained on (grey: where documents got longer)")
    axes.set_ylabel("right reply tokens, running mean")
    axes.set_title("Training the embedded model", loc="left")
    save(figure, "training")


def plain_rows(name: str) -> list[dict]:
    """All rows of a benchmark that rewrites its file at each run."""
    return [json.loads(line) for line in (RESULTS / f"{name}.jsonl").read_text().splitlines()]


def theorem() -> None:
    """SubGen's theorem: error against samples, and samples against the spread of a cluster."""
    found = plain_rows("theorem")
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.6), dpi=150)
    errors = [row for row in found if row["part"] == "error"]
    samples = [row["s"] for row in errors]
    left.plot(samples, [(row["d"] / row["s"]) ** 0.5 for row in errors], color=STOCK, ls="--", label="√(d/s)")
    for colour, name, label in ((OTHERS[0], "q99", "99th percentile"), (OURS, "rms", "root mean square")):
        left.plot(samples, [row[name] for row in errors], color=colour, marker="o", ms=4, lw=2, label=label)
    left.set_xlabel("value samples s")
    left.set_title("error / (‖softmax‖₂ ‖V‖op)", loc="left", fontsize=10)
    left.set_xscale("log", base=2)
    spread = [row for row in found if row["part"] == "spread"]
    places = sorted({row["spread"] for row in spread})
    right.plot(places, [math.exp(x) / 0.01 for x in places], color=STOCK, ls="--", label="e^(2δr) / ε²")
    for colour, kind, label in ((OTHERS[0], "worst", "two points, worst mix"), (OURS, "ball", "ball of radius δ")):
        needed = [row["t"] for row in sorted(spread, key=lambda row: row["spread"]) if row["kind"] == kind]
        right.plot(places, needed, color=colour, marker="o", ms=4, lw=2, label=label)
    right.set_xlabel("2δr")
    right.set_title("key samples t for ε = 0.1", loc="left", fontsize=10)
    for axes in (left, right):
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    save(figure, "theorem")


def stream() -> None:
    """SubGen on a stream of a million tokens: seconds and bytes, beside exact attention; slopes once it is sampled."""
    found = plain_rows("stream")
    sampled = [row for row in found if row["clusters"]]
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.6), dpi=150)
    lines = (
        (left, "exact_read_seconds", 1000, STOCK, "exact", found),
        (left, "read_seconds", 1000, OURS, "subgen", found),
        (left, "write_seconds_per_token", 1000, OTHERS[0], "subgen, taking in a token", sampled),
        (right, "exact_bytes", 1 / MIB, STOCK, "exact", found),
        (right, "bytes", 1 / MIB, OURS, "subgen", found),
        (right, "clusters", 1, OTHERS[0], "clusters (number)", sampled),
    )
    for axes, name, unit, colour, what, rows_of_line in lines:
        slope = log_log_slope([row["tokens"] for row in sampled], [row[name] for row in sampled])
        label = f"{what} (slope {slope:.2f})"
        tokens, values = [row["tokens"] for row in rows_of_line], [unit * row[name] for row in rows_of_line]
        axes.plot(tokens, values, color=colour, marker="o", ms=3, lw=2, label=label)
    left.set_title("a query, or a token taken in (ms)", loc="left", fontsize=10)
    right.set_title("held (MiB); clusters (number)", loc="left", fontsize=10)
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("tokens seen")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8, frameon=False)
    save(figure, "stream")


BALANCED = {"fair signs": STOCK, "theorem": OURS, "c = 16": OTHERS[0], "c = 4": OTHERS[1]}


def balance() -> None:
    """BalanceKV's theorems: the signed sum against the number of tokens, a stream's error against its batches."""
    found = plain_rows("balance")
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.6, 4.2), dpi=150)
    signed_sums(left, found)
    streams_of_halves(right, [row for row in found if row.get("kind") == "values"])
    for axes in (left, right):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7.5, frameon=False)
    save(figure, "balance")


def signed_sums(axes, found: list[dict]) -> None:
    """Theorem 3.3: signed sums against the number of tokens."""
    names = {"theorem": "walk, c = 30 log(n/δ)", "c = 16": "walk, c = 16", "c = 4": "walk, c = 4, until most fail"}
    sums = [row for row in found if row["part"] == "signed sum"]
    slopes = {row["way"]: f" (slope {row['slope']:.2f})" for row in found if row["part"] == "signed sum slope"}
    for way, colour in BALANCED.items():
        measured = [row for row in sums if row["way"] == way and "rms" in row]
        sizes = [row["n"] for row in measured]
        axes.plot(sizes, [row["expected_rms"] for row in measured], color=colour, lw=1)
        label = names.get(way, way) + slopes.get(way, "").replace("-0.00", "0.00")
        spread = [2 * row["rms_error"] for row in measured]
        axes.errorbar(sizes, [row["rms"] for row in measured], spread, color=colour, fmt="o", ms=4, label=label)
    bounds = [(row["n"], row["bound"]) for row in sums if row["way"] == "theorem"]
    axes.plot(*zip(*bounds, strict=True), color="black", lw=1, ls=":", label="bound of Theorem 3.3, its constant as 1")
    axes.set_xlabel("tokens n (lines: expected from the walk's moments)")
    axes.set_title("‖Σ η exp⟨k,q⟩ v‖, root mean square", loc="left", fontsize=10)


def streams_of_halves(axes, found: list[dict]) -> None:
    """Theorem 3.4. If all halves were exact, errors of T rounds would add up to √(1 - 2⁻ᵀ) times that of the first."""
    names = {"fair signs": "halved by fair signs", "theorem": "halved, c of the theorem", "c = 16": "halved, c = 16"}
    names |= {"sample of most held": "weighted sample, as many tokens"}
    slopes = {row["way"]: row["slope"] for row in found if row["part"] == "stream slope" and row["from"] == 2**12}
    for way, name in names.items():
        measured = [row for row in found if row["part"] == "stream" and row["way"] == way]
        colour, sizes = BALANCED.get(way, OTHERS[2]), [row["t"] for row in measured]
        if way in BALANCED:
            expected = [row["first_halving_alone"] * math.sqrt(1 - 2.0 ** -row["T"]) for row in measured]
            axes.plot(sizes, expected, color=colour, lw=1)
        spread, style = [2 * row["rms_error"] for row in measured], "o" if way in BALANCED else "o--"
        label = f"{name} (slope {slopes[way]:.2f})"
        axes.errorbar(sizes, [row["rms"] for row in measured], spread, color=colour, fmt=style, ms=4, lw=1, label=label)
    count = next(row["n"] for row in found if "n" in row)
    axes.set_xlabel("batch size t (slopes: of the last four; lines: expected)")
    axes.set_title(f"ε of Theorem 3.4 after {count:,} tokens, root mean square", loc="left", fontsize=10)


def log_log_slope(x: list[float], y: list[float]) -> float:
    """Slope of the straight line through the logarithms."""
    return linear_regression([math.log(value) for value in x], [math.log(value) for value in y]).slope


if __name__ == "__main__":
    for draw in (long_prompt, memory, decode, training, theorem, stream, balance):
        draw()

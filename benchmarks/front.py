"""The picture at the top of the README, drawn from rows in docs/results and nothing else: `python benchmarks/front.py`.

Answers found against bytes held, for a real language model: numbers hidden in novels, the question after compression.
"""

import json
from dataclasses import fields

from common import RESULTS
from figures import OTHERS, OURS, STOCK, label_ends, plain_axes, save
from kvsketch.caches.registry import chosen_method
from kvsketch.evaluation.answers.summary import Mean

CURVES = {  # name, method (None: the recommended one), colour
    "kvzip, by threshold (recommended)": (None, OURS),
    "keydiff, shares by profile": ("keydiff(heads='profile')", OTHERS[2]),
    "the latest tokens": ("streaming_llm", STOCK),
    "keydiff, equal shares": ("keydiff", OTHERS[1]),
    "a random sample": ("uniform", OTHERS[0]),
}
KEEPS, FILE = (0.0625, 0.125, 0.25, 0.5), RESULTS / "answers-smollm2.jsonl"
TASK, LENGTH = "niah_single", 1000


def found() -> dict[str, Mean]:
    """The mean of each method by its spec."""
    lines = [json.loads(line) for line in FILE.read_text().splitlines()]
    rows = [row for row in lines if row.get("task") == TASK and row["length"] == LENGTH and row["asked"] == "after"]
    names = [field.name for field in fields(Mean)]
    return {row["method"]: Mean(**{name: row[name] for name in names}) for row in rows}


def front() -> None:
    means = found()
    figure, axes = plain_axes(height=3.8)
    ends, shown = [], list[Mean]()
    for name, (method, colour) in CURVES.items():
        points = [means[str(chosen_method(method, keep))] for keep in KEEPS]
        shown += points
        x, y = [100 * mean.share for mean in points], [100 * mean.score for mean in points]
        ranges = zip(*(mean.interval for mean in points), strict=True)
        errors = [[abs(100 * end - score) for end, score in zip(own_ends, y, strict=True)] for own_ends in ranges]
        axes.errorbar(x, y, yerr=errors, color=colour, marker="o", ms=5, lw=2, elinewidth=1, capsize=2)
        ends.append((x[-1], y[-1], name, colour))
    full, counts = means["exact"], sorted({mean.count for mean in shown})
    axes.plot([0, 49], 2 * [100 * full.score], color="#bbbbbb", ls=":", lw=1)
    axes.text(1, 100 * full.score + 1, "everything held", color="#777777", ha="left", va="bottom", fontsize=8)
    axes.set_xlim(0, 80)
    axes.set_ylim(-2, 112)
    label_ends(axes, ends)
    axes.set_xlabel("bytes held, in percent of a full cache")
    axes.set_ylabel("answers found, percent")
    what = "A number hidden in a novel, asked for after the cache was compressed"
    axes.set_title(
        f"{what}\n(SmolLM2-135M, {LENGTH:,} tokens, {' to '.join(map(str, counts))} prompts, 95 % intervals)",
        loc="left",
        fontsize=10,
    )
    save(figure, "front")


if __name__ == "__main__":
    front()

"""SubGen's Table 1 with all methods that forget: `python benchmarks/longeval.py OUT --longeval FOLDER`.

LongEval's own files with the paper's shares of the cache, on the embedded model, with the question known before
compression or coming afterwards. Rows go to OUT, where an interrupted run continues; means go to
docs/results/longeval.jsonl, and a table is printed. The profile is measured on needles, and saw no lines.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from asking import bench, write_means
from by_head import NEEDLES, measured
from common import RESULTS
from kvsketch.evaluation.answers.summary import Mean, summarise
from kvsketch.evaluation.results.rows import read_rows

# The paper's n tokens as longchat counts them, its r + k, and the r it tried (docs/papers.md on its Table 1).
PAPER = {"200": (4815, 3072, (2048,)), "300": (7143, 4096, (2048, 3072)), "400": (9447, 4608, (2048, 3072))}
OURS = {"200": 2440, "300": 3630, "400": 4760}  # tokens of a prompt in the embedded model's tokenizer
WITH_R = (
    "uniform({}, window={})",
    "clustergen({}, window={}, weights='none', entries='centre', apart=0)",
    "clustergen({}, window={})",
    "subgen({}, window={})",
)
WITHOUT = ("clustergen", "balancekv", "h2o", "tova", "snapkv", "pyramidkv", "keydiff", "kvzip")


def methods_of(lines: str, profile: Path) -> dict[str, str]:
    """The name of each method in the table, by its spec."""
    theirs, total, recents = PAPER[lines]
    scale = OURS[lines] / theirs
    keep = f"keep={round(total * scale)}"
    found = {"exact": "exact", f"streaming_llm({keep})": "streaming_llm"}
    for recent in recents:
        for form in WITH_R[: None if recent == recents[0] else -1]:
            found[form.format(keep, round(recent * scale))] = form.format("", f"r={recent}").replace("(, ", "(")
    half = round(total * scale) // 2
    found[f"h2o({keep}, window={half})"] = "h2o(window=half)"
    found |= {f"{name}({keep})": name for name in WITHOUT}
    found[f"keydiff({keep}, heads={str(profile)!r})"] = "keydiff(heads='profile')"
    return {spec: name.replace("window=r", "r").replace("window=half", "r=half") for spec, name in found.items()}


def run(out: Path, folder: Path) -> list[Mean]:
    """Write rows of all files; their means, with the names of the table."""
    profile, found, runs = measured(out / "profile.json", list(NEEDLES)).absolute(), list[Mean](), list[dict]()
    for lines in PAPER:
        (file,) = folder.glob(f"{lines}_lines.jsonl*")
        methods = methods_of(lines, profile)
        bench("lines", out / lines, "--cases", file, "--methods", "; ".join(methods), "--batch", 10)
        first, rows = read_rows(out / lines / "rows.jsonl")
        runs += first
        found += [replace(mean, method=methods[mean.method]) for mean in summarise(rows)]
    write_means(RESULTS / "longeval.jsonl", runs, found)
    return found


def print_table(means: list[Mean]) -> None:
    """Print methods down, files with both question modes across."""
    columns = list(dict.fromkeys((mean.task, mean.asked) for mean in means))
    print("| | " + " | ".join(f"{task.removeprefix('lines: ')}, {asked}" for task, asked in columns) + " |")
    print("|---|" + "---|" * len(columns))
    for method in dict.fromkeys(mean.method for mean in means):
        cells = {(mean.task, mean.asked): mean for mean in means if mean.method == method}
        print(f"| `{method}` | " + " | ".join(str(cells.get(column, "")) for column in columns) + " |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--longeval", type=Path, required=True)
    given = parser.parse_args()
    print_table(run(given.out, given.longeval))

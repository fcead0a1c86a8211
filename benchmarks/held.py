"""What the embedded model answers with everything held: `python benchmarks/held.py OUT [--haystack FILE ...]`.

Every task that the model was trained for, in both wordings, in noise and in your texts, at four lengths. Each prompt is
asked three times: ending with nothing, with a blank, and with a new line. LongEval's own files are asked too if their
folder is named. Rows go to OUT, where an interrupted run continues. Shares of right answers go to the screen as a
table, and with --publish to docs/results/held.jsonl.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from common import RESULTS, published
from kvsketch.caches.exact import Exact
from kvsketch.cli.bench import about_run
from kvsketch.editions import EDITIONS
from kvsketch.evaluation.answers.reading import Prompt, Reading
from kvsketch.evaluation.answers.runner import GREEDY
from kvsketch.evaluation.answers.session import padded, split_ids
from kvsketch.evaluation.answers.summary import wilson
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.evaluation.results.rows import RowsFile, name_without_digest, read_rows
from kvsketch.evaluation.tasks import TASKS, WORDINGS, Sample, Setting
from kvsketch.evaluation.tasks.haystack import Grammar, Haystack, haystack_of
from kvsketch.evaluation.tasks.length import Fitter, TooShortError
from kvsketch.evaluation.tasks.longeval_files import read_cases
from kvsketch.huggingface import make_cache

LENGTHS = (1000, 2000, 4000, 8000)
ENDS = {"nothing": "", "a blank": " ", "a new line": "\n"}
KEY = ("task", "wording", "haystack", "length", "sample", "end")
NOT_KNOWN = ("cwe",)  # tasks that the model was not trained for
ASKED = 0.98  # the score that is hoped for
TOKENS = {"cpu": 16_000, "cuda": 300_000}  # tokens of a batch
MOST_NEW = 64  # tokens of an answer; or one more than a task allows, as a prompt may lack its last blank


class Cells:
    """Prompts by task, wording, haystack and length."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: int) -> None:
        self.model, self.tokenizer, self.samples = model, tokenizer, samples

    def made(self, tasks: Sequence[str], haystacks: Sequence[Haystack], lengths: Sequence[int]) -> Iterator[Any]:
        """The labels of each cell, and the haystack that things are hidden in."""
        for length in lengths:
            for name in tasks:
                for wording in WORDINGS:
                    for haystack in haystacks if TASKS[name].hides else haystacks[:1]:
                        about = {"task": name, "wording": wording, "length": length}
                        yield about | {"haystack": haystack.name if TASKS[name].hides else None}, haystack

    def samples_of(self, about: dict[str, Any], haystack: Haystack) -> list[Sample]:
        """A cell's documents, each with one question."""
        task, length = TASKS[about["task"]], about["length"]
        fitters, made = dict[str, Fitter](), []
        for number in range(self.samples):
            setting = Setting(size=1, wording=about["wording"], haystack=haystack.of(number))
            if setting.haystack.name not in fitters:
                fitters[setting.haystack.name] = Fitter(task, setting, self.count)
            made.append(fitters[setting.haystack.name].sample(length, f"held/{length}/{number}"))
        return made

    def count(self, sample: Sample) -> int:
        """The number of tokens of a prompt."""
        prompt = self.prompt(sample, "\n")
        return len(prompt.context) + len(prompt.question)

    def prompt(self, sample: Sample, end: str) -> Prompt:
        """The tokens of a prompt that ends with `end`."""
        question = sample.questions[0]
        asked = question.prompt.rstrip(" \n") + end
        return Prompt(*split_ids(self.tokenizer, sample.context, asked, special=True), question.answers, question.depth)

    def rows(self, about: dict[str, Any], samples: list[Sample]) -> Iterator[list[dict[str, Any]]]:
        """Rows of the answers, batch by batch."""
        task, longest = TASKS[about["task"]], max(map(self.count, samples))
        batch = max(1, TOKENS[self.model.device.type] // longest)
        for start in range(0, len(samples), batch):
            part = samples[start : start + batch]
            reading = Reading(self.model, [self.prompt(sample, "") for sample in part], self.pad)
            for what, end in ENDS.items():
                prompts = [self.prompt(sample, end) for sample in part]
                cache = reading.compressed("after", Exact())
                ask, mask = self.pad([prompt.question for prompt in prompts])
                out = self.model.generate(
                    **cache.new_tokens(ask, mask),
                    past_key_values=cache,
                    max_new_tokens=min(task.new_tokens + 1, MOST_NEW),
                    pad_token_id=self.tokenizer.pad_token_id,
                    **GREEDY,
                )
                texts = self.tokenizer.batch_decode(out[:, ask.shape[1] :], skip_special_tokens=True)
                yield [
                    about
                    | {"sample": start + row, "end": what, "tokens": len(prompt.context) + len(prompt.question)}
                    | {"score": task.score(text, prompt.answers), "output": text, "answers": list(prompt.answers)}
                    for row, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
                ]

    def pad(self, rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        ids, mask = padded(rows, self.tokenizer.pad_token_id)
        return ids.to(self.model.device), mask.to(self.model.device)


def run(given: argparse.Namespace) -> None:
    model, tokenizer = load_embedded(torch.float32, given.model)
    model.to(given.device)
    fingerprint = str(make_cache(model, Exact()).model.fingerprint())
    about = about_run(given.model, fingerprint, "float32", given.device, program="python benchmarks/held.py")
    file = RowsFile(given.out / "held.jsonl", about, KEY)
    cells = Cells(model, tokenizer, given.samples)
    tasks = given.tasks.split(",") if given.tasks else [name for name in TASKS if name not in NOT_KNOWN]
    if unknown := set(tasks) - set(TASKS):
        raise SystemExit(f"--tasks must be of {', '.join(TASKS)}, got {', '.join(sorted(unknown))}")
    haystacks = [Grammar(), *([haystack_of(given.haystack)] if given.haystack else [])]
    lengths = [int(length) for length in given.lengths.split(",")]
    todo = [(about, haystack, None) for about, haystack in cells.made(tasks, haystacks, lengths)]
    for path in sorted(given.longeval.glob("*_lines.jsonl*")) if given.longeval else []:
        name, cases = read_cases(path)
        todo.append(({"task": "lines", "wording": name, "length": 0, "haystack": None}, None, cases))
    for about, haystack, cases in track(todo, "Asking"):
        count = given.samples if cases is None else len(cases)
        wanted = [about | {"sample": number, "end": end} for number in range(count) for end in ENDS]
        if all(tuple(row[part] for part in KEY) in file.done for row in wanted):
            continue
        try:
            samples = cases or cells.samples_of(about, haystack)
        except TooShortError as error:
            print(f"left out: {error}")
            continue
        for rows in cells.rows(about, samples):
            file.add(rows)


def sum_up(out: Path, into: Path | None) -> None:
    """Write shares of right answers by cell and end, and print the table."""
    runs, rows = read_rows(out / "held.jsonl", KEY)
    groups = defaultdict(list)
    names = [name for name in KEY if name != "sample"]
    for row in rows:
        groups[tuple(row[name] for name in names)].append(row["score"])
    means = [dict(zip(names, key, strict=True)) | mean_of(scores) for key, scores in groups.items()]
    if into is not None:
        into.write_text("".join(json.dumps(line) + "\n" for line in [{"runs": published(runs)}, *means]))
    columns = sorted({mean["length"] for mean in means if mean["length"]})
    print("| task | wording | in |", " | ".join(f"{n:,}" for n in columns), "| with " + " / ".join(ENDS), "| n |")
    print("|---|---|---|" + "---|" * (len(columns) + 2))
    for task, wording, haystack in dict.fromkeys(key[:3] for key in groups):
        mine = {key[3:]: scores for key, scores in groups.items() if key[:3] == (task, wording, haystack)}
        by_length = [[s for (n, _), scores in mine.items() if n == length for s in scores] for length in columns]
        by_end = [[s for (_, e), scores in mine.items() if e == end for s in scores] for end in ENDS]
        shown, ends = [shown_mean(s) for s in by_length], " / ".join(map(shown_mean, by_end))
        count = sum(map(len, by_end))
        where = name_without_digest(haystack) if haystack else "—"
        print(f"| {task} | {name_without_digest(wording)} | {where} |", " | ".join(shown), f"| {ends} | {count} |")
    low = [mean for mean in means if mean["score"] < ASKED]
    print(f"\n{len(means) - len(low)} of {len(means)} cells are at {ASKED} or above")


def shown_mean(scores: list[float]) -> str:
    return f"{sum(scores) / len(scores):.3f}" if scores else ""


def mean_of(scores: list[float]) -> dict[str, Any]:
    score = sum(scores) / len(scores)
    return {
        "count": len(scores),
        "score": round(score, 4),
        "interval": [round(x, 4) for x in wilson(score, len(scores))],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="embedded", choices=EDITIONS)
    parser.add_argument("--device", default="cpu", choices=TOKENS)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--tasks")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--haystack", action="append")
    parser.add_argument("--longeval", type=Path)
    parser.add_argument("--only-sum-up", action="store_true")
    parser.add_argument("--publish", action="store_true")
    given = parser.parse_args()
    if not given.only_sum_up:
        run(given)
    sum_up(given.out, RESULTS / "held.jsonl" if given.publish else None)

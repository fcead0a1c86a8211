"""Which heads look at a needle, and which methods leave it to them: `python benchmarks/needle_heads.py OUT BOOK ...`.

Both models read 2,000 tokens of a book in which a number is hidden; the question comes later, in official wording. With
everything held: in every head, how much attention of the tokens that say the number goes to the number in the text.
With a quarter held: how much of that attention falls on tokens that the head still has. A head that copies the number
has to hold it; what other heads hold, which never look there, does not matter. Rows go to OUT, where an interrupted run
continues; means go to docs/results/needle-heads.jsonl, a figure to docs/figures; tables are printed.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel

from common import RESULTS, published
from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.exact import Exact
from kvsketch.caches.registry import parse_spec
from kvsketch.cli.bench import about_run
from kvsketch.cli.models import load_model
from kvsketch.evaluation.answers.plan import Plan
from kvsketch.evaluation.answers.reading import Prompt
from kvsketch.evaluation.answers.runner import GREEDY, Runner
from kvsketch.evaluation.inspection.kept import held_tokens
from kvsketch.evaluation.reading import Text
from kvsketch.evaluation.results.panels import save
from kvsketch.evaluation.results.rows import Row, RowsFile, read_rows
from kvsketch.evaluation.tasks import TASKS
from kvsketch.evaluation.tasks.haystack import haystack_of
from kvsketch.huggingface import SketchCache
from kvsketch.huggingface.capture import capture

MODELS, TASK, TOKENS, NEW_TOKENS = ("embedded", "smollm2"), "niah_single", 2000, 16
METHODS = {
    "uniform": "uniform(keep=0.25, window=16)",
    "k-center as published": "clustergen(keep=0.25, window=16, entries='centre', apart=0, weights='none')",
    "clustergen": "clustergen(keep=0.25, window=16)",
    "balancekv": "balancekv(keep=0.25, window=16)",
    "keydiff": "keydiff(keep=0.25)",
    "snapkv": "snapkv(keep=0.25)",
    "keydiff, by profile": "keydiff(keep=0.25, heads='profile')",
    "kvzip": "kvzip(keep=0.25)",
}
KEY = ("task", "sample")
SUMMARY, MOST = RESULTS / "needle-heads.jsonl", 0.9  # this share counts as most of the attention


class Case:
    """A prompt with a needle: which heads look at it, and how much of that attention methods leave."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, prompt: Prompt) -> None:
        self.model, self.tokenizer, self.prompt = model, tokenizer, prompt
        (self.answer,) = prompt.answers
        said = tokenizer(" " + self.answer, add_special_tokens=False)["input_ids"]
        self.places = torch.tensor(places_of(self.answer, [tokenizer.decode([token]) for token in prompt.context]))
        whole = torch.tensor([prompt.context + prompt.question + said], device=model.device)
        self.looks = [attention_to(layer, self.places, len(said)) for layer in capture(model, whole)]

    def rows(self, methods: dict[str, MethodConfig]) -> Row:
        """For each method: whether it answers right, and the attention to the needle that is left, by layer."""
        ids = torch.tensor([self.prompt.context], device=self.model.device)
        text = Text(self.model, ids, methods=methods.values())
        plain = text.cache(Exact())
        found: Row = {"looks": [layer.sum(1).tolist() for layer in self.looks], "found": {}, "left": {}}
        for name, config in {"exact": Exact(), **methods}.items():
            small = text.cache(config)
            if name != "exact":
                held = [layer.held[:, self.places] for layer in held_tokens(plain, small)]
                found["left"][name] = [left.tolist() for left in map(left_of, self.looks, held)]
            found["found"][name] = self.answers_right(small)
        return found

    def answers_right(self, cache: SketchCache) -> bool:
        ask = torch.tensor([self.prompt.question], device=self.model.device)
        pad = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id
        out = self.model.generate(
            **cache.new_tokens(ask), past_key_values=cache, max_new_tokens=NEW_TOKENS, pad_token_id=pad, **GREEDY
        )
        said = self.tokenizer.decode(out[0, ask.shape[1] :], skip_special_tokens=True)
        return bool(TASKS[TASK].score(said, self.prompt.answers))


def places_of(answer: str, pieces: Sequence[str]) -> list[int]:
    """The tokens that contain a part of the first occurrence of the answer, given the text of each token."""
    first = "".join(pieces).index(answer)
    places, begin = list[int](), 0
    for place, piece in enumerate(pieces):
        if begin < first + len(answer) and begin + len(piece) > first:
            places.append(place)
        begin += len(piece)
    return places


def attention_to(layer: Any, places: Tensor, said: int) -> Float[Tensor, "h t"]:
    """The mean attention of each KV head's group to tokens at these places, from the tokens that say the answer."""
    heads, count = layer.keys.shape[:2]
    asking = layer.queries[:, count - said - 1 : count - 1].unflatten(0, (heads, -1))
    logits = torch.einsum("hgqd,hnd->hgqn", asking.float(), layer.keys.float()) * layer.scale
    later = torch.arange(count) > torch.arange(count - said - 1, count - 1)[:, None]
    return logits.masked_fill_(later, float("-inf")).softmax(3)[..., places].mean((1, 2))


def left_of(looks: Float[Tensor, "h t"], held: Bool[Tensor, "h t"]) -> Float[Tensor, " h"]:
    """For each head, the attention to tokens that it still holds."""
    return (looks * held).sum(1)


def run(name: str, out: Path, books: Sequence[Path], samples: int) -> None:
    """Write a row for every prompt of a model."""
    model, tokenizer = load_model(name, "float32", "cpu")
    plan = Plan(tasks=[TASK], methods=["exact"], lengths=[TOKENS], asked=["after"], samples=samples,
                haystack=haystack_of(books))  # fmt: skip
    runner = Runner(model, tokenizer, plan)
    about = about_run(name, runner.fingerprint, "float32", "cpu", program="python benchmarks/needle_heads.py")
    file, methods = RowsFile(out / f"{name}.jsonl", about, KEY), {name: parse_spec(x) for name, x in METHODS.items()}
    for labels, _, make in track(list(runner.prompts()), name):
        if tuple(labels[part] for part in KEY) not in file.done:
            file.add([labels | Case(model, tokenizer, make()).rows(methods)])


def sum_up(out: Path) -> None:
    lines: list[Row] = []
    for name in MODELS:
        runs, rows = read_rows(out / f"{name}.jsonl", KEY)
        looks = torch.tensor([row["looks"] for row in rows])  # [prompts, layers, heads]
        line: Row = {"model": name, "prompts": len(rows), "runs": published(runs)}
        line["looks"] = looks.mean(0).tolist()
        for method in ("exact", *METHODS):
            line[f"found, {method}"] = sum(row["found"][method] for row in rows)
        for method in METHODS:
            left = torch.tensor([row["left"][method] for row in rows])
            line[f"left, {method}"] = float((left.sum((1, 2)) / looks.sum((1, 2))).mean())
            line[f"left by layer, {method}"] = (left.sum((0, 2)) / looks.sum((0, 2))).tolist()
        lines.append(line)
        print_table(line)
    SUMMARY.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    save(picture(lines), RESULTS.parent / "figures" / "needle-heads.png")


def print_table(line: Row) -> None:
    """Print the layers with most of the attention to needles, and how much of it methods leave there."""
    looks = torch.tensor(line["looks"])
    ordered = looks.flatten().sort(descending=True).values
    few = int((ordered.cumsum(0) < MOST * ordered.sum()).sum()) + 1
    print(f"\n{line['model']}, n = {line['prompts']}: {few} of {looks.numel()} heads have {MOST:.0%} of it")
    layers = sorted(looks.sum(1).topk(min(len(looks), 8)).indices.tolist())
    print(
        "| | found | left |",
        " | ".join(f"layer {layer}" for layer in layers),
        "|\n|---|---|---|" + "---|" * len(layers),
    )
    shares = (looks.sum(1) / looks.sum())[layers].tolist()
    print(f"| `exact` | {line['found, exact']} | |", " | ".join(f"({share:.2f})" for share in shares), "|")
    for method in METHODS:
        cells = [f"{line[f'left by layer, {method}'][layer]:.2f}" for layer in layers]
        print(f"| {method} | {line[f'found, {method}']} | {line[f'left, {method}']:.2f} |", " | ".join(cells), "|")


def picture(lines: Sequence[Row]) -> Figure:
    """A map of the heads of each model, darker where more attention goes to needles."""
    figure = Figure(figsize=(8, 3.2), dpi=150)
    for axes, line in zip(figure.subplots(1, len(lines)), lines, strict=True):
        looks = torch.tensor(line["looks"]).T
        image = axes.imshow(looks, aspect="auto", cmap="Purples", vmin=0, vmax=1, interpolation="nearest")
        axes.set_title(line["model"], loc="left", fontsize=10)
        axes.set_xlabel("layer")
        axes.set_ylabel("KV head")
        axes.set_yticks(range(len(looks)))
        figure.colorbar(image, ax=axes, label="attention to the number")
    figure.tight_layout()
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("books", type=Path, nargs="*")
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--models", default=",".join(MODELS))
    given = parser.parse_args()
    if given.books:
        for model in given.models.split(","):
            run(model, given.out, given.books, given.samples)
    sum_up(given.out)

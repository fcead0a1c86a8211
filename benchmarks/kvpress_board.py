"""kvpress beside kvsketch, on the same prompts: `python benchmarks/kvpress_board.py BOARD MODEL --out FOLDER`.

BOARD is a folder that `kvsketch bench all` has written, MODEL the folder of the model that it was made with. kvpress
needs an older transformers, so this script runs in its own environment, which `make kvpress` makes, with
`PYTHONPATH=src .venv-kvpress/bin/python`. `kvsketch bench all ... --beside FOLDER` puts its results onto the page. An
interrupted run continues.

Bytes are those of the tensors that the cache holds after the prompt: some presses only hide tokens from attention.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import kvpress
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from kvsketch.cli.app import progress_bar
from kvsketch.evaluation.board.names import EXACT, SAME_PROMPT, SPEED_KEY
from kvsketch.evaluation.board.peak import peak_bytes
from kvsketch.evaluation.board.timed import READ, WARM, Plan
from kvsketch.evaluation.results.names import ANSWERS, PROMPTS, SPEED
from kvsketch.evaluation.results.provenance import provenance
from kvsketch.evaluation.results.rows import KEY, Row, RowsFile, key_of, read_rows
from kvsketch.evaluation.tasks import TASKS

PACKAGE = f"kvpress {version('kvpress')}"
# And how heads share the budget, as kvpress does it by hiding tokens from attention.
PRESSES: dict[str, tuple[Callable[[float], Any], str]] = {
    "StreamingLLMPress": (kvpress.StreamingLLMPress, "equal"),
    "KnormPress": (kvpress.KnormPress, "equal"),
    "KeyDiffPress": (kvpress.KeyDiffPress, "equal"),
    "TOVAPress": (kvpress.TOVAPress, "equal"),
    "SnapKVPress": (kvpress.SnapKVPress, "equal"),
    "PyramidKVPress": (kvpress.PyramidKVPress, "pyramid"),
    "ExpectedAttentionPress": (kvpress.ExpectedAttentionPress, "equal"),
    "AdaKVPress": (lambda ratio: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(ratio)), "by layer"),
    "KVzipPress": (kvpress.KVzipPress, "threshold"),
}


class Presses:
    """A model that reads and answers prompts with presses."""

    def __init__(self, folder: str, dtype: str) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        ends = self.model.generation_config.eos_token_id
        self.ends = set(ends if isinstance(ends, list) else [ends])

    def read(self, ids: torch.Tensor, press: Any) -> DynamicCache:
        """A compressed cache that has read these tokens."""
        for module in self.model.modules():
            if hasattr(module, "masked_key_indices"):
                module.masked_key_indices = None  # else an earlier press would still hide tokens
        cache = DynamicCache()
        with nullcontext() if press is None else press(self.model):
            self.model.model(input_ids=ids, past_key_values=cache)
        return cache

    def step(self, cache: DynamicCache, token: int, place: int) -> torch.Tensor:
        """Logits after one more token, at this place of the text."""
        given = {"past_key_values": cache, "position_ids": torch.tensor([[place]])}
        return self.model(torch.tensor([[token]]), **given).logits[0, -1]

    def answer(self, cache: DynamicCache, asked: list[int], place: int, most: int) -> str:
        """The answer of the model after these tokens, always with the likeliest token.

        The question too is read one token at a time: layers may hold different numbers of tokens, and the mask is made
        for the first layer alone.
        """
        for number, token in enumerate(asked):
            logits = self.step(cache, token, place + number)
        said = [int(logits.argmax())]
        while len(said) < most and said[-1] not in self.ends:
            said.append(int(self.step(cache, said[-1], place + len(asked) + len(said) - 1).argmax()))
        return self.tokenizer.decode(said, skip_special_tokens=True)

    def full_nbytes(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens."""
        config = self.model.config
        width = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return 2 * tokens * width * self.model.dtype.itemsize


def nbytes(cache: DynamicCache) -> int:
    """Bytes of all storages that contain tensors of the cache."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def specs(keeps: list[float], presses: list[str]) -> dict[str, Any]:
    """Presses by their names in rows; the first one compresses nothing."""
    found: dict[str, Any] = {EXACT: None}
    for keep in keeps:
        for name in presses:
            make, heads = PRESSES[name]
            found[f"{name}(keep={keep!r}, heads={heads!r})"] = make(1 - keep)
    return found


@torch.no_grad()
def answer(presses: Presses, prompt: Row, press: Any) -> Row:
    """Measurements of one prompt, whose question is known before compression or comes after it."""
    question = prompt["question"]
    known, rest = (question[:-1], question[-1:]) if prompt["asked"] == "before" else ([], question)
    ids = torch.tensor([prompt["context"] + known])
    began = time.perf_counter()
    cache = presses.read(ids, press)
    held = nbytes(cache)
    text = presses.answer(cache, rest, ids.shape[1], prompt["new_tokens"])
    return {
        "tokens": len(prompt["context"]) + len(question),
        "score": TASKS[prompt["task"]].score(text, prompt["answers"]),
        "output": text,
        "answers": prompt["answers"],
        "nbytes": held,
        "full_nbytes": presses.full_nbytes(ids.shape[1]),
        "looked_up": None,
        "seconds": round(time.perf_counter() - began, 4),
    }


def answers(presses: Presses, prompts: list[Row], wanted: dict[str, Any], rows: RowsFile) -> Iterator[str]:
    """Ask the prompts that the file does not have yet."""
    for prompt in prompts:
        for method, press in wanted.items():
            labels = {name: prompt[name] for name in SAME_PROMPT} | {"method": method}
            yield f"{prompt['task']}, {method}"
            if key_of(labels) not in rows.done:
                rows.add([labels | answer(presses, prompt, press)])


@torch.no_grad()
def time_one(presses: Presses, ids: list[int], plan: Plan, press: Any) -> Row:
    """Seconds to read with and without a press, in turn, and of steps after that, in turn; and the peak of memory."""
    read, following = torch.tensor([ids[: plan.tokens]]), ids[plan.tokens :]
    peak, cache = peak_bytes(partial(presses.read, read, press), read.device)
    held = nbytes(cache)
    exact, own = list[float](), list[float]()
    for _ in range(READ):
        whole = timed(exact, partial(presses.read, read, None))
        cache = timed(own, partial(presses.read, read, press))
    hiding = [module for module in presses.model.modules() if getattr(module, "masked_key_indices", None) is not None]
    hidden = [module.masked_key_indices for module in hiding]
    exact_step, step = list[float](), list[float]()
    for number, token in enumerate(following):
        for one, times in ((whole, exact_step), (cache, step)):
            for module, places in zip(hiding, hidden, strict=True):
                module.masked_key_indices = places if one is cache else None
            timed(times, partial(presses.step, one, token, plan.tokens + number))
    found = {"exact_reading": exact, "reading": own, "compressing": [], "exact_step": exact_step[WARM:]}
    found |= {"step": step[WARM:], "peak_nbytes": peak, "nbytes": held, "looked_up": None}
    return found | {"full_nbytes": presses.full_nbytes(plan.tokens)}


def timed(times: list[float], work: Callable[[], Any]) -> Any:
    """The result of some work; its seconds are appended to `times`."""
    began = time.perf_counter()
    made = work()
    times.append(round(time.perf_counter() - began, 7))
    return made


def times(presses: Presses, plan: Plan, wanted: dict[str, Any], rows: RowsFile) -> Iterator[str]:
    """Time the presses that the file does not have yet."""
    ids = plan.document(lambda text: presses.tokenizer(text)["input_ids"])
    for method, press in wanted.items():
        yield f"speed, {method}"
        if key_of(plan.labels(method), SPEED_KEY) not in rows.done:
            rows.add([plan.labels(method) | time_one(presses, ids, plan, press)])


def first_of_each(prompts: list[Row], samples: int) -> list[Row]:
    """The first `samples` prompts of each kind."""
    numbers: dict[tuple[Any, ...], int] = {}
    kept = []
    for prompt in prompts:
        kind = tuple(prompt[name] for name in SAME_PROMPT if name != "sample")
        numbers[kind] = numbers.get(kind, 0) + 1
        kept += [prompt] if numbers[kind] <= samples else []
    return kept


def main(given: argparse.Namespace) -> None:
    if not (given.board / PROMPTS).is_file():
        raise SystemExit(f"{given.board} has no {PROMPTS}: name a folder that kvsketch bench all has written")
    runs, prompts = read_rows(given.board / PROMPTS, SAME_PROMPT)
    made = {name: runs[-1][name] for name in ("model", "fingerprint", "dtype", "kvsketch")}
    about = {"package": PACKAGE} | provenance() | made
    presses = Presses(given.model, made["dtype"])
    wanted, prompts = specs(given.keep, given.presses), first_of_each(prompts, given.samples)
    total = len(wanted) * len(prompts)
    with progress_bar() as bar:
        steps = answers(presses, prompts, wanted, RowsFile(given.out / ANSWERS, about, KEY))
        show(bar, steps, total)
        if given.turns:
            plan = Plan(methods=list(wanted), tokens=max(prompt["length"] for prompt in prompts), turns=given.turns)
            show(bar, times(presses, plan, wanted, RowsFile(given.out / SPEED, about, SPEED_KEY)), len(wanted))


def show(bar: Any, steps: Iterator[str], total: int) -> None:
    task = bar.add_task("reading", total=total)
    for label in steps:
        bar.update(task, advance=1, description=label)
    bar.remove_task(task)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("board", type=Path)
    parser.add_argument("model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.5, 0.25, 0.125, 0.0625])
    parser.add_argument("--presses", nargs="+", choices=PRESSES, default=list(PRESSES))
    parser.add_argument("--samples", type=int, default=1 << 30, help="prompts of each kind, at most")
    parser.add_argument("--turns", type=int, default=7, help="the turns of the board; 0: nothing is timed")
    main(parser.parse_args())

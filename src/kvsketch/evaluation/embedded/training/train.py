"""The training loop: it can be resumed at any moment; on a CPU, the same recipe gives the same run."""

import dataclasses
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, LlamaForCausalLM, PreTrainedTokenizerBase

from kvsketch.evaluation.embedded.training.ahead import Ahead, Wanted, processes_beside
from kvsketch.evaluation.embedded.training.documents import (
    ALSO_HIDDEN,
    HIDES_SEVERAL_FROM,
    IGNORED,
    QUESTIONS,
    SHARES,
    TASK_NAMES,
    Batch,
    Documents,
)
from kvsketch.evaluation.embedded.training.looks import RULES
from kvsketch.evaluation.embedded.training.loss import (
    FUSED,
    LOOKS_WEIGHT,
    PROSE_WEIGHT,
    RESTS_WEIGHT,
    attend,
    loss_of,
    read,
)
from kvsketch.evaluation.embedded.training.recipe import (
    FINISHED_AT,
    FINISHED_WITH,
    LENGTHS,
    NOT_BEFORE,
    SHARE_AT_LENGTH,
    SHORTER,
    Progress,
    Recipe,
)
from kvsketch.evaluation.embedded.training.shape import Shape
from kvsketch.evaluation.embedded.training.start import start_model
from kvsketch.evaluation.embedded.training.tokenizer import build_tokenizer
from kvsketch.evaluation.tasks.haystack import Haystack, names_of
from kvsketch.files import (
    holds_files,
    making,
    read_json,
    read_tensors,
    remove_left_over,
    replacing,
    write_json,
    write_tensors,
)
from kvsketch.fitting import adam

STEPS_AHEAD = 8  # steps whose batches are begun early
# Why a run may not be resumable although the command is the same.
ANOTHER = {"beginnings": "another kvsketch, torch or kind of processor began it: "}
STATE, WEIGHTS, LOG, MODEL = "state.json", "checkpoint.safetensors", "log.jsonl", "model"


@contextmanager
def _no_tiny_numbers() -> Iterator[None]:
    """Numbers below 1e-38 are zero in the body: some weights of the shift heads get so small, and slow down a CPU."""
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@_no_tiny_numbers()
def train(
    folder: Path,
    recipe: Recipe,
    *,
    haystacks: Sequence[Haystack] = (),
    device: str = "cpu",
    save_every: float = 60.0,
    show: Callable[[Progress], None] = lambda progress: None,
) -> Path:
    """Train the embedded model, or go on where a run in this folder was stopped; returns the model's folder.

    Things are hidden in made-up text, and in the haystacks that are given. For a GPU, other processes make documents: a
    script that calls this needs its `if __name__ == "__main__"`. A process that dies loses at most `save_every`
    seconds and one step.
    """
    names = names_of(haystacks)
    if not (folder / STATE).is_file() and holds_files(folder):
        raise ValueError(f"{folder} has files in it, and none of a training run: name a new folder, or that of a run")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer()
    model = start_model(tokenizer, shape=Shape(), seed=recipe.seed).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, betas=(0.9, 0.95), weight_decay=0.0)
    if torch.device(device).type == "cuda":
        AttentionInterface.register(FUSED, attend)
        model.set_attn_implementation(FUSED)
    ahead = Ahead(recipe.seed, haystacks, processes=processes_beside(device))
    begun = {"settings": dataclasses.asdict(recipe), "haystacks": names, "device": torch.device(device).type}
    begun["beginnings"] = _digest(model, ahead.documents)
    progress = _resume(folder, begun, model, optimizer)
    saved = time.monotonic()
    with ahead, (folder / LOG).open("a", encoding="utf-8") as log:
        while progress.tokens < recipe.all_tokens:
            for group in optimizer.param_groups:
                group["lr"] = recipe.rate_at(progress.step + 1, progress.tokens)
            wanted = _wanted(recipe, progress)
            batches = ahead.batches(wanted, _later(recipe, progress))
            loss, seen = _step(model, optimizer, batches, device)
            progress = progress.after(sum(batch.tokens for batch in batches), seen, recipe)
            print(json.dumps(_row(progress, wanted, loss)), file=log)
            show(progress)
            if time.monotonic() - saved >= save_every:
                log.flush()
                _save(folder, begun, progress, model, optimizer)
                saved = time.monotonic()
    _save(folder, begun, progress, model, optimizer)
    finished = folder / MODEL
    if not finished.exists():  # the run may have ended before
        with making(finished) as unfinished:
            save_model(unfinished, model, tokenizer)
    return finished


def save_model(folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    """Save the finished model in bfloat16 with its tokenizer, as a Hugging Face checkpoint."""
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _digest(model: LlamaForCausalLM, documents: Documents) -> str:
    """A digest of the initial weights, first documents and schedule, which may differ in another version."""
    batch = documents.batch(0, max(HIDES_SEVERAL_FROM, LENGTHS[0]), LENGTHS[-1])
    parts = [batch.context, batch.asked, *model.state_dict().values()]
    plan = [LENGTHS, SHARE_AT_LENGTH, NOT_BEFORE, SHORTER, dict(SHARES), dict(FINISHED_WITH), FINISHED_AT]
    plan += [PROSE_WEIGHT, LOOKS_WEIGHT, RESTS_WEIGHT, QUESTIONS, *RULES]
    numbers = b"".join(part.cpu().contiguous().numpy().tobytes() for part in parts)
    return hashlib.sha256(numbers + json.dumps(plan).encode()).hexdigest()


def _wanted(recipe: Recipe, progress: Progress) -> list[Wanted]:
    """A step's batches: documents of the present length and of a shorter one; in the finish, of two drawn lengths."""
    draw, stage = random.Random(f"{recipe.seed}/{progress.step}/lengths"), progress.stage
    finish = recipe.finishes(progress.tokens)
    if finish:
        lengths = draw.choices(FINISHED_AT, [1 / length for length in FINISHED_AT], k=2)
    else:
        lengths = [LENGTHS[stage], draw.choice(LENGTHS[max(0, stage - SHORTER) : max(1, stage)])]
    return [Wanted(2 * progress.step + part, length, recipe.batch, finish) for part, length in enumerate(lengths)]


def _later(recipe: Recipe, progress: Progress) -> list[Wanted]:
    """The batches of the next steps, if documents do not get longer and the finish does not begin."""
    steps = range(progress.step + 1, progress.step + 1 + STEPS_AHEAD)
    return [one for step in steps for one in _wanted(recipe, dataclasses.replace(progress, step=step))]


def _step(
    model: LlamaForCausalLM, optimizer: torch.optim.Adam, batches: list[Batch], device: str
) -> tuple[float, Mapping[str, float]]:
    optimizer.zero_grad()
    total, right, asked = 0.0, torch.zeros(len(TASK_NAMES)), torch.zeros(len(TASK_NAMES))
    for batch in batches:
        here = batch.on(device)
        found = read(model, here)
        loss = loss_of(model, here, found)
        (loss / len(batches)).backward()
        total += loss.item() / len(batches)
        places = batch.labels != IGNORED
        tasks, correct = batch.tasks[places], (found.replies.argmax(-1).cpu() == batch.labels[places]).float()
        asked += tasks.bincount(minlength=len(asked))
        right += tasks.bincount(correct, minlength=len(right))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    shares = (right / asked).tolist()
    return total, {name: share for name, share in zip(TASK_NAMES, shares, strict=True) if share == share}


def _row(progress: Progress, wanted: Sequence[Wanted], loss: float) -> dict[str, object]:
    asked = wanted[0].tasks.keys() | ALSO_HIDDEN
    accuracy = {name: round(value, 4) for name, value in progress.accuracy.items() if name in asked}
    about = {"step": progress.step, "tokens": progress.tokens, "length": max(one.length for one in wanted)}
    return about | {"accuracy": accuracy, "loss": round(loss, 4)}


def _save(
    folder: Path, begun: Mapping[str, Any], progress: Progress, model: LlamaForCausalLM, optimizer: torch.optim.Adam
) -> None:
    """Save weights and optimizer under a name with the step, then the state that names them: so a kill does no harm."""
    weights = folder / f"{progress.step}.{WEIGHTS}"
    write_tensors(weights, adam.state_of(model, optimizer), {})
    _write_state(folder, begun, progress, weights.name)
    for old in folder.glob(f"*.{WEIGHTS}"):
        if old != weights:
            old.unlink()


def _write_state(folder: Path, begun: Mapping[str, Any], progress: Progress, weights: str | None) -> None:
    write_json(folder / STATE, {**begun, "weights": weights, "progress": dataclasses.asdict(progress)})


def _resume(folder: Path, begun: Mapping[str, Any], model: LlamaForCausalLM, optimizer: torch.optim.Adam) -> Progress:
    if not (folder / STATE).is_file():
        _write_state(folder, begun, Progress(accuracy={}), None)
    state = read_json(folder / STATE)
    for name, wanted in begun.items():
        if state.get(name) != wanted:
            raise ValueError(
                f"{folder} holds a run with other {name}, {state.get(name)}, now {wanted}; {ANOTHER.get(name, '')}"
                "go on with those, or use another folder"
            )
    remove_left_over(folder)  # left over from a checkpoint that was killed; the next one has another name
    progress = Progress(**state["progress"])
    rows = (folder / LOG).read_text(encoding="utf-8").splitlines() if (folder / LOG).is_file() else []
    with replacing(folder / LOG) as log:
        log.write("".join(f"{row}\n" for row in rows[: progress.step]).encode())
    if state["weights"] is None:  # stopped before the first checkpoint
        return progress
    weights = folder / state["weights"]
    adam.restore(model, optimizer, read_tensors(weights), weights)
    return progress

"""Training that can be stopped at any moment, and then goes on to the same result."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from jaxtyping import Int64
from torch import Tensor

from kvsketch.files import read_about, read_tensors, write_tensors
from kvsketch.fitting import adam as adam_state
from kvsketch.fitting.classifiers import Classifiers, train
from kvsketch.fitting.pool import Pool
from kvsketch.fitting.settings import Recipe


def train_or_resume(
    path: Path,
    classifiers: Classifiers,
    pool: Pool,
    recipe: Recipe,
    draw: torch.Generator,
    *,
    layer: int,
    save_every: float,
    show: Callable[[int, float], None],
) -> float:
    """Train by the recipe, or go on from the checkpoint at `path`; the result is how many seconds it took in all."""
    adam = torch.optim.Adam(classifiers.parameters(), lr=recipe.rate, fused=True)
    done, before = _load(path, classifiers, adam, draw)
    begin = saved = time.monotonic()
    losses = train(classifiers, pool.queries, pool.shares, _batches(pool, recipe, draw), recipe.rates(done), adam)
    for step, each in enumerate(losses, done + 1):
        loss = float(each.mean())
        _check_finite(loss, layer, step - 1, recipe)
        now = time.monotonic()
        if now - saved >= save_every or step == recipe.steps:
            _save(path, classifiers, adam, draw, step, before + now - begin)
            saved = time.monotonic()
        show(step, loss)
    with torch.no_grad():
        learnt = classifiers(pool.queries[:, : recipe.batch]).sum()
    _check_finite(float(learnt), layer, recipe.steps, recipe)  # every loss is from before its own step
    return before + time.monotonic() - begin


def _check_finite(loss: float, layer: int, done: int, recipe: Recipe) -> None:
    if math.isfinite(loss):
        return
    what = f"layer {layer}: expected a finite loss after {done} of {recipe.steps} steps, got {loss}"
    if not done:
        raise ValueError(
            f"{what}: the model's own queries or keys are not finite. Load it in another precision (--dtype), and fit "
            "in a new folder (-o)"
        )
    raise ValueError(
        f"{what}: the training diverged at a rate of {recipe.rate:g}. Choose a smaller --rate, and a new folder (-o)"
    )


def _batches(pool: Pool, recipe: Recipe, draw: torch.Generator) -> Iterator[Int64[Tensor, " b"]]:
    while True:
        numbers = torch.randint(pool.queries.shape[1], (recipe.batch,), generator=draw)
        yield numbers.to(pool.queries.device)


def _save(
    path: Path, classifiers: Classifiers, adam: torch.optim.Adam, draw: torch.Generator, step: int, seconds: float
) -> None:
    tensors = adam_state.state_of(classifiers, adam)
    write_tensors(path, {**tensors, "draw": draw.get_state()}, {"step": step, "seconds": seconds})


def _load(path: Path, classifiers: Classifiers, adam: torch.optim.Adam, draw: torch.Generator) -> tuple[int, float]:
    """The steps that were done, and the seconds they took."""
    about = read_about(path)
    if about is None:
        return 0, 0.0
    tensors = read_tensors(path)
    adam_state.restore(classifiers, adam, tensors, path)
    draw.set_state(tensors["draw"])
    return int(about["step"]), float(about["seconds"])

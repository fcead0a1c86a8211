"""Work that is killed (kill -9) at random moments, in children of this process: test_file_faults.py runs it.

Each part prints how many times it killed, and fails if anything was lost, or left over.
"""

import json
import os
import random
import signal
import sys
import time
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file

import kvsketch
from fitted import fitted, result_of, same, settings, tiny_model, write_corpus
from histories import model
from kvsketch.caches.lookup.key_index import DESCRIPTION, read_index
from kvsketch.evaluation.answers.plan import Plan
from kvsketch.evaluation.answers.runner import Runner
from kvsketch.evaluation.embedded.training.recipe import Recipe
from kvsketch.evaluation.embedded.training.tokenizer import build_tokenizer
from kvsketch.evaluation.embedded.training.train import train
from kvsketch.evaluation.results.rows import RowsFile, key_of, read_rows
from kvsketch.files import UNFINISHED
from states import difference, state_of

DRAW = random.Random(0)


def killed(work, longest):
    """Start some work and kill it within so many seconds; whether it was still at it."""
    child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(0)
    end, done = time.monotonic() + DRAW.uniform(0, longest), 0
    while not done and time.monotonic() < end:
        done, _ = os.waitpid(child, os.WNOHANG)
        time.sleep(0.0005)
    if done:
        return False
    os.kill(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def saves(folder, times):
    """Two caches saved in turn under one name: it always holds one of them, whole."""
    ids, path = torch.randint(1, 31, (2, 3000)), folder / "text.safetensors"
    caches = [
        kvsketch.prefill(model(), part[None].expand(4, -1), kvsketch.make_cache(model(), "exact")) for part in ids
    ]
    states = [state_of(cache) for cache in caches]
    caches[0].save(path)
    began = time.monotonic()
    caches[0].save(path)
    seconds = time.monotonic() - began

    def save():
        while True:
            for cache in reversed(caches):
                cache.save(path)

    count, left = 0, set()
    while count < times:
        count += killed(save, 3 * seconds)
        left |= {one.name for one in folder.iterdir()} - {path.name}
        loaded = state_of(kvsketch.load_cache(model(), path))
        assert None in [difference(loaded, state) for state in states]
    assert all(name.startswith(UNFINISHED) for name in left), left
    assert len(left) <= 1, f"{len(left)} of {count} kills left a file"  # it has a name for a moment alone
    caches[0].save(path)
    assert [one.name for one in folder.iterdir()] == [path.name]
    return count


def fits(folder, times):
    """A fit that is killed again and again ends as one that was not."""
    write_corpus(folder, texts=12)
    chosen = settings(steps=60)
    began = time.monotonic()
    fitted(folder, tiny_model(), chosen, out=folder / "whole")
    seconds, count, out = time.monotonic() - began, 0, folder / "killed"
    while count < times:
        # What a kill leaves is gone on from: the later ones meet later parts of the work.
        work = partial(fitted, folder, tiny_model(), chosen, out=out, save_every=0.0)
        count += killed(work, 0.4 * seconds)
        if (out / DESCRIPTION).exists():
            read_index(out).check_files()
            if count < times:
                out = folder / f"killed {count}"
    fitted(folder, tiny_model(), chosen, out=out)
    assert same(result_of(folder / "whole"), result_of(out))
    names = {path.name for path in out.rglob("*")}
    assert names == {path.name for path in (folder / "whole").rglob("*")}, names
    return count


def benches(folder, times):
    """A benchmark that is killed again and again has every row once, as one that was not."""
    tokenizer = build_tokenizer()
    plan = Plan(
        tasks=("lines",), methods=("exact", "uniform(keep=200)"), lengths=(300,), samples=24, batch=2,
        max_new_tokens=4, wording="compact",
    )  # fmt: skip
    about = {"model": "tiny", "fingerprint": "1", "dtype": "float32", "kvsketch": "0"}
    runner = Runner(tiny_model(), tokenizer, plan)

    def bench(name):
        file = RowsFile(folder / name, about)
        for step in runner.run(file.done, key_of):
            file.add(step.rows)

    began = time.monotonic()
    bench("whole.jsonl")
    seconds, count = time.monotonic() - began, 0
    while count < times:
        count += killed(lambda: bench("killed.jsonl"), 0.3 * seconds)
        if (folder / "killed.jsonl").exists():
            rows = read_rows(folder / "killed.jsonl")[1]
            assert len({key_of(row) for row in rows}) == len(rows)
            if len(rows) == plan.answers and count < times:
                (folder / "killed.jsonl").unlink()
    bench("killed.jsonl")
    found = [read_rows(folder / f"{name}.jsonl")[1] for name in ("whole", "killed")]
    whole, again = ({key_of(row): row for row in rows} for rows in found)
    assert whole.keys() == again.keys()
    assert len(whole) == plan.answers
    for key, row in whole.items():
        assert {**row, "seconds": 0} == {**again[key], "seconds": 0}
    return count


def trains(folder, times):
    """A training that is killed again and again ends with the weights of one that was not, and with its log."""
    recipe = Recipe(tokens=2000, batch=192, finish=0.0)
    train(folder / "warm", Recipe(tokens=1, batch=192, finish=0.0))  # its tokenizer and words are made once a process
    began = time.monotonic()
    train(folder / "whole", recipe)
    seconds, count, out = time.monotonic() - began, 0, folder / "killed"
    while count < times:
        count += killed(partial(train, out, recipe, save_every=0.0), seconds)
        if (out / "model").exists() and count < times:
            out = folder / f"killed {count}"
    train(out, recipe)
    whole, again = (load_file(each / "model" / "model.safetensors") for each in (folder / "whole", out))
    assert whole.keys() == again.keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    assert (folder / "whole" / "log.jsonl").read_text() == (out / "log.jsonl").read_text()
    assert {path.name for path in out.iterdir()} == {path.name for path in (folder / "whole").iterdir()}
    return count


def main():
    torch.set_num_threads(1)
    parts = {"save": (saves, 12), "fit": (fits, 5), "bench": (benches, 5), "train": (trains, 3)}
    folder = Path(sys.argv[1])
    found = {}
    for name, (work, times) in parts.items():
        (folder / name).mkdir()
        found[name] = work(folder / name, times)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

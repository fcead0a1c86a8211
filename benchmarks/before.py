"""Time of a step of one layer in this checkout and in another one: `python benchmarks/before.py CHECKOUT`.

The layer has 8 KV heads × 128 in bfloat16, four query heads each. Each version runs in its own process; the two take
turns, twelve steps at a time, so that the state of the machine affects both alike. One version starts first for half of
the turns, and the other one for the rest, in new processes: of two equal versions the second was up to 7 % slower, as
it got its memory after the first. Before a step 64 MB of other memory are read, which leaves little of the step's data
in the processor's caches; a second step follows at once. At the end of a turn come 64 steps in a row, and their mean
includes what is done only every so many tokens. Rows go to docs/results/before.jsonl. Nothing has to be installed in
the other checkout: `git worktree add CHECKOUT COMMIT`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

HERE = Path(__file__).parent.parent
WIDTH, HEADS, GROUP, INDEX = 128, 8, 4, (1024, 1024)
AT_ONCE, WAIT = 12, 0.03  # steps of a turn; seconds for the threads of the other process to fall asleep
IN_ROW = 64
CASES = "exact:256; exact:4096; balancekv(keep=0.25):4096; saap(probes=32):4096; saap(probes=32):171000"


@torch.no_grad()
def work(spec: str, tokens: int, threads: int) -> None:
    """Fill a cache, and answer each input line with the milliseconds of a turn's steps: cold, again and in a row."""
    from kvsketch.caches.registry import parse_spec
    from kvsketch.evaluation.speed.layer import filled
    from kvsketch.evaluation.speed.made import NUMBER, keys_and_values, made_up, new_token

    torch.set_num_threads(threads)
    keys, values = keys_and_values(HEADS, tokens, WIDTH, torch.bfloat16, seed=2)
    with made_up(HEADS, WIDTH, [NUMBER], INDEX) as ready:
        cache = filled(ready(parse_spec(spec)), keys, values)
    others, step = torch.zeros(1 << 24), 0
    print("ready", flush=True)
    for _ in sys.stdin:
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(AT_ONCE):
            others.sum()
            for kind in times:
                asked = new_token(HEADS, GROUP, WIDTH, torch.bfloat16, step)
                began = time.perf_counter()
                cache.read(*asked, WIDTH**-0.5)
                kind.append(time.perf_counter() - began)
                step += 1
        began = time.perf_counter()
        for _ in range(IN_ROW):
            cache.read(*new_token(HEADS, GROUP, WIDTH, torch.bfloat16, step), WIDTH**-0.5)
            step += 1
        in_row = (time.perf_counter() - began) / IN_ROW
        print(*(1e3 * statistics.median(kind) for kind in times), 1e3 * in_row, flush=True)


def versions(trees: list[Path], spec: str, tokens: int, threads: int) -> list["subprocess.Popen[str]"]:
    """A process for each checkout, started one after the other."""
    command = [sys.executable, __file__, str(HERE), "--worker", spec, str(tokens), "--threads", str(threads)]
    started = list[subprocess.Popen[str]]()
    for tree in trees:
        environment = os.environ | {"PYTHONPATH": str(tree / "src")}
        started.append(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        )
        assert _answer(started[-1]) == ["ready"], f"the version in {tree} fills no cache of {spec}"
    return started


def _answer(version: "subprocess.Popen[str]") -> list[str]:
    assert version.stdout is not None
    return version.stdout.readline().split()


def turn(version: "subprocess.Popen[str]") -> list[float]:
    """Run one turn; the milliseconds of its steps."""
    assert version.stdin is not None
    time.sleep(WAIT)
    print(file=version.stdin, flush=True)
    return [float(number) for number in _answer(version)]


def measure(other: Path, threads: int, rounds: int, cases: str) -> None:
    from common import write_row

    before = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True, cwd=other).strip()
    for case in cases.split(";"):
        spec, tokens = case.strip().rsplit(":", 1)
        times = list[list[list[float]]]()
        for order in (1, -1):
            both = versions([other, HERE][::order], spec, int(tokens), threads)
            try:
                turns = [[turn(version) for version in both] for _ in range(-(-rounds // 2) + 1)][1:]
            finally:
                for version in both:
                    version.kill()
                    version.wait()
            times += [each[::order] for each in turns]
        for number, kind in enumerate(("cold", "again", "in a row")):
            was, now = ([one[version][number] for one in times] for version in range(2))
            ratios = [a / b for a, b in zip(was, now, strict=True)]
            low, *_, high = statistics.quantiles(ratios, n=10)
            write_row("before", {
                "method": spec, "tokens": int(tokens), "kind": kind, "threads": threads, "rounds": len(times),
                "before": before,
                "ms_before": round(statistics.median(was), 3), "ms": round(statistics.median(now), 3),
                "ratio": round(statistics.median(ratios), 3), "ratio_10": round(low, 3), "ratio_90": round(high, 3),
            })  # fmt: skip


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("checkout", type=Path)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--rounds", type=int, default=40)
    options.add_argument("--cases", default=CASES, help="SPEC:TOKENS; SPEC:TOKENS; ...")
    options.add_argument("--worker", nargs=2, metavar=("SPEC", "TOKENS"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.worker:
        work(given.worker[0], int(given.worker[1]), given.threads)
    else:
        measure(given.checkout.resolve(), given.threads, given.rounds, given.cases)

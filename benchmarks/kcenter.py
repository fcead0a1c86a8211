"""Time of greedy k-center on one core, with a pass per centre or per several, or in C: `python benchmarks/kcenter.py`.

Every form is compared with the first before its time counts. Writes docs/results/kcenter.jsonl.
"""

from functools import partial
from statistics import quantiles

import torch

from common import RESULTS, seconds, write_row
from kvsketch.kernels.kcenter import lazy, native, reference

N, WIDTH, CENTRES, REPEATS = 8192, 128, 512, 9


def points(kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(N, WIDTH, generator=generator)
    if kind == "gauss":
        return noise
    if kind == "heavy tails":
        return noise / torch.rand(N, 1, generator=generator).sqrt()
    centres = 3 * torch.randn(40, WIDTH, generator=generator)
    return centres[torch.randint(40, (N,), generator=generator)] + noise / 2


def in_c(given: torch.Tensor, wanted: torch.Tensor, valid: torch.Tensor):
    found = native.k_center(given, wanted, valid, CENTRES)
    assert found is not None, "there is a C compiler"
    return found


def main() -> None:
    torch.set_num_threads(1)
    (RESULTS / "kcenter.jsonl").unlink(missing_ok=True)
    valid, wanted = torch.ones(1, N, dtype=torch.bool), torch.tensor([CENTRES])
    for kind in ("gauss", "clustered", "heavy tails"):
        given = points(kind)[None]

        def run(form, given: torch.Tensor = given):
            return form(given if form is in_c else given.double(), wanted, valid)

        first = run(reference.k_center)
        forms = {"a pass for every centre": reference.k_center}
        forms |= {f"{width} candidates a pass": partial(lazy.k_center, candidates=width) for width in (8, 16, 32, 64)}
        forms["in C"] = in_c
        times = {name: [] for name in forms}
        for _ in range(REPEATS):  # in turns, so that a busy moment hits all forms
            for name, form in forms.items():
                times[name].append(seconds(partial(run, form)))
        for name, form in forms.items():
            assert torch.equal(run(form).centres, first.centres), name
            low, middle, high = quantiles(times[name], n=4)
            row = {"data": kind, "form": name, "n": N, "d": WIDTH, "k": CENTRES, "median_seconds": middle}
            write_row("kcenter", row | {"quartiles": [low, high]})


if __name__ == "__main__":
    main()

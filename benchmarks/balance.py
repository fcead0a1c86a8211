"""BalanceKV's Theorems 3.3 and 3.4 in numbers: signed sums against n, errors of a stream against t.

`python benchmarks/balance.py` writes docs/results/balance.jsonl; `figures.py` draws it. Keys have two dimensions and
norm 1, so that a few features represent exp⟨k, ·⟩ and a walk costs O(n). Many walks run side by side, after a check
that each yields the signs of the one-head algorithm; independent fair signs are the walk with c = ∞.
"""

import math
from collections.abc import Iterator
from itertools import count

import torch
from torch import Tensor

from bootstrap import DOUBLE, Row, slope, summary
from common import RESULTS, write_row
from kvsketch.algorithms.balancekv import (
    Tokens,
    balance,
    constant,
    merge_and_reduce,
    no_levels,
    self_balancing_walk,
    softmax_balance,
    softmax_products,
)

SCALE, DELTA, DEGREE = 2**-0.5, 0.01, 10
SQUARED_RADIUS = math.exp(SCALE)  # R² for keys and values of norm 1
QUERIES, STREAMS, STREAM = 16, 32, 2**18
CHUNK, ABREAST = 32, 1024


# -- tokens and walks


def on_circle(*shape: int, generator: torch.Generator) -> Tensor:
    angle = 2 * math.pi * torch.rand(*shape, generator=generator, dtype=DOUBLE)
    return torch.stack([angle.cos(), angle.sin()], -1)


def features(keys: Tensor) -> Tensor:
    """Features of keys on the circle, with products exp(⟨k, k'⟩·scale): √I_0 and √(2 I_n) (cos nθ, sin nθ).

    The I_n are modified Bessel functions: exp(z cos θ) = I_0(z) + 2 Σ I_n(z) cos nθ, which converges like the power
    series that the theorem uses, with 2·DEGREE + 1 terms instead of all monomials.
    """
    turns = torch.view_as_complex(keys.contiguous())[..., None].expand(*keys.shape[:-1], DEGREE).cumprod(-1)
    waves = (
        torch.view_as_real(turns)
        * torch.tensor([math.sqrt(2 * bessel(n)) for n in range(1, DEGREE + 1)], dtype=DOUBLE)[:, None]
    )
    return torch.cat([torch.full_like(keys[..., :1], math.sqrt(bessel(0))), waves.flatten(-2)], -1)


def bessel(order: int) -> float:
    """I_order(scale)."""
    half = SCALE / 2
    return sum(half ** (2 * m + order) / (math.factorial(m) * math.factorial(m + order)) for m in range(12))


def embedded(keys: Tensor, values: Tensor) -> Tensor:
    """φ(k) ⊗ v."""
    return (features(keys)[..., :, None] * values[..., None, :]).flatten(-2)


def walks(keys: Tensor, values: Tensor, bounds: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Signs [w b n], 0 after a failure, and signed sums [w b D] of walks with w bounds on b rows of tokens [b n .]."""
    rows, length = uniforms.shape
    total = torch.zeros(len(bounds), *embedded(keys[:, 0], values[:, 0]).shape, dtype=DOUBLE)
    signs = torch.zeros(length, len(bounds), rows, dtype=DOUBLE)
    alive = torch.ones(len(bounds), rows, dtype=torch.bool)
    for start in range(0, length, CHUNK):
        part = slice(start, start + CHUNK)
        vectors = embedded(keys[:, part].transpose(0, 1), values[:, part].transpose(0, 1))
        for j, vector in enumerate(vectors, start):
            y = torch.linalg.vecdot(total, vector)
            alive &= y.abs() <= bounds
            signs[j] = torch.where(uniforms[:, j] < 0.5 - y / (2 * bounds), 1.0, -1.0) * alive
            total.addcmul_(vector, signs[j, ..., None])
    return signs.permute(1, 2, 0), total


def check() -> None:
    """Check that the features are right to 1e-9, and that every walk has the signs of the one-head algorithms."""
    generator = torch.Generator().manual_seed(0)
    for length in (64, 512):
        keys, values = on_circle(8, length, generator=generator), on_circle(8, length, generator=generator)
        uniforms = torch.rand(8, length, generator=generator, dtype=DOUBLE)
        exact = torch.exp(keys[0] @ keys[0].T * SCALE)
        error = (features(keys[0]) @ features(keys[0]).T / exact - 1).abs().max()
        assert error < 1e-9, f"features miss the kernel by {error:.0e}"
        limits = [constant(length, DELTA), 8.0, 4.0, 2.0]
        signs, total = walks(keys, values, SQUARED_RADIUS * torch.tensor(limits)[:, None], uniforms)
        for row, (k, v, u) in enumerate(zip(keys, values, uniforms, strict=True)):
            one_head = softmax_balance(k, v, 1.0, 1.0, DELTA, u, SCALE).signs
            carried = self_balancing_walk(embedded(k, v), math.sqrt(SQUARED_RADIUS), DELTA, u).signs
            assert torch.equal(one_head, carried)
            assert torch.equal(one_head, signs[0, row])
            for way, c in enumerate(limits[1:], 1):
                expected = balance(softmax_products(k, v, SCALE), c * SQUARED_RADIUS, u).signs
                assert torch.equal(expected, signs[way, row])
                torch.testing.assert_close(expected @ embedded(k, v), total[way, row])
    assert bool((signs == 0).any()), "no walk failed: failures are not checked"


# -- what is expected


def expected_rms(length: int, c: float, width: int) -> float:
    """The expected root mean square of ‖Σ η exp⟨k, q⟩ v‖ over random tokens and queries, as long as no walk fails.

    With b = cR², one step changes the second moment C of the sum to C - (ΣC + CΣ)/b + Σ, where Σ is the second moment
    of the vectors. Along an eigenvector with eigenvalue λ, C is b/2 · (1 - (1 - 2λ/b)^n) after n steps, and n λ for
    fair signs (b = ∞).
    """
    angle = torch.arange(4096, dtype=DOUBLE) * (2 * math.pi / 4096)
    circle = features(torch.stack([angle.cos(), angle.sin()], -1))
    key_moments = torch.linalg.eigvalsh(circle.T @ circle / len(circle)).clamp(min=0)
    vector_moments, b = key_moments / width, c * SQUARED_RADIUS
    moments = length * vector_moments if math.isinf(c) else b / 2 * (1 - (1 - 2 * vector_moments / b) ** length)
    return math.sqrt(width * float(moments @ key_moments))


# -- Theorem 3.3


def signed_sums(seeds: int = 200) -> None:
    """Write ‖Σ η exp⟨k, q⟩ v‖ for the walk and for independent signs; failed walks are counted and left out."""
    found: dict[str, dict[int, Tensor]] = {}
    for length in (2**power for power in range(6, 18)):
        ways = {"theorem": constant(length, DELTA), "c = 16": 16.0, "c = 4": 4.0, "fair signs": math.inf}
        bound = math.sqrt(2) * math.log(length * 2 / DELTA) * math.exp(SCALE)  # with the theorem's constant taken as 1
        for (way, c), error, failed in zip(ways.items(), *errors_of_sums(length, ways, seeds), strict=True):
            row = {"part": "signed sum", "way": way, "n": length, "c": finite(c), "walks": seeds, "queries": QUERIES}
            row |= {"failed": int(failed.sum()), "bound": bound, "expected_rms": expected_rms(length, c, 2)}
            if failed.double().mean() <= 0.5:
                finished = found.setdefault(way, {})[length] = error[~failed]
                over = {str(times): float((finished > times * bound).double().mean()) for times in (1, 30)}
                row |= summary(finished) | {"share_over_bound_times": over}
            write_row("balance", row)
    for way, by_length in found.items():
        upper = {length: errors for length, errors in by_length.items() if length >= 2**12}
        if len(upper) > 2:
            write_row("balance", {"part": "signed sum slope", "way": way} | slope(upper))


def errors_of_sums(length: int, ways: dict[str, float], seeds: int, abreast: int = 50) -> tuple[Tensor, Tensor]:
    """Errors [ways, seeds, queries] of walks with these c on the same tokens and draws, and which walks failed."""
    bounds = SQUARED_RADIUS * torch.tensor(list(ways.values()), dtype=DOUBLE)[:, None]
    errors, failed = [], []
    for first in range(0, seeds, abreast):
        generator = torch.Generator().manual_seed(length + first)
        keys, values = (on_circle(abreast, length, generator=generator) for _ in range(2))
        uniforms = torch.rand(abreast, length, generator=generator, dtype=DOUBLE)
        signs, total = walks(keys, values, bounds, uniforms)
        queries = features(on_circle(abreast, QUERIES, generator=generator))
        errors.append(torch.einsum("bqf,wbfe->wbqe", queries, total.unflatten(-1, (-1, 2))).norm(dim=-1))
        failed.append((signs == 0).any(-1))
    return torch.cat(errors, 1), torch.cat(failed, 1)


def finite(c: float) -> float | None:
    """The number for a row, or None: JSON has no infinity."""
    return None if math.isinf(c) else c


# -- Theorem 3.4


def smaller(keys: Tensor, values: Tensor, present: Tensor, bounds: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Of the tokens [b t .] that are `present` [b t], those that a walk keeps; and which rows failed."""
    signs = torch.cat(
        [
            walks(keys[rows], values[rows] * present[rows, :, None], bounds[None, rows], uniforms[rows])[0][0]
            for rows in (slice(start, start + ABREAST) for start in range(0, len(keys), ABREAST))
        ]
    )
    positive, negative = (signs > 0) & present, (signs < 0) & present
    fewer = (positive.sum(1) <= negative.sum(1))[:, None]
    return torch.where(fewer, positive, negative), (signs == 0).any(1)


def streamed(keys: Tensor, values: Tensor, batch: int, small: float | None, draw) -> tuple[Tokens, Tensor, Tensor]:
    """The last level of MergeAndReduce after n = t·2^T tokens, when all other levels are empty: [streams t .].

    Rows are (stream, batch), so that two halves that share a level are neighbours. `draw(level, b, t)` gives the
    uniforms; `small` is c, or None for the theorem's c, with which a whole stream fails with probability δ at most.
    Returns tokens, which of them are present, and which streams failed.
    """
    streams, length, _ = keys.shape
    keys, values = keys.reshape(-1, batch, keys.shape[-1]), values.reshape(-1, batch, values.shape[-1])
    present = torch.ones(keys.shape[:2], dtype=torch.bool)
    failed = torch.zeros(streams, dtype=torch.bool)
    for level in range(int(math.log2(length / batch))):
        calls = 2 * length / batch
        c = 30 * (present.sum(1).clamp(min=1) * calls / DELTA).log() if small is None else small * torch.ones(len(keys))
        which, fell = smaller(keys, values, present, c * SQUARED_RADIUS, draw(level, len(keys), batch))
        failed |= fell.view(streams, -1).any(1)
        joined = which.view(-1, 2 * batch)
        order = torch.argsort(~joined, dim=1, stable=True)[:, :batch, None]
        keys, values = (x.view(len(joined), 2 * batch, -1).take_along_dim(order, 1) for x in (keys, values))
        present = joined.take_along_dim(order[..., 0], 1)
    return Tokens(keys, values), present, failed


def check_streams(length: int = 512, batch: int = 32) -> None:
    """Check that the last level equals that of `merge_and_reduce`, token for token, for the same draws."""
    rate, calls = int(math.log2(length / batch)), 2 * length / batch
    for seed, small in ((0, None), (1, None), (2, 16.0), (3, 8.0)):
        generator = torch.Generator().manual_seed(seed)
        keys, values = (on_circle(1, length, generator=generator) for _ in range(2))
        uniforms = [torch.rand(length // batch >> level, batch, generator=generator) for level in range(rate)]
        turns = ((level, b >> level) for b in count(1) for level in range(rate) if b % 2**level == 0)

        def halve(tokens: Tokens, *, turns=turns, uniforms=uniforms, small=small) -> Tokens:
            level, turn = next(turns)
            drawn, (k, v) = uniforms[level][turn - 1, : len(tokens.keys)], (tokens.keys, tokens.values)
            if small is None:
                return tokens.choose(softmax_balance(k, v, 1.0, 1.0, DELTA / calls, drawn, SCALE).smaller)
            return tokens.choose(balance(softmax_products(k, v, SCALE), small * SQUARED_RADIUS, drawn).smaller)

        state = no_levels(batch, rate)
        for key, value in zip(keys[0], values[0], strict=True):
            state = merge_and_reduce(state, key, value, halve)
        last, present, _ = streamed(keys, values, batch, small, lambda level, *_, uniforms=uniforms: uniforms[level])
        assert state.levels[:-1] == (None,) * rate
        assert torch.equal(state.levels[-1].keys, last.keys[present])
        assert torch.equal(state.levels[-1].values, last.values[present])


def answers(keys: Tensor, values: Tensor, queries: Tensor) -> Tensor:
    """Σ exp⟨k, q⟩ v, [streams queries e]."""
    return torch.cat([torch.exp(q @ k.T * SCALE)[None] @ v for k, v, q in zip(keys, values, queries, strict=True)])


def streams() -> None:
    """Write errors of streams and of weighted uniform samples against t; failed streams are counted and left out."""
    generator = torch.Generator().manual_seed(0)
    for kind in ("values", "ones"):
        found: dict[str, dict[int, Tensor]] = {}
        for batch in (2**power for power in range(6, int(math.log2(STREAM)) - 2)):
            row = {"part": "stream", "kind": kind, "n": STREAM, "t": batch, "T": int(math.log2(STREAM / batch))}
            for way, errors, more in errors_of_streams(kind, batch, generator):
                found.setdefault(way, {})[batch] = errors
                row |= {"way": way, "streams": STREAMS, "queries": QUERIES}
                write_row("balance", row | more | summary(errors))
        for way, by_batch in found.items():
            for low, high in ((2**6, 2**10), (2**10, 2**15), (2**12, 2**15)):
                part = {batch: errors for batch, errors in by_batch.items() if low <= batch <= high}
                write_row("balance", {"part": "stream slope", "kind": kind, "way": way} | slope(part))


def errors_of_streams(kind: str, batch: int, generator: torch.Generator) -> Iterator[tuple[str, Tensor, Row]]:
    """Each way with its errors [streams, queries] over n·e^(-r²·scale)·max ‖v‖, the ε of the theorem.

    Samples have two sizes: the number of tokens that MergeAndReduce holds at the end, t, and the most that it ever
    holds, t·(T + 2)/2: a full level 0 and half of every other level.
    """
    keys, on_plane, queries = (on_circle(STREAMS, n, generator=generator) for n in (STREAM, STREAM, QUERIES))
    values = on_plane if kind == "values" else torch.ones_like(on_plane[..., :1])
    exact, unit, rate = answers(keys, values, queries), STREAM * math.exp(-SCALE), int(math.log2(STREAM / batch))

    def draw(_level: int, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=DOUBLE)

    for way, small in (("theorem", None), ("c = 16", 16.0), ("fair signs", math.inf)):
        last, present, failed = streamed(keys, values, batch, small, draw)
        kept = 2.0**rate * answers(last.keys, last.values * present[..., None], queries)
        c = 30 * math.log(2 * STREAM / DELTA) if small is None else small
        more = {"c": finite(c), "failed": int(failed.sum()), "held": float(present.sum(1).double().mean())}
        more |= {"first_halving_alone": expected_rms(batch, c, values.shape[-1]) / (batch * math.exp(-SCALE))}
        yield way, (kept - exact).norm(dim=-1)[~failed] / unit, more
    for way, size in (("sample of t", batch), ("sample of most held", batch * (rate + 2) // 2)):
        chosen = torch.stack([torch.randperm(STREAM, generator=generator)[:size] for _ in range(STREAMS)])
        k, v = (x.take_along_dim(chosen[..., None], 1) for x in (keys, values))
        yield way, (STREAM / size * answers(k, v, queries) - exact).norm(dim=-1) / unit, {"held": size}


if __name__ == "__main__":
    torch.set_num_threads(1)
    (RESULTS / "balance.jsonl").unlink(missing_ok=True)
    check()
    check_streams()
    signed_sums()
    streams()

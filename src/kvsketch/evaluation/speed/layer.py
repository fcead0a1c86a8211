"""One layer: stock's attention, two plain products, exact and every method, first checked, then timed by turns."""

import statistics
import tempfile
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens, Unrotated
from kvsketch.caches.exact import Exact
from kvsketch.evaluation.results.rows import Row, RowsFile, key_of
from kvsketch.evaluation.speed.checks import Checked, check_dense, check_layer
from kvsketch.evaluation.speed.clock import Memory, Turn, in_turn, no_room, seconds, share_of_memory, summed_up
from kvsketch.evaluation.speed.made import NUMBER, Ready, keys_and_values, made_up, new_layer, new_token
from kvsketch.evaluation.speed.plan import BUILD, EXACT, FOLDED, KEY, LAYER, PRODUCTS, STOCK, TORCH, C, Plan
from kvsketch.kernels.native.build import build_into

Form = tuple[str, str]  # a method, and its kernels
FILLING = 3  # memory that filling a cache may take, in times the bytes of all keys and values
Steps = Iterator[tuple[str, int]]


@dataclass(frozen=True)
class Case:
    """A way to answer a query and to take in its token, with the result of the check before it is timed."""

    step: Callable[[Tensor, NewTokens], object]
    checked: Checked
    held: int  # bytes


def build(plan: Plan, rows: RowsFile) -> None:
    """Time once how long it takes to compile the kernels."""
    labels = plan.labels(BUILD, 0, BUILD, C)
    if C in plan.kernels and key_of(labels, KEY) not in rows.done:
        with tempfile.TemporaryDirectory() as folder:
            rows.add([{**labels, "seconds": round(seconds(partial(build_into, Path(folder))), 3)}])


def run(plan: Plan, rows: RowsFile, memory: Memory, say: Callable[[str], None]) -> Steps:
    """Measure rows that the file lacks, length by length; yields what comes next, and how many rows that settles."""
    with made_up(plan.kv_heads, plan.width, [NUMBER], plan.index) as ready:
        for tokens in plan.lengths:
            wanted = plan.missing(tokens, rows.done)
            yield f"{tokens:,} tokens", len(plan.forms()) - len(wanted)
            if wanted:
                yield from _length(plan, tokens, wanted, rows, memory, ready, say)


def _length(
    plan: Plan, tokens: int, wanted: Sequence[Form], rows: RowsFile, memory: Memory, ready: Ready,
    say: Callable[[str], None],
) -> Steps:  # fmt: skip
    """Measure every form that is wanted at this length, and those that others are compared with."""
    whole = 2 * plan.kv_heads * tokens * plan.width * plan.precision.itemsize
    if missing := no_room(3 * whole + 16 * tokens * plan.width * 2):
        say(f"{tokens:,} tokens of one layer are left out: {missing}")
        yield f"{tokens:,} tokens", len(wanted)
        return
    cases = dict[Form, Case]()
    dense = keys_and_values(plan.kv_heads, tokens, plan.width, plan.precision, seed=2)
    for method in (STOCK, EXACT, *(name for name in plan.configs if any(name == form[0] for form in wanted))):
        yield f"{tokens:,} tokens, {method}", 0
        missing = no_room(FILLING * whole) if method in plan.configs else None
        if missing:
            say(f"{method} is left out at {tokens:,} tokens: {missing}")
            yield f"{tokens:,} tokens", len([form for form in wanted if form[0] == method])
        else:
            cases |= _dense_cases(plan, *dense) if method == STOCK else _cases(plan, method, ready, *dense)
    right = {form: case for form, case in cases.items() if case.checked.right(plan.within)}
    taken = yield from _timed(plan, right, memory, f"{tokens:,} tokens")
    found = [_row(plan, tokens, form, case, taken) for form, case in cases.items()]
    rows.add(row for row in found if (row["method"], row["kernel"]) in wanted)
    yield f"{tokens:,} tokens", len([form for form in wanted if form in cases])


def dense_forms(keys: Tensor, values: Tensor, group: int, scale: float) -> dict[str, Callable[[Tensor], Tensor]]:
    """Other ways to compute the full attention of one token, by name."""
    folded = (1, keys.shape[1], group, keys.shape[3])

    def stock(query: Tensor) -> Tensor:  # the call of transformers
        return F.scaled_dot_product_attention(query, keys, values, scale=scale, enable_gqa=group > 1)

    def at_its_best(query: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query.view(folded), keys, values, scale=scale).view_as(query)

    def products(query: Tensor) -> Tensor:
        logits = (query.view(folded) @ keys.mT).float() * scale
        return (torch.softmax(logits, 3).to(query.dtype) @ values).view_as(query)

    return {STOCK: stock, FOLDED: at_its_best, PRODUCTS: products}


@torch.no_grad()
def _dense_cases(plan: Plan, keys: Tensor, values: Tensor) -> dict[Form, Case]:
    """All dense forms, checked."""
    query, _ = _token(plan, -1000)

    def case(form: Callable[[Tensor], Tensor]) -> Case:
        checked = check_dense(form(query), query, keys, values, plan.scale)
        return Case(lambda query, new: form(query), checked, keys.nbytes + values.nbytes)

    forms = dense_forms(keys, values, plan.group, plan.scale)
    return {(name, TORCH): case(form) for name, form in forms.items()}


@torch.no_grad()
def _cases(plan: Plan, method: str, ready: Ready, keys: Tensor, values: Tensor) -> dict[Form, Case]:
    """A cache that holds these tokens, as a case for every kernel that can read it."""
    cache = filled(ready(plan.configs.get(method, Exact())), keys, values)
    query, _ = _token(plan, -1000)

    def step(query: Tensor, new: NewTokens) -> object:
        return cache.read(query, new, plan.scale, lse=False)

    return {
        (method, kernel): Case(step, check_layer(cache, query, plan.scale, kernel), cache.nbytes)
        for kernel in plan.kernels
    }


def filled(config: MethodConfig, keys: Tensor, values: Tensor) -> LayerCache:
    """A cache of one layer that was given these tokens in one call, without rotation."""
    cache = new_layer(config)
    cache.hold(NewTokens(keys, values, None, Unrotated(keys, keys)))
    return cache


def _timed(
    plan: Plan, cases: dict[Form, Case], memory: Memory, label: str
) -> Generator[tuple[str, int], None, dict[Form, list[Turn]]]:
    """Time these cases, all of which are right; the turns of each."""

    def work(case: Case, step: int) -> Callable[[], object]:
        return partial(case.step, *_token(plan, step))

    works = {form: partial(work, case) for form, case in cases.items()}
    taken: dict[Form, list[Turn]] = {form: [] for form in cases}
    for number in in_turn(plan, memory, works, {form: form[1] for form in cases}, taken):
        yield f"{label}, round {number + 1}", 0
    return taken


def _token(plan: Plan, step: int) -> tuple[Tensor, NewTokens]:
    return new_token(plan.kv_heads, plan.group, plan.width, plan.precision, step)


def _row(plan: Plan, tokens: int, form: Form, case: Case, taken: dict[Form, list[Turn]]) -> Row:
    """A case's row; without times if its answer is wrong."""
    row = plan.labels(LAYER, tokens, *form)
    for name, (own, plain) in case.checked.errors.items():
        row |= {f"{name}_error": own, f"plain_{name}_error": plain}
    row |= {"right": form in taken, "nbytes": case.held, "entries": case.checked.entries, "read": case.checked.nbytes}
    if form not in taken:
        return row
    times = summed_up([turn.seconds for turn in taken[form]])
    beside = (EXACT, form[1] if form[0] in (EXACT, *plan.configs) else plan.kernels[0])
    exact = summed_up([turn.seconds for turn in taken[beside]])["seconds"] if beside in taken else None
    memory = statistics.median(turn.memory for turn in taken[form])
    share = share_of_memory(case.checked.nbytes, taken[form])
    return row | times | {"exact": exact, "memory": round(memory), "share": round(share, 4)}

"""What a method costs beside exact, in one process and by turns: seconds to compress, decode speed, peak memory.

A prompt is read with the notes that a method needs, by turns with exact, and then compressed several times. Then both
caches take the same tokens, a step of each by turns, so that a busy moment of the machine hits both.
"""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.exact import Exact
from kvsketch.caches.registry import parse_spec
from kvsketch.evaluation.board.peak import peak_bytes
from kvsketch.evaluation.board.timed import READ, WARM, Plan
from kvsketch.evaluation.reading import readable_for
from kvsketch.evaluation.results.rows import Row, RowsFile
from kvsketch.huggingface import SketchCache, attach, detach, make_cache, prefill
from kvsketch.huggingface.naming import as_argument

T = TypeVar("T")
TOLERANCE = 0.05  # relative error allowed of exact's logits beside those of transformers, in any precision


@dataclass(frozen=True)
class Read:
    """A cache that has read the prompt in one way, with the seconds of this reading and of exact's by turns."""

    cache: SketchCache
    exact: list[float]
    own: list[float]


def run(model: PreTrainedModel, ids: Int64[Tensor, "1 n"], plan: Plan, rows: RowsFile) -> Iterator[tuple[str, int]]:
    """Measure methods that the file lacks, one by one; yields what was just done, and how many rows that settles."""
    clocks = functools.cache(lambda: Clocks(model, ids, plan))
    wanted = {method: plan.labels(method) for method in plan.methods}
    return rows.fill(wanted, lambda method: clocks().measure(parse_spec(method)), "speed beside exact")


class Clocks:
    """Times to read one prompt, to compress it, and to decode after it."""

    def __init__(self, model: PreTrainedModel, ids: Int64[Tensor, "1 n"], plan: Plan) -> None:
        self.model, self.plan = model, plan
        self.read, self.next = ids[:, : plan.tokens], ids[0, plan.tokens : plan.needed]
        self.readings = dict[MethodConfig, Read]()
        self._check_exact(ids[:, : plan.tokens + 1])

    @torch.no_grad()
    def measure(self, config: MethodConfig) -> Row:
        """A row: all seconds as they were measured, and bytes."""
        peak, cache = peak_bytes(lambda: self._cache(config), self.model.device)
        shared = readable_for(config)
        reading = self._reading(config if shared is None else shared)
        compressing = list[float]()
        for _ in range(0 if shared is None else self.plan.turns + 1):
            compressing.append(self._seconds(lambda: reading.cache.compress(config)))
        report = cache.report()
        exact, own = self._steps(cache, config)
        return {
            "exact_reading": reading.exact,
            "reading": reading.own,
            "compressing": compressing[1:],
            "exact_step": exact,
            "step": own,
            "peak_nbytes": peak,
            "nbytes": report.nbytes,
            "full_nbytes": report.full_nbytes,
            "looked_up": cache.report().looked_up,
        }

    @torch.no_grad()
    def _check_exact(self, ids: Int64[Tensor, "1 n"]) -> None:
        """Refuse to time anything if exact's answers are wrong."""
        detach(self.model)
        expected = self.model(ids, logits_to_keep=1, use_cache=False).logits[0, -1]
        cache = self._cache(Exact())
        found = self._step(as_argument(self.model.forward, cache), ids[0, -1], self.plan.tokens)
        wrong = float((found - expected).norm() / expected.norm())
        if not wrong < TOLERANCE:
            raise ValueError(f"exact answers differ from those of transformers by {wrong:.3f}: no times are taken")

    def _cache(self, config: MethodConfig) -> SketchCache:
        return prefill(self.model, self.read, make_cache(self.model, config))

    def _reading(self, config: MethodConfig) -> Read:
        """The reading that this config needs, by turns with exact; kept if other methods can share it."""
        if config not in self.readings:
            exact, own, cache = list[float](), list[float](), None
            for _ in range(READ):
                exact.append(self._seconds(lambda: self._cache(Exact())))
                if config != Exact():
                    cache, taken = self._timed(lambda: self._cache(config))
                    own.append(taken)
            read = Read(self._cache(config) if cache is None else cache, exact, own or exact)
            if readable_for(config) is None:
                return read  # no other method can share it
            self.readings[config] = read
        return self.readings[config]

    def _steps(self, cache: SketchCache, config: MethodConfig) -> tuple[list[float], list[float]]:
        """Seconds of exact's steps and of the method's, over the same tokens."""
        exact, own, whole = list[float](), list[float](), self._reading(Exact()).cache.fork()
        for number, token in enumerate(self.next):
            for one, times in ((whole, exact), (cache, own)):
                if config.before_rotation:  # watching what comes before rotation would cost exact time too
                    detach(self.model)
                    attach(self.model, before_rotation=one is cache)
                given = as_argument(self.model.forward, one)  # not a part of the step
                times.append(self._seconds(functools.partial(self._step, given, token, self.plan.tokens + number)))
        if config.before_rotation:
            detach(self.model)
            attach(self.model)
        return exact[WARM:], own[WARM:]

    def _step(self, given: dict[str, SketchCache], token: Int64[Tensor, ""], place: int) -> Tensor:
        positions = torch.tensor([[place]], device=token.device)
        logits: Tensor = self.model(token.view(1, 1), **given, position_ids=positions, use_cache=True).logits[0, -1]
        return logits

    def _seconds(self, work: Callable[[], object]) -> float:
        return self._timed(work)[1]

    def _timed(self, work: Callable[[], T]) -> tuple[T, float]:
        self._wait()
        began = time.perf_counter()
        made = work()
        self._wait()
        return made, round(time.perf_counter() - began, 7)

    def _wait(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

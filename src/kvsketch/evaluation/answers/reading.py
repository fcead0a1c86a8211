"""Reading a batch of prompts with questions once, exactly, for all methods that can continue from that."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel

from kvsketch.caches.core.config import MethodConfig
from kvsketch.caches.exact import Exact
from kvsketch.evaluation.answers.plan import Asked
from kvsketch.evaluation.reading import readable_for
from kvsketch.huggingface import SketchCache, make_cache, prefill


@dataclass(frozen=True)
class Prompt:
    """A document and a question on it, as tokens."""

    context: list[int]
    question: list[int]
    answers: tuple[str, ...]
    depth: float | None


class Reading:
    """A batch of prompts: exact caches that have read it, and the methods' caches made from them."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Prompt],
        pad: Callable[[list[list[int]]], tuple[Tensor, Tensor]],
        methods: Sequence[tuple[Asked, MethodConfig]] = (),
    ) -> None:
        """`methods` are all that will be asked for; those with the same question mode share a reading if they can."""
        self.model, self.prompts, self.pad, self.methods = model, prompts, pad, methods
        self._exact = dict[tuple[Asked, Exact], SketchCache]()

    def begin(self, asked: Asked, config: MethodConfig) -> None:
        """Read exactly what a method can share with others, if it can."""
        shared = self._readable(asked, config)
        if shared is not None:
            self._read_for(asked, shared)

    def compressed(self, asked: Asked, config: MethodConfig) -> SketchCache:
        """A method's cache of the documents and, if known before, of the questions without their last tokens."""
        shared = self._readable(asked, config)
        if shared is not None:
            return self._read_for(asked, shared).compress(config)
        return self._read_whole(asked, config)

    def _readable(self, asked: Asked, config: MethodConfig) -> Exact | None:
        return readable_for(config, [other for mode, other in self.methods if mode == asked])

    def _read_for(self, asked: Asked, config: Exact) -> SketchCache:
        """The exact cache of the documents, and of the questions if they are known before; read once.

        Notes of queries are taken within one call, so where they are taken, document and question are read in one.
        """
        if (asked, config) not in self._exact:
            for other in [key for key in self._exact if key[1].askings]:
                del self._exact[other]  # modes come one by one, and a whole cache with notes for each is much
            if asked == "after" or config.askings:
                self._exact[asked, config] = self._read_whole(asked, config)
            else:
                questions = [p.question[:-1] for p in self.prompts]
                self._exact[asked, config] = self._read(questions, self._read_for("after", config).fork())
        return self._exact[asked, config]

    def _read_whole(self, asked: Asked, config: MethodConfig) -> SketchCache:
        """A cache of this method that has read the documents, and questions known before, in one call."""
        known = [p.question[:-1] if asked == "before" else [] for p in self.prompts]
        rows = [p.context + question for p, question in zip(self.prompts, known, strict=True)]
        return self._read(rows, make_cache(self.model, config))

    def _read(self, rows: list[list[int]], cache: SketchCache) -> SketchCache:
        ids, mask = self.pad(rows)
        return prefill(self.model, ids, cache, attention_mask=mask) if ids.shape[1] else cache

"""Reading a batch of prompts with questions once, exactly, for all methods that can take that over."""

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
    """A batch of prompts: what was read of it exactly, and what methods make of that."""

    def __init__(
        self,
        model: PreTrainedModel,
        prompts: Sequence[Prompt],
        pad: Callable[[list[list[int]]], tuple[Tensor, Tensor]],
        methods: Sequence[tuple[Asked, MethodConfig]] = (),
    ) -> None:
        """`methods` are those that will be asked for: those of one mode share a reading where they can."""
        self.model, self.prompts, self.pad, self.methods = model, prompts, pad, methods
        self._exact = dict[tuple[Asked, Exact], SketchCache]()

    def begin(self, asked: Asked, config: MethodConfig) -> None:
        """Read what a method can share with others."""
        shared = self._readable(asked, config)
        if shared is not None:
            self._read_for(asked, shared)

    def compressed(self, asked: Asked, config: MethodConfig) -> SketchCache:
        """A cache that has read the documents, and all but the last token of the questions if they are known before."""
        shared = self._readable(asked, config)
        if shared is not None:
            return self._read_for(asked, shared).compress(config)
        return self._read_whole(asked, config)

    def _readable(self, asked: Asked, config: MethodConfig) -> Exact | None:
        return readable_for(config, [other for mode, other in self.methods if mode == asked])

    def _read_for(self, asked: Asked, config: Exact) -> SketchCache:
        """The exact cache of the documents, and of the questions if they are known before; read once.

        Notes of queries are those of one call, so where they are taken documents and questions are read as one.
        """
        if (asked, config) not in self._exact:
            for other in [key for key in self._exact if key[1].askings]:
                del self._exact[other]  # modes follow one another, and a whole cache with notes for each is much
            if asked == "after" or config.askings:
                self._exact[asked, config] = self._read_whole(asked, config)
            else:
                questions = [p.question[:-1] for p in self.prompts]
                self._exact[asked, config] = self._read(questions, self._read_for("after", config).fork())
        return self._exact[asked, config]

    def _read_whole(self, asked: Asked, config: MethodConfig) -> SketchCache:
        """A cache of this method that has read all there is to read, in one call."""
        known = [p.question[:-1] if asked == "before" else [] for p in self.prompts]
        rows = [p.context + question for p, question in zip(self.prompts, known, strict=True)]
        return self._read(rows, make_cache(self.model, config))

    def _read(self, rows: list[list[int]], cache: SketchCache) -> SketchCache:
        ids, mask = self.pad(rows)
        return prefill(self.model, ids, cache, attention_mask=mask) if ids.shape[1] else cache

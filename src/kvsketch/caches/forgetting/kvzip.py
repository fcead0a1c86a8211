"""KVzip (Kim et al. 2025, arXiv:2505.23416): what a model looks at when it reads the prompt a second time."""

from dataclasses import dataclass
from typing import ClassVar

from kvsketch.caches.core.asking import MAX, QUESTIONS, SECOND, Asking
from kvsketch.caches.core.checks import check_choice
from kvsketch.caches.core.chooser import Chooser
from kvsketch.caches.core.shares import THRESHOLD
from kvsketch.caches.forgetting.scored import Noted, NotedConfig


@dataclass(frozen=True, kw_only=True)
class KVzip(NotedConfig):
    """Keeps sinks, window and the tokens that are looked at when the model reads the prompt again, behind itself.

    A token's score is the largest weight that it gets from any query of the second reading, of both readings' tokens
    together. Of later text: from any query while it is in the window. Deviation from the paper: the text is read
    again as it is, without a prompt that asks to repeat it. With `queries="questions"` it is questions that ask, those
    given to `make_cache`.
    """

    name: ClassVar[str] = "kvzip"

    heads: str = THRESHOLD
    queries: str = SECOND

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("queries", self.queries, (SECOND, QUESTIONS))

    @property
    def asking(self) -> Asking:
        return Asking(self.queries, MAX)

    @property
    def holds_back(self) -> bool:
        return True

    def new_method(self, layer: int) -> Chooser:
        return Noted(self)

"""KVzip (Kim et al. 2025, arXiv:2505.23416): what a model looks at when it reads the prompt a second time."""

from dataclasses import dataclass
from typing import ClassVar

from kvsketch.caches.core.asking import MAX, SECOND, Asking
from kvsketch.caches.core.chooser import Chooser
from kvsketch.caches.core.shares import THRESHOLD
from kvsketch.caches.forgetting.scored import Noted, NotedConfig


@dataclass(frozen=True, kw_only=True)
class KVzip(NotedConfig):
    """Keeps sinks, window and the tokens that are looked at when the model reads the prompt again, behind itself.

    A token's score is the largest weight that it gets from any query of the second reading, of both readings' tokens
    together. Of later text: from any query while it is in the window. Deviation from the paper: the text is read
    again as it is, without a prompt that asks to repeat it.
    """

    name: ClassVar[str] = "kvzip"

    heads: str = THRESHOLD

    @property
    def asking(self) -> Asking:
        return Asking(SECOND, MAX)

    @property
    def holds_back(self) -> bool:
        return True

    def new_method(self, layer: int) -> Chooser:
        return Noted(self)

"""KVzip (Kim et al. 2025, arXiv:2505.23416): what a model looks at when it reads the prompt a second time."""

from dataclasses import dataclass
from typing import ClassVar

from kvsketch.caches.core.asking import MAX, SECOND
from kvsketch.caches.core.chooser import Chooser
from kvsketch.caches.core.shares import THRESHOLD
from kvsketch.caches.forgetting.scored import Noted, QueriesConfig


@dataclass(frozen=True, kw_only=True)
class KVzip(QueriesConfig):
    """Keeps sinks, window and the tokens that are looked at when the model reads the prompt again, behind itself.

    A token's score is the largest weight that it gets from any query of the second reading, of all that this sees. Of
    later text: from any query while it is in the window. Deviation from the paper: the text is read again as it is, in
    pieces, without a prompt that asks to repeat it. `queries` has others asked: questions, those given to
    `make_cache`; or the prompt's own, all of them ("context") or the last `observed` ("window").
    """

    name: ClassVar[str] = "kvzip"
    noted: ClassVar[str] = MAX

    heads: str = THRESHOLD
    queries: str = SECOND

    def new_method(self, layer: int) -> Chooser:
        return Noted(self)

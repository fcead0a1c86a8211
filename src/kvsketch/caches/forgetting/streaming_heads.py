"""DuoAttention's layout (Xiao et al. 2024, arXiv:2410.10819): heads that hold everything, and heads that forget."""

from dataclasses import dataclass
from typing import ClassVar

from kvsketch.caches.core.budget import Budget
from kvsketch.caches.core.checks import check_count
from kvsketch.caches.core.config import BudgetedConfig
from kvsketch.caches.core.profile import PROFILE
from kvsketch.caches.core.shares import EQUAL, LENGTH, PYRAMID, Shares

WHOLE = 1 - 1e-9


@dataclass(frozen=True, kw_only=True)
class StreamingHeads(BudgetedConfig):
    """Keeps everything in the heads that look far back, and sinks and the latest tokens in the others.

    A profile says which heads hold everything: those with the largest parts, as many as the budget allows at 2,048
    tokens. They are the same in all rows of a batch; where tokens are protected, as many as fit beside the protected
    tokens of any row, at the length of the prompt if that is more. Deviation from the paper: it learns which heads they
    are by training on synthetic texts.
    """

    name: ClassVar[str] = "streaming_heads"
    window_by_budget: ClassVar[bool] = True
    leaving: ClassVar[int] = 8

    window: int = 16
    heads: str = PROFILE

    def __post_init__(self) -> None:
        check_count("window", self.window, least=1)
        super().__post_init__()
        if self.heads in (EQUAL, PYRAMID) or not isinstance(self.keep, float):
            raise ValueError(
                f"{self.name} needs a fraction to keep, and a profile that says which heads hold everything: "
                f"heads={PROFILE!r} or the file of one, got keep={self.keep!r}, heads={self.heads!r}"
            )

    def floor(self) -> int:
        return self.sinks + self.window

    def window_size(self, budget: Budget, count: int) -> int | None:
        full = budget.share * (budget.fraction or 0) >= WHOLE
        return count + budget.beside if full else self.window  # protected tokens are not in `count`, but stay here too

    def new_method(self, layer: int) -> None:
        """Nothing remains of what leaves the window."""

    def divided(self, shares: Shares, beside: int = 0, length: int = LENGTH) -> Shares:
        """The heads with the largest shares get all, the others nothing beyond sinks, window and what is held `beside`.

        As many get all as fit at this length of a text, or at the usual length if that is more.
        """
        assert isinstance(self.keep, float), "checked above"
        heads = [(-share, layer, head) for layer, own in shares.items() for head, share in enumerate(own)]
        least, length = self.floor() + beside, max(LENGTH, length)
        part = max(0.0, self.keep * length - least) / max(1, length - least)
        full = {(layer, head) for _, layer, head in sorted(heads)[: int(part * len(heads))]}
        return {
            layer: [1 / self.keep if (layer, head) in full else 0.0 for head in range(len(own))]
            for layer, own in shares.items()
        }

"""BalanceKV: its options. The forms of its cache are `practical.py` and `theorem.py`."""

from dataclasses import dataclass
from typing import ClassVar

from kvsketch.caches.core.checks import check_choice, check_count, check_number, check_seed
from kvsketch.caches.core.config import BLOCK, WindowedConfig
from kvsketch.caches.core.method import Method
from kvsketch.caches.forgetting.balancekv.batches import Theorem
from kvsketch.caches.forgetting.balancekv.practical import WALKS, Halves, Halving
from kvsketch.caches.forgetting.balancekv.theorem import TheoremSets

OPTIONS = {
    "practical": ("walk", "sharpness", "augmented", "apart"),
    "faithful": ("constant", "failure", "epsilon"),
}  # by mode


@dataclass(frozen=True, kw_only=True)
class BalanceKV(WindowedConfig):
    """Keeps sinks, window, tokens unlike all others, and of the rest halves of halves that answer like the whole.

    Blocks of `block` tokens are halved; smaller ones at the end of a call, and where a stream has little room.
    `mode="practical"`, the form of the experiments: exactly half of a block is kept. `walk="greedy"` takes the sign
    that brings the sum back; `walk="fair"` tosses coins, to show what the walk is worth. `sharpness` is a factor on the
    walk's logits: below 1, keys farther apart balance each other. Tokens whose keys point away from all others are
    set apart and not halved; `apart` is their share of the room, and with `augmented=False` there are none.
    `mode="faithful"`, the form of the theorem: buckets of value norms, a set of tokens for each sum, and signs drawn
    with c = `constant` · log(n/`failure`); buckets are erased with the precision `epsilon`.
    """

    name: ClassVar[str] = "balancekv"

    mode: str = "practical"
    block: int = 256
    walk: str = "greedy"
    sharpness: float | int = 0.25
    augmented: bool = True
    apart: float = 0.5
    constant: float | int = 30
    failure: float = 0.01
    epsilon: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        check_choice("mode", self.mode, OPTIONS)
        for mode, names in OPTIONS.items():
            for name in names if mode != self.mode else ():
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(f"{name} is an option of mode={mode!r}, and mode is {self.mode!r}")
        check_count("block", self.block, least=BLOCK, most=1 << 14)
        if self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two, got {self.block}")
        check_seed(self.seed)
        check_choice("walk", self.walk, WALKS)
        if not isinstance(self.augmented, bool):
            raise ValueError(f"augmented must be True or False, got {self.augmented!r}")
        check_number("sharpness", self.sharpness, above=0)
        check_number("apart", self.apart, above=0, below=1)
        if self.apart != type(self).apart and not self.augmented:
            raise ValueError(f"apart is an option of augmented=True, got apart={self.apart!r} without it")
        check_number("constant", self.constant, above=0)
        check_number("failure", self.failure, above=0, below=1)
        check_number("epsilon", self.epsilon, above=0)
        super().__post_init__()

    def floor(self) -> int:
        return super().floor() + BLOCK  # with less, each level holds a token more or less: nothing to halve

    def new_method(self, layer: int) -> Method:
        if self.mode == "practical":
            options = Halving(
                self.block, self.walk, self.sharpness, self.apart if self.augmented else 0.0, self.seed, layer
            )
            return Halves(options, self.room)
        return TheoremSets(Theorem(self.block, self.constant, self.failure, self.epsilon, self.seed, layer), self.room)

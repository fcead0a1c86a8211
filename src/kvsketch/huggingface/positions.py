"""Where the tokens that were read stand in their rows, and whether new ones continue them."""

from typing import Any

import torch
from torch import Tensor

from kvsketch.caches.core.buffers import Growing
from kvsketch.caches.core.tokens import NewTokens


class Positions:
    """Which tokens so far are padding, and at which position each row began."""

    def __init__(self) -> None:
        self.padding = Growing(dim=1)  # once there is padding: which tokens so far are real
        self.offsets: list[int] | None = None  # position minus rank, of each row's first token
        self.checked = False  # whether the present call's positions were checked

    @property
    def real(self) -> Tensor | None:
        """Which tokens so far are real, rows × tokens; None if all are."""
        return self.padding.view if self.padding.length else None

    def real_tokens(self, count: int, rows: int) -> list[int]:
        """How many of the last `count` places of each row are tokens, and not padding."""
        if self.padding.length:
            return self.padding.view[:, max(0, self.padding.length - count) :].sum(1).tolist()
        return [count] * rows

    # -- before a call

    def check_mask(self, mask: Tensor, new: int, seen: int) -> None:
        """Refuse a mask that hides what was read, or shows what was padding; with single tokens it is not checked."""
        if new == 1 or not seen:
            return
        before = mask[:, :seen].bool()
        same = torch.equal(before, self.padding.view.to(before)) if self.padding.length else bool(before.all())
        if not same:
            raise ValueError(
                "the attention mask disagrees with the cache about which tokens read so far are padding: what was "
                "read cannot be hidden any more. Pass the mask of cache.new_tokens(ids)"
            )

    def check(self, positions: Tensor, valid: Tensor | None, lengths: list[int]) -> None:
        """Refuse tokens that do not continue rows of these lengths: text cut wrongly, or several texts in one row."""
        if positions.ndim != 2:
            return
        positions = positions.expand(len(lengths), -1)
        _check_one_text(positions, valid)
        if valid is None:
            first = positions[:, 0].tolist()
            begun = [True] * len(first)
        else:  # the device is asked once
            at = valid.long().argmax(1, keepdim=True)
            first, begun = torch.cat([positions.gather(1, at), valid.gather(1, at)], 1).T.tolist()
        offsets = [place - length for place, length in zip(first, lengths, strict=True)]
        there = self.offsets if any(lengths) else None  # before anything was read they are left by a refused call
        before = there or offsets
        for row, (offset, known, real) in enumerate(zip(offsets, before, begun, strict=True)):
            if real and lengths[row] and offset != known:
                if self.padding.length and not bool(self.padding.view[row, -1]):
                    raise ValueError(
                        f"row {row} goes on at position {first[row]} behind padding, and the cache has read "
                        f"{lengths[row]} of its tokens: generate goes on where rows end, so pad them on the left "
                        '(tokenizer.padding_side = "left"), prompts and what follows them; a model that is called by '
                        "itself takes position_ids too"
                    )
                raise ValueError(
                    f"row {row} goes on at position {first[row]}, but the cache has read {lengths[row]} of its tokens "
                    f"and expects position {lengths[row] + known}. To continue with new tokens only, pass generate "
                    "**cache.new_tokens(ids), and a model that is called by itself position_ids too, where rows are "
                    "padded; to pass the whole text, it must begin with what the cache has read and go on "
                    "(use_cache=False passes it again at every step). For another text, or this one anew, call "
                    "cache.reset() first, or make a new cache"
                )
        self.offsets = [o if r and not n else k for o, k, r, n in zip(offsets, before, begun, lengths, strict=True)]
        self.checked = True

    # -- as the text goes on

    def remember(self, new: NewTokens, seen: int) -> None:
        """Add new tokens, the last of the `seen` ones."""
        rows, count = new.keys.shape[0], new.keys.shape[2]
        if new.valid is None and not self.padding.length:
            return
        device = new.keys.device
        if not self.padding.length:
            self.padding.append(torch.ones(rows, seen - count, dtype=torch.bool, device=device))
        real = torch.ones(rows, count, dtype=torch.bool, device=device) if new.valid is None else new.valid
        self.padding.append(real)

    def remember_one(self) -> None:
        """Add a token of each row."""
        if self.padding.length:
            self.padding.append(torch.ones_like(self.padding.view[:, :1]))

    def take_back(self, count: int) -> None:
        """Forget the last `count` places."""
        if self.padding.length:
            self.padding.remove(self.padding.length - count, self.padding.length)

    def map_rows(self, rows: list[int]) -> None:
        """Row i becomes what row `rows[i]` was."""
        self.padding.select(torch.tensor(rows, device="cpu"))
        self.offsets = None if self.offsets is None else [self.offsets[row] for row in rows]

    # -- copies and files

    def copy_from(self, other: "Positions") -> None:
        """Take over the positions of the same text in another cache."""
        self.offsets = None if other.offsets is None else list(other.offsets)
        if other.padding.length:
            self.padding.append(other.padding.view)

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Everything that `restore` needs, as tensors and as JSON."""
        return {} if self.real is None else {"padding": self.real}, {"offsets": self.offsets}

    def restore(
        self, tensors: dict[str, Tensor], numbers: dict[str, Any], lengths: list[int], seen: int, *, known: bool
    ) -> None:
        """Take back what `state` gave for rows of these lengths; `known` says that padding would be held here."""
        self.offsets = offsets = numbers["offsets"]
        if offsets is not None and [type(offset) for offset in offsets] != [int] * len(lengths):
            raise ValueError(f"positions of {len(lengths)} rows begin at {offsets}")
        if "padding" in tensors:
            self.padding.append(tensors["padding"])
        if not self.padding.length:
            if known and any(length != seen for length in lengths):
                raise ValueError(f"{seen} tokens were read, and rows have {lengths}")
            return
        found = self.padding.view
        if found.dtype != torch.bool or found.shape != (len(lengths), seen) or found.sum(1).tolist() != lengths:
            raise ValueError(f"padding of shape {tuple(found.shape)} for rows of {lengths} tokens, {seen} places")


def _check_one_text(positions: Tensor, valid: Tensor | None) -> None:
    """Refuse several texts in one row."""
    if positions.shape[1] < 2:
        return
    back = positions.diff(dim=1) < 0
    if valid is not None:
        back = back & valid[:, 1:] & valid[:, :-1]
    if bool(back.any()):
        raise ValueError(
            "positions start again within a row: packed sequences are not supported with a kvsketch cache, "
            "give each sequence a row of its own"
        )

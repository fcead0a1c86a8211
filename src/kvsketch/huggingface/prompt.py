"""A prompt that layers hold whole until all of it is read: what is chosen then may follow from all layers.

It is read a second time where the method asks for that, shares are set where the prompt itself sets them, and layers
forget one after another: the most that is ever held is the exact cache, one layer, and what is read again at a time.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from kvsketch.caches.core.config import MANY, MethodConfig
from kvsketch.caches.forgetting.threshold import sets_shares, shares_of_prompt
from kvsketch.huggingface.free_memory import free_memory
from kvsketch.huggingface.frequencies import ChangingFrequencies
from kvsketch.huggingface.layers import LayerStack
from kvsketch.huggingface.naming import as_argument
from kvsketch.huggingface.protecting import check_protected, lengths_of
from kvsketch.huggingface.rereading import Behind, check_room_behind, most_behind, pieces, read_behind
from kvsketch.huggingface.supported import check_context, context_of
from kvsketch.kernels.places import in_front

NO_QUESTIONS = (
    "{} goes by questions, and there are none: kvsketch.make_cache(model, method, questions=[ids, ...]), token ids of "
    "each, as the prompt goes on with them; kvsketch.study(model, tokenizer, text) writes some"
)


@dataclass(frozen=True)
class Unfinished:
    """A call of `kvsketch.prefill` that has not come to its end: all that it was given, and where it began."""

    ids: Tensor
    mask: Tensor | None
    before: int  # tokens held when it began


class Prompt:
    """The prompt of one cache: held whole while it is read, if the method asks for that."""

    def __init__(
        self,
        config: MethodConfig,
        stack: LayerStack,
        questions: Sequence[Tensor] = (),
        rope: ChangingFrequencies | None = None,
    ) -> None:
        self.config, self.stack, self.rope = config, stack, rope
        self.questions = questions  # token ids, 1 × tokens each, if they are to say what matters
        self.held = False  # whether all layers hold all of it
        self.open = False  # whether more calls belong to it
        self.noted: int | None = None  # tokens of it, once it was read
        self.first = 0  # tokens of its first call, if that was all of it
        self.again = False  # whether it is being read a second time
        self.due = False  # whether all of it was read, and what was to follow has not come to its end
        self.texts = list[Tensor]()  # what was read so far
        self.latest = 0  # texts that there were before the latest `kvsketch.prefill`
        self.unfinished: Unfinished | None = None  # what that is to read, until all of it is done
        self.in_it = False  # whether the latest tokens that came are of that
        self.decoder: weakref.ref[nn.Module] | None = None  # what reads

    @property
    def read_more(self) -> bool:
        """Whether the model reads it twice, or questions behind it."""
        return self.config.askings.behind

    # -- as calls come

    def begin(self) -> None:
        """Hold all of what comes now until it is read, where the method asks for that and nothing came yet."""
        if self.config.holds_back and not self.held and self.stack.seen == 0:
            for layer in self.stack.sketch:
                layer.held.recording = True
            self.held = True  # last: after an interruption the next call begins again

    def read_already(self, ids: Tensor, mask: Tensor | None) -> int:
        """How many of a prompt's tokens were read by the same call, if that was interrupted and nothing came since."""
        left = self.unfinished
        if left is None or not self.in_it or not (_equal(left.ids, ids) and _equal(left.mask, mask)):
            return 0
        self.stack.check_whole()
        return self.stack.seen - left.before

    @contextmanager
    def reading(self, ids: Tensor, mask: Tensor | None) -> Iterator[None]:
        """All calls in here are one prompt; after an interruption the next call, or more in here, completes it."""
        self.begin()
        self._drop_unread()
        already = self.read_already(ids, mask)
        self.latest = self.latest if already else len(self.texts)
        self.in_it = already > 0
        self.unfinished, self.open = Unfinished(ids, mask, self.stack.seen - already), True
        try:
            yield
        finally:
            self.open = False

    def complete(self, cache: Any, ids: Tensor | None = None, progress: Callable[[int], None] | None = None) -> bool:
        """Do now what an interruption has left undone; whether these tokens are those that it had just read."""
        if not self.due or self.again:
            return False
        read = self.texts[self.latest :]
        same = ids is not None and bool(read) and torch.equal(torch.cat(read, -1).to(ids), ids)
        self.end(cache, progress)
        return same

    def check(self, cache: Any, decoder: Any, given: Mapping[str, Any], rows: int, count: int) -> None:
        """A call comes: do what is left of an earlier one, refuse what cannot be read twice, say if memory is short."""
        self.complete(cache)
        if not self.open and self.stack.whole.protected and not torch.compiler.is_compiling():
            mask = given.get("attention_mask")
            known = isinstance(mask, Tensor) and mask.shape == (rows, count)
            check_protected(self.stack, lengths_of(rows, count, mask if known else None))
        if not self.config.holds_back or self.again:
            return
        self.begin()
        if self.held:
            self._check_held(decoder, given, rows, count)

    def note(self, decoder: nn.Module, given: Mapping[str, Any], count: int) -> None:
        """The call, of so many tokens, is read now: nobody refuses it any more."""
        self.in_it = self.open
        if not self.config.holds_back or self.again:
            return
        if not self.held and (count >= MANY or (count > 1 and count == self.first == self.stack.seen)):
            warnings.warn(
                f"{self.config} went by its first call alone, and these {count:,} tokens are later text. To have "
                "several calls count as one prompt use kvsketch.prefill(model, ids, cache, chunk=...)",
                stacklevel=2,
            )
        if self.held:
            self._drop_unread()
            ids = given.get("input_ids")
            self.texts.append(ids if isinstance(ids, Tensor) else torch.empty(0, device="cpu"))
            self.decoder = weakref.ref(decoder)

    def _drop_unread(self) -> None:
        """Forget the text of a call that was interrupted before any layer took it: nobody says so of a Ctrl-C."""
        while self.texts and sum(ids.shape[-1] for ids in self.texts) > self.stack.seen:
            self.texts.pop()

    def call_ended(self, cache: Any, *, begun: bool, failed: bool) -> None:
        """It was read, and is all of the prompt unless more is said to come; or it failed."""
        if not self.held or self.again:
            return
        if failed and begun:
            self.texts.pop()
        elif not failed and not self.open:
            self.first = self.stack.seen
            self.end(cache)

    def _check_held(self, decoder: Any, given: Mapping[str, Any], rows: int, count: int) -> None:
        self._say_if_short(rows, count, decoder)
        if not self.read_more:
            return
        if self.config.askings.by_questions and not self.questions:
            raise ValueError(NO_QUESTIONS.format(self.config))
        if torch.compiler.is_compiling():
            raise ValueError(
                f"{self.config} has the model read on behind the prompt, which compiled code does not: read the "
                "prompt with kvsketch.prefill and the model as it is, and compile what follows"
            )
        if not isinstance(given.get("input_ids"), Tensor):
            raise ValueError(
                f"{self.config} has the model read on behind the prompt, and embeddings came instead of token ids (a "
                "model that reads images too makes them of text as well): use a method that reads a prompt once, as "
                "keydiff or snapkv"
            )
        self._check_padding(given.get("attention_mask"), count)
        if decoder.training:
            raise ValueError(f"{self.config} has the model read on behind the prompt: call model.eval() first")
        self.check_context(decoder, count)

    def _check_padding(self, mask: Any, count: int) -> None:
        """Refuse padding that layers would see which do not attend to everything."""
        stock = self.stack.summing or len(self.stack.sketch) < len(self.stack.layers)
        if not stock or not isinstance(mask, Tensor) or mask.ndim != 2 or bool(mask.all()):
            return
        behind = bool((mask.int().diff(dim=1) < 0).any())  # then it lies between the prompt and what is read behind it
        alone = count == 1 and bool(self.stack.summing)  # transformers hides no single token from those that sum up
        if behind or (alone and not bool(mask[:, -1].all())):
            raise ValueError(
                f"{self.config} has the model read on behind the prompt, and the layers of this model that do not "
                "attend to everything would see its padding: have all of it in front of the rows (padding_side="
                '"left"), or give each row a cache of its own'
            )

    def check_context(self, decoder: Any, count: int) -> None:
        """Refuse a prompt that is longer than the context with what is read behind it."""
        if not self.held or not self.read_more:
            return
        count += self.stack.seen
        once = f"{self.config.name} reads more than the prompt: methods that read it once, as keydiff, have all of it"
        if self.questions:
            more = max(ids.shape[1] for ids in self.questions)
            check_context(decoder, count + more, "a prompt and the longest question have", once)
        else:
            more = check_room_behind(decoder, count, "a prompt", once)
        if self.rope is not None:
            self.rope.check_can_follow(count, more)

    def _room(self, decoder: Any, count: int) -> int | None:
        """For how many tokens the model has place behind so many; None: for any."""
        most = context_of(decoder) if self.rope is None else self.rope.limit
        return None if most is None or (self.rope is not None and count > most) else most - count

    def _say_if_short(self, rows: int, count: int, decoder: Any) -> None:
        whole, dtype = self.stack.whole, self.stack.whole.dtype or decoder.dtype
        again = most_behind(self.stack.seen + count) if self.config.askings.second else 0
        token = sum(whole.token_bytes(layer.held.layer, dtype) for layer in self.stack.sketch)
        needed = rows * (count + again) * token // whole.model.parts
        free = free_memory(decoder.device)
        if free is not None and needed > free:
            told = f" and {again:,} that are read again" if again else ""
            warnings.warn(
                f"{self.config} holds all {count:,} tokens{told} until that is done: {needed / 1e9:.1f} GB, and "
                f'{free / 1e9:.1f} GB are free. With heads="profile" and a method that reads a prompt once only one '
                "layer is held whole",
                stacklevel=2,
            )

    # -- when it is read

    def end(self, cache: Any, progress: Callable[[int], None] | None = None) -> None:
        """All of it is read: choose, layer by layer. `progress` hears of its second reading if there is one."""
        if not self.held:
            self.unfinished = None
            return
        self.due = True
        decoder = None if self.decoder is None else self.decoder()
        if self.read_more and self.texts and decoder is not None and self.stack.sketch:
            self._read_behind(cache, decoder, progress)
        with self.stack.changing():  # layers that have forgotten do not go with others that have not
            self._share()
            for layer in self.stack.sketch:
                layer.settle(recording=False)
        self.held, self.due, self.texts, self.decoder, self.noted = False, False, [], None, self.stack.seen
        self.unfinished = None

    def check_noted(self) -> None:
        """Refuse to choose of a text that has gone on since the model read on behind it."""
        if self.noted not in (None, self.stack.seen):
            raise ValueError(
                f"this cache has notes of {self.noted:,} tokens, and the cache has read {self.stack.seen:,}: compress "
                "it before it reads on"
            )

    def _share(self) -> None:
        """Divide the budget among heads, where the prompt itself says how."""
        held = [layer.held for layer in self.stack.sketch]
        if not held or not held[0].started or not sets_shares(self.config):
            return
        found = shares_of_prompt(self.config, held, [own.budgets[0] for own in held])
        for own, shares in zip(held, found, strict=True):
            own.share(shares)

    def _read_behind(self, cache: Any, decoder: Any, progress: Callable[[int], None] | None) -> None:
        own = torch.cat(self.texts, 1)
        if own.shape[1] != self.stack.seen:  # an interruption has left there what was read behind it
            self.stack.touched = True
            self.stack.check_whole()
        texts = [Behind(ids := one.to(own.device).expand(len(own), -1), torch.ones_like(ids)) for one in self.questions]
        if not texts:
            again = _without_padding(own, self.stack.sketch[0].positions.real)
            texts = pieces(*again, self._room(decoder, self.stack.seen))
        before = own.shape[1]
        try:
            self.again = True
            read_behind(
                self.stack,
                self.config.askings,
                texts,
                lambda inputs: decoder(**inputs, **as_argument(decoder.forward, cache), use_cache=True),
                lambda count: None if progress is None else progress(before + count),
            )
        finally:
            self.again = False


def _without_padding(ids: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """Rows that begin with their first real token, and which tokens are real: what is padding comes last.

    So no layer sees any of it, and a row reads as if it were alone.
    """
    if real is None:
        return ids, torch.ones_like(ids)
    index = in_front(real)[:, : int(real.sum(1).max())].to(ids.device)
    return ids.gather(1, index), real.to(ids).gather(1, index)


def _equal(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.device == right.device and torch.equal(left, right)

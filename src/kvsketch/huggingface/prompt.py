"""A prompt that layers hold whole until all of it is read: the choice made then may depend on all layers.

The model reads it a second time if the method asks for that, heads' shares are set if the prompt itself sets them, and
layers are compressed one by one: the most ever held is the exact cache, one layer, and what is read again at a time.
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
    "{} needs questions, and got none: kvsketch.make_cache(model, method, questions=[ids, ...]), with the token ids of "
    "each question as it would follow the prompt; kvsketch.study(model, tokenizer, text) writes some"
)


@dataclass(frozen=True)
class Unfinished:
    """A call of `kvsketch.prefill` that has not finished: all that it was given, and where it began."""

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
        self.questions = questions  # token ids, 1 × tokens each, if questions are to say what matters
        self.held = False  # whether all layers hold all of it
        self.open = False  # whether more calls belong to it
        self.noted: int | None = None  # how many tokens it has, once it was read
        self.first = 0  # tokens of its first call, if that was all of it
        self.again = False  # whether it is being read a second time
        self.due = False  # whether all of it was read, but the work that follows is not finished
        self.texts = list[Tensor]()  # token ids read so far, call by call
        self.latest = 0  # how many texts there were before the latest `kvsketch.prefill`
        self.unfinished: Unfinished | None = None  # the latest `prefill`, until all of it is done
        self.in_it = False  # whether the latest tokens came in that `prefill`
        self.decoder: weakref.ref[nn.Module] | None = None  # the module that reads

    @property
    def read_more(self) -> bool:
        """Whether the model reads the prompt twice, or questions after it."""
        return self.config.askings.behind

    # -- as calls come

    def begin(self) -> None:
        """Hold all that comes until the prompt is read, if the method asks for that and nothing came yet."""
        if self.config.holds_back and not self.held and self.stack.seen == 0:
            for layer in self.stack.sketch:
                layer.held.recording = True
            self.held = True  # last: after an interruption the next call begins again

    def read_already(self, ids: Tensor, mask: Tensor | None) -> int:
        """How many of these tokens the same call has read already, if it was interrupted and nothing came since."""
        left = self.unfinished
        if left is None or not self.in_it or not (_equal(left.ids, ids) and _equal(left.mask, mask)):
            return 0
        self.stack.check_whole()
        return self.stack.seen - left.before

    @contextmanager
    def reading(self, ids: Tensor, mask: Tensor | None) -> Iterator[None]:
        """All calls in here are one prompt; after an interruption the next call, or more calls in here, complete it."""
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
        """Finish now what an interruption left undone; whether `ids` are the tokens that it had just read."""
        if not self.due or self.again:
            return False
        read = self.texts[self.latest :]
        same = ids is not None and bool(read) and torch.equal(torch.cat(read, -1).to(ids), ids)
        self.end(cache, progress)
        return same

    def check(self, cache: Any, decoder: Any, given: Mapping[str, Any], rows: int, count: int) -> None:
        """Before a call: finish an earlier one, refuse what cannot be read twice, and warn if memory is short."""
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
        """The checks before the call are passed: its `count` tokens are read now."""
        self.in_it = self.open
        if not self.config.holds_back or self.again:
            return
        if not self.held and (count >= MANY or (count > 1 and count == self.first == self.stack.seen)):
            warnings.warn(
                f"{self.config} took the first call for the whole prompt, so these {count:,} tokens count as later "
                "text. To have several calls count as one prompt use kvsketch.prefill(model, ids, cache, chunk=...)",
                stacklevel=2,
            )
        if self.held:
            self._drop_unread()
            ids = given.get("input_ids")
            self.texts.append(ids if isinstance(ids, Tensor) else torch.empty(0, device="cpu"))
            self.decoder = weakref.ref(decoder)

    def _drop_unread(self) -> None:
        """Forget the text of a call that was interrupted before any layer took it: nothing reports a Ctrl-C."""
        while self.texts and sum(ids.shape[-1] for ids in self.texts) > self.stack.seen:
            self.texts.pop()

    def call_ended(self, cache: Any, *, begun: bool, failed: bool) -> None:
        """The call was read, and is all of the prompt unless more calls are to come (`open`); or it failed."""
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
                f"{self.config} has the model read more after the prompt, which compiled code does not: read the "
                "prompt with kvsketch.prefill and the model as it is, and compile what follows"
            )
        if not isinstance(given.get("input_ids"), Tensor):
            raise ValueError(
                f"{self.config} has the model read more after the prompt, and embeddings came instead of token ids (a "
                "model that reads images too makes them of text as well): use a method that reads a prompt once, as "
                "keydiff or snapkv"
            )
        self._check_padding(given.get("attention_mask"), count)
        if decoder.training:
            raise ValueError(f"{self.config} has the model read more after the prompt: call model.eval() first")
        self.check_context(decoder, count)

    def _check_padding(self, mask: Any, count: int) -> None:
        """Refuse padding that would be seen by layers which do not attend to everything."""
        stock = self.stack.summing or len(self.stack.sketch) < len(self.stack.layers)
        if not stock or not isinstance(mask, Tensor) or mask.ndim != 2 or bool(mask.all()):
            return
        behind = bool((mask.int().diff(dim=1) < 0).any())  # padding between the prompt and what is read after it
        alone = count == 1 and bool(self.stack.summing)  # transformers hides no single token from layers that sum up
        if behind or (alone and not bool(mask[:, -1].all())):
            raise ValueError(
                f"{self.config} has the model read more after the prompt, and the layers of this model that do not "
                "attend to everything would see its padding: put all padding before the rows (padding_side="
                '"left"), or give each row a cache of its own'
            )

    def check_context(self, decoder: Any, count: int) -> None:
        """Refuse a prompt that, together with what is read after it, is longer than the model's context."""
        if not self.held or not self.read_more:
            return
        count += self.stack.seen
        once = f"{self.config.name} reads more than the prompt: methods that read it once, such as keydiff, do not"
        if self.questions:
            more = max(ids.shape[1] for ids in self.questions)
            check_context(decoder, count + more, "a prompt and the longest question have", once)
        else:
            more = check_room_behind(decoder, count, "a prompt", once)
        if self.rope is not None:
            self.rope.check_can_follow(count, more)

    def _room(self, decoder: Any, count: int) -> int | None:
        """How many tokens the model has room for after `count` others; None: for any number."""
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
        """All of it is read: compress layer by layer. `progress` is told of its second reading, if there is one."""
        if not self.held:
            self.unfinished = None
            return
        self.due = True
        decoder = None if self.decoder is None else self.decoder()
        if self.read_more and self.texts and decoder is not None and self.stack.sketch:
            self._read_behind(cache, decoder, progress)
        with self.stack.changing():  # layers that have evicted tokens do not fit together with layers that have not
            self._share()
            for layer in self.stack.sketch:
                layer.settle(recording=False)
        self.held, self.due, self.texts, self.decoder, self.noted = False, False, [], None, self.stack.seen
        self.unfinished = None

    def check_noted(self) -> None:
        """Refuse to compress a text that has gone on since notes were taken by reading something after it."""
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
        if own.shape[1] != self.stack.seen:  # an interruption has left tokens there that were read after the prompt
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
    """Rows moved so that they begin with their first real token and padding comes last; and which tokens are real.

    So no layer sees any padding, and a row reads as if it were alone.
    """
    if real is None:
        return ids, torch.ones_like(ids)
    index = in_front(real)[:, : int(real.sum(1).max())].to(ids.device)
    return ids.gather(1, index), real.to(ids).gather(1, index)


def _equal(left: Tensor | None, right: Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return left.device == right.device and torch.equal(left, right)

"""Questions about a text that the model writes itself, with its answers: they may decide what is kept of the text."""

import re
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Int64
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList

from kvsketch.caches.core.checks import check_count
from kvsketch.huggingface.supported import check_context, unwrapped
from kvsketch.huggingface.templates import split_prompt, uses_template

LEAST = 128  # tokens of a piece: about fewer there is too little to ask
LONGEST = 48  # tokens of a question, with its number, and of an answer
TASK = "\n\nWrite questions about this text, each on a line of its own."  # for a model that follows instructions
LIST = "\n\nQuestions about this text:\n"  # for a model that only continues a text
BEGUN = "1."  # begins the list: small models write something else before it, or in its place
QUESTION = re.compile(r"\W*(?:\d+\s*[.):]\W*)?(\w.*[?？؟])")  # in a line, after its number


@torch.no_grad()
def study(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    count: int = 16,
    raw: bool = False,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Int64[Tensor, "1 q"]]:
    """Questions about a text that the model writes, `count` at most, as `make_cache(..., questions=)` takes them.

    Each question comes with the token ids by which a prompt goes on with it and with the model's answer: while the
    answer is written, its words are looked up. The ids are in the chat template, if the tokenizer has one and `raw`
    does not leave it out. The text is read piece by piece, one for each question; a piece has at least 128 tokens, and
    no more than the context has room for. If that makes more pieces than questions, some are skipped, evenly. The
    likeliest token is taken each time, so the same questions come again; a question asked twice comes once. `progress`
    is called after each piece with the number of the text's tokens up to there.
    """
    check_count("count", count, least=1)
    if not isinstance(text, str):
        raise ValueError(f"study takes the text itself, as a str, and not its tokens: got {type(text).__name__}")
    if not callable(tokenizer):
        raise ValueError(f"study needs the model's tokenizer, got {type(tokenizer).__name__}")
    if not text.strip():
        raise ValueError("the text is empty: there is nothing to ask about")
    writer = _Writer(unwrapped(model), tokenizer, uses_template(tokenizer, raw))
    ids, found, asked = writer.ids(text), dict[str, Tensor](), set[str]()
    bounds = writer.pieces(ids.shape[1], count)
    for number, (start, stop) in enumerate(bounds):
        wanted = count * (number + 1) // len(bounds) - count * number // len(bounds)
        for question in writer.questions(ids[:, start:stop], wanted) if wanted else ():
            if question.casefold() not in asked:
                asked.add(question.casefold())
                found[question] = writer.answered(ids[:, start:stop], question)
        if progress is not None:
            progress(stop)
    if not found:
        name = type(writer.model).__name__
        raise ValueError(f"{name} wrote no question about this text: give make_cache questions of your own")
    return found


class _Writer:
    """A model that writes about pieces of a text."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, template: bool) -> None:
        if model.training:
            raise ValueError("the model is to write questions, and is in training: call model.eval() first")
        self.model, self.tokenizer, self.template = model, tokenizer, template
        before, task = split_prompt(tokenizer, "", TASK) if template else ("", LIST)
        self.before, self.task = self.ids(before, special=not template), self.ids(task + BEGUN)

    def ids(self, text: str, *, special: bool = False) -> Int64[Tensor, "1 n"]:
        """A text as tokens."""
        found: Any = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return torch.tensor([found], dtype=torch.long, device=self.model.device)

    def pieces(self, tokens: int, count: int) -> list[tuple[int, int]]:
        """Where pieces of a text begin and end: nearly equal pieces, each with room for its questions and an answer."""
        number = max(1, min(count, tokens // LEAST))
        most = getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)
        if most is not None:
            around = self.before.shape[1] + self.task.shape[1] + LONGEST * (1 + -(-count // number))
            what = "a piece of the text and the questions about it have"
            check_context(self.model, around + min(tokens, LEAST), what, "Fewer questions need less")
            number = max(number, -(-tokens // max(1, most - around)))
        return [(tokens * i // number, tokens * (i + 1) // number) for i in range(number)]

    def questions(self, piece: Int64[Tensor, "1 n"], count: int) -> list[str]:
        """At most `count` questions about a piece."""

        def asked(reply: str) -> list[str]:
            return [found[1] for line in reply.split("\n") if (found := QUESTION.match(line))]

        written = self._written(piece, self.task, LONGEST * count, lambda reply: len(asked(reply)) >= count)
        return asked(self._text(written))[:count]

    def answered(self, piece: Int64[Tensor, "1 n"], question: str) -> Int64[Tensor, "1 q"]:
        """The ids by which a prompt goes on with a question, and with one line of an answer to it."""
        asked = f"\n\n{question}"
        own = self.ids(split_prompt(self.tokenizer, "", asked)[1] if self.template else f"{asked}\n")
        written = self._written(piece, own, LONGEST, lambda reply: "\n" in reply.lstrip())
        return torch.cat([own, written], 1)

    def _written(
        self, piece: Int64[Tensor, "1 n"], behind: Int64[Tensor, "1 b"], most: int, enough: Callable[[str], bool]
    ) -> Int64[Tensor, "1 w"]:
        """What the model writes after a piece and the ids that follow it, until that is enough."""
        prompt = torch.cat([self.before, piece, behind], 1)
        until = _Until(lambda ids: enough(self._text(ids[:, prompt.shape[1] :])))
        out: Any = self.model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=most,
            stopping_criteria=StoppingCriteriaList([until]),
        )
        return out[:, prompt.shape[1] :]

    def _text(self, ids: Int64[Tensor, "1 n"]) -> str:
        return str(self.tokenizer.decode(ids[0], skip_special_tokens=True))


class _Until(StoppingCriteria):
    """Has a model write until something is true of the ids."""

    def __init__(self, true: Callable[[Tensor], bool]) -> None:
        self.true = true

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), self.true(input_ids), device=input_ids.device)

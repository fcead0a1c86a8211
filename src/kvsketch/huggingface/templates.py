"""A text and a question on it, as a tokenizer's chat template puts them."""

from transformers import PreTrainedTokenizerBase


def uses_template(tokenizer: PreTrainedTokenizerBase, raw: bool) -> bool:
    """Whether a prompt goes into a chat template: the tokenizer has one, and the user wants it."""
    return not raw and getattr(tokenizer, "chat_template", None) is not None


def split_prompt(tokenizer: PreTrainedTokenizerBase, text: str, question: str) -> tuple[str, str]:
    """A user's message in the chat template, cut before the question."""
    border = "\u2063kvsketch\u2063"  # invisible separators: no text has them around this word
    message = [{"role": "user", "content": f"{text}{border}{question}"}]
    rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, found, after = str(rendered).partition(border)
    if not found:
        raise ValueError(
            "this tokenizer's chat template does not show a message's text as it is: leave it out (--raw, raw=True)"
        )
    return before, after

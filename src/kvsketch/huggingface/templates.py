"""A text and a question about it, in a tokenizer's chat template."""

from transformers import PreTrainedTokenizerBase


def uses_template(tokenizer: PreTrainedTokenizerBase, raw: bool) -> bool:
    """Whether a prompt goes into a chat template: the tokenizer has one, and the user wants it."""
    return not raw and getattr(tokenizer, "chat_template", None) is not None


def split_prompt(tokenizer: PreTrainedTokenizerBase, text: str, question: str) -> tuple[str, str]:
    """A user's message, a text and a question about it, in the tokenizer's chat template: cut before the question.

    The first part is to be read first, and the second follows it; both have all special tokens that they need.
    """
    if not uses_template(tokenizer, raw=False):
        raise ValueError(
            "this tokenizer has no chat template: there is nothing to split, the model reads the text and then the "
            "question as they are"
        )
    border = "\u2063kvsketch\u2063"  # invisible separators: no text has them around this word
    message = [{"role": "user", "content": f"{text}{border}{question}"}]
    rendered = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, found, after = str(rendered).partition(border)
    if not found:
        raise ValueError(
            "this tokenizer's chat template does not show a message's text as it is: leave it out (--raw, raw=True)"
        )
    return before, after

"""The embedded model's tokenizer: known words and template pieces are one token each, everything else falls to bytes.

A standard byte-level BPE, as Llama 3 has it (`ignore_merges`: a word of the vocabulary is taken whole), so any text
survives both ways. Only the list of words is special: names, sentences and templates of the tasks.
"""

import json
import random
import re

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from kvsketch.evaluation.tasks import TASKS, Setting
from kvsketch.evaluation.tasks.haystack import SENTENCES
from kvsketch.evaluation.tasks.lines import HEADER
from kvsketch.evaluation.tasks.words import ADJECTIVES, NOUNS

BEGIN, END, PAD = "<begin>", "<end>", "<pad>"
PIECES = 1000  # byte-pair pieces for words that are not listed, bytes included
# Pieces of templates that are one token, so that a record and the question after it are laid out alike.
PHRASES = (
    ": REGISTER_CONTENT is <",
    "? I need the number. ",
    "? I need the number.",
    ": <",
    "? <",
    ">\n",
    '": "',
    '", "',
    '{"',
    '"}',
)
BEFORE_DIGITS = (" is ", " are ", " = ", ", ")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; the same one every time."""
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_pattern()), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    words = dict.fromkeys([*(f" {word}" for word in ADJECTIVES), *(f"-{word}" for word in NOUNS)])
    vocabulary, merges = _pieces(list(words), split)
    listed = [piece for word in words for piece, _ in split.pre_tokenize_str(word)]
    listed += [f"{number:0{digits}d}" for digits in (2, 3) for number in range(10**digits)]
    listed += sorted({piece for text in _texts() for piece, _ in split.pre_tokenize_str(text)})
    for piece in listed:
        vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (BEGIN, END, PAD)])
    begin = tokenizer.token_to_id(BEGIN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, begin)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BEGIN,
        eos_token=END,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )


def _pattern() -> str:
    whole = [re.escape(phrase).replace("\\\n", r"\n").replace(r"\ ", " ") for phrase in PHRASES]
    before_digits = [f"{phrase}(?=[0-9]|\\z)" for phrase in BEFORE_DIGITS]
    return "|".join([*whole, *before_digits, r"-\p{L}+", r" ?\p{L}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+", r"\s+"])


def _pieces(words: list[str], split: pre_tokenizers.PreTokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A small vocabulary of byte pairs, learnt from the words."""
    learner = Tokenizer(BPE())
    learner.pre_tokenizer = split
    trainer = BpeTrainer(
        vocab_size=PIECES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator(words, trainer)
    pieces = learner.get_vocab()
    ordered = sorted(pieces, key=lambda piece: pieces[piece])
    merges = json.loads(learner.to_str())["model"]["merges"]
    return {piece: i for i, piece in enumerate(ordered)}, [(left, right) for left, right in merges]


def _texts() -> list[str]:
    """Whatever the tasks say around names and numbers; ids of random letters are left to bytes."""
    texts = [HEADER, *SENTENCES]
    for task in TASKS.values():
        for seed in range(0 if "uuid" in task.name else 8):
            sample = task.make(random.Random(seed), Setting(size=max(4, task.smallest), questions=4, wording="compact"))
            texts += [sample.context, *(question.prompt + question.reply for question in sample.questions)]
    sample = TASKS["lines"].make(random.Random(0), Setting(size=1))
    return [*texts, sample.context, sample.questions[0].prompt]

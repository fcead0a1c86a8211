"""The embedded model's tokenizer: names, numbers and template pieces are one token each, other text is split.

It is a standard byte-level BPE like Llama 3's (`ignore_merges`: a word of the vocabulary is taken whole), so any text
can be encoded and decoded. Only the lists are special. White space before a number is a token of its own, so that a
prompt means the same whether it ends with a blank or not; a UUID is split into pairs of digits.
"""

import json
import random
import re
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

from kvsketch.evaluation.tasks.prose import Writer
from kvsketch.evaluation.tasks.words import ADJECTIVES, NOUNS, names

BEGIN, END, PAD = "<begin>", "<end>", "<pad>"
SIZE = 5330  # most tokens: two rows of 512 bytes for each are half of the model
SENTENCES, NAMES = 40_000, 10_000  # numbers of texts from which pieces of words are learnt
PLACES = (" (1)", " (2)", " (3)", " (4)")  # places of answers, if several have one name
# Pieces of templates that are one token each, so that a record and the question after it have the same layout.
PHRASES = (
    "Now the record is over. Tell me what is the <REGISTER_CONTENT> in line",
    "? I need the number.",
    ": REGISTER_CONTENT is",
    '"\nThe value associated with the specified key is:',
    ">\n",
    " is:",
    ", and",
    *PLACES,
)
MARKS = (
    "line",
    " line",
    "VAR",
    " VAR",
    *(f" {mark}{blank}" for mark in '<"' for blank in ("", " ", "\n")),
    '":',
    '{"',
    '"}',
    '",',
    " =",
    " ...",
    "...",
)  # pieces that cannot be learnt from the sentences
# More such pieces, with a blank before them or not; {} is one of the kinds.
KINDS = ("number", "uuid")
CLAUSES = (
    "One of the special magic {}s for",
    "The special magic {} for",
    "The special magic {}s for",
    "What is the special magic {} for",
    "What are all the special magic {}s for",
    "The magic {} of",
    "The magic {}s of",
    "What is the magic {} of",
    "What are the magic {}s of",
    "What are all the magic {}s of",
    "The special magic number of",
    "What is the special magic number of",
    "mentioned in the provided text is",
    "mentioned in the provided text are",
    "mentioned in the provided text",
    "The pass key is",
    "is the pass key",
    "What is the pass key",
    "The sequence of digits is",
    "is the sequence of digits",
    "What is the sequence of digits",
)
# Groups of pieces with the same role in a record, in a question and before an answer, with a blank before or not.
ALIKE = (
    (" ", "\n", *(f" {mark}{blank}" for mark in '<"' for blank in ("", " ", "\n"))),
    (" is", " is:", " mentioned in the provided text is"),
    (" are", " mentioned in the provided text are"),
    (":", "?", ": REGISTER_CONTENT is", "? I need the number."),
    ('":', '"\nThe value associated with the specified key is:'),
    ("line", " line", "Now the record is over. Tell me what is the <REGISTER_CONTENT> in line"),
    (",", ", and"),
    *([blank + clause.format(kind) for clause in CLAUSES if "{}" in clause for blank in ("", " ")] for kind in KINDS),
)
ASSIGNED = " ="  # stands between a variable and its source
NEEDLE = "The magic number of"  # begins a needle
VALUE = " is:"  # stands before a value
SEVERAL = " are"  # stands before several answers
UUID = (8, 4, 4, 4, 12)  # numbers of hexadecimal digits in its parts


@cache
def build_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer; the same one every time."""
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_pattern()), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    whole = [*_clauses(), *PHRASES, *(f" {word}" for word in ADJECTIVES), *(f"-{word}" for word in NOUNS)]
    listed = [piece for text in whole for piece, _ in split.pre_tokenize_str(text)]
    listed += [f"{number:0{digits}d}" for digits in (2, 3) for number in range(10**digits)]
    listed += [f"{number:02x}" for number in range(256)]
    listed += [piece for mark in MARKS for piece, _ in split.pre_tokenize_str(mark)]
    listed = list(dict.fromkeys(listed))
    vocabulary, merges = _pieces(SIZE - len(listed) - 3, split)
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


def alike(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Groups of tokens with the same role, which may start with the same code."""
    return [[token_of(tokenizer, text) for text in group] for group in ALIKE]


def token_of(tokenizer: PreTrainedTokenizerFast, text: str) -> int:
    """The single token of a piece of a template."""
    (token,) = tokenizer(text, add_special_tokens=False)["input_ids"]
    return int(token)


def _clauses() -> list[str]:
    """All clauses, longer ones first."""
    found = {clause.format(kind) for clause in CLAUSES for kind in KINDS}
    return [blank + clause for clause in sorted(found, key=lambda one: (-len(one), one)) for blank in ("", " ")]


def _pattern() -> str:
    uuid = "-".join(f"[0-9a-f]{{{digits}}}" for digits in UUID)
    whole = [*(" ?" + _escaped(clause) + r"(?!\p{L})" for clause in _clauses()[::2]), *map(_escaped, PHRASES)]
    words = [r"-\p{L}+", r" ?\p{L}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+", r"\s+"]
    return "|".join([f" (?={uuid})", ' [<"][ \\n]?', *_pairs_of_uuids(), *whole, *words])


def _escaped(text: str) -> str:
    return re.escape(text).replace("\\\n", r"\n").replace(r"\ ", " ")


def _pairs_of_uuids() -> list[str]:
    """A pattern for each pair of hexadecimal digits of a UUID and each dash, by what stands before and after it."""
    places, found = [i for i, digits in enumerate(UUID) for _ in range(digits // 2)], []
    for i, part in enumerate(places):
        inside = [j for j in range(len(places)) if places[j] == part]
        left = "".join([f"[0-9a-f]{{{UUID[p]}}}-" for p in range(part)]) + f"[0-9a-f]{{{2 * inside.index(i)}}}"
        right = f"[0-9a-f]{{{2 * (len(inside) - 1 - inside.index(i))}}}"
        right += "".join([f"-[0-9a-f]{{{UUID[p]}}}" for p in range(part + 1, len(UUID))])
        found.append(f"(?<={left})[0-9a-f]{{2}}(?={right}(?![0-9A-Za-z]))")
    for part in range(1, len(UUID)):
        left = "-".join(f"[0-9a-f]{{{digits}}}" for digits in UUID[:part])
        right = "-".join(f"[0-9a-f]{{{digits}}}" for digits in UUID[part:])
        found.append(f"(?<={left})-(?={right}(?![0-9A-Za-z]))")
    return found


def _pieces(count: int, split: pre_tokenizers.PreTokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A vocabulary of byte pairs, learnt from sentences and names."""
    draw = random.Random(0)
    writer = Writer(draw)
    texts = [" ".join(writer.sentence() for _ in range(10)) for _ in range(SENTENCES // 10)]
    texts += [f" {name}" for name in names(draw, NAMES, invented=0.8)]
    learner = Tokenizer(BPE())
    learner.pre_tokenizer = split
    trainer = BpeTrainer(
        vocab_size=count,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    learner.train_from_iterator(texts, trainer)
    pieces = learner.get_vocab()
    ordered = sorted(pieces, key=lambda piece: pieces[piece])
    merges = json.loads(learner.to_str())["model"]["merges"]
    return {piece: i for i, piece in enumerate(ordered)}, [(left, right) for left, right in merges]

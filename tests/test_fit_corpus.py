"""A corpus: files become texts of a bounded length, and what cannot be one is refused by name."""

import hashlib
import json
from pathlib import Path

import pytest
import torch

from fitted import TOKENIZER, sentences
from kvsketch.fitting.corpus import read_corpus

LIMITS = {"tokens": 50, "least": 20, "apart": 17}


def ids_of(text):
    return TOKENIZER(text)["input_ids"]


def test_a_long_text_becomes_pieces_that_begin_as_a_text_does(tmp_path):
    path = tmp_path / "book.txt"
    path.write_text(sentences(60))
    corpus = read_corpus([path], TOKENIZER, **LIMITS)
    begin, *rest = ids_of(sentences(60))
    assert begin == TOKENIZER.bos_token_id
    assert all(text.ids[0] == begin for text in corpus.texts)
    assert [len(text.ids) for text in corpus.texts[:-1]] == [50] * (len(corpus.texts) - 1)
    read = torch.cat([text.ids[1:] for text in corpus.texts]).tolist()
    assert read == rest[: len(read)]
    assert len(rest) - len(read) < LIMITS["least"]
    source = corpus.sources[0]
    assert (source.file, source.texts) == ("book.txt", len(corpus.texts))
    assert source.tokens == sum(len(text.ids) for text in corpus.texts)
    assert source.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()


def test_what_is_left_out_is_said(tmp_path):
    texts = [sentences(20, 1), "too short", sentences(20, 2), sentences(20, 1)]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts) + "\n\n")
    corpus = read_corpus([path], TOKENIZER, **{**LIMITS, "tokens": 500})
    assert [text.ids.tolist() for text in corpus.texts] == [ids_of(texts[0]), ids_of(texts[2])]
    assert len(corpus.notes) == 2
    assert "left out 1 of 4 texts, which have fewer than 20 tokens" in corpus.notes[0]
    assert "left out 1 of 4 texts, which were there before" in corpus.notes[1]


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("no.txt", None, "there is no file .*no.txt"),
        ("book.pdf", b"", r"book.pdf: a corpus is made of .txt files \(a text each\) and .jsonl files"),
        ("latin.txt", b"caf\xe9", "latin.txt is no text in UTF-8: byte 3 is 0xe9"),
        ("deep.jsonl", b"[" * 100_000, "deep.jsonl:1: not JSON"),
        ("half.jsonl", b'{"text": "\\ud800"}', "half.jsonl:1: expected an object"),
        ("cut.jsonl", b'{"text": "a"}\n{"text": ', "cut.jsonl:2: not JSON"),
        ("other.jsonl", b'{"body": "a"}', 'other.jsonl:1: expected an object with a string named "text", got {"body"'),
        ("list.jsonl", b"[1]", r"list.jsonl:1: expected an object .* got \[1\]"),
        ("short.txt", b"one two three", "longest has . tokens, and 20 are needed, .* more than 17 tokens away"),
        ("empty.txt", b"", "empty.txt has no text: leave it out"),
    ],
)
def test_what_is_no_corpus_is_refused_by_name(name, content, error, tmp_path):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=error):
        read_corpus([path], TOKENIZER, **LIMITS)


def test_pieces_must_be_longer_than_the_window():
    with pytest.raises(ValueError, match=r"texts of 10 tokens are too short: .* Let them be 20 or longer"):
        read_corpus([Path("x.txt")], TOKENIZER, tokens=10, least=20, apart=17)
    with pytest.raises(ValueError, match="at least one file"):
        read_corpus([], TOKENIZER, **LIMITS)

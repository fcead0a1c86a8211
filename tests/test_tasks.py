"""Tasks: right answers, any length, fresh permutations, both wordings."""

import gzip
import itertools
import json
import math
import os
import random
import re
import statistics
from collections import Counter

import pytest

from kvsketch.cli import bench
from kvsketch.evaluation.embedded.training.tokenizer import build_tokenizer
from kvsketch.evaluation.tasks import TASKS, WORDINGS, Setting
from kvsketch.evaluation.tasks.haystack import SENTENCES, Grammar, TextFile, haystack_of
from kvsketch.evaluation.tasks.length import Fitter
from kvsketch.evaluation.tasks.lines import HEADER
from kvsketch.evaluation.tasks.longeval_files import read_cases
from kvsketch.evaluation.tasks.prose import Writer
from kvsketch.evaluation.tasks.words import ADJECTIVES, NOUNS, names

SUITES = {"lines", "needle", "ruler", "infinite"}
NEEDLES = [name for name in TASKS if name.startswith("niah")]


TOKENIZER = build_tokenizer()


def tokens_in(sample):
    return max(len(TOKENIZER(sample.context + question.prompt)["input_ids"]) for question in sample.questions)


def make(name, size=100, seed=0, **setting):
    return TASKS[name].make(random.Random(seed), Setting(size=size, **setting))


def test_every_suite_has_tasks_dense_ones_and_others():
    assert {task.suite for task in TASKS.values()} == SUITES
    assert {name for name, task in TASKS.items() if task.dense} == {
        "lines",
        "kv",
        "niah_multikey_dense",
        "niah_multikey_uuid",
    }


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize("name", TASKS)
def test_the_right_reply_scores_full_marks_and_a_wrong_one_does_not(name, wording):
    for seed in range(20):
        sample = make(name, seed=seed, wording=wording, questions=4)
        for question in sample.questions:
            assert TASKS[name].score(question.opening + question.reply, question.answers) == 1
            assert TASKS[name].score("", question.answers) == 0
            assert TASKS[name].score("zero", question.answers) == 0
            assert question.depth is None or 0 <= question.depth <= 1


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize("name", TASKS)
def test_the_same_seed_gives_the_same_document_and_another_another(name, wording):
    first = make(name, seed=1, wording=wording)
    assert make(name, seed=1, wording=wording) == first
    assert make(name, seed=2, wording=wording).context != first.context


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize("name", TASKS)
def test_documents_of_any_length_are_filled_and_never_too_long(name, wording):
    fitter = Fitter(TASKS[name], Setting(size=1, wording=wording), tokens_in)
    for length in (1500, 6000):
        for seed in range(2):
            found = tokens_in(fitter.sample(length, str(seed)))
            # Common words come 3 or 30 times each: a list grows by jumps.
            assert (0.6 if name == "cwe" else 0.9) * length <= found <= length, (length, found)


@pytest.mark.parametrize("name", TASKS)
def test_a_length_too_short_for_one_sample_is_refused(name, tmp_path):
    (tmp_path / "book.txt").write_text("The cow jumped over the moon. ")
    for haystack, text in ((Grammar(), ""), (TextFile(tmp_path / "book.txt"), " in book.txt" * TASKS[name].hides)):
        with pytest.raises(ValueError, match=rf"^{name}{text}: 3 tokens are too few for one sample, which takes \d+"):
            Fitter(TASKS[name], Setting(size=1, haystack=haystack), tokens_in).sample(3, "0")


def test_lines_have_longevals_words_and_distribution():
    sample = make("lines", size=2000, questions=2000)
    assert sample.context.startswith(HEADER)
    lines = sample.context.removeprefix(HEADER).splitlines()
    found = [re.fullmatch(r"line ([a-z]+-[a-z]+): REGISTER_CONTENT is <(\d+)>", line) for line in lines]
    keys = [match[1] for match in found]
    numbers = [int(match[2]) for match in found]
    assert len(keys) == len(set(keys)) == 2000
    assert all(1 <= number <= 50_000 for number in numbers)
    spread = (50_000**2 / 12 / 2000) ** 0.5  # standard error of their mean
    assert abs(statistics.fmean(numbers) - 25_000) < 4 * spread
    table = dict(zip(keys, numbers, strict=True))
    for question in sample.questions:
        key = re.search(r"in line (\S+)\? I need the number\. $", question.text)[1]
        assert question.answers == (str(table[key]),)


def test_depths_of_questions_on_lines_are_uniform():
    depths = [make("lines", size=101, seed=seed).questions[0].depth for seed in range(1000)]
    assert abs(statistics.fmean(depths) - 0.5) < 4 * (1 / 12 / 1000) ** 0.5


@pytest.mark.parametrize("name", ["needle", "niah_single", "passkey", "number_string"])
def test_a_needle_goes_where_it_is_told(name):
    for depth in (0.0, 0.25, 0.5, 1.0):
        sample = make(name, size=400, depth=depth)
        (answer,) = sample.questions[0].answers
        assert sample.questions[0].depth == pytest.approx(depth, abs=0.01)
        assert sample.context.index(answer) / len(sample.context) == pytest.approx(depth, abs=0.03)


@pytest.mark.parametrize("wording", WORDINGS)
@pytest.mark.parametrize("name", NEEDLES)
def test_every_answer_of_a_needle_task_stands_in_the_text_under_its_title(name, wording):
    sample = make(name, size=30, wording=wording, questions=3)
    for question in sample.questions:
        for answer in question.answers:
            before = sample.context[: sample.context.index(answer)]
            title = re.search(r"(?:for|of) (\S+) is:? $", before)[1]
            assert title in question.text


def test_values_of_one_key_are_expected_in_the_order_of_the_text():
    for seed in range(30):
        sample = make("niah_multivalue", seed=seed, size=20)  # so few places that some stand in the same one
        places = [sample.context.index(answer) for answer in sample.questions[0].answers]
        assert len(places) == 4
        assert places == sorted(places)


def test_variable_tracking_follows_the_chain():
    sample = make("vt", size=40)
    example, last = sample.context.rsplit("Memorize and track", 1)
    assert len(re.findall(r"VAR [A-Z]{3} = ", example)) == 5
    assert len(re.findall(r"[.!?]", example)) > 8  # it is hidden in noise as well
    chain = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", last)
    value = re.search(r"assigned the value (\d+) in the text above", sample.questions[0].text)[1]
    assert chain[0][1] == value
    assert all(later[1] == earlier[0] for earlier, later in itertools.pairwise(chain))
    assert sample.questions[0].answers == tuple(name for name, _ in chain)
    assert "assgined the value" in sample.questions[0].opening  # as the official prompt spells it


@pytest.mark.parametrize("wording", WORDINGS)
def test_common_words_are_the_most_common_and_their_places_are_fresh(wording):
    first_places = set()
    for seed in range(6):
        sample = make("cwe", size=150, seed=seed, wording=wording)
        listed = sample.context.rsplit("appear most often.\n", 1)[-1].removeprefix("Words: ")
        words = re.findall(r"[a-z]{2,}", listed)
        counts = Counter(words)
        assert set(sample.questions[0].answers) == {word for word, count in counts.items() if count == 30}
        assert sorted(counts.values()) == [3] * 150 + [30] * 10
        first_places.add(tuple(words.index(word) for word in sample.questions[0].answers[:3]))
    assert len(first_places) == 6  # the official generator shuffles every sample alike


def test_rulers_counts_depend_on_the_length_aimed_at():
    for length, often, seldom, example in ((2000, 6, 1, [1] * 10 + [3] * 10), (4096, 30, 3, [3] * 30 + [10] * 10)):
        first, second = make("cwe", size=50, length=length).context.split("appear most often.\n")[1:]
        counts = Counter(re.findall(r"\d+\. (\w+)", second))
        assert sorted(counts.values()) == [seldom] * 50 + [often] * 10
        counts = Counter(re.findall(r"\d+\. (\w+)", first.split("\nQuestion")[0]))
        assert sorted(counts.values()) == example


@pytest.mark.parametrize("wording", WORDINGS)
def test_frequent_words_are_ranked_without_ties(wording):
    for seed in range(6):
        sample = make("fwe", size=400, seed=seed, wording=wording)
        counts = Counter(re.findall(r"[a-z]{3,}", sample.context.split("coded words. ")[-1].removeprefix("Code: ")))
        (first, a), (second, b), (third, c), (_, d) = counts.most_common(4)
        assert a > b > c > d
        assert sample.questions[0].answers == (first, second, third)
        assert sample.context.count(" ...") + sample.context.count(": ...") >= a  # the most frequent of all is hidden
    with pytest.raises(ValueError, match="fwe needs at least"):
        make("fwe", size=9, wording=wording)


def test_number_strings_double_digits_in_place():
    for seed in range(50):
        (answer,) = make("number_string", seed=seed).questions[0].answers
        assert len(answer) == 10
        assert len(re.sub(r"(.)\1*", r"\1", answer)) <= 5


@pytest.mark.parametrize("wording", WORDINGS)
def test_math_find_asks_for_what_the_list_says(wording):
    for seed in range(60):
        sample = make("math_find", size=101, seed=seed, wording=wording)
        numbers = [int(number) for number in re.findall(r"\d+", sample.context.split(":\n")[-1].split("?\n")[-1])]
        assert len(numbers) == 101
        what = re.search(r"The (.*?)(?: of)? the list is", sample.questions[0].text + sample.questions[0].opening)[1]
        ordered = sorted(set(numbers))
        expected = {
            "median": statistics.median(numbers),
            "largest number": ordered[-1],
            "second largest number": ordered[-2],
            "third largest number": ordered[-3],
            "smallest number": ordered[0],
            "second smallest number": ordered[1],
            "third smallest number": ordered[2],
        }[what]
        assert float(sample.questions[0].answers[0]) == expected


def test_pairs_are_json():
    for wording in WORDINGS:
        sample = make("kv", size=50, wording=wording, questions=5)
        pairs = json.loads(sample.context[sample.context.index("{") :])
        assert len(pairs) == 50
        for question in sample.questions:
            key = re.search(r'"([^"]+)"', question.prompt)[1]
            assert question.answers == (pairs[key],)


def test_names_are_distinct_and_some_may_be_made_up():
    draw = random.Random(0)
    assert len(set(names(draw, 5000))) == 5000
    known = {*ADJECTIVES, *NOUNS}
    parts = [part for name in names(draw, 2000, invented=0.5) for part in name.split("-")]
    made_up = sum(part not in known for part in parts) / len(parts)
    assert abs(made_up - 0.5) < 4 * (0.25 / len(parts)) ** 0.5 + 0.01  # a made-up word may be a known one
    with pytest.raises(ValueError, match="too few to draw"):
        names(draw, 10**6)


def test_a_text_of_the_users_can_be_the_haystack(tmp_path):
    book = tmp_path / "book.txt"
    book.write_text(" ".join(f"Sentence number {i} of the book{'.!?'[i % 3]}" for i in range(50)))  # one long line
    sample = make("needle", size=80, haystack=TextFile(book))
    places = [int(number) for number in re.findall(r"number (\d+) of the book", sample.context)]
    assert len(places) == 80
    assert all((b - a) % 50 == 1 for a, b in itertools.pairwise(places))  # in order, and round again
    assert not any(sentence in sample.context for sentence in SENTENCES)
    plain = TextFile(book).sentences
    book.write_bytes(b"\xef\xbb\xbf" + book.read_bytes().replace(b"! ", b"!\r\n"))  # as other systems write it
    assert TextFile(book).sentences == plain
    (tmp_path / "empty.txt").write_text("\n \n")
    with pytest.raises(ValueError, match="is empty"):
        TextFile(tmp_path / "empty.txt")
    with pytest.raises(ValueError, match="there is no file"):
        TextFile(tmp_path / "nowhere.txt")
    with pytest.raises(ValueError, match="is a folder: name a file"):
        TextFile(tmp_path)


def test_a_text_that_comes_round_again_in_a_prompt_is_told(tmp_path, capsys):
    (tmp_path / "short.txt").write_text("A line of the book.\n\n" * 50)
    (tmp_path / "long.txt").write_text("A line of the book.\n\n" * 500)
    both = [tmp_path / "short.txt", tmp_path / "long.txt"]
    others = {"samples": 1, "seed": 0, "batch": 1, "max_new_tokens": None, "raw": False}
    for lengths, files, told in (
        ("100,1000", both, True),
        ("100,1000", both[1:], False),
        ("100", both, False),
        ("9000", [], False),
    ):
        bench.say_if_short(
            bench._plan("needle", None, "exact", lengths, None, "after", "compact", files, None, **others)
        )
        assert ("has only 950 letters. Prompts of 1,000" in " ".join(capsys.readouterr().err.split())) == told


@pytest.mark.parametrize("name", TASKS)
def test_tasks_say_whether_they_hide_anything(name, tmp_path):
    (tmp_path / "book.txt").write_text("The cow jumped over the moon. ")
    text = make(name, size=80, haystack=TextFile(tmp_path / "book.txt")).context
    assert ("The cow jumped" in text) == TASKS[name].hides


def test_a_text_comes_back_with_the_quotes_it_closes(tmp_path):
    """Sentences with single blanks between them are the text, whatever closes them."""
    book = tmp_path / "book.txt"
    book.write_text("\"Who is there?\" said he. (Nobody.) 'Go on.'\n\u201cWell!\u201d A title\n\nIt   rained.")
    text = TextFile(book)
    assert text.joint.join(text.sentences) == " ".join(book.read_text().split())
    assert text.sentences == [
        '"Who is there?"', "said he.", "(Nobody.)", "'Go on.'", "\u201cWell!\u201d", "A title", "It rained.",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["An entry of a log\n" * 500, "word " * 5000, "x" * 9000])
def test_a_text_without_full_stops_fills_documents_too(text, tmp_path):
    """By lines, or where those are long by words; a sentence as novels have it stays whole, however long."""
    book = tmp_path / "book.txt"
    book.write_text(f"{'It rained ' * 175}again. {text}")
    first, *others = TextFile(book).sentences
    assert len(first) == 1756
    assert "".join("".join(others).split()) == "".join(text.split())
    assert len(set(map(len, others))) <= 2  # as long as they may be, but for the last
    assert max(map(len, others)) <= 400
    book.write_text(text)
    fitter = Fitter(TASKS["niah_single"], Setting(size=1, haystack=TextFile(book)), tokens_in)
    assert 0.7 * 1500 <= tokens_in(fitter.sample(1500, "0")) <= 1500


def test_several_texts_take_turns(tmp_path):
    """Sample by sample; together they have another name than each of them, and than others of the same names."""
    paths = [tmp_path / f"{name}.txt" for name in "ab"]
    for path in paths:
        path.write_text(f"A sentence of {path.stem}.")
    both = haystack_of(paths)
    draw = random.Random(0)
    assert [both.of(sample).pieces(draw, 1) for sample in range(3)] == [
        ["A sentence of a."], ["A sentence of b."], ["A sentence of a."],
    ]  # fmt: skip
    assert both.name.startswith("a.txt+b.txt#")
    assert haystack_of(paths[:1]).name == TextFile(paths[0]).name
    assert haystack_of(()).name == "grammar"
    assert haystack_of([":sentences"]).name == "noise"
    paths[1].write_text("Another sentence.")
    assert haystack_of(paths).name != both.name
    with pytest.raises(ValueError, match=r"a haystack is named twice in a\.txt, a\.txt"):
        haystack_of([paths[0], paths[0]])


def test_a_haystack_may_come_through_a_pipe(tmp_path):
    """As the shell's <(command) gives it; what is read is there once, and the pipe has another number each time."""
    book, names = tmp_path / "book.txt", set()
    book.write_text("A horse ran.\r\n\r\nIt rained.")
    for _ in range(2):
        read, write = os.pipe()
        os.write(write, book.read_bytes())
        os.close(write)
        piped = TextFile(f"/dev/fd/{read}")
        names.add(piped.name)
        assert piped.sentences == TextFile(book).sentences == ["A horse ran.", "It rained."]
        os.dup(read)  # so that the next one is another
        os.close(read)
    assert names == {TextFile(book).name.replace("book.txt", "pipe")}


def case(number=2416, key="torpid-kid"):
    line = f"line {key}: REGISTER_CONTENT is <{number}>\n"
    question = f"\nNow the record is over. Tell me what is the <REGISTER_CONTENT> in line {key}? I need the number. "
    return {"random_idx": [key, 0], "expected_number": number, "num_lines": 1, "prompt": HEADER + line + question}


def test_longevals_files_are_read(tmp_path):
    plain, packed = tmp_path / "1_lines.jsonl", tmp_path / "1_lines.jsonl.gz"
    plain.write_text(json.dumps(case()) + "\n" + json.dumps(case(7, "red-fox")) + "\n")
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    name, samples = read_cases(plain)
    packed_name, again = read_cases(packed)
    assert again == samples
    assert [sample.questions[0].answers for sample in samples] == [("2416",), ("7",)]
    assert samples[0].context + samples[0].questions[0].text == case()["prompt"]
    assert name.startswith("1_lines#")
    assert name != packed_name
    packed.write_bytes(packed.read_bytes()[:30])
    with pytest.raises(ValueError, match="cannot be unpacked"):
        read_cases(packed)


def case_without_text():
    return case() | {"prompt": 7}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1: not a LongEval lines case"),
        (json.dumps(case_without_text()), "line 1: not a LongEval lines case"),
        (json.dumps({"prompt": "x"}), "line 1: not a LongEval lines case"),
        (json.dumps(case() | {"num_lines": math.inf}), "line 1: not a LongEval lines case"),
        (json.dumps(case() | {"expected_number": "many"}), "line 1: not a LongEval lines case"),
        (json.dumps(case() | {"expected_number": 42.5}), r"line 1: .*expected_number that is no whole one"),
        (json.dumps(case() | {"random_idx": ["x", 10**400]}), "line 1: not a LongEval lines case"),
        (json.dumps(case() | {"random_idx": ["x", -1]}), r"not a LongEval lines case .*line -1 of 1"),
        (json.dumps(case()).replace("torpid", r"\ud800"), "letters that UTF-8 does not have"),
        ("[" * 100_000, "line 1: not a LongEval lines case"),
        (json.dumps(case() | {"prompt": "Which line?"}), "has no 'Now the record is over.'"),
    ],
)
def test_other_files_are_refused_by_line(text, message, tmp_path):
    (tmp_path / "x.jsonl").write_text(text + "\n")
    with pytest.raises(ValueError, match=message):
        read_cases(tmp_path / "x.jsonl")
    with pytest.raises(ValueError, match="there is no file"):
        read_cases(tmp_path / "y.jsonl")


def test_made_up_sentences_differ_and_are_whole():
    write = Writer(random.Random(0)).sentence
    made = [write() for _ in range(3000)]
    assert len(set(made)) > 2990
    assert all(text == text.strip() and text[-1] in ".!?\"'\u201d" and "  " not in text for text in made)
    words = {word for text in made for word in re.findall(r"[A-Za-z]+", text)}
    assert len(words) > 4000
    assert not words & {"stoped", "runing", "geting", "begining", "tiing", "fullly", "basicly", "wolfs"}
    assert not [text for text in made if re.search(r"\ba [aeiou]", text)]

"""Scoring rules against what the official scripts do on their edge cases."""

import pytest

from kvsketch.evaluation.tasks.scoring import all_contained, among_words, first_digits, first_number, last_number


@pytest.mark.parametrize(
    ("output", "answer", "score"),
    [
        ("The <REGISTER_CONTENT> in line torpid-kid is <2416>.", "2416", 1),
        ("", "2416", 0),
        ("I do not know.", "2416", 0),
        ("2,416", "2416", 0),  # a thousands separator leaves 416
        ("2,416", "416", 1),
        ("It is 2416. I hope that helps, see page 3.", "2416", 0),  # the last number counts
        ("See page 3: 2416", "2416", 1),
        ("٢٤١٦", "2416", 1),  # any Unicode digits
        ("02416", "2416", 1),  # compared as numbers
        ("-2416", "2416", 1),  # the sign is no digit
        ("2416.0", "2416", 0),  # ends in 0
        ("24162416", "2416", 0),
    ],
)
def test_longeval_takes_the_last_number(output, answer, score):
    assert last_number(output, [answer]) == score


@pytest.mark.parametrize(
    ("output", "answers", "score"),
    [
        (" 1234567, 7654321.", ["1234567", "7654321"], 1),
        ("1234567", ["1234567", "7654321"], 0.5),
        ("", ["1234567"], 0),
        ("12345678", ["1234567"], 1),  # as a substring
        ("\x00\x1f The ANSWER is\x07 Foo-Bar \n", ["foo-bar"], 1),  # whatever the case, control characters aside
        ("foo\x07bar", ["foobar"], 0),  # a control character is a line break, not nothing
        ("1 234 567", ["1234567"], 0),
        ("no, 1234567 is wrong", ["1234567"], 1),  # chatter does not matter
    ],
)
def test_ruler_counts_answers_that_occur(output, answers, score):
    assert all_contained(output, answers) == score


@pytest.mark.parametrize(
    ("output", "answer", "score"),
    [
        (" 71432.", "71432", 1),
        ("key 71432 or 11111", "71432", 1),
        ("1 71432", "71432", 0),  # the first run counts
        ("71,432", "71432", 0),
        ("٧١٤٣٢", "71432", 0),  # ASCII digits only
        ("071432", "71432", 0),  # compared as text
        ("", "71432", 0),
        ("none", "71432", 0),
    ],
)
def test_infinitebench_takes_the_first_run_of_digits(output, answer, score):
    assert first_digits(output, [answer]) == score


@pytest.mark.parametrize(
    ("output", "score"),
    [
        ('"abc-1"}', 1),
        ("The value is: abc-1.", 1),
        ("abc-1\nabc-2", 1),
        ("xabc-1", 0),
        ("abc-1;", 0),  # a semicolon is not taken away
        ("ABC-1", 0),
        ("", 0),
    ],
)
def test_infinitebench_looks_for_the_value_among_the_words(output, score):
    assert among_words(output, ["abc-1"]) == score


@pytest.mark.parametrize(
    ("output", "answer", "score"),
    [
        ("57", "57", 1),
        ("is 57, not 58", "57", 1),
        ("58 57", "57", 0),
        ("57.0", "57", 0),  # the official script stops with an error here
        ("57.5", "57.5", 1),
        ("57.50", "57.5", 1),
        ("57", "57.5", 0),
        ("-57", "57", 1),
        ("", "57", 0),
    ],
)
def test_infinitebench_takes_the_first_number(output, answer, score):
    assert first_number(output, [answer]) == score

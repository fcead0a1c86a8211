"""Result files survive anything, and refuse what they do not understand."""

import json
import math
import os
import resource
import select
import subprocess
import sys
from pathlib import Path

import pytest

from kvsketch.evaluation.answers.summary import standard_error, summarise, wilson
from kvsketch.evaluation.results.rows import FORMAT, KEY, RowsFile, read_rows, with_checksum

RUN = {"model": "a", "fingerprint": "123", "dtype": "float32", "kvsketch": "0.1.0"}


def row(sample, score=1.0, **changes):
    made = {"task": "lines", "wording": "compact", "cases": None, "asked": "after", "length": 1000, "depth": None}
    made |= {"haystack": "noise", "template": False, "new_tokens": 100, "tokens": 990}
    made |= {"sample": sample, "method": "exact", "score": score, "nbytes": 100, "full_nbytes": 400, "seconds": 0.5}
    return made | changes


def test_rows_come_back_and_are_not_written_twice(tmp_path):
    path = tmp_path / "deep" / "rows.jsonl"
    file = RowsFile(path, RUN)
    file.add([row(0), row(1)])
    file.add([row(1), row(2)])
    again = RowsFile(path, RUN)
    again.add([row(0), row(3)])
    runs, rows = read_rows(path)
    assert [found["sample"] for found in rows] == [0, 1, 2, 3]
    assert runs == [{"format": FORMAT, **RUN}]  # the same run is named once
    RowsFile(path, RUN | {"commit": "abc"})
    assert len(read_rows(path)[0]) == 2
    for name, what in (("kvsketch", "version"), ("fingerprint", "model"), ("dtype", "precision")):
        with pytest.raises(ValueError, match=rf"rows of another {what}: a in float32, kvsketch 0\.1\.0"):
            RowsFile(path, RUN | {name: "other"})
    RowsFile(path, RUN | {"model": "./a"})  # the same model under another name


def test_rows_of_a_method_that_has_learnt_something_else_since_are_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    RowsFile(path, RUN | {"learnt": {"saap": "one", "keydiff(heads='profile')": "two"}}).add([row(0)])
    RowsFile(path, RUN | {"learnt": {"saap": "one", "kmeans": "three"}})  # others may be added
    RowsFile(path, RUN)
    for method in ("saap", "kmeans"):
        with pytest.raises(ValueError, match=f"rows of {method} with another index or profile"):
            RowsFile(path, RUN | {"learnt": {method: "four"}})


def test_without_the_line_that_says_what_made_them_rows_are_refused_with_that_advice(tmp_path):
    path = tmp_path / "rows.jsonl"
    RowsFile(path, RUN).add([row(0)])
    whole = path.read_bytes()
    first, rest = whole.split(b"\n", 1)
    for damaged in (first.replace(b'"a"', b'"b"') + b"\n" + rest, rest):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"line 1: .*Put it back as it was, or write to another folder"):
            read_rows(path)


HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "rb")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_do_not_write_at_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    RowsFile(path, RUN).add([row(0)])
    before = path.read_bytes()
    with subprocess.Popen([sys.executable, "-c", HOLDS, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ValueError, match=r"another run is writing to .*: wait until it has ended, or write to"):
            RowsFile(path, RUN)
        assert path.read_bytes() == before
    file = RowsFile(path, RUN)
    RowsFile(path, RUN).add([row(1)])  # this process may, as often as it likes
    with subprocess.Popen([sys.executable, "-c", HOLDS, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert not select.select([other.stdout], [], [], 0.3)[0], "it has to wait"
        del file
        assert other.stdout.readline() == b"held\n"


def test_a_row_that_stands_twice_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    RowsFile(path, RUN).add([row(0), row(1)])
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(ValueError, match=r"line 5: this row stands in line 2 already\. Remove one of the two"):
        read_rows(path)


def test_answers_may_hold_anything(tmp_path):
    file = RowsFile(tmp_path / "rows.jsonl", RUN)
    odd = "".join(map(chr, [*range(32), 0x85, 0x2028, 0x2029, 0xD7FF, 0x1F600])) + '"\\'
    file.add([row(0, output=odd), row(1)])
    assert [found.get("output") for found in read_rows(file.path)[1]] == [odd, None]
    RowsFile(file.path, RUN).add([row(2)])
    assert len(read_rows(file.path)[1]) == 3


def test_a_line_that_was_cut_off_is_made_again(tmp_path):
    path = tmp_path / "rows.jsonl"
    RowsFile(path, RUN).add([row(0), row(1)])
    whole = path.read_bytes()
    for cut in range(len(whole) - 1, len(whole) - 150, -7):
        path.write_bytes(whole[:cut])
        file = RowsFile(path, RUN)
        file.add([row(0), row(1)])
        assert [found["sample"] for found in read_rows(path)[1]] == [0, 1]


@pytest.mark.parametrize("name", KEY)
def test_rows_differ_by_everything_that_is_set(name, tmp_path):
    file = RowsFile(tmp_path / "rows.jsonl", RUN)
    file.add([row(0), row(0) | {name: "other"}])
    assert len(read_rows(file.path)[1]) == 2


def test_a_file_may_have_a_key_of_its_own(tmp_path):
    path = tmp_path / "rows.jsonl"
    file = RowsFile(path, RUN, ("layer", "seed"))
    file.add([{"layer": 0, "seed": 1, "error": 0.5}, {"layer": 0, "seed": None}])
    RowsFile(path, RUN, ("layer", "seed")).add([{"layer": 0, "seed": 1}, {"layer": 1, "seed": 1}])
    _, rows = read_rows(path, ("layer", "seed"))
    assert [(row["layer"], row["seed"], row.get("error")) for row in rows] == [
        (0, 1, 0.5),
        (0, None, None),
        (1, 1, None),
    ]
    with pytest.raises(ValueError, match="line 2: not a row of a kvsketch benchmark"):
        RowsFile(path, RUN)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps({"run": {"format": 99, "kvsketch": "9.0"}}), "made by another version of kvsketch: .*99.*9.0"),
        (with_checksum({"run": {"format": FORMAT, "model": "b"}}).decode().strip(), "holds rows of another model: b"),
        ("hello", "line 1: not JSON"),
        ("[1", "line 1: not JSON"),
        ("[1]", "line 1: not a row"),
        (json.dumps({"a": 1}), "line 1: not a row of a kvsketch benchmark"),
        (with_checksum({"a": 1}).decode().strip(), "line 1: not a row of a kvsketch benchmark"),
    ],
)
def test_other_files_are_refused_and_left_as_they_were(text, message, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(ValueError, match=message):
        RowsFile(path, RUN)
    assert path.read_text() == text + "\n"
    path.write_text('{"precious": 1}')  # no line end, and not ours
    with pytest.raises(ValueError, match="is not a file of rows"):
        RowsFile(path, RUN)
    assert path.read_text() == '{"precious": 1}'


def test_means_have_the_textbook_standard_error():
    rows = [row(i, score=float(i % 4 == 0)) for i in range(100)]
    (mean,) = summarise(rows)
    assert (mean.count, mean.score, mean.share) == (100, 0.25, 0.25)
    assert mean.error == pytest.approx((0.25 * 0.75 / 99) ** 0.5)
    assert math.isnan(standard_error([1.0]))
    assert len(summarise([*rows, row(0, method="uniform"), row(0, length=2000)])) == 3


def test_rows_that_differ_in_their_making_are_not_averaged():
    rows = [row(0), row(0, wording="official"), row(0, task="needle"), row(0, task="needle", haystack="a.txt#123")]
    titles = [mean.task for mean in summarise(rows)]
    assert titles == ["lines (compact)", "lines (official)", "needle (noise)", "needle (a.txt)"]
    ready = row(0, cases="200_lines#ab12", wording="official")
    assert [mean.task for mean in summarise([row(0), ready])] == ["lines", "lines: 200_lines"]


def test_files_of_the_same_name_are_not_averaged():
    """Their content makes them others; the digest of it is shown where the name alone would not tell them apart."""
    cases = [row(i, cases=f"200_lines#{digest}") for i, digest in enumerate(("ab12", "cd34"))]
    texts = [row(i, task="needle", haystack=f"a#b.txt#{digest}") for i, digest in enumerate(("ab12", "cd34"))]
    found = summarise([*cases, *texts, row(0, task="needle", haystack="c.txt#ab12")])
    assert [(mean.task, mean.count) for mean in found] == [
        ("lines: 200_lines#ab12", 1),
        ("lines: 200_lines#cd34", 1),
        ("needle (a#b.txt#ab12)", 1),
        ("needle (a#b.txt#cd34)", 1),
        ("needle (c.txt)", 1),
    ]


def test_given_depths_are_not_averaged_with_drawn_ones():
    rows = [row(0, task="needle", depth=depth) for depth in (None, 0.0, 0.5)]
    assert [(mean.task, mean.count) for mean in summarise(rows)] == [
        ("needle (depths drawn at random)", 1),
        ("needle (given depths)", 2),
    ]


def test_rows_stay_where_they_began(tmp_path, monkeypatch):
    """In the folder that a relative path meant then."""
    monkeypatch.chdir(tmp_path)
    file = RowsFile(Path("out") / "rows.jsonl", RUN)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    file.add([row(0)])
    assert len(read_rows(tmp_path / "out" / "rows.jsonl")[1]) == 1
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_full_disk_costs_only_the_rows_that_found_no_room(tmp_path):
    """Here the file may not be larger; what was cut off is dropped when it is opened again."""
    file = RowsFile(tmp_path / "rows.jsonl", RUN)
    file.add([row(0)])
    limits, room = resource.getrlimit(resource.RLIMIT_FSIZE), file.path.stat().st_size + 100
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        with pytest.raises(OSError, match=r"rows that were written stay.*rows\.jsonl"):
            file.add([row(1)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    RowsFile(file.path, RUN).add([row(1)])
    assert [found["sample"] for found in read_rows(file.path)[1]] == [0, 1]


def test_what_is_no_file_gets_no_rows(tmp_path):
    os.mkfifo(tmp_path / "rows.jsonl")  # to open it would be to wait for ever
    for place in (tmp_path / "rows.jsonl", tmp_path):
        with pytest.raises(ValueError, match="is no file: rows are written there"):
            RowsFile(place, RUN)


def test_rows_of_ready_prompts_with_other_limits_are_not_averaged():
    """As with --cases run twice, with another --max-new-tokens: each has its own number of prompts."""
    ready = {"cases": "200_lines#ab12", "wording": "official"}
    rows = [row(i, new_tokens=count, **ready) for count in (40, 100) for i in range(30 if count == 40 else 10)]
    assert [(mean.task, mean.count) for mean in summarise(rows)] == [
        ("lines: 200_lines (40 new tokens)", 30),
        ("lines: 200_lines (100 new tokens)", 10),
    ]


def test_intervals_are_wilsons_and_never_say_that_all_is_certain():
    """Against Wilson's own condition: a true share at an end lies 1.96 standard errors from what was found."""
    for found, count in ((0, 12), (3, 12), (12, 12), (150, 200), (1, 1)):
        score = found / count
        low, high = wilson(score, count)
        assert 0 <= low <= score <= high <= 1
        assert high - low > 0
        for end in {low, high} - {0.0, 1.0}:
            assert abs(score - end) == pytest.approx(1.96 * (end * (1 - end) / count) ** 0.5)
    assert str(summarise([row(i) for i in range(12)])[0]) == "1.000 [0.76, 1.00]"
    assert str(summarise([row(0)])[0]) == "1.000 [0.21, 1.00]"

"""The runner's answers are the model's own; interrupted runs lose and repeat nothing."""

import itertools
from dataclasses import replace

import pytest
import torch

import zoo
from kvsketch.caches.lookup.key_index import find_index
from kvsketch.evaluation.answers.able import first_prompts, unable
from kvsketch.evaluation.answers.plan import Plan
from kvsketch.evaluation.answers.runner import Runner
from kvsketch.evaluation.board.names import SAME_PROMPT
from kvsketch.evaluation.board.prompts import write_prompts
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.evaluation.embedded.training.tokenizer import build_tokenizer
from kvsketch.evaluation.results.rows import RowsFile, key_of, read_rows
from kvsketch.evaluation.tasks import Question, Sample
from kvsketch.evaluation.tasks.haystack import haystack_of
from kvsketch.huggingface.identity import describe_model

TOKENIZER = build_tokenizer()
TINY = {"model": "tiny", "fingerprint": "1", "kvsketch": "0.1.0"}
METHODS = ("exact", "streaming_llm(keep=128)", "uniform(keep=200)", "uniform(keep=200, prefill='streaming', chunk=64)")


def tiny(family="llama"):
    model = zoo.build(family)
    torch.manual_seed(0)
    model.resize_token_embeddings(len(TOKENIZER))
    return model


def plan(**changes):
    given = {  # a small plan
        "tasks": ("lines",),
        "methods": ("exact",),
        "lengths": (300,),
        "samples": 3,
        "wording": "compact",
        "batch": 2,
    }
    return Plan(**(given | {"max_new_tokens": 6} | changes))


def rows_of(runner, done=frozenset()):
    return [row for step in runner.run(set(done), key_of) for row in step.rows]


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("asked", ["before", "after"])
def test_exact_answers_are_stocks_whatever_the_batch(asked, family):
    model, stock = tiny(family), tiny(family)
    runner = Runner(model, TOKENIZER, plan(asked=(asked,), tasks=("lines", "kv")))
    for row in rows_of(runner):
        number = row["sample"]
        cell = next(cell for cell in runner.plan.cells() if cell.task.name == row["task"])
        prompt = runner._prompt(cell, number)
        ids = torch.tensor([prompt.context + prompt.question])
        out = stock.generate(ids, do_sample=False, max_new_tokens=6, pad_token_id=TOKENIZER.pad_token_id)
        assert row["output"] == TOKENIZER.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert row["tokens"] == ids.shape[1] <= 300


@pytest.mark.parametrize("asked", ["before", "after"])
def test_rows_do_not_depend_on_who_else_runs(asked):
    model, methods = tiny(), (*METHODS, "snapkv(keep=200)")
    together = rows_of(Runner(model, TOKENIZER, plan(methods=methods, asked=(asked,), batch=3)))
    assert len(together) == 3 * len(methods)
    for method in methods:
        alone = rows_of(Runner(model, TOKENIZER, plan(methods=(method,), asked=(asked,), batch=1)))
        theirs = [row["output"] for row in together if row["method"] == alone[0]["method"]]
        assert [row["output"] for row in alone] == theirs


def test_a_run_goes_on_where_it_stopped(tmp_path):
    model = tiny()
    runner = Runner(model, TOKENIZER, plan(methods=METHODS[:3], samples=5))
    whole = rows_of(runner)
    file = RowsFile(tmp_path / "rows.jsonl", TINY)
    for number, step in enumerate(runner.run(file.done, key_of)):
        if number == 5:
            break
        file.add(step.rows)
    again = RowsFile(tmp_path / "rows.jsonl", TINY)
    settled = 0
    for step in runner.run(again.done, key_of):
        again.add(step.rows)
        settled += step.answers
    _, found = read_rows(tmp_path / "rows.jsonl")
    without_time = [[{k: v for k, v in row.items() if k != "seconds"} for row in rows] for rows in (found, whole)]
    assert sorted(without_time[0], key=str) == sorted(without_time[1], key=str)
    assert settled == runner.plan.answers == len(whole)
    assert not rows_of(runner, again.done)


def test_bytes_are_a_rows_own_and_below_the_budget():
    rows = rows_of(
        Runner(tiny(), TOKENIZER, plan(methods=("exact", "uniform(keep=200)"), lengths=(900,), asked=("after",)))
    )
    exact = [row for row in rows if row["method"] == "exact"]
    small = [row for row in rows if row["method"] != "exact"]
    assert all(1.0 <= row["nbytes"] / row["full_nbytes"] < 1.1 for row in exact)
    assert all(0.2 < row["nbytes"] / row["full_nbytes"] < 0.35 for row in small)


def test_a_chat_template_is_used_and_the_answers_opening_comes_after_it():
    import copy

    tokenizer = copy.deepcopy(TOKENIZER)
    tokenizer.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    runner = Runner(tiny(), tokenizer, plan(tasks=("passkey",)))
    assert runner.template
    prompt = runner._prompt(next(runner.plan.cells()), 0)
    context, question = tokenizer.decode(prompt.context), tokenizer.decode(prompt.question)
    assert context.startswith("<user>A text:")
    assert question == "\nWhat is the pass key?<assistant> The pass key is "
    assert not Runner(tiny(), tokenizer, plan(raw=True)).template


def test_samples_take_turns_with_several_haystacks_wherever_they_begin(tmp_path):
    paths = [tmp_path / f"{name}.txt" for name in ("horse", "cow")]
    for path in paths:
        path.write_text(f"A {path.stem} ran. It rained. ")
    for seed in (0, 1):
        runner = Runner(tiny(), TOKENIZER, plan(tasks=("passkey",), haystack=haystack_of(paths), seed=seed))
        texts = [TOKENIZER.decode(runner._prompt(next(runner.plan.cells()), number).context) for number in range(3)]
        assert ["horse" in text for text in texts] == [(number + seed) % 2 == 0 for number in range(3)]
        assert ["cow" in text for text in texts] == [(number + seed) % 2 == 1 for number in range(3)]
        assert {row["haystack"] for row in rows_of(runner)} == {runner.plan.haystack.name}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("haystack",)}, "unknown task 'haystack'; there are lines, needle"),
        ({"samples": 0}, "samples must be at least 1, got 0"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
        ({"methods": ()}, "name at least one method"),
        ({"lengths": (0,)}, "lengths must be positive, got 0"),
        ({"depths": (1.5,)}, "a depth is a share of the document from 0 to 1, got 1.5"),
        ({"depths": (0.5,), "tasks": ("vt", "lines")}, "vt cannot be told where answers lie"),
        ({"lengths": ()}, "name at least one task, one length and one mode"),
        ({"tasks": ()}, "name at least one task, one length and one mode"),
        ({"cases": ("none", ())}, "none has no cases"),
        ({"cases": ("x", (Sample("a", ()),)), "seed": 3}, "leave out seed and depths"),
    ],
)
def test_bad_plans_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        plan(**changes)


def test_what_cannot_be_read_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="lines: 10 tokens are too few for one sample"):
        Runner(tiny(), TOKENIZER, plan(lengths=(5000, 10)))
    with pytest.raises(ValueError, match="a prompt has 50,000,000 tokens, and the context of"):  # no such text is made
        Runner(tiny(), TOKENIZER, plan(lengths=(50_000_000,)))
    with pytest.raises(ValueError, match="did you mean uniform"):
        Runner(tiny(), TOKENIZER, plan(methods=("unifrm",)))
    with pytest.raises(ValueError, match="a method is named twice"):
        Runner(tiny(), TOKENIZER, plan(methods=("uniform", "uniform(keep=0.25)")))


def test_a_question_that_opens_the_document_is_always_known():
    both = plan(tasks=("math_find", "kv"), wording="official")
    assert [list(both.question_modes(cell)) for cell in both.cells()] == [["before"], ["before", "after"]]
    assert both.answers == 3 * 3
    rows = rows_of(Runner(tiny(), TOKENIZER, both))
    assert {row["asked"] for row in rows if row["task"] == "math_find"} == {"before"}
    assert len(rows) == both.answers


def test_prompts_for_another_package_are_asked_whenever_ours_are(tmp_path):
    """Also where a folder goes on with more than before."""
    model, path = tiny(), tmp_path / "prompts.jsonl"
    for asked in (("after",), ("before", "after")):
        write_prompts(path, TINY, Runner(model, TOKENIZER, plan(asked=asked)))
    rows = read_rows(path, SAME_PROMPT)[1]
    assert len(rows) == 6
    assert {(row["sample"], row["asked"]) for row in rows} == set(itertools.product(range(3), ("after", "before")))


def test_a_runner_says_which_index_and_profile_its_methods_go_by():
    methods = ("exact", "saap", "keydiff(keep=0.25)", "keydiff(keep=0.25, heads='profile')")
    learnt = Runner(*load_embedded(), plan(methods=methods)).learnt
    assert set(learnt) == {"saap", "keydiff(keep=0.25, heads='profile')"}
    assert learnt["saap"] == find_index("saap", describe_model(load_embedded()[0])).digest


def test_what_a_model_cannot_do_is_left_out():
    """By the first prompts of the same making alone; in each mode by itself."""
    whole = plan(tasks=("lines", "kv"), methods=("exact", "uniform(keep=200)"), samples=50)
    first = Runner(tiny(), TOKENIZER, first_prompts(whole))
    rows = [labels | {"score": 1.0} for labels in first.labels()]
    assert len(rows) == 2 * 2 * 20
    for row in rows:
        if (row["task"], row["asked"]) == ("kv", "after"):
            row["score"] = float(row["sample"] < 15)
    others = [row | change | {"score": 0.0} for row in rows for change in ({"sample": 30}, {"haystack": "a"})]
    left_out = unable(first, rows + others, 0.8)
    assert left_out == {("kv", 300, "after"): [1.0] * 15 + [0.0] * 5}
    assert unable(first, rows, 0.75) == {}
    rest = replace(whole, left_out=left_out)
    assert [rest.question_modes(cell) for cell in rest.cells()] == [["before", "after"], ["before"]]
    assert rest.answers == 50 * 3 * 2
    assert len(list(Runner(tiny(), TOKENIZER, rest).labels())) == rest.answers


def test_ready_prompts_are_left_out_whatever_their_length():
    cases = ("three", [Sample("A text.", (Question(f"What is {i}?", ("1",), "1"),)) for i in range(3)])
    whole = plan(cases=cases, lengths=())
    first = Runner(tiny(), TOKENIZER, first_prompts(whole))
    left_out = unable(first, rows_of(first), 0.8)
    assert set(left_out) == {("lines", 0, "before"), ("lines", 0, "after")}
    assert replace(whole, left_out=left_out).answers == 0
    assert not rows_of(Runner(tiny(), TOKENIZER, replace(whole, left_out=left_out)))


def test_a_models_own_generation_settings_do_not_matter():
    plain, odd = tiny(), tiny()
    odd.generation_config.update(repetition_penalty=5.0, num_beams=3, do_sample=True, no_repeat_ngram_size=1)
    assert [row["output"] for row in rows_of(Runner(odd, TOKENIZER, plan()))] == [
        row["output"] for row in rows_of(Runner(plain, TOKENIZER, plan()))
    ]


def test_models_with_sliding_layers_are_asked_one_prompt_at_a_time():
    assert Runner(tiny("gpt_oss"), TOKENIZER, plan()).batch == 1
    assert Runner(tiny("llama"), TOKENIZER, plan()).batch == 2


@pytest.mark.slow
def test_the_embedded_model_answers_and_dropping_costs_answers():
    """24 pass keys in 1,000 tokens: known with everything held; without the middle only those near its ends."""
    model, tokenizer = load_embedded(torch.float32)
    methods = ("exact", "streaming_llm(keep=0.25)")
    found = rows_of(
        Runner(
            model, tokenizer, plan(tasks=("passkey",), methods=methods, lengths=(1000,), samples=24, asked=("after",))
        )
    )
    scores = {m: [row["score"] for row in found if row["method"] == m] for m in methods}
    assert sum(scores["exact"]) >= 23
    assert sum(scores["streaming_llm(keep=0.25)"]) <= 14
    kept = [row["score"] for row in found if row["method"] != "exact" and row["at"] > 0.85]
    assert len(kept) >= 2
    assert all(score == 1 for score in kept)  # the end of the text is in the window

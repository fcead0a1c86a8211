"""No answer changes by accident: what was noted down in golden/rows.json is answered still."""

import json

import pytest

from golden import rows
from kvsketch.caches.registry import parse_spec

KNOWN = json.loads(rows.FILE.read_text())
# In double precision no logit differs from these by more than 2e-6.
TOLERANCE = 2e-5


def cases():
    """On other models than llama, and the first of each method, with whatever version of transformers."""
    first = {parse_spec(spec).name: spec for spec in reversed((*rows.NAMED, *rows.MORE))}.values()
    return [
        pytest.param(family, spec, marks=[] if family != "llama" or spec in first else pytest.mark.once)
        for family, spec in rows.cases()
    ]


@pytest.mark.parametrize(("family", "spec"), cases())
def test_logits_are_what_they_were(family, spec, tmp_path):
    got, expected = rows.answers(family, spec, tmp_path), KNOWN[f"{family}: {spec}"]
    assert len(got) == len(expected)
    for moment, (now, then) in enumerate(zip(got, expected, strict=True)):
        assert now["logits"] == pytest.approx(then["logits"], abs=TOLERANCE), f"moment {moment}"
        for token, before, lead in zip(now["token"], then["token"], then["lead"], strict=True):
            assert token == before or lead < 2 * TOLERANCE, f"moment {moment}"


@pytest.mark.parametrize("spec", rows.ANSWERED)
def test_words_are_what_they_were(spec):
    assert rows.words(spec) == KNOWN[f"embedded: {spec}"]


def test_rows_of_different_methods_differ():
    """Or they would say nothing about the method."""
    seen = {}
    for family, spec in rows.cases():
        config = parse_spec(spec)
        everything = config.budget_given in (1.0, 4096) and getattr(config, "window", 2047) in (64, 2047)
        least = isinstance(config.budget_given, float) and config.budget_given < 0.125
        if spec != "exact" and (everything or least):
            continue  # such a one holds or reads all of these texts, or no more than it needs to work
        answers = str([moment["logits"] for moment in KNOWN[f"{family}: {spec}"]])
        assert parse_spec(seen.setdefault((family, answers), spec)) == config

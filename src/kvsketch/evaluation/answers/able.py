"""Which tasks a model can do with everything held: only on these does a method have right answers to lose."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvsketch.evaluation.answers.plan import Place, Plan
from kvsketch.evaluation.answers.runner import Runner
from kvsketch.evaluation.answers.summary import Mean, summarise, titles
from kvsketch.evaluation.results.rows import Row, key_of

EXACT = "exact"
PROMPTS = 20  # of each kind, by whose scores it is decided what a model can do


def first_prompts(plan: Plan) -> Plan:
    """The part of a plan that is run to see what the model can do."""
    return replace(plan, methods=(EXACT,), samples=min(PROMPTS, plan.samples))


def unable(runner: Runner, rows: Iterable[Row], least: float) -> dict[Place, list[float]]:
    """The places where the mean score of a runner's rows is below `least`, with the scores."""
    asked = {key_of(labels) for labels in runner.labels()}
    scores = defaultdict[Place, list[float]](list)
    for row in rows:
        if key_of(row) in asked:
            length = row["length"] if row["cases"] is None else 0  # as in a plan: ready prompts have their own
            scores[row["task"], length, row["asked"]].append(row["score"])
    return {place: found for place, found in scores.items() if statistics.fmean(found) < least}


def able_part(rows: Sequence[Row], least: float) -> tuple[list[Mean], list[Row]]:
    """Means with everything held; and the rows where these are at least `least` and methods were measured."""
    means = summarise(rows)
    held = [mean for mean in means if mean.method == EXACT]
    able = {(mean.task, mean.asked, mean.length) for mean in held if mean.score >= least}
    able &= {(mean.task, mean.asked, mean.length) for mean in means if mean.method != EXACT}
    title_of = titles(rows)
    return held, [row for row in rows if (title_of(row), row["asked"], row["length"]) in able]

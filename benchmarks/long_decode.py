"""Ten thousand tokens written after a prompt of four thousand: `python benchmarks/long_decode.py [--steps N]`.

On the embedded model: bytes held at the worst step, over the budget; the time of a step at the end, compared with the
beginning, also per entry held; the slowest step; and how many questions about the prompt, a record of lines, are
answered right after 0, 1,000 and all steps. Rows go to docs/results/long-decode.jsonl.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

import torch

import kvsketch
from common import RESULTS, provenance
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.evaluation.tasks import TASKS, Setting
from kvsketch.evaluation.tasks.length import Fitter

PROMPT, QUESTIONS, PART = 4000, 20, 1000
SPECS = (
    "kvzip(keep=0.25, window=0.25)",
    "kvzip(keep=0.25)",
    "kvzip(keep=1024)",
    "keydiff(keep=0.25, heads='profile')",
    "keydiff(keep=1024, heads='profile')",
)


@dataclass
class Found:
    """The results of one method."""

    spec: str
    right: dict[int, int]  # right answers to QUESTIONS, by the number of steps before
    worst_bytes: float  # bytes held at the worst step, over the budget's
    slack: float  # at the worst step, entries per row and head beyond 1.05 of the budget
    first_ms: float  # median of the first thousand steps
    last_ms: float
    speed_kept: float  # speed per entry held of the last thousand steps, over that of the first thousand
    slowest_ms: float


def asked(model, tokenizer, cache, sample) -> int:
    """How many questions a cache answers right, each asked of a copy."""
    right = 0
    for question in sample.questions:
        ids = tokenizer(question.prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]
        twin = cache.fork()
        out = model.generate(**twin.new_tokens(ids), past_key_values=twin, max_new_tokens=12, do_sample=False)
        text = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        right += TASKS["lines"].score(text, question.answers) == 1
    return right


@torch.no_grad()
def measure(model, tokenizer, spec: str, steps: int) -> Found:
    """Read the prompt, write tokens, and ask in between."""
    count = lambda made: len(tokenizer(made.context)["input_ids"])  # noqa: E731
    sample = Fitter(TASKS["lines"], Setting(size=1, wording="compact", questions=QUESTIONS), count).sample(
        PROMPT, "long"
    )
    ids = tokenizer(sample.context, return_tensors="pt")["input_ids"]
    cache = kvsketch.prefill(model, ids, kvsketch.make_cache(model, spec))
    keep, heads = cache.config.keep, model.config.num_key_value_heads * model.config.num_hidden_layers
    width = 2 * model.config.head_dim * next(model.parameters()).element_size()
    token, times, entries, worst, slack = ids[:, -1:], list[float](), list[float](), 0.0, 0.0
    right = {0: asked(model, tokenizer, cache, sample)}
    for step in range(1, steps + 1):
        began = time.perf_counter()
        out = model(input_ids=token, past_key_values=cache, use_cache=True)
        token = out.logits[:, -1:].argmax(2)
        times.append(1000 * (time.perf_counter() - began))
        held = cache.nbytes / heads / width
        budget = keep if isinstance(keep, int) else keep * cache.seen
        entries.append(held)
        worst, slack = max(worst, held / budget), max(slack, held - 1.05 * budget)
        if step in (PART, steps):
            right[step] = asked(model, tokenizer, cache, sample)
    first, last = times[:PART], times[-PART:]
    rate = [statistics.median(t) / statistics.fmean(e) for t, e in ((first, entries[:PART]), (last, entries[-PART:]))]
    return Found(
        spec,
        right,
        worst,
        max(0.0, slack),
        statistics.median(first),
        statistics.median(last),
        rate[0] / rate[1],
        max(times),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    model, tokenizer = load_embedded(torch.float32)
    rows = []
    for spec in SPECS:
        rows.append(asdict(measure(model, tokenizer, spec, steps)))
        print(json.dumps(rows[-1]), flush=True)
    lines = [{"run": provenance()}, *rows]
    (RESULTS / "long-decode.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()

"""Which tokens k-center keeps, and what that means for an answer: `python benchmarks/kept.py`.

Keys of the embedded model: greedy k-center keeps a quarter of the tokens before the last 64. (A uniform choice keeps a
quarter of everything, and n tokens in a row with probability 1/4ⁿ.) For lines, kept tokens are counted by kind; for a
needle in noise, the tokens of the needle. Writes docs/results/kept.jsonl.
"""

import re
from statistics import fmean

import torch

from common import RESULTS, write_row
from kvsketch.evaluation.embedded import load_embedded
from kvsketch.evaluation.tasks import TASKS, Sample, Setting
from kvsketch.evaluation.tasks.length import Fitter
from kvsketch.huggingface.capture import capture
from kvsketch.kernels.kcenter import k_center

SINKS, WINDOW, KEEP, PROMPTS, LENGTH = 4, 64, 0.25, 20, 2000


def kinds_of(tokenizer, sample: Sample, task: str) -> tuple[torch.Tensor, list[str]]:
    """Token ids of the prompt, and the kind of each token."""
    text = sample.context + sample.questions[0].prompt
    found = tokenizer(text, return_offsets_mapping=True)
    answer = sample.questions[0].answers[0]
    where = [match.span() for match in re.finditer(rf"(?<![0-9]){re.escape(answer)}(?![0-9])", sample.context)]
    kinds = []
    for start, stop in found["offset_mapping"]:
        token = text[start:stop].strip()
        if any(start < end and stop > begin for begin, end in where):
            kinds.append("the answer")
        elif re.fullmatch(r"[0-9]+", token):
            kinds.append("other numbers")
        elif task == "lines" and re.search(r"line [^:]*$", text[max(0, start - 60) : start]):
            kinds.append("names")
        else:
            kinds.append("words" if task != "lines" else "template")
    return torch.tensor([found["input_ids"]]), kinds


def main() -> None:
    model, tokenizer = load_embedded()
    (RESULTS / "kept.jsonl").unlink(missing_ok=True)

    def count(made: Sample) -> int:
        return len(tokenizer(made.context + made.questions[0].prompt)["input_ids"])

    for task in ("lines", "niah_single"):
        fitter = Fitter(TASKS[task], Setting(size=1, wording="compact"), count)
        shares = dict[tuple[int, str], list[float]]()
        whole = dict[int, list[float]]()  # by layer: the share of heads that keep every token of the answer
        for seed in range(PROMPTS):
            ids, kinds = kinds_of(tokenizer, fitter.sample(LENGTH, f"kept/{seed}"), task)
            middle = slice(SINKS, ids.shape[1] - WINDOW)
            for layer in capture(model, ids):
                keys = layer.keys[None, :, middle]
                wanted = round(KEEP * keys.shape[2])
                chosen = k_center(keys, torch.tensor([wanted])).centres[0]  # [h, k]
                kept = torch.zeros(keys.shape[1:3], dtype=torch.bool).scatter_(1, chosen, True)
                for kind in sorted(set(kinds[middle])):
                    which = torch.tensor([one == kind for one in kinds[middle]])
                    shares.setdefault((layer.layer, kind), []).append(float(kept[:, which].float().mean()))
                    if kind == "the answer":
                        whole.setdefault(layer.layer, []).append(float(kept[:, which].all(1).float().mean()))
        for (layer, kind), found in sorted(shares.items()):
            row = {"task": task, "layer": layer, "kind": kind, "kept": fmean(found), "prompts": len(found)}
            if kind == "the answer":
                row["whole"] = fmean(whole[layer])  # share of heads that keep all tokens of the answer
            write_row("kept", row | {"keep": KEEP})


if __name__ == "__main__":
    main()

"""Do methods keep what kvpress keeps? `python benchmarks/kvpress_kept.py scores MODEL TEXT FILE`.

Then `python benchmarks/kvpress_kept.py compare MODEL FILE`. The first command runs in kvpress's own environment
(`make kvpress` makes it; `.venv-kvpress/bin/python`), and writes the scores that presses give the tokens of a text, as
they are and without their known differences from our methods. The second command reads the same tokens with kvsketch.
Among the tokens that are neither sinks nor in the window, each head keeps the best by those scores, as many as our
method keeps; the table says how many are the same. MODEL is a folder. Rows go to docs/results/kvpress-kept.jsonl.
"""

import argparse
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS, KEEP = 1000, 0.25
OURS = {  # our method for each press that should do the same
    "KeyDiffPress": "keydiff(keep={})",
    "SnapKVPress": "snapkv(keep={})",
    "ObservedAttentionPress": "h2o(keep={})",
    "TOVAPress": "tova(keep={})",
    "ExpectedAttentionPress": "expected_attention(keep={})",
    "KVzipPress": "kvzip(keep={}, heads='equal', pooled=1)",
}
LIKE_OURS = {  # the difference that is taken away
    "KeyDiffPress": "anchor of the tokens chosen from",
    "ObservedAttentionPress": "sums, not means over queries",
    "TOVAPress": "each KV head by itself",
    "KVzipPress": "no request to repeat the text",
}


def loaded(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def write_scores(folder: str, text: Path, path: Path) -> None:
    """Write the scores that presses give each token in each KV head of each layer."""
    import kvpress
    from transformers import DynamicCache

    class EachHead(kvpress.TOVAPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            last = attentions[..., -1, :]
            return last.unflatten(1, (keys.shape[1], -1)).mean(2)

    class Sums(kvpress.ObservedAttentionPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            return attentions.sum(2).unflatten(1, (keys.shape[1], -1)).mean(2)

    class AsItIs(kvpress.KVzipPress):
        def prepare(self, model, tokenizer, *given):
            self.prefix_length = 0
            super().prepare(model, tokenizer, *given)
            return [(self._context_ids, self._context_ids)]

    tokenizer, model = AutoTokenizer.from_pretrained(folder), loaded(folder)
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :TOKENS]
    ratio = 1 - KEEP
    presses = {
        "KeyDiffPress": kvpress.KeyDiffPress(ratio),
        "SnapKVPress": kvpress.SnapKVPress(ratio, window_size=32, kernel_size=5),  # as many as ours
        "ObservedAttentionPress": kvpress.ObservedAttentionPress(ratio),
        "TOVAPress": kvpress.TOVAPress(ratio),
        "ExpectedAttentionPress": kvpress.ExpectedAttentionPress(ratio, epsilon=0.01),  # as ours
        "KVzipPress": kvpress.KVzipPress(ratio),
        "ObservedAttentionPress, like ours": Sums(ratio),
        "TOVAPress, like ours": EachHead(ratio),
        "KVzipPress, like ours": AsItIs(ratio),
    }
    found: dict[str, Tensor] = {"ids": ids}
    for name, press in presses.items():
        kept = list[Tensor]()
        if isinstance(press, kvpress.KVzipPress):
            press.compress_post = lambda _, own=press, into=kept: into.extend(own.score_val[:, 0])
        else:
            press.score = lambda *given, own=press.score, into=kept: into.append(own(*given)[0]) or into[-1][None]
        with press(model):
            model.model(input_ids=ids, past_key_values=DynamicCache())
        found[name] = torch.stack(kept).float().contiguous()
    save_file(found, path, metadata={"kvpress": version("kvpress")})


@torch.no_grad()
def compare(folder: str, path: Path) -> None:
    """Write how many of the tokens that our methods choose are among the best by those scores."""
    import kvsketch
    from common import write_row
    from kvsketch.evaluation.inspection.kept import held_tokens

    model, scores = loaded(folder), load_file(path)
    ids = scores["ids"]
    whole = kvsketch.prefill(model, ids, kvsketch.make_cache(model, "exact"))
    print("| | | the same | worst head | heads alike | with this taken away | |\n|---|---|---|---|---|---|---|")
    for press, form in OURS.items():
        spec = form.format(KEEP)
        small = kvsketch.prefill(model, ids, kvsketch.make_cache(model, spec))
        held, there = list[Tensor](), list[Tensor]()
        for layer, own in zip(held_tokens(whole, small), small.sketch_layers, strict=True):
            between = torch.ones(ids.shape[1], dtype=torch.bool)
            between[own.held.window.columns.ranks[0]] = False
            held.append(layer.held[:, between])
            there.append(between)
        alike = scores.get(f"{press}, like ours")
        if press == "KeyDiffPress":
            keys = [layer.held.window.columns.keys[0] for layer in whole.sketch_layers]
            alike = [_towards(own, between) for own, between in zip(keys, there, strict=True)]
        shares, others = (
            None if theirs is None else _shared(held, [x[:, b] for x, b in zip(theirs, there, strict=True)])
            for theirs in (scores[press], alike)
        )
        assert shares is not None, "every press has scores"
        row = {"model": Path(folder).name, "press": press, "method": spec, "tokens": ids.shape[1], "heads": len(shares)}
        row |= {"mean": float(shares.mean()), "worst": float(shares.min()), "alike": int((shares == 1).sum())}
        line = f"| `{press}` | `{spec}` | {row['mean']:.3f} | {row['worst']:.3f} | {row['alike']} of {len(shares)} |"
        if others is not None:
            row |= {"taken_away": LIKE_OURS[press], "then": float(others.mean()), "then_worst": float(others.min())}
            line += f" {row['then']:.3f}, worst {row['then_worst']:.3f} | {LIKE_OURS[press]} |"
        write_row("kvpress-kept", row)
        print(line)


def _shared(held: list[Tensor], theirs: list[Tensor]) -> Tensor:
    """For each head, the share of its n held tokens that are among the n best by their scores."""
    found = list[float]()
    for layer, scores in zip(held, theirs, strict=True):
        for own, score in zip(layer, scores, strict=True):
            best = torch.zeros_like(own).index_fill_(0, score.topk(int(own.sum())).indices, value=True)
            found.append(float((own & best).sum() / own.sum()))
    return torch.tensor(found)


def _towards(keys: Tensor, between: Tensor) -> Tensor:
    """How far each key points away from the mean direction of those in `between`, as in kvpress: not by our code."""
    directions = torch.nn.functional.normalize(keys.double(), dim=2)
    return -(directions * directions[:, between].mean(1, keepdim=True)).sum(2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parts = parser.add_subparsers(dest="part", required=True)
    for name, arguments in (("scores", ("model", "text", "file")), ("compare", ("model", "file"))):
        own = parts.add_parser(name)
        for argument in arguments:
            own.add_argument(argument, type=str if argument == "model" else Path)
    given = parser.parse_args()
    if given.part == "scores":
        write_scores(given.model, given.text, given.file)
    else:
        compare(given.model, given.file)

"""`kvsketch inspect --heads`: which tokens of a text each head of a small cache keeps, as a page."""

from pathlib import Path
from typing import TYPE_CHECKING

import kvsketch
from kvsketch.caches.recommended import FOR_BOTH
from kvsketch.cli.app import made_text, or_default, progress_bar
from kvsketch.cli.models import load_model
from kvsketch.cli.notes import say

if TYPE_CHECKING:
    from kvsketch.caches.core.config import MethodConfig

PAGE = "kept.html"


def show_heads(
    model: str | None,
    method: str | None,
    prompt_file: Path | None,
    text: str | None,
    tokens: int,
    dtype: str,
    device: str | None,
    out: Path,
) -> None:
    """Read a text once, compress what was read into a small cache, and write the page."""
    config = checked(method)
    from kvsketch.evaluation.inspection.kept import held_tokens, token_texts, write_kept_page
    from kvsketch.evaluation.reading import readable_for
    from kvsketch.evaluation.results.provenance import provenance
    from kvsketch.huggingface.supported import check_context

    exact = readable_for(config)
    if exact is None:
        why, advice = "needs notes that an exact cache does not take", "name another method"
        if config.prefill != "exact":
            why, advice = "chooses while it reads", f'leave out prefill="{config.prefill}", or {advice}'
        raise ValueError(f"{config} {why}, and --heads shows what is chosen of a text that was read exactly: {advice}")
    language_model, tokenizer = load_model(model, dtype, device)
    read = made_text("lines", tokens, "inspect", tokenizer) if text is None else text
    found = tokenizer(read, return_tensors="pt", return_offsets_mapping=True)
    ids = found["input_ids"][:, :tokens].to(language_model.device)
    check_context(language_model, ids.shape[1], "a text has")
    with progress_bar() as bar:
        task = bar.add_task(f"reading {ids.shape[1]:,} tokens", total=None)
        whole = kvsketch.make_cache(language_model, exact)
        kvsketch.prefill(language_model, ids, whole, progress=lambda count: bar.update(task, completed=count))
        small = whole.compress(config)
    about = {"method": str(config), "model": model or "embedded", "text": str(prompt_file or "a record of lines")}
    report = small.report()
    about["bytes"] = f"{report.nbytes / report.full_nbytes:.1%} of a full cache"
    run = provenance()
    about |= {"kvsketch": f"{run['kvsketch']} {run['commit']}", "date": run["date"]}
    ends = found["offset_mapping"][0, : ids.shape[1], 1].tolist()
    out.mkdir(parents=True, exist_ok=True)
    write_kept_page(out / PAGE, held_tokens(whole, small), token_texts(read, ends), about)
    say(f"which tokens are kept: {out / PAGE}")


def checked(method: str | None) -> "MethodConfig":
    """The method's config; refuses one that holds every token."""
    from kvsketch.caches.core.config import BudgetedConfig

    config = kvsketch.parse_spec(or_default(method, FOR_BOTH))
    if not isinstance(config, BudgetedConfig):
        raise ValueError(f"{config} holds every token in every head: --heads is for methods that forget")
    return config

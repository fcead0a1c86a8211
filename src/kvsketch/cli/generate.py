"""`kvsketch generate`: read a text with a bounded cache; then answer a question, or go on with the text."""

import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

import kvsketch
from kvsketch.caches.recommended import FOR_BOTH, READ_ONCE, READ_ONCE_WITHOUT_PROFILE
from kvsketch.cli.app import MOST, check_output, or_default, progress_bar, read_text, size_for_people
from kvsketch.cli.models import load_model
from kvsketch.cli.notes import notes, say
from kvsketch.cli.options import Device, ModelName, Precision

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from kvsketch.caches.core.config import MethodConfig
    from kvsketch.evaluation.answers.session import Timing


LEAST_TEMPERATURE = 1e-4  # below it, dividing logits by it gives no finite numbers


def generate(
    model: ModelName = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method",
            "-m",
            help=f"How the cache is kept small, as a spec; {FOR_BOTH} if left out.",
        ),
    ] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A text file to read; - is standard input.")] = None,
    question: Annotated[
        str | None, typer.Option(help="A question on the text, asked once the cache is compressed.")
    ] = None,
    save_cache: Annotated[Path | None, typer.Option(help="Save the cache of the text in this file.")] = None,
    load_cache: Annotated[
        Path | None, typer.Option(help="Start from the cache saved in this file instead of a text.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=MOST, help="Most tokens of the answer.")] = 128,
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST, help="Tokens of the text to read at a time; left out, all at once, or as the method says."
        ),
    ] = None,
    protect: Annotated[
        list[str] | None, typer.Option(help="Tokens of the text never to drop, as START:STOP; repeat for more.")
    ] = None,
    dtype: Precision = "auto",
    device: Device = None,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0 takes the likeliest token each time.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the draws, for a --temperature that is not 0: the same draws each time.")
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Do not use the model's chat template.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Also show what each layer holds.")] = False,
) -> None:
    """Read a text with a bounded cache; then answer a question on it, or go on with the text."""
    _check_sources(prompt_file, question, load_cache, save_cache, method, chunk)
    if temperature and not LEAST_TEMPERATURE <= temperature < math.inf:
        raise ValueError(f"--temperature must be 0, or a number from {LEAST_TEMPERATURE:g} on, got {temperature}")
    if seed is not None and not (temperature and 0 <= seed < 1 << 32):
        raise ValueError(f"--seed is a number from 0 to 2**32 - 1, for a --temperature that is not 0, got {seed}")
    config, spans = kvsketch.parse_spec(or_default(method, FOR_BOTH)), _spans(protect, load_cache)
    if load_cache is not None:
        from kvsketch.files import check_is_file

        check_is_file(load_cache)
    text = None if prompt_file is None else read_text(prompt_file)
    language_model, tokenizer = load_model(model, dtype, device)
    before, new = _tokens(language_model, tokenizer, text or "", question or "", raw)
    if new is None and save_cache is None:
        before, new = before[:, :-1], before[:, -1:]  # to go on, the model needs one token that the cache has not read
    asked = 0 if new is None else new.shape[1]
    if load_cache is None:
        from kvsketch.huggingface.supported import check_context

        check_context(language_model, before.shape[1] + asked, "the text and the question have")
        if method is None:
            config = _as_it_fits(config, language_model, before.shape[1])
    _check_spans(spans, before.shape[1])
    new_cache = partial(kvsketch.make_cache, language_model, config, protect=spans)
    cache, prefill_time = _loaded_or_filled(language_model, new_cache, load_cache, before, chunk, asked)
    not_saved = None if save_cache is None else _try_to_save(cache, save_cache, answers=new is not None)
    decode_time = None
    if new is not None:
        if seed is not None:
            from transformers import set_seed

            set_seed(seed)
        decode_time = _answer(language_model, tokenizer, new, cache, max_new_tokens, temperature)
    _closing_table(cache, prefill_time, decode_time, in_full=report)
    if not_saved is not None:
        raise not_saved


def _tokens(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", text: str, question: str, raw: bool
) -> "tuple[Tensor, Tensor | None]":
    """The tokens that the cache reads, and the tokens that come after, or None."""
    from kvsketch.huggingface.templates import split_prompt, uses_template

    template = uses_template(tokenizer, raw)
    if template:
        text, question = split_prompt(tokenizer, text, question)
    before = _ids(tokenizer, text, model, special=not template)
    return before, _ids(tokenizer, question, model, special=False) if question else None


def _as_it_fits(config: "MethodConfig", model: "PreTrainedModel", tokens: int) -> "MethodConfig":
    """The usual method, or another one where the model's context has no room to read the text a second time."""
    from kvsketch.huggingface.rereading import check_room_behind

    try:
        check_room_behind(model, tokens, "a text")
    except ValueError:
        once = _read_once(model)
        say(f"the text leaves no room in the model's context to read it again, as {config} does: {once} instead")
        return once
    return config


def _read_once(model: "PreTrainedModel") -> "MethodConfig":
    """The usual method for a text that is read once: by profile, if this model has one."""
    try:
        return kvsketch.make_cache(model, READ_ONCE).config
    except ValueError:
        return kvsketch.parse_spec(READ_ONCE_WITHOUT_PROFILE)


def _loaded_or_filled(
    model: "PreTrainedModel",
    new_cache: Callable[[], Any],
    saved: Path | None,
    ids: "Tensor",
    chunk: int | None,
    asked: int,
) -> "tuple[Any, Timing | None]":
    """The saved cache, if `asked` more tokens fit, or a new one that has read these tokens; and how fast it read."""
    from kvsketch.huggingface.supported import check_context

    if saved is not None:
        cache = kvsketch.load_cache(model, saved)
        check_context(model, cache.seen + asked, "the saved text and the question have")
        return cache, None
    cache = new_cache()
    return cache, _read_with_bar(model, ids, cache, chunk) if ids.shape[1] else None


def _spans(given: list[str] | None, saved: Path | None) -> list[tuple[int, int]]:
    """The spans of tokens that `--protect` names, as in 0:20."""
    if given and saved is not None:
        raise ValueError("--protect does not go with --load-cache: it is said when a text is read")
    spans = list[tuple[int, int]]()
    for one in given or ():
        found = re.fullmatch(r"(\d{1,15}):(\d{1,15})", one)
        if found is None:
            raise ValueError(f"--protect is START:STOP in tokens of the text, as in 0:20, got {one!r:.40}")
        if int(found[1]) >= int(found[2]):
            raise ValueError(f"--protect is START:STOP with STOP after START, as in 0:20, got {one}")
        spans.append((int(found[1]), int(found[2])))
    return spans


def _check_spans(spans: list[tuple[int, int]], tokens: int) -> None:
    """Refuse to protect tokens that the text does not have."""
    last = max((stop for _, stop in spans), default=0)
    if last > tokens:
        raise ValueError(f"--protect goes up to token {last:,}, and the text has {tokens:,}")


def _try_to_save(cache: Any, path: Path, *, answers: bool) -> Exception | None:
    """Save a cache; an error is returned, not raised, if there is a question to answer before it ends the command."""
    try:
        cache.save(path)
    except (ValueError, OSError) as error:
        if not answers:
            raise
        say(f"the cache is not saved ({error}); the answer comes first")
        return error
    say(f"cache saved in {path}")
    return None


def _check_sources(
    prompt_file: Path | None, question: str | None, load_cache: Path | None, save_cache: Path | None,
    method: str | None, chunk: int | None,
) -> None:  # fmt: skip
    if (prompt_file is None) == (load_cache is None):
        raise ValueError("give a text with --prompt-file, or a saved cache with --load-cache, and not both")
    if load_cache is not None and not question:
        raise ValueError("--load-cache needs a --question to answer")
    if load_cache is not None and save_cache is not None:
        raise ValueError("--save-cache keeps the cache of a text that was read; with --load-cache none is read")
    if load_cache is not None and method is not None:
        raise ValueError("--method is chosen when a text is read; a loaded cache keeps the one it was made with")
    if load_cache is not None and chunk is not None:
        raise ValueError("--chunk says how a text is read; with --load-cache none is read")
    if save_cache is not None:
        from kvsketch.files import begins_as_tensors

        check_output("--save-cache", save_cache, [prompt_file], begins=begins_as_tensors, what="saved cache")


def _ids(tokenizer: "PreTrainedTokenizerBase", text: str, model: "PreTrainedModel", *, special: bool) -> "Tensor":
    ids: Tensor = tokenizer(text, return_tensors="pt", add_special_tokens=special)["input_ids"]
    return ids.to(model.device)


def _read_with_bar(model: "PreTrainedModel", ids: "Tensor", cache: Any, chunk: int | None) -> "Timing":
    from kvsketch.evaluation.answers.session import read_prompt

    count = ids.shape[1]
    twice = cache.config.askings.second
    in_one_call = chunk is None and cache.config.prefill == "exact"  # then the bar cannot show progress, only activity
    with progress_bar() as bar:
        task = bar.add_task(f"reading {count:,} tokens", total=None if in_one_call else count * (1 + twice))
        return read_prompt(model, ids, cache, chunk=chunk, progress=lambda read: bar.update(task, completed=read))


def _answer(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    new: "Tensor",
    cache: Any,
    max_new_tokens: int,
    temperature: float,
) -> "Timing":
    from transformers import TextStreamer

    from kvsketch.evaluation.answers.session import answer

    options = {"do_sample": True, "temperature": temperature} if temperature else {}
    streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
    _, timing = answer(model, new, cache, max_new_tokens=max_new_tokens, streamer=streamer, **options)
    return timing


def _closing_table(cache: Any, prefill: "Timing | None", decode: "Timing | None", *, in_full: bool) -> None:
    report = cache.report()
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("method", report.method)
    table.add_row("tokens seen", f"{report.seen:,}")
    if prefill is not None:
        table.add_row("prompt", f"{prefill.tokens:,} tokens, {prefill.rate:,.0f} tokens/s")
    if decode is not None and decode.tokens:
        table.add_row("answer", f"{decode.tokens + 1:,} tokens, {decode.rate:,.1f} tokens/s")
    share = f" ({report.nbytes / report.full_nbytes:.1%})" if report.full_nbytes else ""
    table.add_row("kernels", report.kernels)
    table.add_row("cache", f"{size_for_people(report.nbytes)} of {size_for_people(report.full_nbytes)}{share}")
    if report.error is not None:
        table.add_row("attention error", f"{report.error:.3f} (mean over layers and heads, after the text was read)")
    notes.print(table)
    if in_full:
        say(str(report))

"""What was refused has moved nothing, and what was interrupted can go on, or says that it cannot."""

import gc
import random
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import kvsketch
from histories import VOCABULARY, interrupt, model, refusal_of, said
from kvsketch.caches.core.probe import relative_error
from kvsketch.files import TensorFile, write_tensors
from kvsketch.huggingface.attaching import is_attached, is_watched
from kvsketch.huggingface.capture import capture
from states import difference, state_of


def ids(rows, count, seed=0):
    return torch.randint(1, VOCABULARY, (rows, count), generator=torch.Generator().manual_seed(seed))


def read(spec, prompt, mask=None, **options):
    cache = kvsketch.make_cache(model(), spec, **options)
    return cache if prompt is None else kvsketch.prefill(model(), prompt, cache, attention_mask=mask)


def given(cache, new, *, positions=True):
    """Inputs of a call that goes on."""
    inputs = cache.new_tokens(new)
    places = (inputs["attention_mask"].cumsum(1) - 1)[:, -new.shape[1] :]
    return {**inputs, **({"position_ids": places} if positions else {}), "past_key_values": cache}


@torch.no_grad()
def test_a_refused_call_leaves_a_padded_cache_as_it_was():
    prompt, new, mask = ids(2, 40), ids(2, 5, 1), torch.ones(2, 40, dtype=torch.long)
    mask[0, :10] = 0
    right = model()(**given(read("exact", prompt, mask), new)).logits
    cache = read("exact", prompt, mask)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="precision, that it began with"):
        model()(**given(cache, new))
    for _ in range(2):  # without positions a padded row would go on at a wrong one: refused, whatever came before
        with pytest.raises(ValueError, match="row 0 goes on at position 40, but the cache has read 30"):
            model()(**given(cache, new, positions=False))
    assert torch.equal(model()(**given(cache, new)).logits, right)


def test_too_many_rows_at_first_do_not_stay():
    cache = kvsketch.make_cache(model(), "keydiff(keep='20KB')")
    many = torch.ones(40, 60, dtype=torch.long).index_fill(1, torch.arange(3), 0)
    with pytest.raises(ValueError, match="give more bytes"):
        kvsketch.prefill(model(), ids(40, 60), cache, attention_mask=many)
    mask = torch.ones(2, 60, dtype=torch.long)
    mask[1, :7] = 0
    kvsketch.prefill(model(), ids(2, 60), cache, attention_mask=mask)
    assert difference(state_of(cache), state_of(read("keydiff(keep='20KB')", ids(2, 60), mask))) is None


@pytest.mark.parametrize("spec", ["uniform(keep=0.4)", "kvzip(keep=0.4)", "balancekv(keep=0.4, prefill='streaming')"])
def test_the_same_call_again_completes_a_prompt(spec):
    prompt, mask = ids(2, 90), torch.ones(2, 90, dtype=torch.long)
    mask[0, :11] = 0
    options = {"attention_mask": mask, "chunk": 20, "protect": [(0, 5)]}
    whole = kvsketch.prefill(model(), prompt, kvsketch.make_cache(model(), spec), **options)
    cache, read = kvsketch.make_cache(model(), spec), []

    def progress(stop):
        read.append(stop)
        if len(read) in (2, 5):  # in its midst, and when all was read
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            kvsketch.prefill(model(), prompt, cache, progress=progress, **options)
    kvsketch.prefill(model(), prompt, cache, progress=progress, **options)
    assert read == sorted(set(read)), "each token once"
    assert read[:5] == [10, 30, 50, 70, 90]
    assert difference(state_of(cache), state_of(whole)) is None
    later = kvsketch.prefill(model(), prompt, cache, attention_mask=mask)  # and once more it is text that goes on
    assert later.seen == 180


@pytest.mark.parametrize("again", [False, True], ids=["the first reading", "the second"])
def test_ctrl_c_before_a_layer_took_anything(again):
    """No hook hears of it: the text of that call is not counted twice, nor is a text that was read forgotten."""
    prompt, calls = ids(1, 90), []

    def stop(*_):
        calls.append(None)
        if len(calls) == (4 if again else 2):
            raise KeyboardInterrupt

    whole, cache = read("kvzip(keep=0.4)", prompt), read("kvzip(keep=0.4)", None)
    hook = model().model.layers[0].register_forward_pre_hook(stop)
    try:
        with pytest.raises(KeyboardInterrupt):
            kvsketch.prefill(model(), prompt, cache, chunk=30)
    finally:
        hook.remove()
    if again:
        with pytest.raises(ValueError, match="no new tokens"):
            model()(ids(1, 0), past_key_values=cache)
        kvsketch.prefill(model(), prompt, cache, chunk=30)
    else:
        kvsketch.prefill(model(), prompt[:, cache.seen :], cache)
    assert cache.sketch_layers[0].held.count_entries().tolist() == whole.sketch_layers[0].held.count_entries().tolist()
    assert cache.seen == 90
    assert not cache.prompt.due


@pytest.mark.parametrize("padded", [False, True])
def test_a_reading_that_is_interrupted_anywhere_goes_on_or_says_that_it_cannot(padded):
    prompt, mask = ids(2, 60), torch.ones(2, 60, dtype=torch.long)
    mask[0, : 20 * padded] = 0
    right, draw, went_on = state_of(read("kvzip(keep=0.4)", prompt, mask), asked=False), random.Random(padded), 0
    for _ in range(25):
        cache = kvsketch.make_cache(model(), "kvzip(keep=0.4)")

        def work(cache=cache):
            kvsketch.prefill(model(), prompt, cache, attention_mask=mask)

        interrupt(work, draw.randint(1, 7000))
        if refusal_of(cache.stack.check_whole) is not None:
            continue
        if (cache.seen == 0 or cache.prompt.held) and refusal_of(work) is not None:
            continue
        found = state_of(cache, asked=False)
        for name, one in right.items():
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                torch.testing.assert_close(found[name], one, msg=name)
        went_on += 1
    assert went_on > 5


class Full(TorchDispatchMode):
    """Counts operations, and has no memory for one of them."""

    def __init__(self, at=None):
        super().__init__()
        self.at, self.done = at, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.done += 1
        if self.done == self.at:
            raise torch.OutOfMemoryError("pretended")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("spec", ["exact", "balancekv(keep=0.4, window=8)", "keydiff(keep=0.4, heads='pyramid')"])
def test_where_memory_runs_out_a_cache_goes_on_or_says_that_it_cannot_and_gives_back_its_own(spec):
    prompt, new, draw, went_on, broken = ids(1, 60), ids(1, 9, seed=1), random.Random(1), 0, 0

    @torch.no_grad()
    def work(cache):
        if cache.seen == 0:
            kvsketch.prefill(model(), prompt, cache)
        if cache.seen == 60:
            model()(**given(cache, new))

    whole = read(spec, None)
    with Full() as all_of_it:
        work(whole)
    for at in sorted(draw.sample(range(1, all_of_it.done + 1), 8)):
        cache = read(spec, None)
        with pytest.raises(torch.OutOfMemoryError), Full(at):
            work(cache)
        if refusal_of(cache.stack.check_whole) is None:
            work(cache)
            assert difference(state_of(cache), state_of(whole)) is None
            went_on += 1
        else:
            with pytest.raises(ValueError, match="failed half-way"):
                model()(new, past_key_values=cache)
            broken += 1
        windows = [layer.held.window for layer in cache.sketch_layers if layer.held.started]
        buffers = [grown.buffer for window in windows for grown in (window.keys, window.values)]
        held = [weakref.ref(buffer) for buffer in buffers if buffer is not None]
        del cache, windows, buffers
        gc.collect()
        assert not any(one() is not None for one in held)
    assert went_on > 0 < broken


@pytest.mark.parametrize(
    "spec", ["uniform(keep=0.3, window=16)", "random_buckets(buckets=8, probes=2, staging=24, window=20)"]
)
def test_a_file_that_is_not_finished_costs_nothing(spec, tmp_path):
    """Saving has a cache do what it has put off: compress what a draft held back, note where new keys belong."""

    def filled():
        cache = kvsketch.make_cache(model(), spec)
        if spec.startswith("uniform"):
            cache.activate_past_recording()
        said(model(), cache, ids(1, 90), torch.ones(1, 90).bool())
        for number in range(5):
            said(model(), cache, ids(1, 1, number), torch.ones(1, 1).bool())
        return cache

    whole, draw, went_on = filled(), random.Random(0), 0
    whole.save(tmp_path / "whole")
    for _ in range(25):
        cache = filled()
        interrupt(lambda cache=cache: cache.save(tmp_path / "stopped"), draw.randint(900, 1600))
        if refusal_of(cache.stack.check_whole) is None:
            cache.save(tmp_path / "cache")
            assert difference(state_of(cache), state_of(whole)) is None
            went_on += 1
    assert went_on > 2


def test_a_file_remembers_of_how_many_tokens_there_are_notes(tmp_path):
    cache = read("exact(noting='second reading')", ids(1, 60))
    said(model(), cache, ids(1, 40, 1), torch.ones(1, 40).bool())
    cache.save(tmp_path / "cache")
    for one in (cache, kvsketch.load_cache(model(), tmp_path / "cache")):
        with pytest.raises(ValueError, match="notes of 60 tokens, and the cache has read 100"):
            one.compress("kvzip(keep=0.5)")


def test_a_prompt_of_padding_alone_is_a_prompt():
    cache = read("kvzip(keep=0.5)", ids(1, 20), torch.zeros(1, 20, dtype=torch.long))
    said(model(), cache, ids(1, 60, 1), torch.ones(1, 60).bool())
    assert cache.sketch_layers[0].held.lengths == [60]


def test_questions_are_of_the_models_tokens():
    with pytest.raises(
        ValueError, match=f"token ids are from 77 to 77, and the model has tokens 0 to {VOCABULARY - 1}"
    ):
        read("kvzip(keep=0.5, queries='questions')", None, questions=[torch.tensor([77])])


def test_what_is_protected_of_rows_goes_with_them():
    cache = read("uniform(keep=0.8)", ids(2, 40), protect=[[(3, 6)], [(5, 9)]])
    cache.batch_repeat_interleave(2)
    cache.crop(-40)
    said(model(), cache, ids(4, 40, 1), torch.ones(4, 40).bool())
    assert [spans.each for spans in cache.sketch_layers[0].held.spans] == 2 * [((3, 6),)] + 2 * [((5, 9),)]


@pytest.mark.parametrize("spec", ["kvzip(keep=0.5)", "kvzip(keep=0.5, queries='questions')"])
def test_the_error_in_the_report_is_that_of_the_prompts_own_last_queries(spec):
    """Not that of queries that are read behind it; of a padded row it is that of the row alone."""
    prompt, mask = ids(2, 80), torch.ones(2, 80, dtype=torch.long)
    mask[0, :25] = 0
    asked = {"questions": [ids(1, 9, 3)]} if "questions" in spec else {}
    alone, exact = (read(one, prompt[1:], **(asked if one == spec else {})) for one in (spec, "exact"))
    for layer, whole, heard in zip(alone.sketch_layers, exact.sketch_layers, capture(model(), prompt[1:]), strict=True):
        last = heard.queries[None, :, -8:]
        found, right = (one.held.attend(last, heard.scale) for one in (layer, whole))
        torch.testing.assert_close(layer.held.error, relative_error(found, right))
    together = read(spec, prompt, mask, **asked)
    for layer, own in zip(together.sketch_layers, alone.sketch_layers, strict=True):
        torch.testing.assert_close(layer.held.error[1:], own.held.error, rtol=1e-3, atol=1e-5)


def test_a_file_that_is_refused_leaves_a_model_as_it_was(tmp_path):
    """Attached, and not watched, though its method wants to know what there was before rotation."""
    own, cache = model(), read("expected_attention(keep=0.9)", ids(1, 80))
    cache.save(tmp_path / "cache")
    kvsketch.detach(own)
    with TensorFile(tmp_path / "cache") as file:
        about, tensors = file.about, file.read("", torch.device("cpu"))
    about["layers"][1]["state"]["seen"] += 1
    write_tensors(tmp_path / "cache", tensors, about)
    kvsketch.attach(own)
    with pytest.raises(ValueError, match=r"a state of layer 1 that .* cannot be in"):
        kvsketch.load_cache(own, tmp_path / "cache")
    assert is_attached(own)
    assert not is_watched(own)

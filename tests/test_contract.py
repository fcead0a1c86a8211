"""What every method promises; a new line in the registry is tested without a word here."""

from functools import partial

import pytest
import torch

from kvsketch.attention import exact_attention
from kvsketch.caches.core.config import BLOCK
from kvsketch.caches.core.layer import LayerCache
from kvsketch.caches.core.tokens import NewTokens, Unrotated
from kvsketch.caches.forgetting.uniform import Uniform
from kvsketch.caches.registry import METHODS, methods, parse_spec
from made_index import make_index
from pretend import pretended

DEVICE = torch.device("cpu")
ROWS, HEADS, GROUP, WIDTH = 2, 2, 2, 16
SCALE = WIDTH**-0.5
FIXED_SLACK = 128  # entries per row and head, beyond 1.05 × the budget: window run-over, open stratum, spare rows
KINDS = METHODS | {  # and forms of a method that hold other things
    "balancekv, plain": partial(METHODS["balancekv"], sharpness=1, augmented=False),
    "balancekv, faithful": partial(METHODS["balancekv"], mode="faithful"),
}
LOOKUPS = {  # what they are told beside a short window; "index" is filled in when tests run
    "saap": {"index": "", "probes": 2, "staging": 50},
    "saap, estimated": {"index": "", "probes": 2, "staging": 50, "estimate": True},
    "kmeans": {"index": "", "probes": 2, "staging": 50},
    "kmeans, rotated": {"index": "", "probes": 2, "staging": 50, "rope": True},
    "random_buckets": {"buckets": 8, "probes": 2, "staging": 50},
    "lsh": {"bins": 6, "staging": 50},
    "lsh, reformer": {"kind": "reformer", "bits": 4, "bins": 6, "staging": 50},
    "lsh, magicpig": {"kind": "magicpig", "bits": 4, "tables": 9},
    "retrieval": {"top": 0.1},
}
KINDS |= {name: METHODS[name.split(",")[0]] for name in LOOKUPS}
BY_PROFILE = {"streaming_heads"}  # some heads hold everything: a budget is what all of a model hold (test_heads)
BUDGETED = [name for name in KINDS if name != "exact" and name not in LOOKUPS and name not in BY_PROFILE]
DROPPING = [name for name in KINDS if name != "exact"]  # something, or do not look at it
CHUNKS_MATTER = {
    "clustergen": "tokens written together are clustered together, as the papers cluster a prompt at once",
    "subgen": "a call has room for the clusters that a fraction allows at its end, or δ would be learnt on a few",
    "balancekv": "tokens written together are halved together; what points away from all keys depends on which came",
    "balancekv, plain": "tokens written together are halved together, so that their weights stay even",
    "balancekv, faithful": "the same",
    "keydiff": "what is least like all other keys depends on which have come",
    "h2o": "what a token got of the attention depends on what was held by then",
    "tova": "weights taken one by one are rounded otherwise",
    "snapkv": "the last queries of a call choose of its tokens",
    "pyramidkv": "the same",
    "kvzip": "a prompt is a part of its own",
    "expected_attention": "what queries are like depends on which have come",
}
READ_WHOLE = {"kvzip"}  # never in chunks that see compressed ones
SMALL = {"exact": {}} | {name: {"keep": 0.25} for name in BY_PROFILE} | {name: {"keep": 0.25} for name in BUDGETED}
SMALL |= {name: {"window": 40, "full_layers": 0} | given for name, given in LOOKUPS.items()}


def read_in_both_ways(names):
    return [(name, "exact") for name in names] + [(name, "streaming") for name in names if name not in READ_WHOLE]


@pytest.fixture(autouse=True)
def _where(device, monkeypatch):
    """Caches read what is on this device."""
    monkeypatch.setitem(globals(), "DEVICE", device)


@pytest.fixture(scope="module", autouse=True)
def _an_index(tmp_path_factory):
    folder = make_index(tmp_path_factory.mktemp("index"), heads=HEADS, width=WIDTH)
    for given in SMALL.values():
        if "index" in given:
            given["index"] = folder


def small(name, **given):
    """A config of the method that drops most of a few hundred tokens."""
    return KINDS[name](**(SMALL[name] | given))


def stream(count, *, dtype=torch.float32, rows=ROWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(rows, HEADS * GROUP, count, WIDTH, generator=generator)
    keys, values = (torch.randn(rows, HEADS, count, WIDTH, generator=generator) for _ in range(2))
    return query.to(dtype), keys.to(dtype), values.to(dtype)


def padded_in_front(count, padding):
    """Which tokens are real, where the first row begins with padding."""
    valid = torch.ones(ROWS, count, dtype=torch.bool)
    valid[0, :padding] = False
    return valid


def feed(cache, query, keys, values, sizes, valid=None):
    """Read the stream in calls of these sizes; the answers in order."""
    query, keys, values = (x.to(DEVICE) for x in (query, keys, values))
    valid = None if valid is None else valid.to(DEVICE)
    out, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        real = None if valid is None or bool(valid[:, part].all()) else valid[:, part]
        unrotated = Unrotated(query[:, :, part].flip(-1), keys[:, :, part].flip(-1))
        new = NewTokens(keys[:, :, part], values[:, :, part], real, unrotated)
        out.append(cache.read(query[:, :, part], new, SCALE).out)
        start += size
    return torch.cat(out, 2).cpu()


def held(cache):
    """All that a cache holds, as comparable tensors."""
    tensors, numbers = cache.state()
    numbers.pop("measured_at")
    asked = ("error", "longest_query", "recall", ".reads")  # of the queries, not of what is held
    tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(asked)}
    return {name: tensor.cpu().clone() for name, tensor in tensors.items()}, numbers


def causal_answers(query, keys, values):
    count = query.shape[2]
    visible = torch.ones(count, count, dtype=torch.bool).tril()[None, None]
    return exact_attention(query, keys, values, SCALE, visible=visible).out


def assert_same(left, right):
    assert left[1] == right[1]
    assert left[0].keys() == right[0].keys()
    for name in left[0]:
        torch.testing.assert_close(left[0][name], right[0][name], rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("name", KINDS)
def test_it_answers_on_another_device_as_on_the_cpu(name, monkeypatch):
    """With all else that is tested here on one: `make test-device DEVICE=cuda`, or `DEVICE=pretended`."""
    query, keys, values = stream(400)
    given = query, keys, values, [300, *[1] * 40, 60], padded_in_front(400, 30)
    expected = feed(LayerCache(small(name), 0), *given)
    with pretended() as there:
        monkeypatch.setitem(globals(), "DEVICE", there)
        got = feed(LayerCache(small(name), 0), *given)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_the_pretended_device_refuses_what_a_gpu_refuses():
    with pretended() as there:
        ours, foreign = torch.arange(4, device=there), torch.arange(4)
        assert (ours + 1).device == ours[[0, 2]].device == ours[foreign].device == there
        assert (ours + torch.tensor(1)).cpu().tolist() == [1, 2, 3, 4]
        for mixed in (lambda: ours + foreign, lambda: foreign[ours], lambda: torch.cat([ours, foreign])):
            with pytest.raises(RuntimeError, match=r"tensors of .* and of the CPU: \[\(4,\), \(4,\)\]"):
                mixed()


@pytest.mark.parametrize("name", METHODS)
def test_it_says_in_one_line_what_it_keeps(name):
    assert 20 < len(methods()[name]) < 120


@pytest.mark.parametrize("name", KINDS)
def test_its_spec_parses_back(name):
    for config in (
        KINDS[name](),
        small(name, sinks=2, chunk=77, **({} if name in READ_WHOLE else {"prefill": "streaming"})),
    ):
        assert parse_spec(str(config)) == config


@pytest.mark.parametrize("name", ["exact", *BUDGETED])
@pytest.mark.parametrize("sizes", [[200], [1] * 100, [60, 1, 40, *[1] * 50]], ids=["at once", "one by one", "mixed"])
def test_it_is_exact_while_the_budget_holds_everything(name, sizes):
    given = {} if name == "exact" else {"keep": 200 + BLOCK}
    count = sum(sizes)
    query, keys, values = stream(count)
    got = feed(LayerCache(KINDS[name](**given), 0), query, keys, values, sizes)
    torch.testing.assert_close(got, causal_answers(query, keys, values), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", BUDGETED)
def test_keeping_all_tokens_is_exact(name):
    query, keys, values = stream(300)
    got = feed(LayerCache(small(name, keep=1.0), 0), query, keys, values, [200, *[1] * 100])
    torch.testing.assert_close(got, causal_answers(query, keys, values), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in KINDS if name not in CHUNKS_MATTER])
def test_a_chunk_is_held_as_its_tokens_one_by_one(name):
    query, keys, values = stream(400, rows=1)
    apart = LayerCache(small(name), 3)
    feed(apart, query, keys, values, [1] * 400)
    for sizes in ([400], [100, 300], [399, 1], [37] * 10 + [30]):
        together = LayerCache(small(name), 3)
        feed(together, query, keys, values, sizes)
        assert_same(held(together), held(apart))


@pytest.mark.parametrize("name", KINDS)
def test_the_same_seed_gives_the_same_bytes_and_leaves_global_randomness_alone(name):
    query, keys, values = stream(400)
    before = torch.random.get_rng_state()
    caches = [LayerCache(small(name), 0) for _ in range(2)]
    for cache in caches:
        feed(cache, query, keys, values, [400])
    assert_same(held(caches[0]), held(caches[1]))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize(
    ("keep", "sizes"),
    [(2000, [4000]), (512, [500] * 8), (0.25, [3500, *[1] * 40])],
    ids=["2,000 at once", "512 in chunks", "a quarter and decoding"],
)
def test_bytes_stay_within_the_budget(name, keep, sizes):
    query, keys, values = stream(sum(sizes), rows=1)
    cache = LayerCache(small(name, keep=keep), 0)
    start = 0
    entry = 2 * HEADS * WIDTH * keys.element_size() + 12  # one for all heads, with its rank and weight
    for size in sizes:
        feed(cache, query[:, :, start:], keys[:, :, start:], values[:, :, start:], [size])
        start += size
        budget = keep if isinstance(keep, int) else keep * start
        assert cache.nbytes <= (1.05 * budget + FIXED_SLACK) * entry
    if start > 3500:  # and the budget is used, not only respected
        assert cache.nbytes >= 0.8 * min(budget, start) * entry


@pytest.mark.slow
@pytest.mark.parametrize("name", BUDGETED)
@pytest.mark.parametrize(("keep", "side"), [(0.25, "right"), (512, "holes")])
def test_bytes_stay_within_the_budget_of_the_longest_row(name, keep, side):
    """Whatever the padding: buffers are as wide as the fullest row needs."""
    lengths, count = [150, 450, 750, 1200], 1200
    query, keys, values = stream(count + 100, rows=4)
    valid = torch.ones(4, count + 100, dtype=torch.bool)
    for row, length in enumerate(lengths):
        if side == "left":
            valid[row, : count - length] = False
        elif side == "right":
            valid[row, length:count] = False
        else:
            valid[row, :count] = torch.rand(count, generator=torch.Generator().manual_seed(row)) < length / count
    cache = LayerCache(small(name, keep=keep), 0)
    entry = 4 * (2 * HEADS * WIDTH * keys.element_size() + 12)
    feed(cache, query, keys, values, [1000, 200], valid)
    budget = keep if isinstance(keep, int) else keep * count
    assert cache.nbytes <= (1.05 * budget + FIXED_SLACK) * entry
    rest = [t[:, :, count:] for t in (query, keys, values)]
    feed(cache, *rest, [1] * 40 + [60], valid[:, count:])
    budget = keep if isinstance(keep, int) else keep * (count + 100)
    assert cache.nbytes <= (1.05 * budget + FIXED_SLACK) * entry


@pytest.mark.parametrize(("name", "prefill"), read_in_both_ways(BUDGETED))
def test_a_budget_in_bytes_is_kept(name, prefill):
    share = 400_000
    cache = LayerCache(small(name, keep="1MB", prefill=prefill), 0, lambda rows, entry_bytes: share)
    feed(cache, *stream(3440), [3000, *[1] * 40, 400])
    assert 0.8 * share <= cache.nbytes <= 1.05 * share + FIXED_SLACK * ROWS * (2 * HEADS * WIDTH * 4 + 12)


@pytest.mark.parametrize(("name", "prefill"), read_in_both_ways(KINDS))
def test_a_padded_row_equals_the_row_alone(name, prefill):
    count, padding = 384, 61
    query, keys, values = stream(count)
    valid = padded_in_front(count, padding)
    config = small(name, prefill=prefill, chunk=90)
    sizes = [300, *[1] * 34, 50]
    together = LayerCache(config, 1)
    got = feed(together, query, keys, values, sizes, valid)
    assert got.isfinite().all()
    for row, skip in ((0, padding), (1, 0)):
        alone = LayerCache(config, 1)
        single = [t[row : row + 1, :, skip:] for t in (query, keys, values)]
        expected = feed(alone, *single, [sizes[0] - skip, *sizes[1:]])
        torch.testing.assert_close(got[row : row + 1, :, skip:], expected, rtol=1e-4, atol=1e-5)
        assert torch.equal(together.count_entries()[row], alone.count_entries()[0])


@pytest.mark.parametrize("name", KINDS)
def test_rows_of_every_length_are_served(name):
    """Empty rows, rows shorter than the sinks, shorter than the window, and long ones, in one batch."""
    lengths = [0, 1, 3, 40, 90, 300]
    count = max(lengths)
    query, keys, values = stream(count + 40, rows=len(lengths))
    valid = torch.ones(len(lengths), count + 40, dtype=torch.bool)
    for row, length in enumerate(lengths):
        valid[row, : count - length] = False
    got = feed(LayerCache(small(name), 0), query, keys, values, [count, *[1] * 40], valid)
    assert got.isfinite().all()
    for row, length in enumerate(lengths):
        skip = count - length
        single = [t[row : row + 1, :, skip:] for t in (query, keys, values)]
        expected = feed(LayerCache(small(name), 0), *single, [length, *[1] * 40] if length else [1] * 40)
        torch.testing.assert_close(got[row : row + 1, :, skip:], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
def test_half_precision_follows_single_precision(name, dtype):
    query, keys, values = stream(400, dtype=dtype)
    config = small(name)
    got = feed(LayerCache(config, 0), query, keys, values, [350, *[1] * 50])
    wide = feed(LayerCache(config, 0), *(t.float() for t in (query, keys, values)), [350, *[1] * 50])
    apart, length = (got.float() - wide).norm(dim=3), wide.norm(dim=3)
    if name == "saap":  # which bucket is visited may hang on a rounding of the classifier, in one answer of a hundred
        same = apart / length < (apart / length).quantile(0.99)
        apart, length = apart[same], length[same]
    assert apart.norm() / length.norm() < 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("name", KINDS)
def test_huge_keys_give_finite_answers(name):
    query, keys, values = stream(400)
    got = feed(LayerCache(small(name), 0), query * 100, keys * 100, values, [350, *[1] * 50])
    assert got.isfinite().all()


@pytest.mark.parametrize("name", KINDS)
def test_a_prompt_may_be_read_in_inference_mode_and_answered_outside(name):
    query, keys, values = stream(440)
    valid = padded_in_front(440, 30)
    mixed, plain = LayerCache(small(name), 0), LayerCache(small(name), 0)
    with torch.inference_mode():
        feed(mixed, *(t[:, :, :300] for t in (query, keys, values)), [300], valid[:, :300])
    feed(plain, *(t[:, :, :300] for t in (query, keys, values)), [300], valid[:, :300])
    rest = [t[:, :, 300:] for t in (query, keys, values)]
    got, expected = (feed(cache, *rest, [100, *[1] * 40]) for cache in (mixed, plain))
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", KINDS)
def test_what_torch_makes_where_nothing_is_said_does_not_matter(name):
    """Nor is memory written to that is not there: kernels in C write what they write."""
    query, keys, values = stream(400)
    usual, other = LayerCache(small(name), 0), LayerCache(small(name), 0)
    expected = feed(usual, query, keys, values, [300, 60, *[1] * 40])
    try:
        torch.set_default_dtype(torch.bfloat16)
        torch.set_default_device("meta")
        got = feed(other, query, keys, values, [300, 60, *[1] * 40])
        (tensors, numbers), (right, others) = held(other), held(usual)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert torch.equal(got, expected)
    assert (numbers, tensors.keys()) == (others, right.keys())
    for part, tensor in tensors.items():
        torch.testing.assert_close(tensor, right[part], rtol=0, atol=0, equal_nan=True, msg=part)


@pytest.mark.parametrize("name", KINDS)
def test_reset_forgets_everything(name):
    query, keys, values = stream(400)
    used, fresh = LayerCache(small(name), 0), LayerCache(small(name), 0)
    feed(used, *stream(400, seed=1), [400])
    used.reset()
    assert used.nbytes == 0
    torch.testing.assert_close(
        feed(used, query, keys, values, [300, 100]), feed(fresh, query, keys, values, [300, 100]), rtol=0, atol=0
    )


@pytest.mark.parametrize("name", BUDGETED)
def test_what_has_left_the_window_cannot_be_taken_back(name):
    query, keys, values = stream(600)
    cache = LayerCache(small(name, keep=0.125), 0)
    feed(cache, query, keys, values, [600])
    before = held(cache)
    with pytest.raises(ValueError, match=r"cannot take back 500 tokens: only the last \d+ of 600"):
        cache.crop(500)
    assert_same(held(cache), before)


def test_of_rows_the_one_that_cannot_is_named():
    """All of a short row may be taken back; it is not the one that is in the way."""
    _, keys, values = stream(300, rows=2)
    valid = torch.ones(2, 300, dtype=torch.bool)
    valid[0, :290] = False
    cache = LayerCache(Uniform(keep=0.3), 0)
    cache.hold(NewTokens(keys, values, valid))
    free = 300 - cache.left[1] - cache.config.sinks
    with pytest.raises(ValueError, match=f"cannot take back 200 tokens: only the last {free} of 300"):
        cache.crop(200, [10, 200])
    cache.crop(free, [10, free])


@pytest.mark.parametrize("name", [name for name in BUDGETED if name not in READ_WHOLE])
def test_streaming_equals_chunks_given_by_hand(name):
    query, keys, values = stream(1000)
    streaming = LayerCache(small(name, prefill="streaming", chunk=128), 0)
    by_hand = LayerCache(small(name), 0)
    got = feed(streaming, query, keys, values, [1000])
    expected = feed(by_hand, query, keys, values, [104] + [128] * 7)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert_same(held(streaming), held(by_hand))


@pytest.mark.parametrize("name", DROPPING)
def test_the_reported_error_is_the_error(name):
    query, keys, values = stream(600)
    cache = LayerCache(small(name), 0)
    feed(cache, query, keys, values, [600])
    assert cache.measured_at == 600
    exact = exact_attention(query[:, :, -8:], keys, values, SCALE).out
    last = query[:, :, -8:].to(DEVICE)
    got = cache.attend(last, SCALE, unrotated=last.flip(-1)).out.cpu()
    expected = (got - exact).norm(dim=(2, 3)) / exact.norm(dim=(2, 3))
    torch.testing.assert_close(cache.error.cpu(), expected)
    assert (cache.error > 0.05).all()  # something was dropped, and it shows


@pytest.mark.parametrize("name", LOOKUPS)
def test_a_step_looks_up_though_other_rows_are_padding_in_it(name):
    query, keys, values = stream(401)
    valid = torch.ones(2, 401, dtype=torch.bool)
    valid[0, 400] = False
    together, alone = LayerCache(small(name), 1), LayerCache(small(name), 1)
    got = feed(together, query, keys, values, [400, 1], valid)[1:, :, -1:]
    single = [t[1:] for t in (query, keys, values)]
    torch.testing.assert_close(got, feed(alone, *single, [400, 1])[:, :, -1:], rtol=1e-4, atol=1e-5)
    assert (alone.past.share_read() < 1).all(), "something was left out"
    torch.testing.assert_close(together.past.share_read()[1], alone.past.share_read()[0])

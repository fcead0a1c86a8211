"""Which buckets queries visit, in Triton: on a GPU where there is one, else under Triton's interpreter."""

import pytest
import torch

from kvsketch.kernels.routing import in_triton as routing
from kvsketch.kernels.routing import reference
from kvsketch.kernels.sources import Classifier, Limits, Staged
from test_gpu_kernels import DEVICE, interpreted  # noqa: F401 (a fixture that all tests here use)
from test_native import SOME_LIMITS, as_doubles, check_visits


@pytest.mark.parametrize("limits", [one for one in SOME_LIMITS if one.probes], ids=str)
def test_the_buckets_visited_are_those_of_torch(limits):
    check_visits(routing.visit, limits, DEVICE)


def test_of_buckets_worth_the_same_the_earlier_come_first():
    scores = torch.tensor([0.1, 0.3, 0.1, 0.3, 0.2], device=DEVICE)[None, None]
    sizes = torch.tensor([[4, 1, 4, 2, 0]], device=DEVICE)
    edges = torch.nn.functional.pad(sizes.cumsum(1), (1, 0))[:, None].contiguous()
    runs, read, _ = routing.visit(scores, sizes, edges, Limits(4), Staged.on(DEVICE, 11, 2))
    assert runs.begin[0, 0, 0].tolist() == [4, 9, 11, 0, 11]
    assert runs.length[0, 0, 0].tolist() == [1, 2, 0, 4, 2]
    assert read.item() == 9


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((1, 2, 4, 1, 64, 100, 300), torch.float32),
        ((2, 3, 2, 3, 20, 70, 33), torch.float32),
        ((1, 2, 2, 1, 32, 0, 130), torch.float32),
        ((1, 2, 4, 1, 64, 128, 256), torch.float16),
    ],
    ids=str,
)
def test_the_classifier_says_what_torch_says(shape, dtype):
    rows, heads, group, queries, width, hidden, buckets = shape
    draw = torch.Generator().manual_seed(0)

    def normal(*shape, scale=1.0):
        return (scale * torch.randn(*shape, generator=draw)).to(DEVICE, dtype)

    query, inner = normal(rows, heads * group, queries, width), hidden or width
    second, second_bias = normal(heads, inner, buckets, scale=inner**-0.5), normal(heads, 1, buckets)
    before = (normal(heads, width, hidden, scale=width**-0.5), normal(heads, 1, hidden)) if hidden else None
    by = Classifier(before, (second, second_bias))
    found = routing.classify(query, by, heads)
    right = reference.classify(query.double(), as_doubles(by), heads)
    torch.testing.assert_close(found.double(), right.double(), rtol=1e-4 if dtype == torch.float32 else 2e-2, atol=1e-6)
    torch.testing.assert_close(found.sum(3), torch.ones_like(found.sum(3)))
    assert torch.equal(found, routing.classify(query, by, heads))
    many = normal(1, heads * group, 65, width)
    assert routing.classify(many, by, heads) is None

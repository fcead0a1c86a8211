"""Greedy k-center in Triton: on a GPU where there is one, else under Triton's interpreter."""

import pytest
import torch

from kvsketch.kernels import gpu, kcenter
from kvsketch.kernels.kcenter import in_triton, lazy, reference
from test_gpu_kernels import DEVICE, interpreted  # noqa: F401 (a fixture that all tests here use)
from test_kcenter import KINDS
from test_kcenter import points as drawn


def points(*kinds, count, width=32):
    """A lane of each kind, in 16 bits."""
    return torch.stack([drawn(kind, count, width, seed) for seed, kind in enumerate(kinds)]).half().to(DEVICE)


def all_of(given):
    return torch.ones(given.shape[:2], dtype=torch.bool, device=DEVICE)


def check(found, given, wanted, valid):
    """It is what torch finds in float64."""
    right = reference.k_center(given.double().masked_fill(~valid[..., None], 0), wanted, valid)
    assert torch.equal(found.centres, right.centres)
    assert torch.equal(found.nearest, right.nearest)
    torch.testing.assert_close(found.distance.double(), right.distance, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("count", "width", "wanted", "candidates"),
    [(1, 16, 1, 64), (129, 20, 129, 64), (500, 128, 40, 64), (300, 32, 60, 128), (140, 150, 30, 1024)],
)
def test_the_centres_are_those_of_torch(count, width, wanted, candidates):
    given = torch.randn(2, count, width, generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
    counts = torch.tensor([wanted, (wanted + 1) // 2], device=DEVICE)
    found = in_triton._found(given, counts, all_of(given), wanted, candidates)
    check(found, given, counts, all_of(given))


def test_heads_of_all_kinds_are_served_together_and_nothing_is_read_that_is_not_there():
    """`few different ones`: of points that are equally far the first is taken, and of those left over."""
    given = points(*KINDS, "gauss", "gauss", count=250)
    valid = all_of(given)
    valid[1, :120] = False
    valid[2, ::3] = False
    valid[4, 5:] = False
    valid[5] = False
    given[~valid] = float("nan")
    counts = torch.tensor([50, 30, 1, 90, 5, 0], device=DEVICE)
    for candidates in (100, 250):
        check(in_triton._found(given, counts, valid, 90, candidates), given, counts, valid)


def test_the_library_clusters_so():
    given = points("clustered", "gauss", "heavy tails", "gauss", count=120).unflatten(0, (2, 2))
    valid = torch.rand(2, 120, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.8
    counts = torch.tensor([30, 1000], device=DEVICE)
    counts[1] = 20
    found = kcenter.k_center(given.transpose(1, 2).contiguous().transpose(1, 2), counts, valid)
    flat = kcenter.Clustering(*(x.flatten(0, 1) for x in (found.centres, found.nearest, found.distance)))
    check(flat, given.flatten(0, 1), counts.repeat_interleave(2), valid.repeat_interleave(2, 0))
    assert in_triton.k_center(given.flatten(0, 1), counts.repeat_interleave(2), valid.repeat_interleave(2, 0), 30)


@pytest.mark.parametrize("value", [0.1, 1.0, 77.7])
def test_equal_points_are_taken_in_their_order(value):
    given = torch.full((1, 140, 50), value, dtype=torch.float16, device=DEVICE)
    wanted = torch.tensor([5], device=DEVICE)
    found = in_triton.k_center(given, wanted, all_of(given), 5)
    assert found.centres[0].tolist() == [0, 1, 2, 3, 4]
    assert found.nearest[0].tolist() == [0, 1, 2, 3, 4] + [0] * 135
    assert not found.distance.any()


def several_times(once):
    """Each of these points five times, mixed, and which of them each is."""
    count = once.shape[1]
    order = torch.randperm(5 * count, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    return once.repeat(1, 5, 1)[:, order], order.remainder(count)


def test_of_points_that_are_there_several_times_the_first_is_the_centre_and_the_others_are_its_own():
    """Of whole numbers: their sums are exact, wherever a row of a product stands."""
    given, _ = several_times(points("gauss", count=40, width=100).mul(4).round())
    wanted = torch.tensor([60], device=DEVICE)
    for candidates in (32, 200):  # fewer than are equally far, and all
        found = in_triton._found(given, wanted, all_of(given), 60, candidates)
        check(found, given, wanted, all_of(given))
        assert not found.distance.any()


def test_points_are_found_to_be_equal_though_their_products_are_rounded():
    given, which = several_times(points("gauss", count=40, width=100))
    wanted = torch.tensor([60], device=DEVICE)
    for candidates in (32, 200):
        found = in_triton._found(given, wanted, all_of(given), 60, candidates)
        assert not found.distance.any()
        assert which[found.centres[0, :40]].unique().numel() == 40, "each before any comes again"


@pytest.mark.parametrize("candidates", [64, 256])
def test_of_what_is_equally_far_or_near_the_first_counts(candidates):
    """Corners of a cube: all their distances are whole, and most are those of others."""
    given = torch.randint(2, (1, 240, 16), generator=torch.Generator().manual_seed(0)).half().to(DEVICE)
    wanted = torch.tensor([100], device=DEVICE)
    check(in_triton._found(given, wanted, all_of(given), 100, candidates), given, wanted, all_of(given))


def test_centres_are_as_far_from_one_another_as_any_point_is_from_its_centre():
    """So no choice of as many has less than half of the radius: on points far from the origin too."""
    given = (points("gauss", "clustered", count=500, width=64) + 5).contiguous()
    wanted = torch.tensor([50, 50], device=DEVICE)
    found = in_triton._found(given, wanted, all_of(given), 50, 64)
    for lane in range(2):
        centres = given[lane, found.centres[lane]].double()
        apart = torch.pdist(centres).min()
        assert found.distance[lane].max() <= apart * (1 + 1e-4)
        near = torch.cdist(given[lane].double(), centres)
        torch.testing.assert_close(found.distance[lane].double(), near.amin(1), rtol=1e-4, atol=1e-4)


def test_two_runs_say_the_same_and_many_lanes_come_in_parts(monkeypatch):
    given = points(*KINDS, count=120)
    wanted = torch.tensor([20, 30, 10, 25], device=DEVICE)
    first = in_triton.k_center(given, wanted, all_of(given), 30)
    monkeypatch.setattr(in_triton, "AT_ONCE", 3)
    again = in_triton.k_center(given, wanted, all_of(given), 30)
    for name in ("centres", "nearest", "distance"):
        assert torch.equal(getattr(first, name), getattr(again, name))


def test_a_pass_finds_many_centres(monkeypatch):
    passes, farthest = [], lazy.farthest
    monkeypatch.setattr(lazy, "farthest", lambda *given: passes.append(given) or farthest(*given))
    given, wanted = points("gauss", count=600, width=64), torch.tensor([120], device=DEVICE)
    check(in_triton._found(given, wanted, all_of(given), 120, 128), given, wanted, all_of(given))
    assert len(passes) <= 5


def test_what_these_kernels_are_not_made_for_is_left_to_torch(monkeypatch):
    given, wanted = points("gauss", count=50), torch.tensor([5], device=DEVICE)

    def found(given, most=5):
        return in_triton.k_center(given, wanted, all_of(given), most)

    assert found(given) is not None
    for other in (given.float(), given.double(), given.repeat(1, 1, 10), given[:, :0], given[:, :, :0]):
        assert found(other) is None
    assert found(given, most=0) is None
    assert found(given * 0) is None, "squares of 0 may be those of numbers that are too small"
    for strange in (float("inf"), float("nan")):
        broken = given.clone()
        broken[0, 7, 3] = strange
        assert found(broken) is None
    assert found(given.clone().requires_grad_()) is None
    monkeypatch.setenv(gpu.SWITCH, "off")
    assert found(given) is None

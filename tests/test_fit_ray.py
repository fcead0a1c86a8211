"""A fit that is spread over a cluster: two nodes with a worker each, and the same result bit for bit."""

import faulthandler
import signal
from functools import partial

import pytest
import torch

from fitted import TOKENIZER, fitted, result_of, same, tiny_model
from kvsketch.cli.fit import model_on
from kvsketch.fitting.spread import RayCluster

pytestmark = pytest.mark.slow
COUNTS = {"include_dashboard": False, "num_cpus": 1}
LIMIT = 300  # seconds of a test; on two busy cores it takes fifteen


@pytest.fixture(scope="module")
def cluster():
    """A cluster of two nodes that is started here and stopped again, whatever happens in between."""
    import ray
    from ray.cluster_utils import Cluster

    started = Cluster()
    try:
        started.add_node(**COUNTS)
        started.add_node(num_cpus=1)
        yield started
    finally:
        ray.shutdown()
        started.shutdown()


@pytest.fixture(autouse=True)
def _a_test_that_hangs_ends_and_shows_where():
    """By the end of the process, as nothing else ends a wait inside Ray."""
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def occupy(cluster):
    """A function by which somebody else's work takes so many of the cluster's two cores, until the test is over."""
    import ray

    class Occupant:  # in here, for workers cannot import this file
        def answer(self):
            """Once it is there."""

    ray.init(cluster.address, ignore_reinit_error=True, log_to_driver=False)
    there = []

    def take(count):
        there.extend(ray.remote(num_cpus=1)(Occupant).remote() for _ in range(count))
        ray.get([one.answer.remote() for one in there], timeout=LIMIT / 2)

    yield take
    for one in there:
        ray.kill(one)


def test_a_spread_fit_is_the_same_bit_for_bit(cluster, tmp_path):
    fitted(tmp_path, out=tmp_path / "here")
    model, seen = tmp_path / "model", []
    tiny_model().save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    spread = RayCluster(cluster.address, partial(model_on, name=str(model), dtype="auto"))
    fitted(tmp_path, out=tmp_path / "there", cluster=spread, show=seen.append)
    assert same(result_of(tmp_path / "here"), result_of(tmp_path / "there"))
    assert [(p.done, p.total) for p in seen if p.part == "reading"] == [(n, 5) for n in range(6)]
    assert seen[-1].done == seen[-1].total


def test_what_goes_wrong_in_a_worker_is_said_as_it_would_be_here(cluster, tmp_path):
    spread = RayCluster(cluster.address, partial(model_on, name=None, dtype="float8"))
    with pytest.raises(ValueError, match=r"--dtype must be auto or one of float32, .* got 'float8'"):
        fitted(tmp_path, cluster=spread)


def test_workers_that_fit_nowhere_are_refused(cluster):
    torch.set_num_threads(2)
    try:
        with pytest.raises(ValueError, match="a worker takes 2 CPUs, and they have 1, 1"):
            list(RayCluster(cluster.address, tiny_model).run(tiny_model, {"a job": 1}))
    finally:
        torch.set_num_threads(1)


def test_a_worker_that_dies_is_named_by_its_job(cluster):
    spread = RayCluster(cluster.address, tiny_model)
    error = r"the worker that had layer 3 is lost \(The actor died .*\): .* Run the same command again to go on from"
    with pytest.raises(ValueError, match=error):
        list(spread.run(lambda: lambda job: signal.raise_signal(signal.SIGKILL), {"layer 3": 3}))


def test_work_goes_on_with_the_workers_there_is_room_for(cluster, occupy):
    occupy(1)
    jobs = {f"text {number}": number for number in range(4)}
    doubled = RayCluster(cluster.address, tiny_model).run(lambda: lambda job: 2 * job, jobs)
    assert sorted(doubled) == [0, 2, 4, 6]


def test_a_cluster_without_room_is_not_waited_for_for_ever(cluster, occupy):
    occupy(2)
    spread = RayCluster(cluster.address, tiny_model, patience=3.0)
    with pytest.raises(ValueError, match="no worker has started on the Ray cluster for 3 seconds: it may have other"):
        list(spread.run(lambda: lambda job: job, {"a job": 1}))

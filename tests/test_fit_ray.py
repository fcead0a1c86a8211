"""A fit that is spread over a cluster: two nodes with a worker each, and the same result bit for bit."""

from functools import partial

import pytest
import torch

from fitted import TOKENIZER, fitted, result_of, same, tiny_model
from kvsketch.cli.fit import model_on
from kvsketch.fitting.spread import RayCluster

pytestmark = pytest.mark.slow
COUNTS = {"include_dashboard": False, "num_cpus": 1}


@pytest.fixture(scope="module")
def cluster():
    """The address of a cluster of two nodes that is started here and stopped again."""
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args=COUNTS)
    started.add_node(num_cpus=1)
    yield started
    import ray

    ray.shutdown()
    started.shutdown()


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
            list(RayCluster(cluster.address, tiny_model).run(tiny_model, [1]))
    finally:
        torch.set_num_threads(1)

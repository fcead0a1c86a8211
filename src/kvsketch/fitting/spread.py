"""Work for many machines, by Ray: the same functions, the same files, the same results."""

import logging
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

Job = TypeVar("Job")
Done = TypeVar("Done")
LOCAL = "local"
CONNECTION_SECONDS = 10


@dataclass(frozen=True)
class RayCluster:
    """Where work is spread: a cluster's address, "auto" for the one this machine is part of, "local" for a new one.

    Every worker reads and writes the same folders, loads the model by itself, and computes with the number of threads
    that this process would use: results depend on that number.
    """

    address: str
    load: Callable[[str], PreTrainedModel]  # onto a device
    device: str | None = None  # of every worker; None: the best that the cluster has
    patience: float = 600.0  # seconds to wait for a first worker

    def place(self) -> str:
        """The device of every worker."""
        there = _started(self.address).cluster_resources()
        return self.device or ("cuda" if there.get("GPU") else "cpu")

    def run(self, make_worker: Callable[[], Callable[[Job], Done]], jobs: Mapping[str, Job]) -> Iterator[Done]:
        """The results of the jobs, which are given by their names, in the order in which workers finish them."""
        if not jobs:
            return
        ray = _started(self.address)
        threads, gpus = torch.get_num_threads(), int(self.place().startswith("cuda"))
        kind, needs = ("GPU", 1) if gpus else ("CPU", threads)
        there = [node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"]]
        fit = sum(int(count // needs) for count in there)
        if fit < 1:
            raise ValueError(
                f"no machine of the Ray cluster is big enough: a worker takes {needs} {kind}s, and they have "
                f"{', '.join(f'{count:g}' for count in there)}. OMP_NUM_THREADS=1 makes it take one core"
            )
        actor = ray.remote(num_cpus=0 if gpus else threads, num_gpus=gpus, scheduling_strategy="SPREAD")(_Worker)
        workers = [actor.remote(make_worker, threads) for _ in range(min(fit, len(jobs)))]
        try:
            yield from _as_they_come(ray, workers, jobs, self.patience)
        finally:
            for worker in workers:
                ray.kill(worker)


class _Worker:
    """A process on some machine that takes jobs."""

    def __init__(self, make_worker: Callable[[], Callable[[Any], Any]], threads: int) -> None:
        self.make_worker, self.threads = make_worker, threads
        self.work: Callable[[Any], Any] | None = None

    def start(self) -> None:
        """Do nothing: a worker that answers is there."""

    def do(self, job: Any) -> Any:
        """One job; an error in getting ready is reported like an error in the job."""
        if self.work is None:
            torch.set_num_threads(self.threads)
            self.work = self.make_worker()
        return self.work(job)


def _as_they_come(ray: Any, workers: list[Any], jobs: Mapping[str, Any], patience: float) -> Iterator[Any]:
    """Each worker that is there and has no job takes the next; workers that cannot start yet hold no job up."""
    left, running = list(jobs.items()), dict[Any, tuple[Any, str]]()
    starting = {worker.start.remote(): worker for worker in workers}
    while left or running:
        ready, _ = ray.wait([*starting, *running], timeout=None if running else patience)
        if not ready:
            raise ValueError(
                f"no worker has started on the Ray cluster for {patience:g} seconds: it may have other work (see "
                "ray status). Run the same command again when it has room"
            )
        starts = ready[0] in starting
        worker, name = (starting.pop(ready[0]), "nothing yet") if starts else running.pop(ready[0])
        done = _result(ray, ready[0], name)
        if left:
            following, job = left.pop(0)
            running[worker.do.remote(job)] = worker, following
        if not starts:
            yield done


def _result(ray: Any, reference: Any, name: str) -> Any:
    """The result of a job; an error in it is raised as it would be without Ray."""
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise ValueError(
            f"the worker that had {name} is lost ({str(error).splitlines()[0]}): its machine may be down, or out of "
            "memory. Run the same command again to go on from what is done"
        ) from error


def _started(address: str) -> Any:
    """Ray, connected."""
    try:
        import ray
    except ImportError as error:
        raise ValueError("--ray needs Ray: pip install ray") from error
    if ray.is_initialized():
        return ray
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody asked for a report to Ray's makers
    options: dict[str, Any] = {"include_dashboard": False} if address == LOCAL else {"address": address}
    try:
        _check_somebody_answers(address)
        ray.init(**options, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"there is no Ray cluster at {address!r} ({str(error).splitlines()[0]}): start one with ray start --head, "
            "or let one be started here: --ray-address local"
        ) from error
    return ray


def _check_somebody_answers(address: str) -> None:
    """Refuse an address that does not answer: Ray itself would try for many minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), timeout=CONNECTION_SECONDS).close()

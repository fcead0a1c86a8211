"""Batches made in other processes, some steps ahead: a single process makes fewer than a GPU reads."""

import os
import signal
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import fields
from multiprocessing import get_context, parent_process
from multiprocessing.process import BaseProcess
from threading import Thread
from types import TracebackType
from typing import Any, NamedTuple

import torch

from kvsketch.evaluation.embedded.training.documents import QUESTIONS, SHARES, Batch, Documents
from kvsketch.evaluation.embedded.training.recipe import FINISHED_WITH
from kvsketch.evaluation.embedded.training.tokenizer import build_tokenizer
from kvsketch.evaluation.tasks.haystack import Haystack

MOST = 14  # processes


class Wanted(NamedTuple):
    """A batch: its number, the length of documents, the number of tokens, and whether it belongs to the finish."""

    number: int
    length: int
    tokens: int
    finish: bool

    @property
    def tasks(self) -> Mapping[str, int]:
        """How often each task is drawn."""
        return FINISHED_WITH if self.finish else SHARES

    def made(self, documents: Documents) -> Batch:
        """The batch, made in this process."""
        return documents.batch(self.number, self.length, self.tokens, self.tasks, QUESTIONS * (1 + self.finish))


class Ahead:
    """Makes batches that are wanted now or later; the same ones with any number of processes, or with none."""

    def __init__(self, seed: int, haystacks: Sequence[Haystack], *, processes: int) -> None:
        self.documents = Documents(build_tokenizer(), seed, haystacks)
        self.pool = (
            ProcessPoolExecutor(processes, get_context("spawn"), _begin, (seed, haystacks)) if processes else None
        )
        self.begun = dict[Wanted, Future[list[Any]]]()

    def __enter__(self) -> "Ahead":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self.pool is not None:
            self.pool.shutdown(wait=False, cancel_futures=True)

    def batches(self, wanted: Sequence[Wanted], later: Sequence[Wanted]) -> list[Batch]:
        """The batches wanted now; those of `later` are begun."""
        if self.pool is None:
            return [one.made(self.documents) for one in wanted]
        asked = [*wanted, *later]
        for one in self.begun.keys() - set(asked):
            self.begun.pop(one).cancel()  # not wanted any more: documents have become longer
        for one in asked:
            if one not in self.begun:
                self.begun[one] = self.pool.submit(_made, one)
        return [_unpacked(self.begun.pop(one).result()) for one in wanted]


def processes_beside(device: str) -> int:
    """How many processes make batches beside a GPU; none beside a CPU, which has no time to spare."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST, there - 2)) if torch.device(device).type == "cuda" else 0


_documents: list[Documents] = []  # in a process of the pool, which has no other place for things made once


def _begin(seed: int, haystacks: Sequence[Haystack]) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C stops the training process, which reports it
    end_with_parent()
    _documents[:] = [Documents(build_tokenizer(), seed, haystacks)]


def end_with_parent() -> None:
    """Have this process end when its parent ends: a parent that is killed does not tell its children."""
    Thread(target=_wait_for, args=[parent_process()], daemon=True).start()


def _wait_for(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)


def _made(wanted: Wanted) -> list[Any]:
    batch = wanted.made(_documents[0])
    return [batch.names, *(getattr(batch, field.name).numpy() for field in fields(batch)[1:])]


def _unpacked(parts: list[Any]) -> Batch:
    return Batch(parts[0], *map(torch.from_numpy, parts[1:]))

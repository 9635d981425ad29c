"""Threads that share preparation's work; Arrow and numpy release Python's global lock while they work. Torch-free."""

from __future__ import annotations

import concurrent.futures
import math
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from trainer.spec import JobSpec

Item = TypeVar("Item")
Result = TypeVar("Result")


def num_threads(job: JobSpec) -> int:
    """Return the number of cores that the job asks for, ``num_workers`` x ``cpus_per_worker``, if available.

    The limit is the number of cores that this process may use.
    """
    asked = math.ceil(job.resources.num_workers * job.resources.cpus_per_worker)
    return max(1, min(asked, len(os.sched_getaffinity(0))))


class Workers:
    """Pool of threads, to be used as a context manager."""

    def __init__(self, threads: int):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="evenkeel-prepare")

    def map(self, function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """Return the results of ``function`` for each item, in the order of items, once all calls have ended.

        Raises:
            Exception: the exception of the first item, in their order, whose call failed, for any number of threads.
        """
        futures = [self._pool.submit(function, item) for item in items]
        concurrent.futures.wait(futures)
        return [future.result() for future in futures]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

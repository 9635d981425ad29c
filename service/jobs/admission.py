"""Decisions whether a run may start in addition to the running runs, from its needs and the host's free resources.

Jobs are served in order: the job at the head of the queue waits until there is room for it, and only a job of the same
tenant with a higher priority may pass it. So a large job is not starved by small jobs. A run's needs are reserved from
its claim until its last process has exited. All functions are pure except :func:`host`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from service.core.settings import Settings
from service.jobs.executors.base import FreeResources
from trainer.sizing.gpus import machine_gpus
from trainer.sizing.memory import RUN_BYTES, RankMemory, machine_memory_bytes
from trainer.spec import JobSpec


class ResourceRequest(NamedTuple):
    """Resources that all workers of a run use together; the memory includes the run's other processes.

    ``counted`` is True if the rows of the tables were counted; otherwise the memory is a lower bound. ``fewer`` lists
    the smaller numbers of workers with which the run may also begin, largest first, as pairs (workers, memory in
    bytes).
    """

    workers: int
    cores: float
    memory_bytes: int
    gpus: float
    counted: bool
    fewer: tuple[tuple[int, int], ...] = ()

    def document(self) -> dict[str, Any]:
        """Return the request as JSON, in the form stored with the job."""
        return {name: value for name, value in self._asdict().items() if name != "fewer" or value}

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> ResourceRequest:
        """Return the request that :meth:`document` converted."""
        return cls(**{**document, "fewer": tuple((count, memory) for count, memory in document.get("fewer", ()))})

    def choices(self) -> list[ResourceRequest]:
        """Return the run's needs for each number of workers that it may begin with, largest number first."""
        each = self.cores / self.workers, self.gpus / self.workers
        return [self._replace(fewer=())] + [
            ResourceRequest(count, count * each[0], memory, count * each[1], self.counted)
            for count, memory in self.fewer
        ]

    def taken(self, workers: int | None) -> ResourceRequest:
        """Return the needs of an attempt with ``workers`` workers; None means all workers."""
        return next((choice for choice in self.choices() if choice.workers == workers), self)


def needs_of(spec: JobSpec, memory: RankMemory, counted: bool, fewer: Mapping[int, RankMemory]) -> ResourceRequest:
    """Return a run's needs; ``memory`` is per rank, ``fewer`` maps smaller numbers of workers to memory per rank."""
    resources = spec.resources
    workers = resources.num_workers
    return ResourceRequest(
        workers,
        workers * resources.cpus_per_worker,
        workers * memory.total + RUN_BYTES,
        workers * resources.gpus_per_worker,
        counted,
        tuple((count, count * rank.total + RUN_BYTES) for count, rank in fewer.items()),
    )


def host(settings: Settings) -> FreeResources:
    """Return the resources of this machine that runs may use: all resources, or the amounts in the settings."""
    cores, gpus = settings.host_cores, settings.host_gpus
    return FreeResources(
        float(len(os.sched_getaffinity(0))) if cores is None else cores,
        machine_memory_bytes() if settings.host_memory_bytes is None else settings.host_memory_bytes,
        float(len(machine_gpus())) if gpus is None else gpus,
    )


def impossible(needs: ResourceRequest, room: FreeResources) -> tuple[str, str] | None:
    """Return (message with the arithmetic, remedy) for needs that can never fit this host; None if they can."""
    # A lower bound on memory is no reason to refuse: the run counts its rows, and fails then if they do not fit.
    short = [scarce for scarce in _short(needs, room) if needs.counted or scarce[0] != "memory"]
    if not short:
        return None
    figures = "; ".join(
        f"{_figure(what, needed)} needed, this host has {_figure(what, had)}" for what, needed, had in short
    )
    remedies = {
        "cores": "lower resources.num_workers or cpus_per_worker, or let runs share cores with EVENKEEL_HOST_CORES",
        "memory": "lower model.embedding_dim or batch_size, take an optimizer with less state, or a larger machine",
        "GPUs": "lower resources.num_workers, or set resources.gpus_per_worker to 0",
    }
    return f"{_in_words(needs)}: {figures}", "; ".join(remedies[name] for name, _, _ in short)


def obstacle(
    needs: ResourceRequest, room: FreeResources, held: Mapping[str, ResourceRequest], max_runs: int
) -> str | None:
    """Return the reason why a run cannot start now, with figures; None if it can.

    ``held`` maps the jobs whose runs have not exited yet to the resources that they use.
    """
    if not held:
        return None  # a run that fits alone must not wait because of rounding
    if len(held) >= max_runs:
        return _too_many(held, max_runs)
    free = FreeResources(
        room.cpus - sum(used.cores for used in held.values()),
        room.memory_bytes - sum(used.memory_bytes for used in held.values()),
        room.gpus - sum(used.gpus for used in held.values()),
    )
    short = _short(needs, free)
    if not short:
        return None
    totals = {"cores": room.cpus, "memory": room.memory_bytes, "GPUs": room.gpus}
    figures = "; ".join(
        f"needs {_figure(name, needed)}, {_figure(name, max(0, had))} of {_figure(name, totals[name])} free"
        for name, needed, had in short
    )
    return f"{figures}; in use by {_holders(held)}"


def cluster_obstacle(
    needs: ResourceRequest, nodes: Sequence[FreeResources] | None, held: Mapping[str, ResourceRequest], max_runs: int
) -> str | None:
    """Return the reason why a run cannot start on the cluster now; None if it can.

    Every worker must fit on one of ``nodes``, given by their free resources. If the cluster does not report these,
    ``nodes`` is None, and only the number of runs is limited.
    """
    if len(held) >= max_runs:
        return _too_many(held, max_runs)
    if nodes is None:
        return None
    each = FreeResources(
        needs.cores / needs.workers, (needs.memory_bytes - RUN_BYTES) // needs.workers, needs.gpus / needs.workers
    )
    capacity = sum(
        min(int(free_amount // needed) for needed, free_amount in zip(each, node, strict=True) if needed)
        for node in nodes
    )
    if capacity >= needs.workers:
        return None
    free = ", ".join(f"{_figure('cores', node.cpus)} and {_size(node.memory_bytes)}" for node in nodes) or "nothing"
    needed = f"{_figure('cores', each.cpus)} and {_size(each.memory_bytes)}"
    return f"{needs.workers} workers of {needed} are needed, the cluster has room for {capacity}: free are {free}"


def choose(
    needs: ResourceRequest, refuse: Callable[[ResourceRequest], str | None]
) -> tuple[ResourceRequest | None, str | None]:
    """Return (the run's largest request for which there is room, or None; the reason why a larger request fails)."""
    why = None
    for choice in needs.choices():
        reason = refuse(choice)
        if reason is None:
            return choice, why
        why = why or reason
    # The last reason is that of the smallest number of workers, for which the job waits.
    return None, reason


BEHIND_ANOTHER_TENANT = "after another tenant's job, which is first in line"


def behind(head: str, obstacle_of_head: str) -> str:
    """Return the reason shown for jobs that wait because they are not first in the queue."""
    return f"after {head}, which is first in line: {obstacle_of_head}"


def _too_many(held: Mapping[str, ResourceRequest], max_runs: int) -> str:
    limit = "one run at a time" if max_runs == 1 else f"{max_runs} runs at a time"
    return f"waiting for {_holders(held)}: {limit} (EVENKEEL_MAX_RUNS)"


def _holders(held: Mapping[str, ResourceRequest]) -> str:
    return ", ".join(f"{job_id} ({_figures(used)})" for job_id, used in sorted(held.items()))


def _short(needs: ResourceRequest, room: FreeResources) -> list[tuple[str, float, float]]:
    """Return (name, amount needed, amount available) of each resource that is too scarce."""
    pairs = (
        ("cores", needs.cores, room.cpus),
        ("memory", float(needs.memory_bytes), float(room.memory_bytes)),
        ("GPUs", needs.gpus, room.gpus),
    )
    return [(name, needed, available) for name, needed, available in pairs if needed > available + 1e-9]


def _in_words(needs: ResourceRequest) -> str:
    workers = "1 worker" if needs.workers == 1 else f"{needs.workers} workers"
    bound = "" if needs.counted else " at least"
    return f"{workers}: {_figures(needs)}{bound}"


def _figures(needs: ResourceRequest) -> str:
    parts = [_figure("cores", needs.cores), _size(needs.memory_bytes)]
    if needs.gpus:
        parts.append(_figure("GPUs", needs.gpus))
    return ", ".join(parts)


def _figure(name: str, value: float) -> str:
    if name == "memory":
        return _size(int(value))
    return f"{value:g} {name if value != 1 else name[:-1]}"


def _size(number: int) -> str:
    return f"{number / 1e9:.1f} GB"

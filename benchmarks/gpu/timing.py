"""Timing of work on a GPU: by CUDA events while the GPU is kept waiting, contestants in turn, on the same inputs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Without a GPU all of this runs on the CPU, by Triton's interpreter, so that tests can run it.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = DEVICE == "cuda"
COPY_BYTES = 1 << (31 if ON_GPU else 21)
UNTIMED_ROUNDS = 3
# Cycles for which the GPU waits while a round is queued: some 20 ms at 2 GHz, longer than the host takes.
WAIT_CYCLES = 40_000_000


@dataclass(frozen=True)
class Times:
    """Milliseconds for one input, [rounds]: of the GPU, and of the host until it had queued the work."""

    gpu: np.ndarray
    host: np.ndarray

    @property
    def median(self) -> float:
        return float(np.median(self.gpu))

    @property
    def host_median(self) -> float:
        return float(np.median(self.host))

    @property
    def iqr(self) -> float:
        return float(np.subtract(*np.percentile(self.gpu, [75, 25])))


def interleave(
    contestants: Mapping[str, Callable[[Any], Any]],
    inputs: Sequence[Any],
    rounds: int,
    prepare: Mapping[str, Callable[[Any], Any]] | None = None,
) -> dict[str, Times]:
    """Return the times of each contestant; the first rounds are not timed.

    A round times all inputs in turn. The GPU waits until all of them are queued, so that the time between two events is
    only the GPU's, as in a training step whose kernels the host has queued; it includes the waits of a contestant that
    waits for the GPU itself. ``prepare`` turns an input, untimed, into the argument of a contestant.
    """
    names = list(contestants)
    gpu: dict[str, list[float]] = {name: [] for name in names}
    host: dict[str, list[float]] = {name: [] for name in names}
    for i in range(-UNTIMED_ROUNDS, rounds):
        for j in range(len(names)):
            name = names[(i + j) % len(names)]
            given = [prepare[name](each) for each in inputs] if prepare else inputs
            on_gpu, on_host = _timed(contestants[name], given)
            if i >= 0:
                gpu[name].append(on_gpu / len(inputs))
                host[name].append(on_host / len(inputs))
    return {name: Times(np.array(gpu[name]), np.array(host[name])) for name in names}


def _timed(contestant: Callable[[Any], Any], given: Sequence[Any]) -> tuple[float, float]:
    """Return the milliseconds of the GPU and of the host."""
    if not ON_GPU:
        began = time.perf_counter()
        for each in given:
            contestant(each)
        return (1e3 * (time.perf_counter() - began),) * 2
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(WAIT_CYCLES)
    start.record()
    began = time.perf_counter()
    for each in given:
        contestant(each)
    took = time.perf_counter() - began
    end.record()
    end.synchronize()
    return start.elapsed_time(end), 1e3 * took


def copy_bandwidth(rounds: int = 15) -> float:
    """Return bytes read and written for each second by a copy within the GPU's memory, far larger than its cache."""
    source = torch.ones(COPY_BYTES // 4, device=DEVICE)
    target = torch.empty_like(source)
    return 2e3 * COPY_BYTES / interleave({"copy": lambda _: target.copy_(source)}, [None], rounds)["copy"].median


def line(bench: str, case: str, times: Mapping[str, Times], copy: float, moved: float, **more: Any) -> dict[str, Any]:
    """Print and return the line of ours, its peers, and a copy of ``moved`` bytes."""
    ours = times["ours"]
    found = {
        "bench": bench, "case": case, "ours_ms": round(ours.median, 4),
        "peers_ms": {name: round(each.median, 4) for name, each in times.items() if name != "ours"},
        "ratios": {name: round(ours.median / each.median, 4) for name, each in times.items() if name != "ours"},
        "bandwidth_ratio": round(1e3 * moved / ours.median / copy, 4),
        "gb_per_second": round(moved / ours.median / 1e6, 1), "mb_moved": round(moved / 1e6, 2),
        "host_ms": {name: round(each.host_median, 4) for name, each in times.items()},
        "iqr_ms": {name: round(each.iqr, 4) for name, each in times.items()}, "rounds": len(ours.gpu), **more,
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    return found

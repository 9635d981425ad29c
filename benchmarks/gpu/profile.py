"""Time of a step of the Triton kernel with AdamAR by GPU kernel, and by function of the host."""

from __future__ import annotations

import cProfile
import json
import pstats
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu.kernels import INPUT_SETS, NUM_STEPS, Case, build, sampler, stepping, train
from benchmarks.gpu.timing import DEVICE, ON_GPU
from embeddings.optim import AdamAR

NUM_FUNCTIONS = 40


def profile(case: Case, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield a result: microseconds of a step on the GPU by kernel, and on the host by function, its own and in all."""
    draw = sampler(case)
    inputs = [draw() for _ in range(INPUT_SETS)]
    grad = 1e-3 * torch.randn(case.batch_size, case.num_tables * case.dim, device=DEVICE)
    tables = build(case, AdamAR(1e-3, alpha=1e-5))
    train(tables, draw, NUM_STEPS)
    step, num_steps = stepping(tables, grad), rounds * len(inputs)
    found: dict[str, Any] = {"bench": "profile", "case": str(case)}
    if ON_GPU:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for i in range(num_steps):
                step(inputs[i % len(inputs)])
            torch.cuda.synchronize()
        found["gpu_us"] = {
            one.key[:80]: round(one.self_device_time_total / num_steps, 2)
            for one in sorted(profiler.key_averages(), key=lambda one: -one.self_device_time_total)
        }
    # In this thread: autograd's has a profile of its own.
    host = cProfile.Profile()
    host.enable()
    for i in range(num_steps):
        step(inputs[i % len(inputs)])
    host.disable()
    stats = pstats.Stats(host).stats  # type: ignore[attr-defined]
    ranked = sorted(stats.items(), key=lambda one: -one[1][3])[:NUM_FUNCTIONS]
    found["host_us"] = {
        f"{'/'.join(where[0].split('/')[-2:])}:{where[1]} {where[2]}": [
            round(1e6 * own / num_steps, 1), round(1e6 * whole / num_steps, 1), round(calls / num_steps, 2)
        ]
        for where, (calls, _, own, whole, _) in ranked
    }  # fmt: skip
    print(json.dumps(found), flush=True)
    yield found

"""One rank that leads runs of jobs, each of them a directory and a device, in a process of its own.

The device is ``cpu``, with the reference as backend of the tables, or ``standin`` (stand_in_device), whose backend is
the reference too: so both end with the same bits, if everything between the tables is on the device. Jobs with
``kernel: fbgemm`` have FBGEMM's operators on ``cpu``, and its module on ``standin``, behind a cache.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from embeddings import embedding_tables
from tests.trainer.launch import stand_in_device
from tests.trainer.launch.stand_in_device import NAME, StandIn, StandInKernel, StandInModuleKernel
from trainer.distributed import build, planner
from trainer.launch import worker
from trainer.models.layers import fused
from trainer.runs.protocol import leave
from trainer.training import dense_parameters

tables_kernel, planned = embedding_tables.kernel_of, planner.Topology


def kernel(backend, layout, device):
    if device.type != NAME:
        return tables_kernel(backend, layout, device)
    return StandInModuleKernel(layout, device) if backend == "fbgemm" else StandInKernel(layout)


def topology(*, compute_device, **settings):
    """TorchRec knows the devices that it knows."""
    made = planned(compute_device="cuda" if compute_device == NAME else compute_device, **settings)
    made._compute_device = compute_device
    return made


class PlainAdam(torch.optim.Adam):
    """Neither has the stand-in the CPU's fused Adam, which rounds in another order."""

    def __init__(self, *arguments, fused=None, **settings):
        super().__init__(*arguments, **settings)


def lead(rank: int, world_size: int, store: str, runs: list[tuple[str, str]]) -> None:
    number, size = str(rank), str(world_size)
    os.environ.update(RANK=number, LOCAL_RANK=number, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    embedding_tables.kernel_of, planner.Topology = kernel, topology
    # The CPU's own attention sums in another order than its plain operators, which the stand-in has.
    torch.backends.cuda.enable_flash_sdp(False)
    dense_parameters.Adam = PlainAdam
    # Nor has the stand-in the CPU's fused layers, which add up gradients of biases in another order.
    fused._is_plain = lambda tensor: False
    planner.free_bytes_per_rank = lambda device, world_size, backend: 10**9

    # Two backends, as groups of ranks with GPUs have.
    dist.init_process_group("cpu:gloo,cuda:gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for directory, name in runs:
        build.BACKENDS["evenkeel"] = "reference" if name == "cpu" else None
        if name == "cpu":
            worker.use_device = lambda job, gpus=(): torch.device("cpu")
            worker.train_rank(directory)
            continue
        worker.use_device = lambda job, gpus=(): stand_in_device.DEVICE
        with StandIn():
            worker.train_rank(directory)
    dist.barrier()
    leave(0)

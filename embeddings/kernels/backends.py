"""The backends of embedding tables: their names, their kernels, and the default for a device."""

from __future__ import annotations

import importlib.util
import os
from typing import Literal

import torch

from embeddings.kernels.cpu import CpuKernel
from embeddings.kernels.layout import Kernel, Layout
from embeddings.kernels.reference import ReferenceKernel

Backend = Literal["cpu", "triton", "fbgemm", "reference"]


def default_backend(device: torch.device | str | None) -> Backend:
    """Return the default backend for tables on ``device``: ``cpu`` (compiled), or ``triton`` for GPUs."""
    return "cpu" if device is None or torch.device(device).type == "cpu" else "triton"


def device_of(backend: str, device: torch.device | str | None) -> torch.device:
    """Return the device for a backend's tables: ``device``, or the backend's default device if it is None.

    Raises:
        ValueError: the backend does not run on that device, or the machine lacks the device.
    """
    given = None if device is None else torch.device(device)
    if backend in ("cpu", "reference") and given is not None and given.type != "cpu":
        raise ValueError(f"backend '{backend}' runs on the CPU, not on {given}: use backend 'triton' for a GPU")
    if given is not None and given.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {given} is asked for, but this torch ({torch.__version__}) finds no GPU")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if given is None and backend == "triton" and torch.cuda.is_available() and not interpreted:
        return torch.device("cuda")
    return given or torch.device("cpu")


def kernel_of(backend: str, layout: Layout, device: torch.device) -> Kernel:
    """Return the kernel of a backend for tables of a layout on a device.

    Raises:
        ValueError: the backend is unknown, or does not support the tables or the optimizer of the layout.
    """
    if backend == "reference":
        return ReferenceKernel(layout)
    if backend == "fbgemm":
        return fbgemm_kernel(layout, device)
    if backend == "cpu":
        return CpuKernel(layout)
    if backend == "triton":
        if importlib.util.find_spec("triton") is None:
            raise ValueError(
                "backend 'triton' needs the package triton, which is not installed: it comes with torch for CUDA "
                "(make setup EXTRA=cuda); on a machine without a GPU use backend 'cpu'"
            )
        # Triton reads TRITON_INTERPRET when it is imported, so import it only when it is used.
        from embeddings.kernels.triton.kernel import TritonKernel

        return TritonKernel(layout)
    raise ValueError(f"backend '{backend}' is unknown: use cpu, triton, fbgemm or reference")


def fbgemm_kernel(layout: Layout, device: torch.device) -> Kernel:
    """Return FBGEMM's kernel for tables on this device: its operators on a CPU, its module on a GPU."""
    # FBGEMM takes a second to import, so import it only when it is used.
    if device.type == "cpu":
        from embeddings.kernels.fbgemm.kernel import FbgemmKernel

        return FbgemmKernel(layout)
    from embeddings.kernels.fbgemm.module import FbgemmModuleKernel

    return FbgemmModuleKernel(layout, device)

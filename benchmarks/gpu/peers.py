"""Peers of the Triton kernel: FBGEMM's CUDA kernels where installed, and torch's EmbeddingBag and SparseAdam."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from benchmarks.gpu.timing import DEVICE, ON_GPU


def _fused() -> tuple[type, ...]:
    if importlib.util.find_spec("fbgemm_gpu") is None:
        return ()
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

    return (SplitTableBatchedEmbeddingBagsCodegen,)


# Modules whose backward is also their update.
FUSED = _fused()


def fbgemm(case: Any, optimizer: str) -> Any:
    """Return FBGEMM's table-batched embedding in the GPU's memory; None where it is not installed."""
    if not FUSED or not ON_GPU:
        return None
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice

    peer = FUSED[0](
        [(case.num_rows, case.dim, EmbeddingLocation.DEVICE, ComputeDevice.CUDA)] * case.num_tables,
        optimizer=getattr(EmbOptimType, optimizer), learning_rate=1e-3, eps=1e-8,
    )  # fmt: skip
    for weight in peer.split_embedding_weights():
        weight.normal_(std=0.1)
    return peer


class TorchBags(torch.nn.Module):
    """A torch.nn.EmbeddingBag for each table, whose sparse gradients torch.optim.SparseAdam applies."""

    def __init__(self, case: Any, train: bool = False) -> None:
        super().__init__()
        self.num_tables = case.num_tables
        self.bags = torch.nn.ModuleList(
            torch.nn.EmbeddingBag(
                case.num_rows, case.dim, mode="sum", sparse=True, include_last_offset=True, device=DEVICE
            )
            for _ in range(case.num_tables)
        )
        self.optimizer = torch.optim.SparseAdam(list(self.parameters()), lr=1e-3) if train else None

    def forward(self, indices: Any, offsets: Any) -> Any:
        ends = offsets[: (len(offsets) - 1) // self.num_tables + 1]
        parts = indices.chunk(self.num_tables)
        return torch.cat([bag(ids, ends) for bag, ids in zip(self.bags, parts, strict=True)], dim=1)

    def step(self, k: int) -> None:
        assert self.optimizer is not None
        self.optimizer.step()
        self.optimizer.zero_grad()

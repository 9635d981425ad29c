"""FBGEMM's own module as a backend, for GPUs: its CUDA kernels, and its cache of tables larger than GPU memory.

This code has never run on a GPU. Tests run it with tables in host memory, behind a simulated write-back cache, and on a
simulated device (docs/adr/0009).

Tables are in GPU memory if they fit, else in unified memory with a cache of rows on the GPU (MANAGED_CACHING). The
module applies its optimizer in ``backward``, so all records go through forward and backward only at the step, as one
batch. The module's storage replaces the layout's. Before other code reads or writes rows, cached rows are written back
and the cache is emptied, so that the next lookup reads the rows as written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from embeddings.kernels.fbgemm.kernel import Bags, FbgemmKernel, Group
from embeddings.kernels.fbgemm.placement import FOR_TABLES, place
from embeddings.kernels.layout import Layout
from embeddings.optim import SGD, Adagrad, RowwiseAdagrad

_OPTIMIZERS = {
    SGD: EmbOptimType.EXACT_SGD,
    Adagrad: EmbOptimType.EXACT_ADAGRAD,
    RowwiseAdagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}


class FbgemmModuleKernel(FbgemmKernel):
    """FBGEMM's module as a :class:`embeddings.kernels.layout.Kernel`.

    It copies the rows and state of ``layout`` into the module, whose storage then replaces the layout's.

    Raises:
        ValueError: as for :class:`FbgemmKernel`, or a dim is not a multiple of 4.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout)
        odd = [f"'{table.name}' ({table.dim})" for table in layout.tables if table.dim % 4]
        if odd:
            raise ValueError(
                f"FBGEMM's module takes dims that are multiples of 4, not those of tables {', '.join(odd)}: use such a "
                "dim, or another backend"
            )
        self._device = device
        self._module = self._build()
        self._adopt()

    def _build(self) -> Any:
        layout = self.layout
        if self._device.type == "cpu":
            return module_of(layout, self._device, EmbeddingLocation.HOST, ComputeDevice.CPU)
        shapes = [(max(1, table.row_count), table.dim) for table in layout.tables]
        sets = place(shapes, len(layout.vector_names), len(layout.row_names), bytes_for_tables(self._device)).cache_sets
        location = EmbeddingLocation.MANAGED_CACHING if sets else EmbeddingLocation.DEVICE
        return module_of(layout, self._device, location, ComputeDevice.CUDA, sets)

    def _adopt(self) -> None:
        """Copy the layout's rows and state into the module's storage, and make this the layout's storage."""
        layout, module = self.layout, self._module
        tables = range(len(layout.tables))
        weights = [layout.weight(t) for t in tables]
        vectors = [layout.vector(t, "sum") for t in tables] if layout.vector_names else []
        numbers = [layout.row_value(t, "sum") for t in tables] if layout.row_names else []
        last = [layout.last_update_step(t) for t in tables]
        layout.weights, layout.weight_base = _storage(module, "weights")
        if layout.vector_names:
            layout.vectors, layout.vector_base = _storage(module, "momentum1")
        if layout.row_names:
            layout.row_values, layout.step_base = _storage(module, "momentum1")
        ends = layout.step_base[-1] + max(1, layout.tables[-1].row_count)
        layout.last_steps = torch.zeros(int(ends), dtype=torch.int32, device=self._device)
        layout.device = self._device
        layout.on_access = self._write_back
        for t in tables:
            layout.weight(t).copy_(weights[t])
            layout.last_update_step(t).copy_(last[t])
            if vectors:
                layout.vector(t, "sum").copy_(vectors[t])
            if numbers:
                layout.row_value(t, "sum").copy_(numbers[t])

    def _write_back(self) -> None:
        """Write cached rows to the layout's storage, and empty the cache, so that later writes there are read."""
        self._module.flush()
        self._module.reset_cache_states()

    def _look_up(self, group: Group, bags: Bags) -> torch.Tensor:
        num_bags = bags.lengths.shape[1]
        if not bags.indices.numel():
            return torch.zeros(num_bags, group.total_dim, device=bags.indices.device)
        # The cache numbers rows over all tables in the type of the ids, which int32 might not hold.
        bags = bags._replace(indices=bags.indices.long())
        if self.layout.pooled:
            return self._module(bags.indices, bags.offsets, bags.pooling_weights)
        # Without pooling, look up one table at a time: the bags of the other tables are empty.
        t, dim = group.descriptors[0].table, group.total_dim
        lengths = bags.lengths.new_zeros(len(self._groups), num_bags)
        lengths[t] = bags.lengths[0]
        rows: torch.Tensor = self._module(bags.indices, bags._replace(lengths=lengths).offsets, bags.pooling_weights)
        return rows[:, t * dim : (t + 1) * dim]

    def _apply(self, group: Group, bags: Bags, grad: torch.Tensor, step: int) -> None:
        self._module.set_learning_rate(self.layout.optimizer.rate(step))
        with torch.enable_grad():
            self._look_up(group, bags).backward(grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> FbgemmModuleKernel:
        # Copy the layout as plain tensors, which the copy's own module then takes over.
        layout = memo.get(id(self.layout)) or self.layout.__deepcopy__(memo)
        twin = type(self)(layout, self._device)
        memo[id(self)] = twin
        return twin


def module_of(
    layout: Layout, device: torch.device, location: EmbeddingLocation, compute: ComputeDevice, cache_sets: int = 0
) -> Any:
    """Return FBGEMM's module for the tables of ``layout``, all at the same ``location``; rows and state are 0."""
    by_table = [
        [descriptor.table for descriptor in layout.descriptors if descriptor.table == t]
        for t in range(len(layout.tables))
    ]
    return SplitTableBatchedEmbeddingBagsCodegen(
        # Give an empty table one row: FBGEMM would merge it with the next table if both started at the same number.
        [(max(1, table.row_count), table.dim, location, compute) for table in layout.tables],
        # Without pooling every id is a bag, so all features of a table can be looked up as one.
        feature_table_map=[t for tables in by_table for t in (tables if layout.pooled else tables[:1])],
        optimizer=_OPTIMIZERS[type(layout.optimizer)],
        eps=getattr(layout.optimizer, "eps", 0.0),
        cache_sets=cache_sets,
        stochastic_rounding=False,
        bounds_check_mode=BoundsCheckMode.NONE,
        device=device,
    )


def bytes_for_tables(device: torch.device) -> int:
    """Return the bytes of GPU memory that tables may take: a fifth of all stays free, whatever groups were made."""
    free, total = torch.cuda.mem_get_info(device)
    return max(0, int(free - (1 - FOR_TABLES) * total))


def _storage(module: Any, prefix: str) -> tuple[torch.Tensor, np.ndarray]:
    """Return the flat tensor with the module's ``prefix`` (rows or a state) of all tables, and each table's start."""
    held = [getattr(module, f"{prefix}_{suffix}") for suffix in ("host", "dev", "uvm")]
    (tensor,) = [each for each in held if each.numel()]
    return tensor.detach(), np.array(getattr(module, f"{prefix}_physical_offsets"), dtype=np.int64)

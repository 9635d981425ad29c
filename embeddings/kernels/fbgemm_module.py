"""FBGEMM's own module as a backend, for GPUs: its CUDA kernels, and its cache of tables larger than GPU memory.

Never run on a GPU. Tests run the same code with tables in host memory (docs/adr/0009). Tables lie in GPU memory where
they fit, else in unified memory with a cache of hot rows on the GPU (MANAGED_CACHING).

The module applies its optimizer in ``backward``: so it is at the step that all records go forward and backward, as one
batch. Its storage becomes the layout's. Rows that the GPU caches are written back whenever someone else asks for them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen

from embeddings.kernels.fbgemm import Bags, FbgemmKernel, Group
from embeddings.kernels.layout import Layout
from embeddings.optim import SGD, Adagrad, RowwiseAdagrad

_OPTIMIZERS = {
    SGD: EmbOptimType.EXACT_SGD,
    Adagrad: EmbOptimType.EXACT_ADAGRAD,
    RowwiseAdagrad: EmbOptimType.EXACT_ROWWISE_ADAGRAD,
}
# Of free GPU memory: the rest is for the model, batches and what allocators waste.
_FOR_TABLES = 0.8
_CACHED_SHARE = 0.2


class FbgemmModuleKernel(FbgemmKernel):
    """See :class:`embeddings.kernels.layout.Kernel`. Takes the rows and state of ``layout`` over, and then holds them.

    Raises ValueError for what the module cannot do beyond :class:`FbgemmKernel`: dims that are no multiples of 4, and
    lookups without pooling.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        super().__init__(layout)
        odd = [f"'{table.name}' ({table.dim})" for table in layout.tables if table.dim % 4]
        if odd:
            raise ValueError(
                f"FBGEMM's module takes dims that are multiples of 4, not those of tables {', '.join(odd)}: use such a "
                "dim, or another backend"
            )
        if not layout.pooled:
            raise ValueError("FBGEMM's module here looks up bags, not sequences: use another backend")
        self._device = device
        self._module = self._build()
        self._adopt()

    def _build(self) -> Any:
        layout, optimizer = self.layout, self.layout.optimizer
        if self._device.type == "cpu":
            location, compute, cached = EmbeddingLocation.HOST, ComputeDevice.CPU, 0.0
        else:
            free, _ = torch.cuda.mem_get_info(self._device)
            location, cached = place(sum(each.nbytes for each in (layout.weights, layout.vectors)), free)
            compute = ComputeDevice.CUDA
        return SplitTableBatchedEmbeddingBagsCodegen(
            [(max(1, table.row_count), table.dim, location, compute) for table in layout.tables],
            feature_table_map=[slot.table for slot in layout.slots],
            optimizer=_OPTIMIZERS[type(optimizer)],
            eps=getattr(optimizer, "eps", 0.0),
            cache_load_factor=cached or _CACHED_SHARE,
            stochastic_rounding=False,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=self._device,
        )

    def _adopt(self) -> None:
        """The module's storage, with what the layout holds in it, in the place of the layout's."""
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
        """Cached rows to where the layout sees them; the cache is empty then, so that what is written there is read."""
        self._module.flush()
        self._module.reset_cache_states()

    def _look_up(self, group: Group, bags: Bags) -> torch.Tensor:
        output: torch.Tensor = self._module(bags.indices, bags.offsets, bags.shares)
        return output

    def _apply(self, group: Group, bags: Bags, grad: torch.Tensor, step: int) -> None:
        self._module.set_learning_rate(self.layout.optimizer.rate(step))
        with torch.enable_grad():
            self._look_up(group, bags).backward(grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> FbgemmModuleKernel:
        # The twin's layout is a plain copy; its own module takes that over.
        layout = memo.get(id(self.layout)) or self.layout.__deepcopy__(memo)
        twin = FbgemmModuleKernel(layout, self._device)
        memo[id(self)] = twin
        return twin


def place(num_bytes: int, free_bytes: int) -> tuple[EmbeddingLocation, float]:
    """Where tables of so many bytes go, on the GPU or into unified memory, and which share of them the GPU caches."""
    if num_bytes <= _FOR_TABLES * free_bytes:
        return EmbeddingLocation.DEVICE, 0.0
    return EmbeddingLocation.MANAGED_CACHING, min(_CACHED_SHARE, _FOR_TABLES * free_bytes / num_bytes)


def _storage(module: Any, prefix: str) -> tuple[torch.Tensor, np.ndarray]:
    """The flat tensor that holds ``prefix`` (all tables are in one place), and where each table starts in it."""
    held = [getattr(module, f"{prefix}_{place}") for place in ("host", "dev", "uvm")]
    (tensor,) = [each for each in held if each.numel()]
    return tensor.detach(), np.array(getattr(module, f"{prefix}_physical_offsets"), dtype=np.int64)

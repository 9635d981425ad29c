"""Tables of FBGEMM's module: on a GPU under `make gpu-check`, else over host memory, behind a cache like its or not.

What can go wrong with the cache is that somebody reads rows which it still has to write back, or writes rows that it
has copies of. :class:`CachedOnHost` goes wrong then, as the GPU's would.
"""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import numpy as np
import torch

from embeddings.embedding_tables import EmbeddingTables
from embeddings.kernels import backends
from embeddings.kernels.fbgemm import module as fbgemm_module
from embeddings.kernels.fbgemm.module import FbgemmModuleKernel

ON_GPU = os.environ.get("TRITON_INTERPRET") == "0" and torch.cuda.is_available()
SCARCE_BYTES = 0
"""Of GPU memory for tables: none, so that one set of rows is cached, which most rows leave again."""


def module_tables(tables, optimizer, *, cached: bool = False, **settings: Any) -> EmbeddingTables:
    """EmbeddingTables of FBGEMM's module; ``cached``: as if no GPU could hold them."""
    if ON_GPU:
        bytes_for_tables = (lambda device: SCARCE_BYTES) if cached else fbgemm_module.bytes_for_tables
        with mock.patch.object(fbgemm_module, "bytes_for_tables", bytes_for_tables):
            return EmbeddingTables(tables, optimizer, backend="fbgemm", device="cuda", **settings)
    kernel = CachedKernel if cached else FbgemmModuleKernel
    with mock.patch.object(backends, "fbgemm_kernel", kernel):
        return EmbeddingTables(tables, optimizer, backend="fbgemm", **settings)


class CachedOnHost:
    """FBGEMM's module over host memory, its rows a cache of others. The layout is given the others (``weights_uvm``);
    a row is copied into the cache when it is looked up, updated there, and copied back by ``flush``."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._cache = module.weights_host.detach()
        self._is_cached = torch.zeros(len(self._cache), dtype=torch.bool)
        self.weights_dev = self.weights_host = torch.empty(0)
        self.weights_uvm = self._cache.clone()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)

    def __call__(self, indices: torch.Tensor, offsets: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        features = self._module.feature_table_map
        ends = offsets[:: (len(offsets) - 1) // len(features)].tolist()
        for number, t in enumerate(features):
            dim, base = self._module.dims[t], self._module.weights_physical_offsets[t]
            rows = np.unique(indices[ends[number] : ends[number + 1]].numpy())
            places = torch.from_numpy((base + rows[:, None] * dim + np.arange(dim)).reshape(-1))
            missing = places[~self._is_cached[places]]
            self._cache[missing] = self.weights_uvm[missing]
            self._is_cached[missing] = True
        return self._module(indices, offsets, shares)

    def flush(self) -> None:
        self.weights_uvm[self._is_cached] = self._cache[self._is_cached]

    def reset_cache_states(self) -> None:
        self._is_cached.zero_()


class CachedKernel(FbgemmModuleKernel):
    """The backend over host memory behind such a cache."""

    def _build(self) -> Any:
        return CachedOnHost(super()._build())

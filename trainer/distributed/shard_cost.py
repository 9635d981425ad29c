"""Cost of a shard on its rank, for the planner: the bytes of memory that it takes, and the time of a step.

The memory of a shard, in bytes, is the sum of two parts:

* kept: rows x (columns x (weight + state vectors) + values kept once per row), in every copy of a data-parallel table;
* in flight: the ids that come in, the outputs that go out, and the gradients of the outputs.

The time of a step is the sum of two parts:

* compute: a lookup reads rows; the step reads gradients, and reads and writes rows and state;
* communication: ids are sent to the ranks with the rows, and outputs are sent back. For a table split by rows, outputs
  are partial sums over the whole batch. Copies of a data-parallel table only exchange ids and gradients, in backward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torchrec.distributed.planner.types import Perf, Shard, ShardEstimator, ShardingOption, Storage

from embeddings.sharding import TableSettings
from embeddings.tables.shardings import SHARDINGS, sharding_name

# Bytes per second of one rank. CPU: row traffic of one thread (benchmarks.update); between ranks of one host the memory
# they share, else gloo (docs/adr/0007-sharding.md). CUDA: of the order of such devices, unmeasured.
_MEMORY_BYTES_PER_SECOND = {"cpu": 1e10, "cuda": 2e12}
_NETWORK_BYTES_PER_SECOND = {"cpu": 7e8, "cuda": 1e11}
_HOST_BYTES_PER_SECOND = 4e9
_ID_BYTES = 8


@dataclass(frozen=True)
class Workload:
    """Size of a step: samples on each rank, and the mean number of ids per sample by feature (default 1)."""

    samples_per_rank: int = 512
    ids_per_sample: Mapping[str, float] | None = None

    def ids(self, features: tuple[str, ...]) -> float:
        """Return the mean number of ids per sample, summed over ``features``."""
        known = self.ids_per_sample or {}
        return sum(known.get(feature, 1.0) for feature in features)


def row_bytes(settings: TableSettings, table: str, columns: int) -> int:
    """Return the bytes of ``columns`` columns of a table's row, with optimizer state and the step of its last touch."""
    optimizer = settings.optimizer
    weight, state = settings.dtype_of(table).itemsize, settings.state_dtype_of(table).itemsize
    per_row = len(optimizer.row_state_names)
    vectors = len(optimizer.state_names) - 1 - per_row
    return columns * (weight + vectors * state) + per_row * state + torch.int32.itemsize


class ShardCost(ShardEstimator):
    """Estimator for TorchRec's planner: sets memory and time of each shard of a sharding option (see the module)."""

    def __init__(
        self, settings: TableSettings, workload: Workload, world_size: int, local_world_size: int, device: torch.device
    ) -> None:
        self._settings, self._workload = settings, workload
        self._world_size, self._local_world_size = world_size, local_world_size
        self._on_gpu = device.type != "cpu"
        kind = "cuda" if self._on_gpu else "cpu"
        self._memory_speed = _MEMORY_BYTES_PER_SECOND[kind] / 1000
        one_host = not self._on_gpu and world_size == local_world_size
        self._network_speed = (_HOST_BYTES_PER_SECOND if one_host else _NETWORK_BYTES_PER_SECOND[kind]) / 1000

    def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any = None) -> None:
        for option in sharding_options:
            for shard in option.shards:
                self._fill(option, shard)

    def _fill(self, option: ShardingOption, shard: Shard) -> None:
        settings, world_size = self._settings, self._world_size
        way = SHARDINGS[sharding_name(option.sharding_type)]
        table = settings.tables[option.name]
        rows, columns = shard.size
        samples = self._workload.samples_per_rank
        own_ids = samples * self._workload.ids(table.features)
        all_ids, others = own_ids * world_size, (world_size - 1) / world_size
        value = settings.compute_dtype.itemsize
        # Rows of output per sample on each side of the exchange: one for each feature, or one for each id.
        own_outputs = samples * len(table.features) if option.is_pooled else own_ids
        all_outputs = own_outputs * world_size
        if way.replicated:
            looked_up, touched, outputs = own_ids, all_ids, own_outputs
            forward_bytes = 0.0
            backward_bytes = (all_ids * _ID_BYTES + all_outputs * columns * value) * others
        else:
            looked_up = touched = all_ids / way.row_shards(world_size, self._local_world_size)
            outputs = all_outputs if option.is_pooled else looked_up
            forward_bytes = (looked_up * _ID_BYTES + outputs * columns * value) * others
            backward_bytes = outputs * columns * value * others
        per_id = row_bytes(settings, option.name, columns)
        shard.perf = Perf(
            fwd_compute=looked_up * columns * settings.dtype_of(option.name).itemsize / self._memory_speed,
            fwd_comms=forward_bytes / self._network_speed,
            bwd_compute=touched * (columns * value + 2 * per_id) / self._memory_speed,
            bwd_comms=backward_bytes / self._network_speed,
        )
        # A replica keeps the gradients of all ranks until the step.
        gradients = all_outputs if way.replicated else outputs
        in_flight = int(2 * touched * _ID_BYTES + (outputs + gradients) * columns * value)
        total = rows * per_id + in_flight
        shard.storage = Storage(hbm=total if self._on_gpu else 0, ddr=0 if self._on_gpu else total)

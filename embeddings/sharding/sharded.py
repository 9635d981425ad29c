"""Base of sharded bags and sharded sequences: their position in training, and the update steps of their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from embeddings.embedding_tables import EmbeddingTables
from embeddings.perturbation import perturb
from embeddings.sharding.exchange.collective_check import CollectiveCheck, emptied, problem_of
from embeddings.sharding.replicas import Replicas, ReplicatedTables
from embeddings.sharding.settings import DATA_TYPES, LocalPiece, StepContext, TableSettings, check_collection
from embeddings.tables.config import TableConfig

if TYPE_CHECKING:
    from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingEnv
    from torchrec.modules.embedding_configs import BaseEmbeddingConfig


class RowsOfRank:
    """The parts of tables that this rank holds, and the updates of their rows; no method communicates."""

    def kernels(self) -> Iterator[EmbeddingTables]:
        """Yield every EmbeddingTables of this rank."""
        raise NotImplementedError

    def set_context(self, step: int, sample_offset: int, part_offset: int = 0) -> None:
        """Set the next batch's step and sample offset; call it before the batch's ids are distributed.

        Usually that means before each training forward. TrainPipelineSparseDist distributes a batch while it trains on
        the previous batch: with it, call this when the pipeline's iterator yields the batch.

        Args:
            step: the step that the batch is for.
            sample_offset: the index in the global batch of this rank's first sample.
            part_offset: the index of the first sample of all ranks, which is not 0 in the later micro-batches of a
                step.
        """
        raise NotImplementedError

    def step(self, k: int, scale: float = 1.0) -> None:
        """Apply the gradients that this rank's backward recorded, times ``scale``, as step ``k``.

        After an error it can be called again: tables that have applied the step do not apply it twice.
        """
        for kernel in self.kernels():
            if kernel.completed_steps != k:
                kernel.step(k, scale)

    def gradient_squared_norm(self) -> float:
        """Return this rank's share of the sum of |gradient|^2 over all rows.

        Added up over ranks, the shares count each element once: for replicated tables only replica 0 counts.
        """
        return sum(
            kernel.gradient_squared_norm()
            for kernel in self.kernels()
            if not isinstance(kernel, ReplicatedTables) or kernel.replica == 0
        )

    def perturbed(self, scale: float) -> list[Callable[[], None]]:
        """Move this rank's touched rows by ``scale`` times their gradient; the functions that are returned undo it."""
        return [perturb(kernel, scale) for kernel in self.kernels()]

    def reset(self, completed_steps: int) -> None:
        """Set initial rows and fresh state; rows and optimizer then count their steps from ``completed_steps``."""
        for kernel in self.kernels():
            kernel.reset(completed_steps)

    def discard(self) -> None:
        """Drop the gradients that this rank's backward recorded."""
        for kernel in self.kernels():
            kernel.discard()

    def non_finite_tables(self) -> list[str]:
        """Return the names of the tables for which this rank recorded a gradient that is not finite."""
        return sorted({name for kernel in self.kernels() for name in kernel.non_finite_tables()})

    def local_pieces(self) -> list[LocalPiece]:
        """Return this rank's pieces of all tables, sorted by name, row_start and column_start."""
        pieces = [
            LocalPiece(
                table.name,
                kernel,
                table.row_start,
                table.row_count,
                table.column_start,
                table.dim,
                kernel.replica if isinstance(kernel, ReplicatedTables) else 0,
            )
            for kernel in self.kernels()
            for table in kernel.layout.tables
        ]
        return sorted(pieces, key=lambda piece: (piece.name, piece.row_start, piece.column_start))


class ShardedTables(RowsOfRank, nn.Module):
    """The part of a model that looks sharded tables up; only ``forward`` and ``backward`` communicate.

    Each subclass combines it with a class of TorchRec.
    """

    module_sharding_plan: EmbeddingModuleShardingPlan
    settings: TableSettings
    _step_context: StepContext
    _readers: Mapping[str, list[TableConfig]]
    _env: ShardingEnv
    _lookups: list[nn.Module]
    _held_as: ClassVar[str]
    """The attribute in which TorchRec keeps the tables of its collection."""

    def _prepare(self, settings: TableSettings, configs: Sequence[BaseEmbeddingConfig]) -> None:
        """Set the attributes and the data types of ``configs`` that TorchRec's constructor needs; call it before."""
        # Module's constructor has not run yet, so only plain attributes may be set.
        self.settings = settings
        self._step_context = StepContext()
        self._readers = {}
        for config in configs:
            for feature in settings.tables[config.name].features:
                self._readers.setdefault(feature, []).append(settings.tables[config.name])
            config.data_type = DATA_TYPES.get(settings.dtype_of(config.name), config.data_type)

    def train(self, mode: bool = True) -> ShardedTables:
        super().train(mode)
        self._step_context.training = mode
        return self

    def _checked(self, ctx: Any, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return the input to distribute: ``features``, or an empty batch if they are invalid.

        ``ctx`` is passed to :meth:`_begin_lookup` later, maybe after the next batch was distributed.
        """
        context = self._step_context
        if context.training and context.step is None and any(map(self.settings.probability, self.settings.sse)):
            raise ValueError(
                "SSE draws by step and sample, and these are not set: call set_context(step, "
                "sample_offset) before each training batch is distributed"
            )
        ctx.step_context = dataclasses.replace(context)
        problem = problem_of(features, self._readers, self.settings.bounds == "fatal")
        ctx.check = CollectiveCheck(problem, self._env.process_group, features.values().device)
        return features if problem is None else emptied(features)

    def _begin_lookup(self, ctx: Any) -> None:
        """Begin the lookup of a distributed batch: raise if any rank refused it, and set its step and sample offset."""
        ctx.check.count()
        context: StepContext = ctx.step_context
        if not context.training or context.step is None:
            return
        for kernel in self.kernels():
            if kernel.completed_steps + 1 != context.step:
                raise ValueError(
                    f"a batch distributed for step {context.step} does not follow {kernel.completed_steps} completed "
                    "steps: call set_context before each training batch is distributed (in TrainPipelineSparseDist "
                    "where the iterator yields it), and step once after it"
                )
            # A replica sees this rank's samples. Other lookups that swap see those of all ranks; those of split rows
            # swap nothing.
            is_replica = isinstance(kernel, ReplicatedTables)
            kernel.set_context(context.step, context.sample_offset if is_replica else context.part_offset)

    def kernels(self) -> Iterator[EmbeddingTables]:
        for lookup in self._lookups:
            for module in lookup.modules():
                if isinstance(module, EmbeddingTables):
                    yield module

    def set_context(self, step: int, sample_offset: int, part_offset: int = 0) -> None:
        # Kernels learn the step when the batch is looked up, because the lookup before may still be pending.
        context = self._step_context
        context.step, context.sample_offset, context.part_offset = step, sample_offset, part_offset

    def init_data_parallel(self) -> None:
        """Wrap lookups of replicated tables in :class:`Replicas`, where TorchRec wraps in DistributedDataParallel."""
        for number, lookup in enumerate(self._lookups):
            if any(isinstance(module, ReplicatedTables) for module in lookup.modules()):
                self._lookups[number] = Replicas(lookup)

    def _initialize_torch_state(self, skip_registering: bool = False) -> None:
        if self.settings.dtype in DATA_TYPES:
            super()._initialize_torch_state(skip_registering)  # type: ignore[misc]  # TorchRec's
        else:
            # TorchRec has no data type for float64, so there state_dict() holds no tables.
            setattr(self, self._held_as, nn.ModuleDict())

    def reset_parameters(self) -> None:
        """Do nothing: EmbeddingTables sets initial rows itself, the same for every sharding plan."""


class SharderOfTables:
    """Mixin for the sharders of bags and of sequences; each inherits from it before TorchRec's sharder."""

    _shardings: ClassVar[Mapping[str, Any]]
    _sharded: ClassVar[type[Any]]

    def __init__(self, settings: TableSettings) -> None:
        super().__init__()
        self._settings = settings

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(self._shardings)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]

    def shard(
        self,
        module: EmbeddingBagCollection | EmbeddingCollection,
        params: Mapping[str, Any],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> Any:
        is_bags = isinstance(module, EmbeddingBagCollection)
        check_collection(
            module.embedding_bag_configs() if is_bags else module.embedding_configs(), self._settings.tables
        )
        return self._sharded(self._settings, module, params, env, device=device, module_fqn=module_fqn)

    @property
    def sharded_module_type(self) -> type[Any]:
        return self._sharded


class ModelTables(RowsOfRank):
    """All sharded tables of a model, over all its collections, whose paths in the model are ``paths``."""

    def __init__(self, model: nn.Module) -> None:
        collections = {name: part for name, part in model.named_modules() if isinstance(part, ShardedTables)}
        if not collections:
            raise ValueError("the model holds no sharded tables")
        self._collections = list(collections.values())
        self.paths = tuple(collections)
        self.settings = self._collections[0].settings
        self.module_sharding_plan = {
            name: sharding for part in self._collections for name, sharding in part.module_sharding_plan.items()
        }

    def kernels(self) -> Iterator[EmbeddingTables]:
        for part in self._collections:
            yield from part.kernels()

    def set_context(self, step: int, sample_offset: int, part_offset: int = 0) -> None:
        for part in self._collections:
            part.set_context(step, sample_offset, part_offset)

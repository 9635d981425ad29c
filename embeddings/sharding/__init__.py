"""Our tables under TorchRec's sharding: table-wise and row-wise, on any number of ranks, also one.

TorchRec plans, wraps and distributes inputs; :class:`TableSharder` makes its lookups run
:class:`embeddings.tables.EmbeddingTables`. What differs from the stock sharder, and why:

* SSE. Table-wise, ids are whole and ordered by rank after the all-to-all, so the lookup swaps, the index in the
  concatenation being the index in the global batch. Row-wise, the new row may live elsewhere: ids are swapped before
  they are distributed, with the rank's own offset. The bits are the same (:mod:`embeddings.sse`).
* Row-wise runs on CPU, and with batches that differ between ranks, also empty ones: gloo refuses the reduce-scatter of
  unequal parts that TorchRec uses, so ``SumExchange`` sums after an all-to-all, in rank order.
* Mean pooling of split rows divides by the exact number of ids. TorchRec divides by that number + 1e-6.
"""

from embeddings.sharding.bags import ShardedBags, TableSharder
from embeddings.sharding.faults import OtherRankFailed
from embeddings.sharding.lookup import TableKernel
from embeddings.sharding.sequences import SequenceSharder, ShardedSequences
from embeddings.sharding.settings import (
    LocalPiece,
    TableSettings,
    embedding_bag_collection,
    embedding_collection,
)
from embeddings.sharding.sharded import ModelTables, ShardedTables
from embeddings.sharding.shardings import BAG_SHARDINGS, SEQUENCE_SHARDINGS

SHARDING_TYPES = tuple(BAG_SHARDINGS)

__all__ = [
    "BAG_SHARDINGS",
    "SEQUENCE_SHARDINGS",
    "SHARDING_TYPES",
    "LocalPiece",
    "ModelTables",
    "OtherRankFailed",
    "SequenceSharder",
    "ShardedBags",
    "ShardedSequences",
    "ShardedTables",
    "TableKernel",
    "TableSettings",
    "TableSharder",
    "embedding_bag_collection",
    "embedding_collection",
]

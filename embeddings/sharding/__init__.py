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

from embeddings.sharding.bags import ShardedTables, TableSharder
from embeddings.sharding.lookup import TableKernel
from embeddings.sharding.settings import SHARDING_TYPES, LocalPiece, LocalTable, TableSettings, embedding_bag_collection

__all__ = [
    "SHARDING_TYPES",
    "LocalPiece",
    "LocalTable",
    "ShardedTables",
    "TableKernel",
    "TableSettings",
    "TableSharder",
    "embedding_bag_collection",
]

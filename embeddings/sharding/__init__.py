"""Embedding tables under TorchRec's sharding, on one rank or many: bags and sequences, tables whole or split.

TorchRec plans, wraps and distributes inputs; the sharders here make its lookups run
:class:`embeddings.embedding_tables.EmbeddingTables`. What differs from the stock sharders, and why
(docs/adr/0007-sharding.md):

* SSE. If a table's rows are not distributed over ranks (table-wise, column-wise, data-parallel), the lookup swaps ids:
  the all-to-all orders them by rank, so an index into its result is the index in the global batch. If they are
  (row-wise, grid), the new row may be on another rank: ids are swapped before they are distributed, with the rank's own
  offset. The bits are the same (:mod:`embeddings.sse`).
* Replicas of data-parallel tables exchange ids and gradients in backward, and stay equal bit for bit.
* Split tables work on CPU, and with batches that differ in size between ranks, even empty batches. For them TorchRec
  uses a reduce-scatter of unequal parts, which gloo refuses; ``SumExchange`` sums after an all-to-all, in rank order.
* Mean pooling of split rows divides by the exact number of ids. TorchRec divides by that number + 1e-6.
* All ranks learn of bad input on one rank before any of them waits for rows.
* Each batch keeps its step and sample offset, which are set before its ids are distributed. So TorchRec's
  TrainPipelineSparseDist may distribute the next batch early: set them when the iterator yields the batch.
"""

from embeddings.sharding.embedding import SEQUENCE_SHARDINGS, SequenceSharder, ShardedSequences
from embeddings.sharding.embedding_bag import BAG_SHARDINGS, ShardedBags, TableSharder
from embeddings.sharding.exchange.collective_check import OtherRankFailed
from embeddings.sharding.lookup import TableKernel
from embeddings.sharding.settings import LocalPiece, TableSettings, embedding_bag_collection, embedding_collection
from embeddings.sharding.sharded import ModelTables, ShardedTables

__all__ = [
    "BAG_SHARDINGS", "SEQUENCE_SHARDINGS", "LocalPiece", "ModelTables", "OtherRankFailed", "SequenceSharder",
    "ShardedBags", "ShardedSequences", "ShardedTables", "TableKernel", "TableSettings", "TableSharder",
    "embedding_bag_collection", "embedding_collection",
]  # fmt: skip

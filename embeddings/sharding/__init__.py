"""Embedding tables under TorchRec's sharding, on any number of ranks, also one: bags and sequences, whole or split.

TorchRec plans, wraps and distributes inputs; the sharders here make its lookups run
:class:`embeddings.embedding_tables.EmbeddingTables`. What differs from the stock sharders, and why
(docs/adr/0007-sharding.md):

* SSE. Where rows are whole (table-wise, column-wise, data-parallel) the lookup swaps: after the all-to-all ids are
  ordered by rank, so the index in the concatenation is the index in the global batch. Where they are split (row-wise,
  grid) the new row may be on another rank: ids are swapped before they are distributed, with the rank's own offset.
  The bits are the same (:mod:`embeddings.sse`).
* Replicas of data-parallel tables exchange ids and gradients in backward, and stay equal bit for bit.
* Splits work on CPU, and with batches that differ between ranks, also empty ones: gloo refuses the reduce-scatter of
  unequal parts that TorchRec uses, so ``SumExchange`` sums after an all-to-all, in rank order.
* Mean pooling of split rows divides by the exact number of ids. TorchRec divides by that number + 1e-6.
* Bad input on one rank is agreed on before any rank waits for its rows.
* Each batch keeps the place in training that was set before its ids were distributed, so TorchRec's
  TrainPipelineSparseDist may distribute the next one early: set it where the iterator yields the batch.
"""

from embeddings.sharding.embedding import SEQUENCE_SHARDINGS, SequenceSharder, ShardedSequences
from embeddings.sharding.embedding_bag import BAG_SHARDINGS, ShardedBags, TableSharder
from embeddings.sharding.exchange.collective_check import OtherRankFailed
from embeddings.sharding.lookup import TableKernel
from embeddings.sharding.settings import (
    LocalPiece,
    TableSettings,
    embedding_bag_collection,
    embedding_collection,
)
from embeddings.sharding.sharded import ModelTables, ShardedTables

__all__ = [
    "BAG_SHARDINGS", "SEQUENCE_SHARDINGS", "LocalPiece", "ModelTables", "OtherRankFailed", "SequenceSharder",
    "ShardedBags", "ShardedSequences", "ShardedTables", "TableKernel", "TableSettings", "TableSharder",
    "embedding_bag_collection", "embedding_collection",
]  # fmt: skip

"""Stochastic Shared Embeddings (SSE): random swaps of ids in training, and graphs of similar rows to swap by.

``graph`` does not import torch. Other packages import ``StochasticSharedEmbedding`` from here.
"""

from typing import TYPE_CHECKING

from embeddings.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from embeddings.stochastic_shared_embedding import StochasticSharedEmbedding as StochasticSharedEmbedding

__getattr__ = lazy_exports(__name__)

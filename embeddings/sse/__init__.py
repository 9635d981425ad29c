"""Stochastic Shared Embeddings: which ids are swapped, for which others, and graphs over rows to walk on.

``graph`` needs no torch. Other packages import ``StochasticSharedEmbedding`` from here.
"""

from typing import TYPE_CHECKING

from embeddings.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from embeddings.stochastic_shared_embedding import StochasticSharedEmbedding as StochasticSharedEmbedding

__getattr__ = lazy_exports(__name__)

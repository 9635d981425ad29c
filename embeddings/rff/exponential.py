"""Exponential vectors of item vectors (Xu et al., "Some Practical Concerns and Solutions", section 4.3).

    e(h) = [exp(<h, a_1>) .. exp(<h, a_m>)]

h and the a_i are unit vectors of items of one training. For the items of a fit, e(h) are the weights of the
Nadaraya-Watson estimator, up to normalisation. A rotation of all vectors does not change them.
"""

from __future__ import annotations

import numpy as np

from embeddings.vectors.item_vectors import Array, unit_rows


def exponential(vectors: Array, anchors: Array) -> Array:
    """Return e(h) [n, m] of the rows of ``vectors`` [n, d], for the rows of ``anchors`` [m, d]."""
    return np.asarray(np.exp(unit_rows(vectors)[0] @ unit_rows(anchors)[0].T))

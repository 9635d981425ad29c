"""Five buckets of ids by how often they were trained on, as in the ablation of AdamAR.

Li and Lyu, slides: "the bucket norms can be controlled via adaptive regularization strength while preserving the AUC
gains across all buckets".

The slides do not say how the buckets are cut. Here each bucket has about a fifth of the training occurrences, rare ids
first. With a fifth of the ids each, several buckets would be alike, since most ids occur once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer.metrics.counts import Float64s, Int64s

NUM_BUCKETS = 5
UNSEEN = 0


def frequency_buckets(counts: npt.NDArray[np.integer]) -> npt.NDArray[np.int8]:
    """Return the bucket of each id, int8 [n], 1 (rarest) to NUM_BUCKETS, from its training occurrences [n].

    An id without occurrences is in bucket :data:`UNSEEN`. A frequency f is in bucket 1 + floor(NUM_BUCKETS *
    (occurrences of ids rarer than f) / (all occurrences)). Ids of equal frequency share a bucket, so that after a
    frequency of many ids a bucket may be empty.
    """
    counts = np.asarray(counts, np.int64)
    frequencies, which = np.unique(counts, return_inverse=True)
    occurrences = frequencies * np.bincount(which, minlength=len(frequencies))
    rarer = np.cumsum(occurrences) - occurrences
    total = int(occurrences.sum())
    buckets = 1 + NUM_BUCKETS * rarer // max(total, 1)
    buckets[frequencies == 0] = UNSEEN
    return buckets.astype(np.int8)[which]


def bucket_rows(
    counts: npt.NDArray[np.integer],
    buckets: npt.NDArray[np.int8],
    norm_sums: Float64s,
    examples: Int64s,
    aucs: Sequence[float],
) -> list[dict[str, Any]]:
    """Return the table of a report, with a row for each bucket that has an id or a held-out example.

    Args:
        counts: training occurrences of the ids [n].
        buckets: bucket of each id [n].
        norm_sums: sums of the L2 norms of the rows in buckets 0 to NUM_BUCKETS.
        examples: held-out examples by the bucket of their id, 0 to NUM_BUCKETS.
        aucs: AUC of the examples of each bucket, 0 to NUM_BUCKETS.
    """
    table = []
    for bucket in range(NUM_BUCKETS + 1):
        own = np.asarray(counts)[buckets == bucket]
        if not len(own) and not examples[bucket]:
            continue
        seen = bucket != UNSEEN and len(own) > 0
        table.append(
            {
                "bucket": bucket,
                "ids": len(own) if seen else 0,
                "min_count": int(own.min()) if seen else 0,
                "max_count": int(own.max()) if seen else 0,
                "norm": float(norm_sums[bucket] / len(own)) if seen else None,
                "examples": int(examples[bucket]),
                "auc": None if np.isnan(aucs[bucket]) else float(aucs[bucket]),
            }
        )
    return table

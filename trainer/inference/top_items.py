"""Search of a whole catalogue, piece by piece, for the items with the highest scores for a query. Torch-free."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embeddings.vectors.top_k import BestSoFar
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.jagged import Jagged

Float32s = npt.NDArray[np.float32]
# Number of items whose scores are in memory at once, for each query of a batch.
_PIECE_ROWS = 1 << 15


class TopItems:
    """Search for the items with the highest score(i) = <query, candidate_i>.

    The special rows of the table, and items that the user had, are left out.

    Args:
        candidates: item vectors [rows of the item table, dim], in the order of its rows.
        ids: raw ids of rows 2, 3, ...
        k: largest number of items for a query.
    """

    def __init__(self, candidates: Float32s, ids: pa.Array, k: int):
        self.candidates, self.ids, self.k = candidates, ids, k

    def of(
        self,
        queries: Float32s,
        had: Jagged,
        known: npt.NDArray[np.bool_] | None = None,
        offsets: Float32s | None = None,
    ) -> tuple[pa.Array, pa.Array]:
        """Return lists of at most k raw ids and of their scores, the highest first.

        Args:
            queries: [b, dim].
            had: table rows of the items that each user had; they are left out.
            known: mask of the users to answer, bool [b]; the others get empty lists. None: all users who had an item
                that is known.
            offsets: terms that are added to all scores of a user [b]; None: none.
        """
        found = BestSoFar(len(queries), self.k)
        owner = np.repeat(np.arange(len(queries)), had.lengths)
        for start in range(0, len(self.candidates), _PIECE_ROWS):
            piece = queries @ self.candidates[start : start + _PIECE_ROWS].T
            if start < NUM_SPECIAL_ROWS:
                piece[:, : NUM_SPECIAL_ROWS - start] = -np.inf
            inside = (had.values >= start) & (had.values < start + _PIECE_ROWS)
            piece[owner[inside], had.values[inside] - start] = -np.inf
            found.add(start, piece)
        scores, rows = found.scores, found.columns
        if known is None:
            known = np.bincount(owner[had.values >= NUM_SPECIAL_ROWS], minlength=len(queries)) > 0
        if offsets is not None:
            scores = scores + offsets[:, None]
        is_answer = np.isfinite(scores) & known[:, None]
        starts = pa.array(np.append(0, np.cumsum(is_answer.sum(axis=1))), pa.int32())
        ids = self.ids.take(pa.array(rows[is_answer] - NUM_SPECIAL_ROWS))
        return pa.ListArray.from_arrays(starts, ids), pa.ListArray.from_arrays(starts, pa.array(scores[is_answer]))

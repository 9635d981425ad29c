"""Check of ids for the publication of vectors: a collection takes no id that is too long or has a NUL. Torch-free."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from embeddings.vectors.item_vectors import CHUNK_ROWS, MAX_ID_BYTES, chunks, impossible_ids
from trainer.data.errors import DataError


def require_publishable(ids: pa.Array, where: Callable[[int], str]) -> None:
    """Check that vectors can be published under these ids.

    ``ids``: int64, which always pass, or large_string; nulls pass too. ``where`` returns, for the position of an id,
    its origin as an error message writes it.

    Raises:
        DataError: naming the first id that cannot be published.
    """
    if not pa.types.is_large_string(ids.type):
        return
    for part in chunks(len(ids), CHUNK_ROWS):
        bad = np.flatnonzero(impossible_ids(ids[part]).to_numpy(zero_copy_only=False))
        if len(bad):
            place = part.start + int(bad[0])
            raise DataError(
                f"has an id that cannot be published, longer than {MAX_ID_BYTES} bytes or with a NUL character: "
                f"{ids[place].as_py()[:40]!r}",
                where=where(place),
                remedy="shorten it, filter such rows, or leave publish out",
            )

"""What publishing needs of the rows of a dynamic table, and a job of one pass has nowhere else.

How often each id occurred since it has its row, and its string, where ids are strings: of the published feature's table
alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from safetensors.numpy import load_file, save_file

from embeddings.dynamic.id_map import Assigned, DynamicIdMap
from trainer.checkpoint.format import Checkpoint, CheckpointError
from trainer.data.one_pass.rows import RawIds

Int64s = npt.NDArray[np.int64]
_COUNTS = "counts"


def counts_file(table: str) -> str:
    """Return the name under which a checkpoint has the occurrences of the ids that have a row of a table."""
    return f"occurrences-{table}.safetensors"


def stored_counts(checkpoint: Checkpoint, table: str) -> Int64s:
    """Count each id's occurrences since it has its row, in the order of the checkpoint's id map.

    Raises:
        CheckpointError: the checkpoint does not say it.
    """
    path = checkpoint.attached(counts_file(table))
    if path is None:
        raise CheckpointError(
            f"{checkpoint.path} does not say how often the ids of '{table}' occurred, because its job did not publish "
            "when it wrote it: start a new job that publishes from its first step"
        )
    return load_file(path)[_COUNTS]


class PublishedIds:
    """Occurrences and strings of the ids that have a row of one table.

    Args:
        table: its name.
        ids: its map from ids to rows.
        has_strings: whether ids are strings.
    """

    def __init__(self, table: str, ids: DynamicIdMap, has_strings: bool):
        self.table, self._ids = table, ids
        self._counts = np.zeros(ids.settings.capacity, dtype=np.int64)
        self._strings = np.empty(ids.settings.capacity, dtype=object) if has_strings else None

    def note(self, given: Assigned, raw_ids: RawIds | None) -> None:
        """Count the ids of a batch, which were given these entries; ``raw_ids`` has all strings of the batch."""
        self._counts[given.new_entries] = 0
        if self._strings is not None and len(given.new_entries):
            assert raw_ids is not None
            self._strings[given.new_entries] = raw_ids.of_keys(given.new_ids)
        entries, times = np.unique(given.entries[given.entries >= 0], return_counts=True)
        self._counts[entries] += times

    def strings(self) -> pa.Array | None:
        """Return the strings that have a row, in the order of their rows; None where ids are integers."""
        if self._strings is None:
            return None
        return pa.array(self._strings[self._ids.ids()[0]], pa.large_string())

    def write(self, path: Path) -> None:
        """Write the occurrences for a checkpoint, which has the strings in its id map."""
        save_file({_COUNTS: self._counts[self._ids.ids()[0]]}, path)

    def load(self, checkpoint: Checkpoint, stored: pa.Array, *, is_own: bool) -> None:
        """Go on from a checkpoint, after the map has.

        Args:
            checkpoint: the checkpoint.
            stored: the ids of its id map.
            is_own: whether it is one of this job: those of a warm start's parent occurred in another.

        Raises:
            CheckpointError: it lacks the strings or the occurrences.
        """
        entries = self._ids.ids()[0]
        self._counts[:] = 0
        if is_own:
            self._counts[entries] = stored_counts(checkpoint, self.table)
        if self._strings is None:
            return
        if not pa.types.is_large_string(stored.type):
            raise CheckpointError(
                f"{checkpoint.path} holds hashes of the strings of '{self.table}', because its job did not publish "
                "them when it wrote it: start a new job that publishes from its first step"
            )
        self._strings[entries] = stored.to_pylist()

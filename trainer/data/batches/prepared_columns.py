"""Files of prepared data, as :func:`trainer.data.prepare.preparation.prepare` wrote them, opened by every rank.

Torch-free.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embeddings.sse.graph import Graph
from trainer.data.batches.keys import Key
from trainer.data.batches.order import GlobalOrder
from trainer.data.columns.dynamic_ids import IdMap
from trainer.data.columns.hashing import UInt64s, derive_key, id_keys
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.numeric import NUMERIC_FILE
from trainer.data.columns.vectors import VECTORS_FILE, Vector, vectors_from
from trainer.data.errors import DataError
from trainer.data.prepare.arrays import (
    CODE,
    ITEM_PLACES,
    LABEL,
    LABELS,
    NUMBERS,
    OFFSET,
    ROW_WEIGHTS,
    USER_CODES,
    VALUE,
    map_array,
    map_jagged,
    vector_file,
    weight_file,
)
from trainer.data.prepare.catalogue import CATALOGUE, Catalogue, open_catalogue
from trainer.data.prepare.drift import PROFILE_FILE
from trainer.data.prepare.example_counts import example_counts
from trainer.data.prepare.graphs import open_graph
from trainer.data.prepare.negatives import SeenItems
from trainer.data.prepare.sequences import Sequences, Windows
from trainer.spec.label_tasks import LabelTask

FORMAT_VERSION = 3
MANIFEST = "prepared.json"
GRAPHS = "graphs"


@dataclass(frozen=True)
class TableInfo:
    """One embedding table: row 0 is padding, row 1 the unknown id, row r >= 2 belongs to ``vocabulary[r - 2]``."""

    name: str
    num_rows: int
    features: tuple[str, ...]
    vocabulary_path: Path


class PreparedColumns:
    """Memory-mapped splits and vocabularies, and the order of the training rows."""

    def __init__(self, directory: Path, manifest: dict[str, Any]):
        self.directory = directory
        self.keys = tuple(Key(**key) for key in manifest["keys"])
        """Keys of the batches, in their order: the dataset's features, then ``item__negative`` for BPR.

        Sequence models have the keys of :mod:`trainer.data.batches.sequence_batches`."""
        self.tables = {
            name: TableInfo(
                name,
                table["num_rows"],
                tuple(key.name for key in self.keys if key.table == name),
                directory / "tables" / f"{name}.arrow",
            )
            for name, table in manifest["tables"].items()
        }
        self.is_bpr = bool(manifest["is_bpr"])
        self.label_dtype = np.dtype(manifest.get("label_dtype", LABEL.name))
        self.tasks = tuple(LabelTask.of_json(task) for task in manifest.get("labels", ()))
        """The dataset's labels if there are several; () for a single label."""
        self.is_weighted = bool(manifest.get("weighted"))
        """True if rows have weights."""
        self.sequence: dict[str, Any] | None = manifest.get("sequence")
        """Settings of a sequence model's batches, None for other models."""
        self.unread: list[str] = manifest.get("unread", [])
        """Features of the dataset that a sequence model does not read."""
        self.sampling: str = manifest["sampling"]["distribution"]
        """Distribution of the negatives that are drawn anew in each epoch: uniform, popularity or in_batch."""
        self.sampling_power: float = manifest["sampling"]["power"]
        self.draws_negatives = bool(manifest.get("draws_negatives"))
        """True if examples of label 0 are negatives that the preparation drew."""
        self.num_rows_read = int(manifest["num_rows_read"])
        self.num_examples: dict[str, int] = manifest["num_examples"]
        """Number of examples by split: train, validation, test."""
        self.num_positives: dict[str, int] = manifest["num_positives"]
        self.unknown_share: dict[str, dict[str, float]] = manifest["unknown_share"]
        """Share of ids that are unknown (table row 1), by feature and split."""
        self.graphs: dict[str, dict[str, Any]] = manifest.get("graphs", {})
        """The job's graphs, name -> facts: its table, and the numbers of edges that were read, left out and kept."""
        self.num_dense = len(manifest.get("numeric", []))
        """Number of numeric features in a batch."""
        self.vectors = vectors_from(manifest.get("vectors", []))
        """Vectors of the rows, then of the item table."""
        self._items: dict[str, int] | None = manifest.get("items")
        self.num_item_numbers = 0 if self._items is None else self._items["num_numbers"]
        """Number of numeric features of the item table, which come last among all numeric features."""
        self.drift: list[dict[str, Any]] | None = manifest.get("drift")
        """Drift of the rows from those of the parent run (trainer.data.prepare.drift); None without a warm start."""
        self.warnings: list[str] = manifest.get("warnings", [])
        """Messages for the owner of the rows about joins and graphs with few matching ids."""
        self.row_figures: dict[str, float | None] = manifest.get("row_figures", {})
        """Figures of all rows (trainer.data.prepare.row_figures); empty if an earlier version prepared the data."""
        self.bad_rows: dict[str, int] | None = manifest.get("bad_rows")
        """Number of bad rows that were left out, by reason; None if bad rows are errors."""
        self.fingerprint: str = manifest["fingerprint"]
        self.dataset_fingerprint: str = manifest["dataset_fingerprint"]
        self.seed: int = manifest["seed"]
        self.batch_size: int = manifest["batch_size"]

    @classmethod
    def open(cls, directory: Path | str) -> Self:
        """Open a prepared directory.

        Raises:
            DataError: the directory has no prepared data, or data of another format version.
        """
        directory = Path(directory)
        try:
            manifest = json.loads((directory / MANIFEST).read_text("utf-8"))
        except (OSError, ValueError):
            manifest = {}
        if manifest.get("format") != FORMAT_VERSION:
            raise DataError("holds no prepared data of this version", where=str(directory), remedy="prepare it again")
        return cls(directory, manifest)

    @classmethod
    def fingerprint_of(cls, directory: Path | str) -> str | None:
        """Return the fingerprint of the prepared data in ``directory``; None if there is none that can be used."""
        try:
            return cls.open(directory).fingerprint
        except DataError:
            return None

    def vocabulary(self, table: str) -> pa.Array:
        """Return a table's raw ids (int64 or large_string), memory-mapped: entry i belongs to table row i + 2."""
        return self.id_map(table).ids

    def id_map(self, table: str) -> IdMap:
        """Return a table's ids with the number of the last run that had each, and tombstones of retired ids."""
        return IdMap.read(self.tables[table].vocabulary_path)

    def parent_rows(self, table: str) -> npt.NDArray[np.int64]:
        """Return, for each row of a table, the row of the same id in the warm start's parent, int64 [num_rows].

        Rows of new ids, which come last, have -1. Without a warm start all rows but the two special rows have -1.
        """
        return np.asarray(map_array(self.directory / "tables" / f"{table}.parent.bin", OFFSET))

    def row_keys(self, table: str) -> UInt64s:
        """Return a stable hash of each row's raw id, uint64 [num_rows], from which its initial embedding is made."""
        special = np.array([derive_key(0), derive_key(1)], dtype=np.uint64)
        return np.concatenate([special, id_keys(self.vocabulary(table))])

    def row_counts(self, table: str) -> npt.NDArray[np.int64]:
        """Return the number of each row's occurrences in the training split, over all features of the table."""
        return np.asarray(map_array(self.directory / "tables" / f"{table}.counts.bin", OFFSET))

    def example_counts(self, feature: str) -> npt.NDArray[np.int64]:
        """Return, for each row of a feature's table, the number of training examples whose feature has that row.

        Drawn negatives do not count.
        """
        key = next(key for key in self.keys if key.name == feature)
        if self.sequence is not None:
            # A sequence model's splits are sequences, and its table holds only items.
            return self.row_counts(key.table)
        num_rows = self.tables[key.table].num_rows
        return example_counts(
            self.directory / "train", key.name, num_rows, is_list=key.is_list, drawn_negatives=self.draws_negatives
        )

    def graph(self, name: str) -> Graph:
        """Return a graph over the rows of its table, memory-mapped."""
        if name not in self.graphs:
            raise DataError(
                f"no graph '{name}' was prepared (there are {', '.join(sorted(self.graphs)) or 'none'})",
                where=str(self.directory),
                remedy="prepare the data for the job that names it",
            )
        return open_graph(self.directory / GRAPHS, name)

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.num_examples["train"] // self.batch_size)

    def order(self) -> GlobalOrder:
        """Return a new object for the order of training rows; each reader needs its own, because it has a state."""
        return GlobalOrder(self.num_examples["train"], self.seed)

    @cached_property
    def keeps_seen_items(self) -> bool:
        """True if :attr:`seen_items` was written, for BPR or for rankings of all items."""
        return (self.directory / "seen.items.bin").exists()

    @cached_property
    def seen_items(self) -> tuple[SeenItems, npt.NDArray[np.int64]]:
        """Items of each user in the training split, and table rows of the items that negatives are drawn from.

        If the dataset has an item table, positions in the catalogue replace the table rows. Only written for BPR and
        for jobs that ask for rankings of all items.
        """
        items, shifted, starts = (
            map_array(self.directory / f"seen.{name}.bin", OFFSET) for name in ("items", "shifted", "starts")
        )
        return SeenItems(shifted, starts, len(items)), items

    @cached_property
    def catalogue(self) -> Catalogue | None:
        """All items with their features, if the dataset has an item table; else None."""
        if self._items is None:
            return None
        is_list = {key.name: key.is_list for key in self.keys if key.of_item}
        folder = self.directory / CATALOGUE
        dims = {one.name: one.dim for one in self.vectors if one.of_item}
        return open_catalogue(folder, is_list, self.num_item_numbers, self._items["num_in_table"], dims)

    def item_places(self, split: str) -> npt.NDArray[np.int32]:
        """Return the position of each example's item in the catalogue, int32 [examples]; -1 if it is not there."""
        return map_array(self.directory / split / ITEM_PLACES, CODE)

    @cached_property
    def sequences(self) -> Sequences:
        """Each user's items in order, for a sequence model."""
        return Sequences(self.directory)

    @cached_property
    def windows(self) -> Windows:
        """The pieces of sequences that sasrec, gru4rec and hstu train on."""
        assert self.sequence is not None
        return Windows(self.sequences.train, self.sequence["length"])

    def labels(self, split: str) -> npt.NDArray[np.uint8] | npt.NDArray[np.float32]:
        """Return the labels of a split: uint8 [examples] of 0 and 1, or float32 [examples] for a real-valued label.

        With several labels they are float32 [examples, labels], with NaN for an absent label.
        """
        labels = map_array(self.directory / split / LABELS, self.label_dtype)
        return labels.reshape(-1, len(self.tasks)) if self.tasks else labels

    def row_weights(self, split: str) -> npt.NDArray[np.float32]:
        """Return the weights of a split's rows, float32 [examples]; they exist only if ``is_weighted``."""
        return map_array(self.directory / split / ROW_WEIGHTS, VALUE)

    def user_codes(self, split: str) -> npt.NDArray[np.int32]:
        """Return a number for each example's user, int32 [examples], also for users without training examples.

        The code is -1 for an example without a user. The numbers are only written if evaluation needs users.
        """
        return map_array(self.directory / split / USER_CODES, CODE)

    def numbers(self, split: str) -> npt.NDArray[np.float32]:
        """Return the numeric features after their transforms, [examples, num_dense]."""
        return map_array(self.directory / split / NUMBERS, VALUE).reshape(-1, self.num_dense)

    def row_vectors(self, split: str, vector: Vector) -> npt.NDArray[np.float32]:
        """Return a vector of the rows, [examples, dim]."""
        return map_array(vector_file(self.directory / split, vector.name), VALUE).reshape(-1, vector.dim)

    @property
    def vectors_path(self) -> Path | None:
        """The file that describes the vectors; None if there are no vectors."""
        return self.directory / VECTORS_FILE if self.vectors else None

    @property
    def profile_path(self) -> Path | None:
        """The file with the profile of the rows; None if an earlier version prepared the data."""
        path = self.directory / PROFILE_FILE
        return path if path.exists() else None

    @property
    def numeric_path(self) -> Path | None:
        """The file of numeric features and their statistics; None if there are no numeric features."""
        return self.directory / NUMERIC_FILE if self.num_dense else None

    def weights(self, split: str, key: Key) -> npt.NDArray[np.float32]:
        """Return the weights of a list's ids, in the order of :meth:`column`."""
        return map_array(weight_file(self.directory / split, key.name), VALUE)

    def column(self, split: str, key: Key) -> npt.NDArray[np.int32] | Jagged:
        """Return the table rows of one feature in a split: int32 [examples], or lists of int32."""
        stem = self.directory / split / key.name
        return map_jagged(stem, CODE) if key.is_list else map_array(stem.with_name(key.name + ".bin"), CODE)

    def checked_column(self, split: str, key: Key) -> npt.NDArray[np.int32] | Jagged:
        """Return :meth:`column` as plain arrays, with as many entries as the split has examples.

        Raises:
            DataError: the files do not hold that many entries.
        """
        column, num_examples = self.column(split, key), self.num_examples[split]
        num_rows = len(column.offsets) - 1 if isinstance(column, Jagged) else len(column)
        if num_rows != num_examples:
            raise DataError(
                f"the prepared column holds {num_rows:,} rows, its split has {num_examples:,}",
                where=f"{self.directory / split}, feature '{key.name}'",
                remedy="remove the folder: the next attempt prepares it again",
            )
        # Plain arrays are faster to index: numpy's memmap class does extra work on each access.
        if isinstance(column, Jagged):
            return Jagged(*(part.view(np.ndarray) for part in column))
        return column.view(np.ndarray)

"""Dynamic tables of a job (``tables: {NAME: {capacity: N}}``): ids get rows, and may lose them, during training.

Prepared data has a code for each id; batches of a one-pass job (trainer.data.one_pass) have hashes of ids. This module
turns codes or hashes into rows before the model sees a batch. Every rank goes through the ids of the whole batch, in
the same order, so that all ranks have the same map without communication, for any number of ranks. Each rank resets the
rows that it holds when they are given to another id. The map belongs to a step, like the rows, and is saved with them.
SSE-SE, which swaps ids at random, is applied here too, among the rows that belong to an id.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from safetensors.numpy import load_file, save_file

from embeddings.dynamic.id_map import Assigned, DynamicIdMap
from embeddings.dynamic.settings import FIRST_ROW, UNKNOWN_ROW
from embeddings.kernels.swap import swap
from embeddings.sse.config import SSEConfig
from embeddings.tables.config import TableConfig
from trainer.checkpoint.format import Checkpoint, CheckpointError
from trainer.checkpoint.warm_start import id_map_file, id_maps
from trainer.data.columns.dynamic_ids import IdMap, of_hashes
from trainer.data.columns.jagged import Jagged
from trainer.data.one_pass.rows import MISSING, RawIds
from trainer.models.base import with_values
from trainer.spec import JobSpec

if TYPE_CHECKING:
    from trainer.data.batches.batch import Batch
    from trainer.data.batches.prepared import PreparedData
    from trainer.distributed.sharded_state import ShardedState

TOMBSTONE_RUNS = 30
"""Number of runs for which the publisher is told of an id that has lost its row."""
_COUNTS = "counts"
Int64s = npt.NDArray[np.int64]


def counts_file(table: str) -> str:
    """Return the name of the checkpoint's file that counts occurrences of the ids that have a row of the table."""
    return f"occurrences-{table}.safetensors"


def stored_counts(checkpoint: Checkpoint, table: str) -> Int64s:
    """Return each id's occurrences since it got its row, int64 [n], in the order of the checkpoint's id map.

    Raises:
        CheckpointError: the checkpoint has no such counts.
    """
    path = checkpoint.attached(counts_file(table))
    if path is None:
        raise CheckpointError(
            f"{checkpoint.path} does not say how often the ids of '{table}' occurred, because its job did not publish "
            "when it wrote it: start a new job that publishes from its first step"
        )
    return load_file(path)[_COUNTS]


class PublishedIds:
    """Occurrences and strings of the ids that have a row of one table."""

    def __init__(self, table: str, ids: DynamicIdMap, has_strings: bool):
        self.table, self._ids = table, ids
        self._counts = np.zeros(ids.settings.capacity, dtype=np.int64)
        self._strings = np.empty(ids.settings.capacity, dtype=object) if has_strings else None

    def note(self, given: Assigned, raw_ids: RawIds | None) -> None:
        """Count the occurrences of a batch's ids, and remember the strings of ids that got a row.

        ``given``: the entries (numbers in the map) of the batch's ids. ``raw_ids``: all strings of the batch; None if
        ids are integers.
        """
        self._counts[given.new_entries] = 0
        if self._strings is not None and len(given.new_entries):
            assert raw_ids is not None
            self._strings[given.new_entries] = raw_ids.of_keys(given.new_ids)
        entries, times = np.unique(given.entries[given.entries >= 0], return_counts=True)
        self._counts[entries] += times

    def strings(self) -> pa.Array | None:
        """Return the strings of the ids that have a row, in the order of their rows; None if ids are integers."""
        if self._strings is None:
            return None
        return pa.array(self._strings[self._ids.ids()[0]], pa.large_string())

    def write(self, path: Path) -> None:
        """Write the counts of occurrences as a file for a checkpoint. The strings are in the checkpoint's id map."""
        save_file({_COUNTS: self._counts[self._ids.ids()[0]]}, path)

    def load(self, checkpoint: Checkpoint, stored: pa.Array, *, is_own: bool) -> None:
        """Load counts and strings from a checkpoint. The map from ids to rows must have been loaded before.

        ``stored``: the ids of the checkpoint's id map. ``is_own``: True for a checkpoint of this job. False for a warm
        start's parent: counts then begin at 0.

        Raises:
            CheckpointError: the checkpoint lacks the strings or the counts.
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


def state_file(table: str) -> str:
    """Return the name of the checkpoint's file with the state of a dynamic table's map from ids to rows."""
    return f"growing-{table}.safetensors"


class DynamicRows:
    """The map from ids to rows of a job's dynamic tables, on this rank. In a job without any, batches stay unchanged.

    ``ids``: table -> the map from ids to entries. Entry e is row e + 2: rows 0 and 1 are padding and the unknown id.
    """

    def __init__(self, job: JobSpec, data: PreparedData, sharded: ShardedState) -> None:
        settings = {name: table.id_map for name, table in job.tables.items()}
        self.ids = {name: DynamicIdMap(one) for name, one in settings.items() if one is not None}
        self._data, self._sharded = data, sharded
        self._published: PublishedIds | None = None
        if not self.ids:
            return
        self._seed = job.seed
        self._sse = {
            key.name: SSEConfig(job.sse[key.name].probability)
            for key in data.keys
            if key.table in self.ids and key.name in job.sse and job.sse[key.name].probability
        }
        self._tables = {key.name: key.table for key in data.keys}
        self._has_codes = not job.dataset.one_pass
        if not self._has_codes:
            if job.publish is not None:
                table = self._tables[job.publish.feature]
                is_text = not pa.types.is_int64(data.vocabulary(table).type)
                self._published = PublishedIds(table, self.ids[table], is_text)
            return
        self._keys = {name: [key for key in data.keys if key.table == name] for name in self.ids}
        self._raw: dict[str, Int64s] = {name: data.row_keys(name).view(np.int64) for name in self.ids}
        self._order = data.order()
        self._columns = {key.name: data.checked_column("train", key) for keys in self._keys.values() for key in keys}

    def admit(self, parts: tuple[Batch, ...], position: int, step: int) -> tuple[Batch, ...]:
        """Return this rank's part of a batch with row numbers instead of codes or hashes.

        Ids of the whole batch get rows, and other ids may lose theirs. Every rank must call it for each training step.

        ``parts``: the micro-batches of this rank's part. ``position``: number of steps that this job has completed.
        ``step``: number of the step that the tables are about to take.
        """
        if not self.ids:
            return parts
        keys = parts[0].id_keys if not self._has_codes else self._keys_of(position, parts[0].global_size)
        assert keys is not None
        for table, ids in self.ids.items():
            given = ids.assign(keys[table], step)
            self._renew(table, given)
            if self._published is not None and self._published.table == table:
                self._published.note(given, parts[0].raw_ids)
        rows = tuple(self.known(part) for part in parts)
        if not self._sse:
            return rows
        taken = {table: _taken(ids.ids()[0]) for table, ids in self.ids.items()}
        return tuple(self._swapped(part, step, taken) for part in rows)

    def known(self, batch: Batch) -> Batch:
        """Return a batch with row numbers instead of codes or hashes; the map stays as it is.

        Ids without a row get the row of unknown ids.
        """
        if not self.ids:
            return batch
        features = batch.features
        values, ends = features.values().numpy().copy(), features.offset_per_key()
        for number, name in enumerate(features.keys()):
            table = self._tables[name]
            if table in self.ids:
                part = values[ends[number] : ends[number + 1]]
                is_live = part >= FIRST_ROW if self._has_codes else part != MISSING
                keys = self._raw[table][part[is_live]] if self._has_codes else part[is_live]
                entries = self.ids[table].find(keys)
                part[is_live] = np.where(entries < 0, UNKNOWN_ROW, entries + FIRST_ROW)
                if not self._has_codes:
                    part[~is_live] = UNKNOWN_ROW
        return _with_values(batch, values)

    def _swapped(self, batch: Batch, step: int, taken: Mapping[str, Int64s]) -> Batch:
        """Return the batch with SSE applied to features of dynamic tables.

        Rows are swapped among ``taken``: table -> the ascending rows that are padding, the unknown id's or an id's.
        """
        features = batch.features
        values, offsets, stride = features.values().numpy().copy(), features.offsets(), features.stride()
        for number, name in enumerate(features.keys()):
            if name in self._sse:
                table = self._tables[name]
                rows, bounds = taken[table], offsets[number * stride : (number + 1) * stride + 1]
                part = values[int(bounds[0]) : int(bounds[-1])]
                positions = swap(
                    torch.from_numpy(np.searchsorted(rows, part)), bounds, table=TableConfig(table, len(rows), 1, name),
                    feature=name, config=self._sse[name], seed=self._seed, step=step,
                    sample_offset=batch.sample_offset,
                )  # fmt: skip
                part[:] = rows[positions.numpy()]
        return _with_values(batch, values)

    def in_words(self) -> str:
        """Return a sentence on how full the dynamic tables are; "" if there are none."""
        sentences = [
            f"{name}: {len(ids):,} of {ids.settings.capacity:,} rows taken"
            + (f", {ids.num_refused:,} occurrences found none free" if ids.num_refused else "")
            for name, ids in self.ids.items()
        ]
        return "; ".join(sentences)

    def _keys_of(self, position: int, size: int) -> dict[str, Int64s]:
        """Return {dynamic table: hashes of the ids} for a whole batch of prepared data."""
        epoch, inside = divmod(position, self._data.steps_per_epoch)
        start = inside * self._data.batch_size
        samples, found = self._order.rows(epoch, start, start + size), {}
        for table in self.ids:
            codes = np.concatenate([self._codes(key.name, samples) for key in self._keys[table]])
            found[table] = self._raw[table][codes[codes >= FIRST_ROW]]
        return found

    def _codes(self, name: str, samples: Int64s) -> Int64s:
        column = self._columns[name]
        codes = column.take(samples).values if isinstance(column, Jagged) else column[samples]
        return codes.astype(np.int64)

    def _renew(self, table: str, given: Assigned) -> None:
        if not len(given.new_entries):
            return
        rows, keys = given.new_entries + FIRST_ROW, given.new_ids.view(np.uint64)
        for piece in self._sharded.local_pieces():
            if piece.name == table:
                held = (rows >= piece.row_start) & (rows < piece.row_start + piece.row_count)
                piece.tables.renew(table, torch.from_numpy(rows[held] - piece.row_start), keys[held])

    # --- checkpoints -------------------------------------------------------------------------------------------------

    def write(self, directory: Path) -> dict[str, Path]:
        """Write the dynamic tables' files for a checkpoint; return their paths by their names in the checkpoint.

        For each table they hold the state of its map, and the ids that have a row, in the order of their rows. For a
        published table a third file holds counts of occurrences.
        """
        written: dict[str, Path] = {}
        for table, ids in self.ids.items():
            directory.mkdir(parents=True, exist_ok=True)
            files = {name: directory / name for name in (state_file(table), id_map_file(table))}
            save_file(ids.state(), files[state_file(table)])
            self._id_map(table).write(files[id_map_file(table)])
            if self._published is not None and self._published.table == table:
                files[counts_file(table)] = directory / counts_file(table)
                self._published.write(files[counts_file(table)])
            written |= files
        return written

    def _id_map(self, table: str) -> IdMap:
        """Return the id map to save: the ids that have a row, and tombstones.

        Tombstones are ids that had a row at the end of an earlier run in the warm-start chain, and may still be served
        from that run's version.
        """
        whole, (_, live) = self._data.id_map(table), self.ids[table].ids()
        if not self._has_codes:
            published = self._published if self._published is not None and self._published.table == table else None
            strings = None if published is None else published.strings()
            return of_hashes(whole, live.view(np.uint64), TOMBSTONE_RUNS, strings)
        positions = codes_of(self._data, table, live.view(np.uint64)) - FIRST_ROW
        had_one = self._data.parent_rows(table)[FIRST_ROW:] >= 0
        had_one[positions] = False
        standing = np.flatnonzero(whole.run - whole.retired_in < TOMBSTONE_RUNS)
        gone = np.flatnonzero(had_one)
        return IdMap(
            whole.ids.take(pa.array(positions)),
            whole.last_seen[positions],
            whole.run,
            pa.concat_arrays([whole.retired.take(pa.array(standing)), whole.ids.take(pa.array(gone))]),
            np.concatenate([whole.retired_in[standing], np.full(len(gone), whole.run, np.int32)]),
        )

    def load(self, checkpoint: Checkpoint, *, is_own: bool = True) -> None:
        """Load the maps from a checkpoint. ``is_own``: True for this job's checkpoint, False for a warm start's parent.

        Raises:
            CheckpointError: the checkpoint lacks a map, or a map does not fit the table.
        """
        for table, state in states(checkpoint, self.ids).items():
            try:
                self.ids[table].load(state)
            except ValueError as error:
                raise CheckpointError(f"{checkpoint.path}: the ids of table '{table}': {error}") from None
        if self._published is not None:
            ids = id_maps(checkpoint)[self._published.table].ids
            self._published.load(checkpoint, ids, is_own=is_own)


def states(checkpoint: Checkpoint, tables: Mapping[str, Any]) -> dict[str, dict[str, np.ndarray]]:
    """Return {table: {name: array}}, the saved state of the map from ids to rows of each dynamic table.

    Tables that the checkpoint lacks are left out, because they belong to features that a warm start adds.

    Raises:
        CheckpointError: a table of the checkpoint has no such state.
    """
    by_table = {}
    for table in tables:
        if table not in checkpoint.tables:
            continue
        path = checkpoint.attached(state_file(table))
        if path is None:
            raise CheckpointError(f"{checkpoint.path}: table '{table}' was not dynamic when it was written")
        by_table[table] = load_file(path)
    return by_table


def codes_of(data: PreparedData, table: str, keys: npt.NDArray[np.uint64]) -> Int64s:
    """Return the codes, int64 [n], of ids whose hashes are ``keys`` [n]. Every id must occur in the prepared data."""
    known = data.row_keys(table)[FIRST_ROW:]
    order = np.argsort(known)
    return order[np.searchsorted(known, keys, sorter=order)] + FIRST_ROW


def taken_rows(checkpoint: Checkpoint, table: str) -> Int64s | None:
    """Return the rows of a dynamic table that are in use, int64 ascending; None for a table that is not dynamic.

    The first two are padding and the unknown id's row; the others are in the order of the checkpoint's id map.
    """
    path = checkpoint.attached(state_file(table))
    if path is None:
        return None
    return _taken(np.flatnonzero(load_file(path)["last_seen"] >= 0))


def _taken(entries: Int64s) -> Int64s:
    """Return the row numbers of padding, of the unknown id, and of these map entries."""
    return np.concatenate([np.arange(FIRST_ROW), entries + FIRST_ROW])


def _with_values(batch: Batch, values: Int64s) -> Batch:
    return replace(batch, features=with_values(batch.features, torch.from_numpy(values)))

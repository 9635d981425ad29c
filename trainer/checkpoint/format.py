"""Checkpoints independent of the sharding plan: rows of tables, dense tensors, and a manifest with every sha256.

A checkpoint is a directory ``step-000000000500`` that appears whole or not at all. Every rank writes its rows into a
temporary directory beside it, and rank 0 adds the dense tensors and the manifest. Everything is fsynced, and one rename
makes the checkpoint visible. Rows are stored by table name, global row number and global column. So four ranks can
read column-wise the rows that two ranks saved row-wise. All files are safetensors, Arrow or JSON: reading one runs no
code (docs/adr/0003-checkpoint-format.md). :mod:`trainer.checkpoint.async_writer` writes checkpoints of the same format
in the background.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from embeddings.durable_files import fsync_path
from trainer.checkpoint.agreement import CheckpointError, FormatVersionError, agree, attempt, from_rank_0, rank_and_size
from trainer.checkpoint.names import new_name, newest_first, replaced_by
from trainer.checkpoint.remote_checkpoints import MANIFEST_FILE, View, put_files, put_record
from trainer.runs.directory import WRITING
from trainer.storage.base import content_of
from trainer.storage.folders import Folders

# Version 1 had neither columns nor attached files. It was never released, and is refused.
FORMAT_VERSION = 2
DENSE_FILE = "dense.safetensors"
# A table is written in pieces of about this size, so that saving needs little memory besides the table itself.
PIECE_BYTES = 256 * 2**20


@dataclass(frozen=True)
class TableShard:
    """A rectangle of one table that a rank holds: consecutive rows, with all of their columns or consecutive columns.

    ``weight`` is [rows, columns]. ``state``, keyed by name, is the optimizer state: a 2-D tensor has the shape of
    ``weight``; a 1-D tensor, [rows], holds one value for each row and is the same in all column pieces of a row. The
    rectangle begins at ``row_start`` and ``column_start`` of the table, which has ``num_rows`` rows and ``dim``
    columns. If ``dim`` is None, the table has as many columns as ``weight``.
    """

    name: str
    num_rows: int
    row_start: int
    weight: Tensor
    state: Mapping[str, Tensor]
    column_start: int = 0
    dim: int | None = None

    @property
    def num_columns(self) -> int:
        """Columns of the whole table."""
        return self.weight.shape[1] if self.dim is None else self.dim

    @property
    def nbytes(self) -> int:
        """Bytes of this rectangle's weight and state."""
        return sum(value.nbytes for value in (self.weight, *self.state.values()))


# --- writing ---------------------------------------------------------------------------------------------------------


def save(
    directory: Path | str,
    *,
    step: int,
    tables: Sequence[TableShard],
    dense: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    attached: Mapping[str, Path] | None = None,
    keep_last: int = 3,
    group: dist.ProcessGroup | None = None,
    fence: Callable[[], None] = lambda: None,
    folders: Folders | None = None,
) -> Path:
    """Write the checkpoint of ``step`` into a new folder of ``directory``. Collective: every rank calls it.

    Args:
        directory: a folder that all ranks see, or with ``folders`` a folder of this host.
        step: number of completed steps at which the checkpoint is taken; it becomes part of the name.
        tables: this rank's rows.
        dense: dense tensors, keyed by name; only rank 0's are written.
        extra: values that JSON can hold: completed steps, data position, spec.
        attached: other files of the checkpoint, name -> path of the file to copy; only rank 0's are copied.
        keep_last: number of newest checkpoints to keep. Checkpoints of later steps than ``step`` are removed: they
            exist only if a resume has gone back to an earlier step.
        group: the ranks that save; None: all of them.
        fence: called on rank 0 before anything is written and before the checkpoint gets its name. An exception that
            it raises ends the save.
        folders: folders of the run storage that the checkpoint is put into; None: it stays in ``directory``.

    Returns:
        The path of the checkpoint. With ``folders``, the path at which its local view will appear
        (trainer.checkpoint.remote_checkpoints).

    Raises:
        CheckpointError: on every rank if any rank failed; the previous checkpoints are then untouched.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, got {keep_last}")
    directory = Path(directory)
    rank, _ = rank_and_size(group)
    where = f"checkpoint of step {step} in {directory} could not be written"
    name = from_rank_0(attempt(_make_temporary, directory, fence, folders) if rank == 0 else None, where, group)
    temporary = directory / name
    try:
        written = agree(attempt(_write_rank, temporary, rank, tables, folders), where, group)
        outcome = None
        if rank == 0:
            shards = [entry for entries in written for entry in entries or ()]
            arguments = (temporary, step, shards, dense, extra, attached or {}, keep_last, fence, folders)
            outcome = attempt(_finish, *arguments)
        return directory / from_rank_0(outcome, where, group)
    finally:
        # After a success the folder has its final name, or its files are in the storage.
        if rank == 0 or folders is not None:
            shutil.rmtree(temporary, ignore_errors=True)


def _make_temporary(directory: Path, fence: Callable[[], None], folders: Folders | None) -> str:
    fence()
    directory.mkdir(parents=True, exist_ok=True)
    if folders is not None:
        folders.sweep()
    for stale in directory.glob(WRITING + "*"):
        shutil.rmtree(stale)
    name = WRITING + uuid.uuid4().hex
    (directory / name).mkdir()
    return name


def _write_rank(
    temporary: Path, rank: int, tables: Sequence[TableShard], folders: Folders | None
) -> list[dict[str, Any]]:
    """Write this rank's rows, and put them into the storage, if any; return one manifest entry per file."""
    if folders is not None:
        # The ranks that created it may all be on other hosts.
        temporary.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, table in enumerate(tables):
        state = _state_to_write(table)
        row_bytes = sum(value[:1].nbytes for value in (table.weight, *table.state.values()))
        step = max(1, PIECE_BYTES // max(1, row_bytes))
        for piece, start in enumerate(range(0, len(table.weight), step)):
            rows = slice(start, start + step)
            tensors = {"weight": table.weight[rows], **{f"state.{k}": v[rows] for k, v in state.items()}}
            file = f"table-{number:04d}-rank-{rank:05d}-{piece:05d}.safetensors"
            entries.append(
                {
                    "table": table.name,
                    "num_rows": table.num_rows,
                    "dim": table.num_columns,
                    "row_start": table.row_start + start,
                    "row_count": len(tensors["weight"]),
                    "column_start": table.column_start,
                    "column_count": table.weight.shape[1],
                    **_write_tensors(temporary / file, tensors),
                }
            )
    if folders is not None:
        put_files(folders, temporary.name.removeprefix(WRITING), temporary, entries)
    return entries


def _state_to_write(table: TableShard) -> dict[str, Tensor]:
    """Return the optimizer state to write with a piece of a table.

    State with one value for each row is written only with the piece that has the first column.
    """
    whole = table.weight.shape[1] == table.num_columns
    for name, value in table.state.items():
        if value.dim() == 1 and value.is_floating_point() and not whole:
            raise ValueError(
                f"table '{table.name}': state '{name}' is one number for each row, but the columns are split, so that "
                "each piece has another: shard a table with such an optimizer table_wise or row_wise"
            )
    return {name: value for name, value in table.state.items() if value.dim() > 1 or table.column_start == 0}


def _finish(
    temporary: Path,
    step: int,
    shards: list[dict[str, Any]],
    dense: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    attached: Mapping[str, Path],
    keep_last: int,
    fence: Callable[[], None],
    folders: Folders | None,
) -> str:
    """Write dense tensors, attached files and manifest, and give the checkpoint its final name; return that name."""
    _check_cover(shards)
    body: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "extra": dict(extra),
        "shards": shards,
        "dense": _write_tensors(temporary / DENSE_FILE, {name: value.clone() for name, value in dense.items()}),
        "attached": [_attach(temporary / name, source) for name, source in sorted(attached.items())],
    }
    (temporary / MANIFEST_FILE).write_bytes(_manifest_bytes(body))
    fsync_path(temporary / MANIFEST_FILE)
    if folders is not None:
        token = temporary.name.removeprefix(WRITING)
        put_files(folders, token, temporary, [body["dense"], *body["attached"]])
        return put_record(folders, temporary, token, step, _entries(body), keep_last, fence)
    fsync_path(temporary)
    names = [path.name for path in checkpoints_in(temporary.parent)]
    final = temporary.parent / new_name(step, names)
    # Chosen before the rename: this process may be stopped after it, and wake up when another attempt has continued
    # from this checkpoint. It must not delete what that attempt wrote for later steps.
    replaced = replaced_by(final.name, names, keep_last)
    fence()
    os.rename(temporary, final)
    fsync_path(final.parent)
    for name in replaced:
        shutil.rmtree(final.parent / name, ignore_errors=True)
    return final.name


def _check_cover(shards: Sequence[Mapping[str, Any]]) -> None:
    """Check that the files of these manifest entries hold every element of every table exactly once."""
    pieces: dict[str, list[Mapping[str, Any]]] = {}
    for shard in shards:
        pieces.setdefault(shard["table"], []).append(shard)
    for table, held in pieces.items():
        if len({(shard["num_rows"], shard["dim"]) for shard in held}) > 1:
            raise ValueError(f"table '{table}': ranks disagree about its size")
        starts: dict[int, list[int]] = {}
        ends: dict[int, list[int]] = {}
        for number, piece in enumerate(held):
            if piece["row_count"]:
                starts.setdefault(piece["row_start"], []).append(number)
                ends.setdefault(piece["row_start"] + piece["row_count"], []).append(number)
        num_rows, dim = held[0]["num_rows"], held[0]["dim"]
        # Go through the rows with the pieces that hold them: between two edges the pieces must make up all columns.
        active: dict[int, Mapping[str, Any]] = {}
        edges = sorted({0, num_rows, *starts, *ends})
        if edges[0] < 0 or edges[-1] > num_rows:
            raise ValueError(f"table '{table}': ranks hold rows [{edges[0]}, {edges[-1]}) of {num_rows}")
        for edge in edges[:-1]:
            for number in ends.get(edge, []):
                del active[number]
            active |= {number: held[number] for number in starts.get(edge, [])}
            column = 0
            for piece in sorted(active.values(), key=lambda piece: piece["column_start"]):
                if piece["column_start"] < column:
                    raise ValueError(f"table '{table}': rows from {edge} are held twice")
                if piece["column_start"] > column:
                    break
                column += piece["column_count"]
            if column != dim:
                what = f"columns from {column} of rows" if column else "rows"
                raise ValueError(f"table '{table}': {what} from {edge} are held nowhere")


def _attach(path: Path, source: Path) -> dict[str, Any]:
    # A hard link would cost nothing, but one damaged file would then damage every checkpoint.
    shutil.copyfile(source, path)
    return _entry(path)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)
    return _entry(path)


def _entry(path: Path) -> dict[str, Any]:
    """Make a written file durable; return its manifest entry."""
    fsync_path(path)
    content = content_of(path)
    return {"file": path.name, "bytes": content.num_bytes, "sha256": content.sha256}


def _manifest_bytes(body: dict[str, Any]) -> bytes:
    """Return canonical JSON of the manifest ``body`` and its sha256, so that a changed byte is detected."""
    try:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra must be JSON: {error}") from None
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"manifest": body, "sha256": digest}, sort_keys=True, separators=(",", ":")).encode()


# --- reading ---------------------------------------------------------------------------------------------------------


class Checkpoint:
    """A checkpoint on disk, at ``path``. Opening it reads only the manifest; :meth:`verify` reads every byte.

    ``step`` and ``extra`` are the arguments that :func:`save` was called with.
    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._view = View.of(self.path)
        self._body = _read_manifest(self.path)
        self.step: int = self._body["step"]
        self.extra: dict[str, Any] = self._body["extra"]
        self._shards: dict[str, list[dict[str, Any]]] = {}
        for shard in self._body["shards"]:
            self._shards.setdefault(shard["table"], []).append(shard)

    @property
    def tables(self) -> dict[str, int]:
        """Number of rows of each table."""
        return {name: shards[0]["num_rows"] for name, shards in self._shards.items()}

    def verify(self) -> None:
        """Read every byte and check it against the manifest.

        Raises:
            CheckpointError: a file is missing, truncated or changed; the message names the first.
        """
        if self._view is not None:
            self._view.verify()
            return
        for entry in _entries(self._body):
            path = self.path / entry["file"]
            try:
                found = content_of(path)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
            if found.num_bytes != entry["bytes"]:
                raise CheckpointError(f"{path} holds {found.num_bytes} bytes, its manifest says {entry['bytes']}")
            if found.sha256 != entry["sha256"]:
                raise CheckpointError(f"{path} was changed after it was written: its sha256 is not the manifest's")

    def attached(self, name: str) -> Path | None:
        """Return the path of the file that was attached under this name, None if there was none."""
        known = {entry["file"] for entry in self._body["attached"]}
        return self._file(name) if name in known else None

    def read_rows(
        self,
        table: str,
        row_start: int = 0,
        row_count: int | None = None,
        column_start: int = 0,
        column_count: int | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return a rectangle of a table: its weight [row_count, column_count] and {name: optimizer state}.

        Any ranks may have written it. State with one value for each row is [row_count], for any columns. A count of
        None means all rows, or columns, of the table.

        Raises:
            CheckpointError: the checkpoint lacks the table or the rectangle, or a file cannot be read.
        """
        shards = self._shards.get(table)
        if shards is None:
            raise CheckpointError(f"{self.path} holds no table '{table}' (there are {', '.join(sorted(self._shards))})")
        num_rows, dim = shards[0]["num_rows"], shards[0]["dim"]
        row_end = num_rows if row_count is None else row_start + row_count
        column_end = dim if column_count is None else column_start + column_count
        if not 0 <= row_start <= row_end <= num_rows:
            raise CheckpointError(
                f"{self.path}: table '{table}' has {num_rows} rows, asked for [{row_start}, {row_end})"
            )
        if not 0 <= column_start <= column_end <= dim:
            raise CheckpointError(
                f"{self.path}: table '{table}' has {dim} columns, asked for [{column_start}, {column_end}): "
                "if another version of evenkeel wrote it, use that one or train anew"
            )
        found = self._empty(shards, row_start, row_end, column_end - column_start)
        for shard in shards:
            first, last = max(row_start, shard["row_start"]), min(row_end, shard["row_start"] + shard["row_count"])
            left = max(column_start, shard["column_start"])
            right = min(column_end, shard["column_start"] + shard["column_count"])
            # Only the piece with the first column has the state with one value for each row.
            if first >= last or (left >= right and shard["column_start"] > 0):
                continue
            rows = slice(first - shard["row_start"], last - shard["row_start"])
            columns = slice(left - shard["column_start"], right - shard["column_start"])
            with self._open(shard["file"]) as file:
                for name in file.keys():  # noqa: SIM118 - not a mapping
                    into = found[name][first - row_start : last - row_start]
                    if into.dim() == 1:
                        into.copy_(file.get_slice(name)[rows])
                    elif left < right:
                        into[:, left - column_start : right - column_start] = file.get_slice(name)[rows, columns]
        weight = found.pop("weight")
        return weight, {name.removeprefix("state."): value for name, value in found.items()}

    def _empty(
        self, shards: Sequence[Mapping[str, Any]], row_start: int, row_end: int, num_columns: int
    ) -> dict[str, Tensor]:
        """Return uninitialized tensors by stored name, of the stored dtypes, for weight and state of a table's rows."""
        left = [shard for shard in shards if shard["column_start"] == 0]
        # Prefer a file that is read anyway.
        read = (one for one in left if one["row_start"] < row_end and row_start < one["row_start"] + one["row_count"])
        whole, num_rows = next(read, left[0]), row_end - row_start
        with self._open(whole["file"]) as file:
            stored = {name: file.get_slice(name)[0:0] for name in file.keys()}  # noqa: SIM118 - not a mapping
        return {
            name: like.new_empty([num_rows] if like.dim() == 1 else [num_rows, num_columns])
            for name, like in stored.items()
        }

    def read_dense(self) -> dict[str, Tensor]:
        """Return the dense tensors that rank 0 saved, keyed by name."""
        with self._open(self._body["dense"]["file"]) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping

    def _file(self, name: str) -> Path:
        if self._view is not None:
            self._view.fetch(name)
        return self.path / name

    def _open(self, name: str) -> Any:
        path = self._file(name)
        try:
            return safe_open(path, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}") from None


def latest_valid(directory: Path | str) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of a folder, or None; warn of each newer, damaged checkpoint.

    Raises:
        FormatVersionError: a checkpoint newer than the first valid checkpoint has another format version. That
            checkpoint may be valid, and a run that continued from an older checkpoint would sooner or later remove it.
    """
    for path in checkpoints_in(Path(directory)):
        try:
            checkpoint = Checkpoint(path)
            checkpoint.verify()
        except FormatVersionError:
            raise
        except CheckpointError as error:
            warnings.warn(f"checkpoint passed over, the previous one is used: {error}", RuntimeWarning, stacklevel=2)
        else:
            return checkpoint
    return None


def checkpoints_in(directory: Path) -> list[Path]:
    """Return the paths of the checkpoints in a folder, latest step first; [] if there is no folder."""
    if not directory.is_dir():
        return []
    return [directory / name for name in newest_first(path.name for path in directory.iterdir())]


def _entries(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries (name, bytes, sha256) of all files that a manifest names."""
    return [*body["shards"], body["dense"], *body["attached"]]


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST_FILE
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}") from None
    try:
        body = json.loads(raw)["manifest"]
        unchanged = raw == _manifest_bytes(body)
    except (ValueError, KeyError, TypeError):
        unchanged = False
    if not unchanged:
        raise CheckpointError(f"{file} was changed or truncated after it was written: its sha256 is not the stated one")
    if body["format_version"] != FORMAT_VERSION:
        raise FormatVersionError(
            f"{path} has format version {body['format_version']}, this version reads {FORMAT_VERSION}: use the version "
            "of evenkeel that wrote it, or start the training again in another run directory"
        )
    if any(Path(entry["file"]).name != entry["file"] for entry in _entries(body)):
        raise CheckpointError(f"{file} names files outside its directory: it was not written by evenkeel")
    return body

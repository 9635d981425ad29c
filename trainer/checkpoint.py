"""Checkpoints that know nothing of the sharding plan: rows of tables, dense tensors, and a manifest with every sha256.

A checkpoint is a directory ``step-000000000500`` that appears whole or not at all: every rank writes the rows it holds
into a temporary directory beside it, rank 0 adds the dense tensors and the manifest, everything is fsynced, and one
rename makes it visible. Rows are stored under table names and global row numbers, so what two ranks saved row-wise, one
rank reads table-wise. All files are safetensors or JSON: reading one runs no code (docs/adr/0003-checkpoint-format.md).
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
DENSE_FILE = "dense.safetensors"
# A table is written in pieces of about this size, so that saving needs little memory beside the table itself.
PIECE_BYTES = 256 * 2**20

# A step saved once more (a resume comes by it again) gets a suffix, so that no rename has to replace anything.
_NAME = re.compile(r"^step-(\d{12})(?:\.(\d+))?$")
_TEMPORARY = ".writing-"

Result = TypeVar("Result")


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or is not valid; the message says which, why and what to do."""


@dataclass(frozen=True)
class TableShard:
    """The consecutive rows of one table that a rank holds.

    ``weight`` is [rows, dim]; each ``state`` is [rows, ...], a 1-D one holding one value per row. ``row_start`` is the
    global number of the first row, ``num_rows`` the number of rows of the whole table.
    """

    name: str
    num_rows: int
    row_start: int
    weight: Tensor
    state: Mapping[str, Tensor]


# --- writing ---------------------------------------------------------------------------------------------------------


def save(
    directory: Path | str,
    *,
    step: int,
    tables: Sequence[TableShard],
    dense: Mapping[str, Tensor],
    extra: Mapping[str, Any],
    keep_last: int = 3,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes the checkpoint of ``step`` under ``directory``, a folder that all ranks see. Collective.

    ``dense`` is taken from rank 0. ``extra`` is JSON: completed steps, data position, spec. The ``keep_last`` newest
    checkpoints stay; checkpoints of later steps, from which a resume has turned back, go. Raises CheckpointError on
    every rank if any rank failed; the previous checkpoints are then untouched.
    """
    if keep_last < 1:
        raise ValueError(f"keep_last must be at least 1, got {keep_last}")
    directory = Path(directory)
    rank, _ = _place(group)
    where = f"checkpoint of step {step} in {directory} could not be written"
    name = _share(_attempt(_make_temporary, directory) if rank == 0 else None, where, group)
    temporary = directory / name
    try:
        written = agree(_attempt(_write_shards, temporary, rank, tables), where, group)
    except CheckpointError:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    if rank == 0:
        outcome = _attempt(_finish, temporary, step, written, dense, dict(extra), keep_last)
        if outcome[1] is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return directory / _share(outcome if rank == 0 else None, where, group)


def _make_temporary(directory: Path) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    for stale in directory.glob(_TEMPORARY + "*"):
        shutil.rmtree(stale)
    name = _TEMPORARY + uuid.uuid4().hex
    (directory / name).mkdir()
    return name


def _write_shards(folder: Path, rank: int, tables: Sequence[TableShard]) -> list[dict[str, Any]]:
    """Writes this rank's rows; returns one manifest entry per file."""
    entries = []
    for number, table in enumerate(tables):
        row_bytes = sum(value[:1].nbytes for value in (table.weight, *table.state.values()))
        step = max(1, PIECE_BYTES // max(1, row_bytes))
        for piece, start in enumerate(range(0, len(table.weight), step)):
            rows = slice(start, start + step)
            tensors = {"weight": table.weight[rows], **{f"state.{k}": v[rows] for k, v in table.state.items()}}
            file = f"table-{number:04d}-rank-{rank:05d}-{piece:05d}.safetensors"
            entries.append(
                {
                    "table": table.name,
                    "num_rows": table.num_rows,
                    "row_start": table.row_start + start,
                    "row_count": len(tensors["weight"]),
                    **_write_tensors(folder / file, tensors),
                }
            )
    return entries


def _finish(
    temporary: Path,
    step: int,
    written: list[list[dict[str, Any]]],
    dense: Mapping[str, Tensor],
    extra: dict[str, Any],
    keep_last: int,
) -> str:
    """Dense tensors, manifest, rename; returns the name that the checkpoint got."""
    shards = [entry for entries in written for entry in entries]
    _check_cover(shards)
    body = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "extra": extra,
        "shards": shards,
        "dense": _write_tensors(temporary / DENSE_FILE, {name: value.clone() for name, value in dense.items()}),
    }
    with open(temporary / MANIFEST_FILE, "wb") as file:
        file.write(_manifest_bytes(body))
        file.flush()
        os.fsync(file.fileno())
    fsync_folder(temporary)
    taken = [
        int(match[2] or 0)
        for path in _list(temporary.parent)
        if (match := _NAME.match(path.name)) and int(match[1]) == step
    ]
    final = temporary.parent / (f"step-{step:012d}" + (f".{max(taken) + 1}" if taken else ""))
    os.rename(temporary, final)
    fsync_folder(final.parent)
    _prune(final, keep_last)
    return final.name


def fsync_folder(path: Path) -> None:
    """Makes names in a folder durable: what was renamed into it stays there when the machine goes down."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(newest: Path, keep_last: int) -> None:
    found = _list(newest.parent)
    position = found.index(newest)
    for path in [*found[:position], *found[position + keep_last :]]:
        shutil.rmtree(path, ignore_errors=True)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    save_file({name: value.detach().cpu().contiguous() for name, value in tensors.items()}, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        return {
            "file": path.name,
            "bytes": os.fstat(file.fileno()).st_size,
            "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
        }


def _manifest_bytes(body: dict[str, Any]) -> bytes:
    """Canonical JSON of the manifest, its own sha256 in it, so that a changed byte shows."""
    try:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"extra must be JSON: {error}") from None
    digest = hashlib.sha256(text.encode()).hexdigest()
    return json.dumps({"manifest": body, "sha256": digest}, sort_keys=True, separators=(",", ":")).encode()


def _check_cover(shards: Sequence[Mapping[str, Any]]) -> None:
    """Every row of every table exactly once, or ValueError: a plan that holds a row twice is the caller's fault."""
    for table in {shard["table"] for shard in shards}:
        pieces = sorted((s["row_start"], s["row_count"], s["num_rows"]) for s in shards if s["table"] == table)
        end = 0
        for start, count, _ in pieces:
            if start != end:
                raise ValueError(
                    f"table '{table}': rows from {min(start, end)} are held {'twice' if start < end else 'nowhere'}"
                )
            end = start + count
        if end != pieces[0][2]:
            raise ValueError(f"table '{table}': ranks hold {end} of {pieces[0][2]} rows")


# --- reading ---------------------------------------------------------------------------------------------------------


class Checkpoint:
    """A checkpoint on disk. Opening it reads the manifest alone; :meth:`verify` reads every byte."""

    path: Path
    step: int
    extra: dict[str, Any]

    def __init__(self, path: Path | str):
        self.path = Path(path)
        self._body = _read_manifest(self.path)
        self.step = self._body["step"]
        self.extra = self._body["extra"]
        self._shards: dict[str, list[dict[str, Any]]] = {}
        for shard in self._body["shards"]:
            self._shards.setdefault(shard["table"], []).append(shard)

    @property
    def tables(self) -> dict[str, int]:
        """Number of rows of each table."""
        return {name: shards[0]["num_rows"] for name, shards in self._shards.items()}

    def verify(self) -> None:
        """Raises CheckpointError naming the first file that is missing, truncated or changed."""
        for entry in [*self._body["shards"], self._body["dense"]]:
            path = self.path / entry["file"]
            try:
                size = path.stat().st_size
                if size != entry["bytes"]:
                    raise CheckpointError(f"{path} holds {size} bytes, its manifest says {entry['bytes']}")
                with open(path, "rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
            if digest != entry["sha256"]:
                raise CheckpointError(f"{path} was changed after it was written: its sha256 is not the manifest's")

    def read_rows(
        self, table: str, row_start: int = 0, row_count: int | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Weight [row_count, dim] and state of these rows, whichever ranks wrote them. Raises CheckpointError."""
        shards = self._shards.get(table)
        if shards is None:
            raise CheckpointError(f"{self.path} holds no table '{table}' (there are {', '.join(sorted(self._shards))})")
        num_rows = shards[0]["num_rows"]
        end = num_rows if row_count is None else row_start + row_count
        if not 0 <= row_start <= end <= num_rows:
            raise CheckpointError(f"{self.path}: table '{table}' has {num_rows} rows, asked for [{row_start}, {end})")
        pieces: dict[str, list[Tensor]] = {}
        for shard in sorted(shards, key=lambda shard: shard["row_start"]):
            first = max(row_start, shard["row_start"]) - shard["row_start"]
            last = min(end, shard["row_start"] + shard["row_count"]) - shard["row_start"]
            # An empty range still needs a piece, for its dim and dtypes.
            if first < last or (row_start == end and not pieces):
                rows = slice(first, last) if first < last else slice(0, 0)
                with self._open(shard["file"]) as file:
                    for name in file.keys():  # noqa: SIM118 - not a mapping
                        pieces.setdefault(name, []).append(file.get_slice(name)[rows])
        tensors = {name: parts[0] if len(parts) == 1 else torch.cat(parts) for name, parts in pieces.items()}
        weight = tensors.pop("weight")
        return weight, {name.removeprefix("state."): value for name, value in tensors.items()}

    def read_dense(self) -> dict[str, Tensor]:
        """The dense tensors that rank 0 saved."""
        with self._open(self._body["dense"]["file"]) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping

    def _open(self, name: str) -> Any:
        try:
            return safe_open(self.path / name, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}") from None


def latest_valid(directory: Path | str) -> Checkpoint | None:
    """The newest checkpoint whose every byte is as written, or None. Warns of each newer one that is not."""
    for path in _list(Path(directory)):
        try:
            checkpoint = Checkpoint(path)
            checkpoint.verify()
        except CheckpointError as error:
            warnings.warn(f"checkpoint passed over, the previous one is used: {error}", RuntimeWarning, stacklevel=2)
        else:
            return checkpoint
    return None


def _list(directory: Path) -> list[Path]:
    """Checkpoints by step, newest first."""
    if not directory.is_dir():
        return []
    return sorted(
        (path for path in directory.iterdir() if _NAME.match(path.name)), key=lambda path: path.name, reverse=True
    )


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
        raise CheckpointError(f"{file} was changed or truncated after it was written: its sha256 is not its own")
    if body["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format version {body['format_version']}, this version reads {FORMAT_VERSION}: "
            "use the version of evenkeel that wrote it"
        )
    if any(Path(entry["file"]).name != entry["file"] for entry in [*body["shards"], body["dense"]]):
        raise CheckpointError(f"{file} names files outside its directory: it was not written by evenkeel")
    return body


# --- ranks agree -----------------------------------------------------------------------------------------------------


def _place(group: dist.ProcessGroup | None) -> tuple[int, int]:
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def _attempt(function: Callable[..., Result], *arguments: Any) -> tuple[Result | None, str | None]:
    """The result, or the words of what went wrong: ranks tell each other before any of them raises."""
    try:
        return function(*arguments), None
    except (OSError, SafetensorError) as error:
        return None, f"{error}: free space in this folder, or give one that every rank can write"
    except ValueError as error:
        return None, str(error)
    except Exception as error:  # Whatever it is: the other ranks wait to hear of it.
        return None, f"{type(error).__name__}: {error}"


def agree(mine: tuple[Result, str | None], where: str, group: dist.ProcessGroup | None = None) -> list[Result]:
    """Every rank's result in rank order, or CheckpointError on all of them if one has a problem. Collective."""
    _, world_size = _place(group)
    everyone: list[Any] = [mine]
    if world_size > 1:
        everyone = [None] * world_size
        dist.all_gather_object(everyone, mine, group=group)
    problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(everyone) if problem is not None]
    if problems:
        raise CheckpointError(f"{where} ({'; '.join(problems)})")
    return [result for result, _ in everyone]


def _share(mine: tuple[Any, str | None] | None, where: str, group: dist.ProcessGroup | None) -> Any:
    """Rank 0's result on every rank."""
    return agree(mine if mine is not None else (None, None), where, group)[0]

"""Checkpoints written in the background: the state is copied in memory, then a separate thread writes the copy.

Training waits only for the copy, and for the previous save if that is still being written: there is at most one save
at a time. The thread does what :func:`trainer.checkpoint.format.save` does, over a separate process group. So a
checkpoint appears whole or not at all, and the previous checkpoint stays intact if the process is killed meanwhile.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.checkpoint.format import CheckpointError, TableShard, save


class BackgroundSaver:
    """Saver of one checkpoint at a time in the background; all ranks use it in the same order (*collective*).

    Attributes:
        failed: True if the last save could not be written; the next call of :meth:`save`, :meth:`wait` or
            :meth:`close` raises the reason. Ranks may learn of it at different steps, so they should agree first.
        staged_bytes: bytes of the copy in memory, as many as this rank's rows and state. The copy's memory is kept
            from save to save, because fresh memory costs more than copying does.
    """

    def __init__(self) -> None:
        self.failed = False
        self._copies: dict[tuple[str, int, int, str], Tensor] = {}
        self._thread: threading.Thread | None = None
        self._path: Path | None = None
        self._error: BaseException | None = None
        # Collectives of the training may run at the same time: on one group the two would take each other's messages.
        # A group of one sends no messages.
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        self._group = None if is_alone else dist.new_group(backend="gloo")

    @property
    def staged_bytes(self) -> int:
        return sum(value.nbytes for value in self._copies.values())

    def save(
        self,
        directory: Path | str,
        *,
        tables: Sequence[TableShard],
        dense: Mapping[str, Tensor],
        extra: Mapping[str, Any],
        attached: Mapping[str, Path] | None = None,
        **others: Any,
    ) -> None:
        """Copy everything, begin to write it in the background, and return. Collective.

        The arguments are those of :func:`trainer.checkpoint.format.save`, except ``group``: the saver has its own.
        Wait first for a save that is still being written.

        Raises:
            CheckpointError: on every rank, if the previous save failed; nothing is begun then.
        """
        self.wait()
        staged = [self._staged(table) for table in tables]
        # The caller may change these while they are written.
        parts = {name: value.detach().to("cpu", copy=True) for name, value in dense.items()}
        keywords = {
            "tables": staged, "dense": parts, "extra": copy.deepcopy(dict(extra)), "attached": dict(attached or {}),
            "group": self._group, **others,
        }  # fmt: skip
        self._thread = threading.Thread(
            target=self._write, args=(Path(directory), keywords), name="evenkeel-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self) -> Path | None:
        """Wait for the save in flight; return the path of the last checkpoint written, None if there was none.

        Raises:
            CheckpointError: the save failed; a second call does not raise it again.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error, self.failed = self._error, None, False
        if error is not None:
            if isinstance(error, CheckpointError):
                raise error
            message = f"a checkpoint could not be written in the background ({type(error).__name__}: {error})"
            raise CheckpointError(message) from error
        return self._path

    def close(self) -> None:
        """Call :meth:`wait`, then free the copies and the process group."""
        try:
            self.wait()
        finally:
            self._copies.clear()
            group, self._group = self._group, None
            if group is not None:
                # If a rank has died, Ray has already destroyed this group, and torch refuses to do so twice.
                with contextlib.suppress(ValueError):
                    dist.destroy_process_group(group)

    def __enter__(self) -> BackgroundSaver:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Call :meth:`close`. If the ``with`` block raised an error, a failed save is only a warning."""
        try:
            self.close()
        except CheckpointError as error:
            if kind is None:
                raise
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)

    def _staged(self, table: TableShard) -> TableShard:
        """Return the same shard with its tensors copied into this saver's CPU memory."""

        def copied(name: str, value: Tensor) -> Tensor:
            key = (table.name, table.row_start, table.column_start, name)
            held = self._copies.get(key)
            if held is None or held.shape != value.shape or held.dtype != value.dtype:
                held = self._copies[key] = torch.empty(value.shape, dtype=value.dtype)
            return held.copy_(value.detach())

        state = {name: copied(f"state.{name}", value) for name, value in table.state.items()}
        return replace(table, weight=copied("weight", table.weight), state=state)

    def _write(self, directory: Path, keywords: dict[str, Any]) -> None:
        try:
            self._path = save(directory, **keywords)
        except BaseException as error:  # any error: the training thread must get it
            self._error, self.failed = error, True

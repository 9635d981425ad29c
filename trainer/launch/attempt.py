"""One rank's part of an attempt: its data and model, its start from a checkpoint, and its own checkpoints."""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from embeddings.refresh.model_comparison import ModelComparison, ModelDifference
from trainer.checkpoint.async_writer import BackgroundSaver
from trainer.checkpoint.format import Checkpoint, CheckpointError
from trainer.checkpoint.record import Position, TrainingRecord
from trainer.checkpoint.remote_checkpoints import described, make_view
from trainer.checkpoint.select import newest_of
from trainer.checkpoint.warm_start import (
    SERVED,
    id_map_files,
    inherited_alpha,
    newest_at,
    parent_checkpoint,
    rows_of_parent,
)
from trainer.data.batches.prepared import PreparedData
from trainer.data.one_pass.data import OnePassData
from trainer.data.one_pass.following import FILES
from trainer.data.prepare.remote_data import fetch_prepared
from trainer.distributed.build import build, choose_alpha
from trainer.distributed.dynamic_tables import DynamicRows
from trainer.distributed.inherited import InheritedCheckpoint
from trainer.evaluation import model_comparison
from trainer.evaluation.held_out_by_both import NotComparableError
from trainer.launch.resume_check import check_same_dataset, check_same_job, identity_of
from trainer.models import bpr
from trainer.publishing import frozen_context
from trainer.runs.directory import Run
from trainer.runs.model_comparison import COMPARISON, in_words, read_comparison
from trainer.spec import JobSpec
from trainer.storage.base import StorageError
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.hooks import Hooks, Resumed
from trainer.training.loop import Trainer
from trainer.training.progress import Reporter


class Attempt:
    """A rank's data, model, optimizer and starting point in an attempt. Building it is collective.

    It starts from the newest checkpoint of the run itself, else from that of a warm start, if any.
    ``saver`` writes checkpoints in the background; without it, training waits for every checkpoint.
    """

    def __init__(self, run: Run, reporter: Reporter, saver: BackgroundSaver | None, device: torch.device):
        self.run, self.job, self.reporter, self.saver, self.device = run, run.job, reporter, saver, device
        fetch_prepared(run.folders(run.data), run.data)
        is_one_pass = run.job.dataset.one_pass
        self.data = OnePassData.of(run.data, run.dataset, run.job) if is_one_pass else PreparedData.open(run.data)
        self._own = _agreed(run, lambda: newest_of(run, run.checkpoints))
        self._parent = None if self._own is not None else _agreed(run, lambda: parent_checkpoint(run))
        self.alpha = self._choose_alpha()
        self.epoch_steps = self._epoch_steps()
        self.sharded = build(self.job, self.data, alpha=self.alpha, epoch_steps=self.epoch_steps, device=device)
        self.optimizer = dense_optimizer(self.job, self.sharded)
        self.dynamic_rows = DynamicRows(self.job, self.data, self.sharded)
        self.inherited: InheritedCheckpoint | None = None
        self.resumed = self._load_start()

    def trainer(self) -> Trainer:
        """Return the training loop. Before that, rank 0 writes events about the start. Collective."""
        self._announce()
        trainer = Trainer(
            self.job,
            self.data,
            self.sharded,
            self.optimizer,
            resumed=self.resumed,
            hooks=Hooks(self.reporter.emit, self.should_stop, self.save, self.save_best, self.load_best),
            device=self.device,
            dynamic_rows=self.dynamic_rows,
        )
        if trainer.progressive is not None and self._own is not None:
            trainer.progressive.load(self._own)
        return trainer

    def compare(self, trainer: Trainer) -> None:
        """Compare the trained model with the served version's model, if the job has a gate. Collective.

        The result is an event. If an earlier attempt has reported a comparison, nothing happens. Afterwards this model
        holds the served version's parameters, so training cannot continue.
        """
        publish, version = self.job.publish, self.run.parent_version
        if publish is None or publish.gate.mode == "off" or self._is_compared():
            return
        begun, skipped = time.monotonic(), ""
        differences: tuple[ModelDifference, ...] = ()
        try:
            served = self._served()
            differences = model_comparison.differences(
                self.job, self.run.dataset, self.data, self.sharded, self.dynamic_rows, trainer.evaluator, served,
                is_start=self.run.init_checkpoint == self.run.served_checkpoint,
            )  # fmt: skip
        except (NotComparableError, CheckpointError, StorageError) as error:
            skipped = str(error)
        except Exception as error:
            # Training is done and saved: a retry would end here again.
            traceback.print_exc()
            skipped = f"{type(error).__name__}: {error}"
        comparison = ModelComparison(version, differences, skipped)
        seconds = round(time.monotonic() - begun, 3)
        self.reporter.emit(COMPARISON, **comparison.as_json(), seconds=seconds)
        self.reporter.emit("info", message=in_words(comparison))

    def _is_compared(self) -> bool:
        """Return True, on every rank, if rank 0 finds the comparison among the run's events."""
        told: list[Any] = [None]
        if dist.get_rank() == 0:
            told = [read_comparison(self.run.directory, self.run.parent_version) is not None]
        dist.broadcast_object_list(told, 0)
        return bool(told[0])

    def _served(self) -> Checkpoint:
        """Return the last checkpoint of the run that published the version served when this job started."""
        run = self.run
        if run.job.publish is not None and run.job.publish.is_repeated:
            raise NotComparableError("the job publishes while it trains")
        if run.job.dataset.one_pass:
            raise NotComparableError("the rows of a job of one pass are read once")
        if run.parent_version is None:
            raise NotComparableError("no version is served yet")
        folder = run.served_checkpoint
        served = None if folder is None else _agreed(run, lambda: newest_at(folder, run.directory / SERVED))
        if served is None:
            raise NotComparableError(f"the checkpoints of version {run.parent_version} are not kept any more")
        return served

    def should_stop(self) -> str | None:
        """Return the reason why this rank is to stop, None if it is to continue."""
        if self.saver is not None and self.saver.failed:
            # All ranks then agree to stop, and their next save raises the error.
            return "a checkpoint could not be written"
        with contextlib.suppress(FileNotFoundError):
            return self.run.cancel_file.read_text("utf-8")
        return None

    def save(self, trainer: Trainer) -> None:
        """Write a checkpoint. Collective."""
        # No training follows the last checkpoint, so a copy in memory would have no use.
        last = trainer.stop_asked or trainer.position.stopped or trainer.position.step == trainer.num_steps
        self._write(trainer, self.run.checkpoints, self.job.checkpoint.keep_last, None if last else self.saver)

    def save_best(self, trainer: Trainer) -> None:
        """Write a separate checkpoint of the parameters after the best epoch so far. Collective."""
        self._write(trainer, self.run.best, 1, None)

    def load_best(self, trainer: Trainer) -> Position | None:
        """Restore the parameters that :meth:`save_best` wrote, and return their position. Collective.

        None if an earlier attempt trained the best epoch, and nothing asked it to keep the parameters.

        Raises:
            CheckpointError: there is no valid checkpoint of the best epoch.
        """
        best = _agreed(self.run, lambda: newest_of(self.run, self.run.best))
        if best is None and self.job.regularizers.early_stopping is None:
            return None
        if best is None:
            raise CheckpointError(f"{self.run.best} holds no valid checkpoint of the best epoch: retry the job")
        self.sharded.load_from(best, dense_optimizer=self.optimizer, verify=False)
        self.dynamic_rows.load(best)
        return TrainingRecord.of(best).position

    def _choose_alpha(self) -> float | None:
        """Return the alpha of adaptive regularization, None for optimizers without it."""
        own, parent = self._own, self._parent
        if own is not None:
            check_same_job(own, self.job)
            check_same_dataset(own, self.run.dataset)
            return TrainingRecord.of(own).alpha
        inherited = None if parent is None else inherited_alpha(self.job, TrainingRecord.of(parent))
        return choose_alpha(self.job, self.data.steps_per_epoch) if inherited is None else inherited

    def _epoch_steps(self) -> int | None:
        """Return the steps that ``decay: by_epoch`` counts as an epoch; None for other kinds of decay.

        A warm start keeps the parent's number if the batch size is the same.
        """
        if self.job.optimizer.decay != "by_epoch":
            return None
        start = self._own or self._parent
        record = None if start is None else TrainingRecord.of(start)
        if record is None or record.epoch_steps is None or record.batch_size != self.job.batch_size:
            return self.data.steps_per_epoch
        return record.epoch_steps

    def _load_start(self) -> Resumed:
        """Load the checkpoint that the attempt begins from into the model, and return its position and history."""
        own, parent, start = self._own, self._parent, self._own or self._parent
        if own is None and parent is not None:
            start = self.inherited = InheritedCheckpoint(parent, self.job, self.run.dataset, self.sharded)
        frozen = frozen_context.is_frozen(self.job, self.data)
        resumed = Resumed()
        if start is not None and not (own is None and frozen and frozen_context.begins_fresh(self.job)):
            parent_rows = None if own is not None else rows_of_parent(self.job, self.data, start.tables)
            self.sharded.load_from(start, dense_optimizer=self.optimizer, verify=own is None, parent_rows=parent_rows)
            self.dynamic_rows.load(start, is_own=own is not None)
            if self.inherited is not None:
                self.inherited.clear_new_tables(self.sharded)
            if own is not None:
                record = TrainingRecord.of(own)
                if isinstance(self.data, OnePassData):
                    self.data.begin_files(own.attached(FILES))
                trained = max((metrics["epoch"] for metrics in record.history), default=0)
                # Early stopping that the job asks for ends it for good; the best epoch kept by default does not.
                ended = self.job.regularizers.early_stopping is not None or trained >= self.job.epochs
                position = replace(record.position, stopped=record.position.stopped and ended)
                resumed = Resumed(position, tuple(record.history))
            else:
                resumed = Resumed(Position(first_step=self.sharded.completed_steps))
        if frozen:
            if own is None:
                assert parent is not None
                assert start is not None
                frozen_context.begin(self.sharded, parent, start, self.job, self.data)
            frozen_context.freeze_dense(self.sharded)
        return resumed

    def _write(self, trainer: Trainer, folder: Path, keep_last: int, saver: BackgroundSaver | None) -> None:
        job = self.job
        record = TrainingRecord(
            job=identity_of(job),
            run_id=self.run.run_id,
            optimizer=job.optimizer.kind,
            alpha=self.alpha,
            epoch_steps=self.epoch_steps,
            batch_size=job.batch_size,
            labels=[task.name for task in self.data.tasks],
            dataset=json.dumps(self.run.dataset.model_dump(mode="json")),
            position=trainer.position,
            history=trainer.history,
        )
        if self.saver is not None:
            # The files attached below are written anew: wait until the last save has copied them.
            self.saver.wait()
        attached = id_map_files(self.data)
        if trainer.progressive is not None:
            attached |= trainer.progressive.write(self.run.staging)
        if trainer.rank == 0:
            attached |= self.dynamic_rows.write(self.run.staging)
            if isinstance(self.data, OnePassData):
                attached |= self.data.write_files(self.run.staging, trainer.position.step)
        self.sharded.save(
            folder, dense_optimizer=self.optimizer, extra=record.to_extra(), attached=attached, keep_last=keep_last,
            saver=saver, fence=self.run.fence, folders=self.run.folders(folder),
        )  # fmt: skip

    def _announce(self) -> None:
        shares = self.sharded.shares()
        position = self.resumed.position
        self.reporter.emit("state", state="running")
        inputs = self.job.model.inputs_in_words(self.run.dataset)
        notes = [] if self.inherited is None else self.inherited.optimizer_notes
        for note in notes if inputs is None else [inputs, *notes]:
            self.reporter.emit("info", message=note)
        if self.resumed.history:
            self.reporter.emit("history", metrics=list(self.resumed.history))
        self.reporter.emit(
            "info",
            message=self._start_in_words(position) + _workers(self.run) + _unread(self.job, self.data),
            alpha=self.alpha,
            resumed_from_step=position.step if self._own is not None else None,
            sharding=self.sharded.plan(),
            rows_per_rank={
                name: [sum(piece.row_count for piece in of_rank) for of_rank in share] for name, share in shares.items()
            },
            steps_per_epoch=None if self.job.dataset.one_pass else self.data.steps_per_epoch,
            unknown_share=self.data.unknown_share,
        )

    def _start_in_words(self, position: Position) -> str:
        what = "training from initial values"
        if self._own is not None:
            what = f"resuming after step {position.step} from {self._own.path.name}"
        elif self._parent is not None:
            what = f"warm start from {self._parent.path}"
        return what + (f"; alpha {self.alpha:.3g}" if self.alpha is not None else "")


def _agreed(run: Run, find: Callable[[], Checkpoint | None]) -> Checkpoint | None:
    """Return on every rank the checkpoint that ``find`` returns on rank 0. Collective; errors are raised on all ranks.

    So all ranks start from the same checkpoint, even if a newer checkpoint is written meanwhile.
    """
    answer: list[Any] = [None, None, None]
    if dist.get_rank() == 0:
        try:
            checkpoint = find()
            if checkpoint is not None:
                # On another host the run's directory may have another name.
                path = checkpoint.path
                inside = path.is_relative_to(run.directory)
                answer = [str(path.relative_to(run.directory) if inside else path), described(path), None]
        except (CheckpointError, StorageError) as error:
            answer = [None, None, error]
    dist.broadcast_object_list(answer, 0)
    name, view, problem = answer
    if problem is not None:
        raise problem
    if name is None:
        return None
    if view is not None:
        make_view(view, run.directory / name)
    return Checkpoint(run.directory / name)


def _workers(run: Run) -> str:
    number, asked = run.job.resources.num_workers, run.submitted.resources.num_workers
    return f"; {number} of {asked} workers" if run.has_fewer_workers else ""


def _unread(job: JobSpec, data: PreparedData) -> str:
    """Return a message that names the features that the model does not read."""
    unread = data.unread
    if job.model.reads_pairs:
        unread = [key.name for key in data.keys if key.name not in (bpr.USER, bpr.ITEM, bpr.NEGATIVE)]
    return f"; {job.model.kind} does not read {', '.join(unread)}" if unread else ""

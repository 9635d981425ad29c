"""Choice of the checkpoint of a run whose model is to be used: the last, the best, or the one of a given step."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from typing import Any

from trainer.checkpoint.format import Checkpoint, CheckpointError, FormatVersionError, checkpoints_in, latest_valid
from trainer.checkpoint.record import TrainingRecord
from trainer.checkpoint.remote_checkpoints import show
from trainer.runs.directory import Run
from trainer.runs.protocol import EXIT_FILE
from trainer.spec.evaluation import is_lower_better
from trainer.spec.label_tasks import watched_metric

LAST, BEST = "last", "best"


def pick(run: Run, which: str = LAST) -> tuple[Checkpoint, list[str]]:
    """Return the chosen checkpoint, whose every byte is verified, and notes that its user should read.

    ``which`` is one of:

    - ``last``: the newest undamaged checkpoint;
    - ``best``: the checkpoint that early stopping has kept. If it kept none, the checkpoint of the epoch with the best
      validation value of the first of ``evaluation.metrics``, for the first label if there are several;
    - a number: the checkpoint of this step.

    Raises:
        CheckpointError: there is no such checkpoint; the message has the remedy.
    """
    show(run.folders(run.checkpoints), run.checkpoints)
    steps = sorted({_step(path) for path in checkpoints_in(run.checkpoints)})
    if not steps:
        raise CheckpointError(
            f"{run.checkpoints} holds no checkpoint: wait until the job has written its first "
            "(checkpoint.every_steps), or run it again if retention has removed them"
        )
    if which == LAST:
        checkpoint, notes = _last(run)
        return checkpoint, [*notes, *_state(run, checkpoint)]
    if which == BEST:
        return _best(run), []
    if not which.isdecimal():
        raise CheckpointError(f"--checkpoint {which}: use best, last or a step ({_words(steps)})")
    found = [path for path in checkpoints_in(run.checkpoints) if _step(path) == int(which)]
    if not found:
        raise CheckpointError(f"{run.checkpoints} holds no checkpoint of step {which}: there are {_words(steps)}")
    return _whole(found[0]), []


def newest_of(run: Run, directory: Path) -> Checkpoint | None:
    """Return the newest undamaged checkpoint of ``directory`` (``run.checkpoints`` or ``run.best``), or None.

    Raises:
        FormatVersionError: a newer checkpoint has another format version.
        StorageError: the run's storage cannot be reached.
    """
    show(run.folders(directory), directory)
    return latest_valid(directory)


def _last(run: Run) -> tuple[Checkpoint, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpoint = latest_valid(run.checkpoints)
    notes = [str(one.message) for one in caught]
    if checkpoint is None:
        raise CheckpointError(
            f"{run.checkpoints} holds no valid checkpoint ({'; '.join(notes)}): run the job again, or restore the "
            "folder"
        )
    return checkpoint, notes


def _best(run: Run) -> Checkpoint:
    """Return the checkpoint of the best epoch."""
    kept_apart = newest_of(run, run.best)
    if kept_apart is not None:
        return kept_apart
    last, _ = _last(run)
    metric = watched_metric(run.job, run.dataset)
    if metric is None:
        raise CheckpointError(
            f"{run.checkpoints}: the job measures no number by which epochs compare: use last or a step, "
            "and for the next run name one in evaluation.metrics"
        )
    sign = -1.0 if is_lower_better(metric) else 1.0
    epochs: dict[int, float] = {
        int(one["epoch"]): float(one[metric])
        for one in TrainingRecord.of(last).history
        if one["split"] == "validation" and one.get(metric) is not None
    }
    if not epochs:
        raise CheckpointError(
            f"{run.checkpoints}: no epoch has a validation {metric} yet: use last, or set evaluation.split.validation"
        )
    best = max(epochs, key=lambda epoch: (sign * epochs[epoch], -epoch))
    there: dict[int, Path] = {}
    for path in reversed(checkpoints_in(run.checkpoints)):
        try:
            position = TrainingRecord.of(Checkpoint(path)).position
        except FormatVersionError:
            raise
        except CheckpointError:
            continue
        # Skip checkpoints that were not written right after an epoch's evaluation, before the next epoch began.
        if position.evaluated and not position.loss_count:
            there[position.evaluated] = path
    if best not in there:
        kept = ", ".join(f"epoch {epoch} ({metric} {epochs.get(epoch, math.nan):.5f})" for epoch in sorted(there))
        raise CheckpointError(
            f"epoch {best} was the best ({metric} {epochs[best]:.5f}), and its checkpoint is not kept (there are "
            f"{kept or 'none at the end of an epoch'}): use last or a step, and for the next run set "
            "checkpoint.every_steps to the steps of an epoch and keep_last to the number of epochs"
        )
    return _whole(there[best])


def _whole(path: Path) -> Checkpoint:
    checkpoint = Checkpoint(path)
    try:
        checkpoint.verify()
    except CheckpointError as error:
        raise CheckpointError(f"{error}: use another --checkpoint, or run the job again") from None
    return checkpoint


def _state(run: Run, checkpoint: Checkpoint) -> list[str]:
    """Return a list with one note if the job has not succeeded or not ended; an empty list if it has succeeded."""
    try:
        ended: dict[str, Any] = json.loads((run.directory / EXIT_FILE).read_text("utf-8"))
    except (OSError, ValueError):
        ended = {}
    state = ended.get("state")
    if state == "succeeded":
        return []
    what = f"the job has ended as {state}" if state else "the job has not ended"
    return [f"{what}: this is its last complete checkpoint, of step {checkpoint.step}"]


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])


def _words(steps: list[int]) -> str:
    return ", ".join(map(str, steps))

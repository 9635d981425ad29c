"""The calibrators of a checkpoint's parameters, and what their user should know of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from trainer.checkpoint.format import Checkpoint
from trainer.checkpoint.record import TrainingRecord
from trainer.output_calibration.base import Calibrator, Uncalibrated
from trainer.output_calibration.registry import of_json
from trainer.spec import JobSpec


def calibrators_of(job: JobSpec, checkpoint: Checkpoint) -> dict[str, Calibrator]:
    """Return by label ("" of the one label) what was fitted to the scores of a checkpoint; {} if none was asked for.

    A checkpoint from inside an epoch has none, for its scores were never seen on the validation rows: ("" then stands
    for all labels) its probabilities are the model's own, and the reason says so.
    """
    if job.output_calibration == "none":
        return {}
    stored = TrainingRecord.of(checkpoint).position.calibration
    if stored is None:
        return {
            "": Uncalibrated(
                f"step {checkpoint.step} is inside an epoch, and validation rows are scored at its end: "
                "wait for it, or name the step of one with --checkpoint"
            )
        }
    return {label: of_json(document) for label, document in stored.items()}


def calibration_notes(kind: str, calibrators: Mapping[str, Calibrator]) -> Iterator[str]:
    """Yield in words what is calibrated, and what is not and why; nothing where there are no calibrators."""
    for label, one in calibrators.items():
        what = f"probabilities of {label}" if label else "probabilities"
        if isinstance(one, Uncalibrated):
            yield f"{what} are not calibrated: {one.reason}"
        else:
            yield f"{what} are calibrated on validation rows ({kind})"

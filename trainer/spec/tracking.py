"""Trackers that receive a job's metrics and curves, in addition to the service. Torch-free.

trainer.runs.trackers sends them. A new kind needs its fields here, and its writer in trainer.runs.trackers.follow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, StringConstraints, field_validator

from trainer.spec.base import Spec

TrackerText = Annotated[str, StringConstraints(min_length=1, max_length=128, pattern=r"^[^\x00-\x1f/\\'\"`]+$")]


class TensorBoardTracking(Spec):
    """Event files of TensorBoard, in the run's directory or below ``EVENKEEL_TENSORBOARD_DIR``."""

    kind: Literal["tensorboard"]


class MLflowTracking(Spec):
    """A run of an MLflow server.

    ``uri``: uri of the server, by default that of the variable ``MLFLOW_TRACKING_URI``. ``experiment``: by default the
    job's name. Credentials are read from MLflow's own variables.
    """

    kind: Literal["mlflow"]
    uri: str | None = None
    experiment: TrackerText | None = None

    @field_validator("uri")
    @classmethod
    def _of_a_server(cls, uri: str | None) -> str | None:
        if uri is None:
            return None
        parts = urlsplit(uri)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"'{uri}' is not the address of an MLflow server: write http://HOST:PORT")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError(
                "uri has a user, a query or a fragment: write http://HOST:PORT, and set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in the environment"
            )
        return uri.rstrip("/")


class WandbTracking(Spec):
    """A run of Weights & Biases; server, key and mode are read from its own variables, such as ``WANDB_API_KEY``."""

    kind: Literal["wandb"]
    project: TrackerText = "evenkeel"
    entity: TrackerText | None = None


if TYPE_CHECKING:
    Tracking = TensorBoardTracking | MLflowTracking | WandbTracking
else:
    Tracking = Annotated[TensorBoardTracking | MLflowTracking | WandbTracking, Field(discriminator="kind")]

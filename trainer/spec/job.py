"""JobSpec: one training run.

Its models are in :mod:`trainer.spec.models`, optimizers in :mod:`trainer.spec.optimizer`, and publication in
:mod:`trainer.spec.publish`; specs are read by :mod:`trainer.spec.reading`. All are frozen pydantic models, torch-free,
so that the control plane validates exactly what the trainer will run. The schema is complete: a field that this version
cannot honour is refused with "not available yet" (:mod:`trainer.spec.checks.supported`), never ignored.
"""

from __future__ import annotations

import datetime
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints, ValidationInfo, field_validator, model_validator

from embeddings.dynamic.settings import MAX_ADMISSION_THRESHOLD, MAX_CAPACITY, IdMapSettings
from embeddings.optim.registry import KINDS
from embeddings.tables.element_types import COMPUTE_TYPE, JOB_ROW_TYPES, JOB_TYPES
from embeddings.tables.shardings import SHARDINGS
from trainer.spec.base import STORED, May, Name, Probability, Spec, later
from trainer.spec.checks import supported
from trainer.spec.dataset import DatasetSpec
from trainer.spec.evaluation import Evaluation
from trainer.spec.models.base import filled_in, with_defaults
from trainer.spec.models.registry import Model
from trainer.spec.optimizer import DenseOptimizer, Optimizer
from trainer.spec.problems import raise_if_invalid
from trainer.spec.publish import Publish
from trainer.spec.regularizers import EarlyStopping, Regularizers
from trainer.spec.tracking import Tracking

FIRING_DATE = "{firing_date}"
UNCHECKED = "unchecked"
"""Key of pydantic's validation context; its value is True for a job whose problems the caller raises."""

if TYPE_CHECKING:
    ShardingKind = str
    RowType = str
    StateType = str
else:
    RowType, StateType = Literal[JOB_ROW_TYPES], Literal[JOB_TYPES]
    ShardingKind = Literal[tuple(name for name, sharding in SHARDINGS.items() if sharding.in_jobs)]
LabelText = Annotated[str, StringConstraints(max_length=255)]
MarkerName = Annotated[str, StringConstraints(pattern=r"^[._][^/]{1,254}$")]
"""Name of a marker file; it begins with ``.`` or ``_``, so that readers do not take it for rows."""


FOLLOWED_CHECKPOINT_SECONDS = 60.0
"""Default time between checkpoints of a job with ``dataset.follow``."""


class Window(Spec):
    """Selection of rows by the dataset's partition column: those of ``days`` days, the last of which is ``start``.

    ``start`` is a date, or ``{firing_date}``, which a schedule replaces by the date of each firing.
    """

    start: str
    days: int = Field(default=1, ge=1, le=3660)

    @field_validator("start", mode="before")
    @classmethod
    def _as_text(cls, start: object) -> object:
        # YAML reads an unquoted 2026-01-31 as a date.
        return start.isoformat() if type(start) is datetime.date else start

    @field_validator("start")
    @classmethod
    def _date(cls, start: str) -> str:
        if start != FIRING_DATE:
            try:
                datetime.date.fromisoformat(start)
            except ValueError:
                raise ValueError(f"'{start}' is neither a date (YYYY-MM-DD) nor {FIRING_DATE}") from None
        return start


class Follow(Spec):
    """Settings for reading a folder while files appear in it, or a topic (trainer.data.sources.topics).

    ``max_rows``: number of rows after which the job ends; without it and without ``until``, the job ends when it is
    cancelled. ``poll_seconds``: time between checks for new files or messages.

    For a folder: ``until``: name of a marker file; once it is in the folder, the job ends after the last file.
    ``settle_seconds``: time for which a file must be unchanged before it is read, so that files that arrive out of
    order are still read in order. ``late``: a file that sorts before a file already begun is reported and not read
    (``report``), or ends the job (``refuse``).

    For a topic: ``start``: where a job without a checkpoint begins: ``earliest``, ``latest`` or the first messages from
    a time on (ISO 8601, with a zone). ``away_seconds``: time to wait for brokers that do not answer; then the attempt
    ends, and the next one continues from the checkpoint.
    """

    until: MarkerName | None = None
    max_rows: int | None = Field(default=None, ge=1)
    poll_seconds: float = Field(default=5.0, ge=0.01, le=3600.0)
    settle_seconds: float = Field(default=0.0, ge=0.0, le=86_400.0)
    late: Literal["report", "refuse"] = "report"
    start: str = later("earliest")
    away_seconds: float = later(600.0, ge=1.0, le=86_400.0)

    @field_validator("start", mode="before")
    @classmethod
    def _as_text(cls, start: object) -> object:
        # YAML reads an unquoted 2026-01-31T09:00:00Z as a time.
        return start.isoformat() if isinstance(start, datetime.datetime) else start

    @field_validator("start")
    @classmethod
    def _position(cls, start: str) -> str:
        if start not in ("earliest", "latest"):
            try:
                is_time = datetime.datetime.fromisoformat(start).tzinfo is not None
            except ValueError:
                is_time = False
            if not is_time:
                raise ValueError(f"'{start}' is neither earliest, latest nor a time with its zone (2026-11-25T09:00Z)")
        return start

    @property
    def start_milliseconds(self) -> int | None:
        """The time to start from, in milliseconds since 1970; None for ``earliest`` and ``latest``."""
        if self.start in ("earliest", "latest"):
            return None
        return round(datetime.datetime.fromisoformat(self.start).timestamp() * 1000)


class DatasetRef(Spec):
    """The dataset of a job, and its choice of rows.

    ``one_pass``: rows are trained on as they are read, once, without a preparation (trainer.data.one_pass).
    ``follow``: after the last file, the job continues with files that appear later.
    """

    name: Name
    window: Window | None = None
    one_pass: bool = later(False)
    follow: Follow | None = later(None)


class InitFrom(Spec):
    """Warm start from the job that published a collection's version, or from a named job.

    ``retire_after_runs``: number N of runs. An id that occurs in none of the last N runs of the warm-start chain, this
    run included, loses its row. Without it no id loses its row.

    ``held`` decides the start if versions of the collection were held after the current version was published.
    ``go_on`` starts from the newest held version whose run, rows and model were sound, so that its training is not
    lost; ``skip`` starts from the served version. Default: ``go_on`` for a job that refreshes this very collection.

    A feature continues from the parent's feature of the same name. ``renamed``: a dict from old to new name of the
    parent's features. ``added``: with ``zero`` predictions at step 0 are the parent's, even with features that it did
    not read; with ``fresh`` weights of added features begin as in a new model. ``dropped``: features of the parent that
    the job does not read; a missing feature that is not listed is refused. Names that the parent does not have are
    ignored, so that the same lines serve the next refresh too.
    """

    collection: Name | None = None
    version: str | None = None
    job: str | None = None
    held: Literal["skip", "go_on"] | None = later(None)
    retire_after_runs: int | None = Field(default=None, ge=1, le=1_000_000)
    renamed: dict[Name, Name] = later({})
    added: Literal["zero", "fresh"] = later("zero")
    dropped: tuple[Name, ...] = later(())

    @model_validator(mode="after")
    def _one(self) -> InitFrom:
        if (self.collection is None) == (self.job is None):
            raise ValueError("give collection (with version) or job")
        if self.job is not None and self.version is not None:
            raise ValueError("version goes with collection, not with job")
        if self.held == "go_on" and (self.job is not None or self.version not in (None, "current")):
            raise ValueError("held: go_on needs the current version of a collection: leave job and version out")
        if len(set(self.renamed.values())) < len(self.renamed):
            raise ValueError("renamed gives several features one name: name one feature of the parent for each")
        if twice := sorted(set(self.dropped) & self.renamed.keys()):
            raise ValueError(f"'{twice[0]}' is both dropped and renamed: leave one out")
        return self

    def goes_on(self, published: str | None) -> bool:
        """Return True if the job starts from the newest sound held version, if any.

        ``published``: the collection that the job publishes to.
        """
        if self.collection is None or self.version not in (None, "current"):
            return False
        return self.held == "go_on" or (self.held is None and self.collection == published)


class Walk(Spec):
    """A random walk over neighbours that returns to its first id with probability ``restart`` at each step."""

    restart: float = Field(ge=0.01, le=1.0, allow_inf_nan=False)


class SSE(Spec):
    """Stochastic Shared Embeddings of one feature: swap probability, graph and ratio (Wu et al., NeurIPS 2019).

    Equations 3 and 5 of the paper. In ``JobSpec.sse`` a feature's name stands for the input side (p_x): its ids are
    swapped wherever the model looks them up; ids of ``item`` also in the drawn negatives of bpr. With ``graph`` (a
    graph of the dataset), a swapped id becomes each of its neighbours with ``rho`` times the probability of each other
    id. With ``walk`` a swapped id becomes an id that a walk from it visits.
    With ``include_unknown`` the row that unknown ids share is swapped and drawn too, so that it learns.
    ``label`` stands for the output side (p_y): class labels flip (dnn, two_tower), or target items are swapped (bpr,
    for which ``label`` and ``item`` mean the same: set one of them).
    """

    probability: Probability = 0.01
    graph: Name | None = None
    rho: float = Field(default=1.0, ge=1.0, allow_inf_nan=False)
    walk: Walk | None = None
    include_unknown: bool = later(False)


class Table(Spec):
    """Storage of an embedding table's rows and their optimizer state.

    Rows in half precision are read, summed and updated as float32, and stored with stochastic rounding.

    With ``capacity`` the table is dynamic and grows while it trains (embeddings.dynamic); ``capacity`` is the most ids
    that have a row at once. An id gets its row at its ``admission_threshold``-th occurrence in training. The id loses
    the row when it did not occur for ``ttl_steps`` steps, or according to ``eviction_policy``. Ids without a row read
    the row of unknown ids. Without ``capacity`` every id of the training rows has a row.
    """

    old_names: ClassVar[dict[str, str]] = {"admit_after": "admission_threshold", "when_full": "eviction_policy"}

    dtype: RowType = COMPUTE_TYPE
    state_dtype: StateType = COMPUTE_TYPE
    capacity: int | None = later(None, ge=1, le=MAX_CAPACITY)
    admission_threshold: int = later(1, ge=1, le=MAX_ADMISSION_THRESHOLD)
    ttl_steps: int | None = later(None, ge=1)
    eviction_policy: Literal["oldest", "refuse"] = later("oldest")

    @model_validator(mode="after")
    def _of_dynamic_tables(self) -> Table:
        for name in ("admission_threshold", "ttl_steps", "eviction_policy"):
            if self.capacity is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is for dynamic tables: set capacity, or leave it out")
        return self

    @property
    def id_map(self) -> IdMapSettings | None:
        """Settings of a dynamic table's map of ids; None if every id of the training rows has a row."""
        if self.capacity is None:
            return None
        return IdMapSettings(self.capacity, self.admission_threshold, self.ttl_steps, self.eviction_policy)


MAX_COUNTS = 64
"""Approximate limit of the numbers of workers, from ``num_workers`` to ``min_workers``, with a memory prediction."""


class Resources(Spec):
    """Workers of a job and their limits.

    ``min_workers``: fewest workers with which an attempt begins if there are no resources for all ``num_workers``;
    without it, an attempt needs all of them. ``memory_bytes_per_worker``: a job whose ranks are predicted to use more
    memory is refused (trainer.sizing.memory).
    """

    num_workers: int = Field(default=1, ge=1, le=1024)
    min_workers: int | None = later(None, ge=1, le=1024)
    cpus_per_worker: float = Field(default=1, gt=0, le=1024)
    gpus_per_worker: float = Field(default=0, ge=0, le=16)
    memory_bytes_per_worker: int | None = Field(default=None, gt=0)
    timeout_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _in_order(self) -> Resources:
        if self.least_workers > self.num_workers:
            raise ValueError(
                f"min_workers {self.min_workers} is more than num_workers {self.num_workers}: lower it, or leave it out"
            )
        return self

    @property
    def least_workers(self) -> int:
        """The fewest workers that an attempt begins with."""
        return self.num_workers if self.min_workers is None else self.min_workers

    @property
    def worker_counts(self) -> tuple[int, ...]:
        """Numbers of workers that an attempt may have, largest first; at most about MAX_COUNTS of them."""
        step = -(-(self.num_workers - self.least_workers) // MAX_COUNTS) or 1
        return tuple(dict.fromkeys([*range(self.num_workers, self.least_workers, -step), self.least_workers]))


class Checkpoint(Spec):
    """Schedule and number of checkpoints.

    ``every_seconds``: longest time between two checkpoints, whatever the step; default 60 with ``dataset.follow``, else
    no limit. ``asynchronous``: training continues while a checkpoint is written, from a copy that needs the memory of
    the rows and their state once more.
    """

    every_steps: int = Field(default=500, ge=1)
    every_seconds: float | None = later(None, gt=0.0, allow_inf_nan=False)
    keep_last: int = Field(default=3, ge=1)
    asynchronous: bool = True


class JobSpec(Spec):
    """One training run. ``batch_size`` is global: ranks share it. Seeds are uint32.

    A step is one batch, whatever ``micro_batches`` is: the number of parts that a batch is cut into to save memory.
    Each part is looked up and differentiated before the next; their gradients add up, and one update follows.

    ``priority``: a tenant's waiting job with the highest priority starts first; among jobs of equal priority, the
    oldest. Priority orders only jobs of the same tenant, and stops no run.

    ``tracking``: trackers that receive the metrics and curves of the run while it trains (trainer.spec.tracking).
    ``output_calibration``: calibration on the validation rows of the probabilities that predictions and exports give
    (trainer.output_calibration).
    """

    spec_version: Literal[1] = 1
    name: Annotated[Name, May.DIFFER_ON_RESUME]
    dataset: DatasetRef
    init_from: InitFrom | None = None
    model: Model
    optimizer: Optimizer = Optimizer()
    dense_optimizer: DenseOptimizer = DenseOptimizer()
    sse: dict[str, SSE] = {}
    regularizers: Regularizers = Regularizers()
    kernel: Literal["evenkeel", "fbgemm"] = "evenkeel"
    epochs: Annotated[int, May.DIFFER_ON_RESUME] = Field(default=1, ge=1, le=1000)
    batch_size: int = Field(default=2048, ge=1, le=2**22)
    micro_batches: int = Field(default=1, ge=1, le=4096)
    seed: int = Field(default=0, ge=0, lt=2**32)
    resources: Annotated[Resources, May.DIFFER_ON_RESUME] = Resources()
    sharding: Annotated[dict[str, ShardingKind], May.DIFFER_ON_RESUME] = {}
    tables: dict[str, Table] = {}
    evaluation: Evaluation = Evaluation()
    output_calibration: Literal["none", "platt", "isotonic"] = later("none")
    checkpoint: Annotated[Checkpoint, May.DIFFER_ON_RESUME] = Checkpoint()
    retries: Annotated[int, May.DIFFER_ON_RESUME] = Field(default=2, ge=0, le=100)
    priority: Annotated[int, May.DIFFER_ON_RESUME] = later(0, ge=-100, le=100)
    labels: Annotated[dict[Name, LabelText], May.DIFFER_ON_RESUME] = {}
    publish: Annotated[Publish | None, May.DIFFER_ON_RESUME] = None
    tracking: Annotated[tuple[Tracking, ...], May.DIFFER_ON_RESUME] = later((), max_length=8)

    @model_validator(mode="before")
    @classmethod
    def _fill_in_defaults(cls, document: Any, info: ValidationInfo) -> Any:
        is_stored = (info.context or {}).get(STORED)
        return with_defaults(document) if isinstance(document, dict) and not is_stored else document

    @field_validator("tracking")
    @classmethod
    def _once_each(cls, tracking: tuple[Tracking, ...]) -> tuple[Tracking, ...]:
        kinds = [one.kind for one in tracking]
        for kind in kinds:
            if kinds.count(kind) > 1:
                raise ValueError(f"{kind} is listed {kinds.count(kind)} times: name each kind of tracker once")
        return tracking

    @model_validator(mode="after")
    def _resolve_decay(self) -> JobSpec:
        if "decay" in self.optimizer.model_fields_set:
            return self
        has_epochs = not (self.dataset.one_pass or self.regularizers.meda)
        by_epoch = has_epochs and KINDS[self.optimizer.kind].takes("decay")
        optimizer = self.optimizer.model_copy()
        # Not marked as a set field: with another kind, or in one pass, the same document resolves to another value.
        object.__setattr__(optimizer, "decay", "by_epoch" if by_epoch else "at_read")
        object.__setattr__(self, "optimizer", optimizer)
        return self

    @model_validator(mode="after")
    def _available(self, info: ValidationInfo) -> JobSpec:
        if not (info.context or {}).get(UNCHECKED):
            raise_if_invalid(supported.job_problems(self))
        return self

    @property
    def checkpoint_seconds(self) -> float | None:
        """Longest time between two checkpoints, at any step; None: no limit."""
        given, follow = self.checkpoint.every_seconds, self.dataset.follow
        return FOLLOWED_CHECKPOINT_SECONDS if given is None and follow is not None else given

    @property
    def early_stopping(self) -> EarlyStopping | None:
        """Early stopping of the run. By default a job that publishes keeps its best epoch, and trains all epochs."""
        asked = self.regularizers.early_stopping
        keeps_best = self.publish is not None and self.epochs > 1 and self.evaluation.split.validation > 0
        return EarlyStopping(patience=self.epochs) if asked is None and keeps_best else asked

    def table(self, name: str) -> Table:
        """Return the storage of a table: that in ``tables``, else the default."""
        return self.tables.get(name, Table())

    def fired_on(self, date: str) -> JobSpec:
        """Return this job with ``{firing_date}`` in its window replaced by the date of a firing (YYYY-MM-DD)."""
        window = self.dataset.window
        if window is None or window.start != FIRING_DATE:
            return self
        dataset = self.dataset.model_copy(update={"window": window.model_copy(update={"start": date})})
        return self.model_copy(update={"dataset": dataset})

    def with_workers(self, number: int) -> JobSpec:
        """Return a copy of this job with ``resources.num_workers`` set to ``number``."""
        return self.model_copy(update={"resources": self.resources.model_copy(update={"num_workers": number})})

    def against(self, dataset: DatasetSpec) -> JobSpec:
        """Return this job with the defaults that the dataset decides, checked against the dataset.

        Raises:
            InvalidFieldsError: The job does not fit the dataset.
        """
        job, document = self, self.model_dump(exclude_unset=True)
        filled = filled_in(document, self.model.defaults_with(self, dataset))
        if filled != document:
            job = JobSpec.model_validate(filled, context={UNCHECKED: True})
            raise_if_invalid(supported.job_problems(job))
        raise_if_invalid(supported.fit_problems(job, dataset))
        return job

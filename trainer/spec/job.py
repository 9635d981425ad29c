"""The two documents users write: DatasetSpec (what the rows mean) and JobSpec (one training run).

The parts of a dataset are in :mod:`trainer.spec.dataset`, a job's model in :mod:`trainer.spec.models`, what it
publishes in :mod:`trainer.spec.publish`; every part can be imported from here. They are frozen pydantic models,
torch-free, so that the control plane validates exactly what the trainer will run. The schema is complete: a field that
this version cannot honour is refused with "not available yet" (:mod:`trainer.spec.checks.supported`), never ignored. A
YAML file may hold a dataset and a job as two documents; :func:`load_documents` tells them apart.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import yaml
from pydantic import Field, StringConstraints, ValidationError, field_validator, model_validator

from embeddings.dynamic.settings import MAX_ADMIT_AFTER, MAX_CAPACITY, Growth
from embeddings.optim.registry import KINDS
from embeddings.tables.shardings import SHARDINGS
from trainer.spec import yaml_documents
from trainer.spec.base import NAME_PATTERN, Column, Name, Positive, Probability, Spec, later
from trainer.spec.checks import supported
from trainer.spec.dataset import DatasetSpec, Feature, Graph, Join, Label, Negatives, PreviousItems, parse_rule
from trainer.spec.evaluation import (
    DEFAULT_METRICS,
    METRIC_PATTERN,
    POINTWISE_METRICS,
    RANKING_METRICS,
    Evaluation,
    Intervals,
    Metric,
    Split,
)
from trainer.spec.models.base import Init
from trainer.spec.models.registry import BROKEN_MODELS, MODELS, Model
from trainer.spec.problems import FieldProblem, InvalidFieldsError, SpecError, raise_if_invalid
from trainer.spec.publish import Anchor, Compass, Expire, Gate, MovingAverage, Publish, View
from trainer.spec.regularizers import Regularizers

__all__ = [
    "DEFAULT_METRICS",
    "FIRING_DATE",
    "NAME_PATTERN",
    "SSE",
    "Anchor",
    "Checkpoint",
    "Column",
    "Compass",
    "DatasetRef",
    "DatasetSpec",
    "DenseOptimizer",
    "Evaluation",
    "Expire",
    "Feature",
    "Gate",
    "Graph",
    "Init",
    "InitFrom",
    "Intervals",
    "JobSpec",
    "Join",
    "Label",
    "LabelText",
    "LearningRateSchedule",
    "Metric",
    "Model",
    "MovingAverage",
    "Name",
    "Negatives",
    "Optimizer",
    "Positive",
    "PreviousItems",
    "Probability",
    "Publish",
    "Regularizers",
    "Resources",
    "ShardingKind",
    "Spec",
    "SpecError",
    "Split",
    "Table",
    "View",
    "Walk",
    "Window",
    "load_documents",
    "parse_dataset",
    "parse_job",
    "parse_rule",
    "problems_of",
]

FIRING_DATE = "{firing_date}"

if TYPE_CHECKING:
    ShardingKind = str
else:
    ShardingKind = Literal[tuple(name for name, sharding in SHARDINGS.items() if sharding.in_jobs)]
LabelText = Annotated[str, StringConstraints(max_length=255)]


class Window(Spec):
    """Rows whose partition lies in ``[start - days + 1, start]``; schedules fill in ``{firing_date}``."""

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


class DatasetRef(Spec):
    name: Name
    window: Window | None = None


class InitFrom(Spec):
    """Warm start from the job behind a published version, or from a job.

    ``retire_after_runs``: an id that is not in the data of the last so many runs of the chain, including this one,
    loses its row; without it no id does.
    """

    collection: Name | None = None
    version: str | None = None
    job: str | None = None
    retire_after_runs: int | None = Field(default=None, ge=1, le=1_000_000)

    @model_validator(mode="after")
    def _one(self) -> InitFrom:
        if (self.collection is None) == (self.job is None):
            raise ValueError("give collection (with version) or job")
        if self.job is not None and self.version is not None:
            raise ValueError("version goes with collection, not with job")
        return self


class LearningRateSchedule(Spec):
    """How a learning rate changes with the steps, each of which is a batch of the job (embeddings.optim.lr_schedules).

    ``linear_warmup``: from ``start_factor`` up to 1 within ``warmup_steps`` steps. The other kinds may begin with a
    warmup: ``cosine``, from 1 down to ``final_factor`` within ``decay_steps``; ``step``, times ``gamma`` every
    ``every_steps``. Steps are those of the tables: a warm start continues from its parent's step, and does not warm up
    again.
    """

    kind: Literal["constant", "linear_warmup", "cosine", "step"] = "constant"
    warmup_steps: int = Field(default=0, ge=0)
    start_factor: float = Field(default=0.0, ge=0.0, le=1.0)
    decay_steps: int | None = Field(default=None, ge=1)
    final_factor: float = Field(default=0.0, ge=0.0, le=1.0)
    every_steps: int | None = Field(default=None, ge=1)
    gamma: float = Field(default=0.1, gt=0.0, le=1.0)

    @model_validator(mode="after")
    def _of_its_kind(self) -> LearningRateSchedule:
        needed, own = _SCHEDULES[self.kind]
        if needed is not None and not getattr(self, needed):
            raise ValueError(f"a schedule of kind {self.kind} needs {needed}")
        if self.start_factor and not self.warmup_steps:
            raise ValueError("start_factor is that of a warmup: set warmup_steps, or leave it out")
        for name, field in type(self).model_fields.items():
            if name != "kind" and name not in own and getattr(self, name) != field.default:
                raise ValueError(f"a schedule of kind {self.kind} has no {name}: leave it out")
        return self


_WARMUP = ("warmup_steps", "start_factor")
_SCHEDULES: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "constant": (None, ()),
    "linear_warmup": ("warmup_steps", _WARMUP),
    "cosine": ("decay_steps", (*_WARMUP, "decay_steps", "final_factor")),
    "step": ("every_steps", (*_WARMUP, "every_steps", "gamma")),
}
"""By kind of schedule, the field that it cannot do without, and those that it has."""


if TYPE_CHECKING:
    OptimizerKind = str
else:
    OptimizerKind = Literal[tuple(KINDS)]


class Optimizer(Spec):
    """Row optimizer of the embedding tables (embeddings.optim). A setting that the kind does not have is refused.

    ``alpha`` is read by the kinds with _ar (Li and Lyu, Adaptive Regularization), ``weight_decay`` by adamw and
    adagradw, ``first_touch`` by both, ``beta1`` by the Adam family, ``moments`` and ``beta2`` by the Adam family and
    RMSprop (for which 0.99 is the default of ``beta2``, like torch's alpha). ``clip_norm`` bounds the norm of the
    step's gradient, taken over all tables and dense parameters on all ranks together; ``clip_row_norm`` bounds that of
    each row.
    """

    kind: OptimizerKind = "adam_ar"
    learning_rate: float = Field(default=0.001, ge=0.0, allow_inf_nan=False)
    alpha: Literal["default", "auto"] | Positive = "default"
    moments: Literal["dense", "lazy"] = "dense"
    decay: Literal["at_read", "at_update"] = "at_read"
    first_touch: Literal["keep", "literal"] = "keep"
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    beta2: float = Field(default=0.999, ge=0.0, lt=1.0)
    eps: float = Field(default=1e-8, gt=0.0, allow_inf_nan=False)
    eps_inside_root: bool = False
    weight_decay: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    schedule: LearningRateSchedule = LearningRateSchedule()
    clip_norm: Positive | None = None
    clip_row_norm: Positive | None = None

    @model_validator(mode="before")
    @classmethod
    def _beta2_of_its_kind(cls, document: Any) -> Any:
        kind = KINDS.get(document.get("kind", "")) if isinstance(document, dict) else None
        return {"beta2": kind.default("beta2"), **document} if kind is not None and kind.takes("beta2") else document


class DenseOptimizer(Spec):
    """torch's optimizer of everything that is not an embedding table.

    ``weight_decay`` is its L2 penalty: that factor times the parameter is added to the gradient.
    """

    kind: Literal["adam", "sgd"] = "adam"
    learning_rate: float = Field(default=0.001, ge=0.0, allow_inf_nan=False)
    schedule: LearningRateSchedule = LearningRateSchedule()
    weight_decay: float = later(0.0, ge=0.0, allow_inf_nan=False)


class Walk(Spec):
    """A random walk over neighbours that returns to its first id with probability ``restart`` at each step."""

    restart: float = Field(ge=0.01, le=1.0, allow_inf_nan=False)


class SSE(Spec):
    """Stochastic Shared Embeddings of one feature: swap probability, graph and ratio (Wu et al., NeurIPS 2019).

    The equations are 3 and 5. In ``JobSpec.sse`` a feature's name is the input side (p_x): its ids are swapped wherever
    the model looks them up, for ``item`` also in the drawn negatives of bpr. With ``graph`` (of the dataset) neighbours
    are ``rho`` times as likely as other rows; with ``walk`` a swapped id becomes one that the walk from it visits.
    ``label`` is the output side (p_y): class labels flip (dnn, two_tower), or the items that are the targets are
    swapped (bpr, where that is ``item`` by another name: give one of the two).
    """

    probability: Probability = 0.01
    graph: Name | None = None
    rho: float = Field(default=1.0, ge=1.0, allow_inf_nan=False)
    walk: Walk | None = None


class Table(Spec):
    """How the rows of an embedding table and the state of their optimizer are stored.

    Rows in half precision are read, summed and updated as float32, and stored with stochastic rounding.

    With ``capacity`` the table is dynamic: it grows while it trains (embeddings.dynamic): at most so many ids have a
    row at once. An id gets its row at its ``admit_after``-th occurrence in training and loses it when it did not occur
    for ``ttl_steps`` steps, or according to ``when_full``. Ids without a row read the row of unknown ids. Without
    ``capacity`` every id of the training rows has a row.
    """

    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    state_dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    capacity: int | None = later(None, ge=1, le=MAX_CAPACITY)
    admit_after: int = later(1, ge=1, le=MAX_ADMIT_AFTER)
    ttl_steps: int | None = later(None, ge=1)
    when_full: Literal["oldest", "refuse"] = later("oldest")

    @model_validator(mode="after")
    def _of_growth(self) -> Table:
        for name in ("admit_after", "ttl_steps", "when_full"):
            if self.capacity is None and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} is of tables that grow: set capacity, or leave it out")
        return self

    @property
    def growth(self) -> Growth | None:
        """How the table grows; None where every id of the training rows has a row."""
        if self.capacity is None:
            return None
        return Growth(self.capacity, self.admit_after, self.ttl_steps, self.when_full)


class Resources(Spec):
    """Workers of a job and their limits.

    ``memory_bytes_per_worker``: a job whose ranks are predicted to use more memory is refused (trainer.sizing.memory).
    """

    num_workers: int = Field(default=1, ge=1, le=1024)
    cpus_per_worker: float = Field(default=1, gt=0, le=1024)
    gpus_per_worker: float = Field(default=0, ge=0, le=16)
    memory_bytes_per_worker: int | None = Field(default=None, gt=0)
    timeout_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)


class Checkpoint(Spec):
    """When checkpoints are written and how many are kept.

    ``asynchronous``: training continues while a checkpoint is written, from a copy that needs the memory of the rows
    and their state once more.
    """

    every_steps: int = Field(default=500, ge=1)
    keep_last: int = Field(default=3, ge=1)
    asynchronous: bool = True


class JobSpec(Spec):
    """One training run. ``batch_size`` is global: ranks share it. Seeds are uint32.

    A step is one batch, whatever ``micro_batches`` is: the number of parts that a batch is cut into to save memory.
    Each part is looked up and differentiated before the next; their gradients add up, and one update follows.
    """

    spec_version: Literal[1] = 1
    name: Name
    dataset: DatasetRef
    init_from: InitFrom | None = None
    model: Model
    optimizer: Optimizer = Optimizer()
    dense_optimizer: DenseOptimizer = DenseOptimizer()
    sse: dict[str, SSE] = {}
    regularizers: Regularizers = Regularizers()
    kernel: Literal["evenkeel", "fbgemm"] = "evenkeel"
    epochs: int = Field(default=1, ge=1, le=1000)
    batch_size: int = Field(default=2048, ge=1, le=2**22)
    micro_batches: int = Field(default=1, ge=1, le=4096)
    seed: int = Field(default=0, ge=0, lt=2**32)
    resources: Resources = Resources()
    sharding: dict[str, ShardingKind] = {}
    tables: dict[str, Table] = {}
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    retries: int = Field(default=2, ge=0, le=100)
    labels: dict[Name, LabelText] = {}
    publish: Publish | None = None

    @model_validator(mode="after")
    def _available(self) -> JobSpec:
        raise_if_invalid(supported.job_problems(self))
        return self

    def against(self, dataset: DatasetSpec) -> JobSpec:
        """Return this job, checked against the dataset it names.

        Raises:
            InvalidFieldsError: The job does not fit the dataset.
        """
        raise_if_invalid(supported.fit_problems(self, dataset))
        return self


# --- reading ---------------------------------------------------------------------------------------------------------


def problems_of(errors: Iterable[Mapping[str, Any]]) -> Iterator[FieldProblem]:
    """Yield what users are told of pydantic's errors (``ValidationError.errors()``).

    An error that a spec's own checks raised is one problem for each field that they name.
    """
    for item in errors:
        cause = item.get("ctx", {}).get("error")
        if isinstance(cause, InvalidFieldsError):
            for problem in cause.problems:
                where = [*map(str, item["loc"]), *([problem.field] if problem.field else [])]
                yield problem._replace(field=".".join(where))
        else:
            yield _problem_of(item)


def _problem_of(error: Mapping[str, Any]) -> FieldProblem:
    """Return what users are told of one error; in the path of a model pydantic names the kind, and users do not."""
    where, message, remedy = [str(part) for part in error["loc"]], str(error["msg"]).removeprefix("Value error, "), ""
    for place, part in enumerate(where[:-1]):
        if part == "model" and where[place + 1] in MODELS:
            del where[place + 1]
            break
    if error["type"] == "extra_forbidden":
        message, remedy = "no such field", "check the spelling"
    elif error["type"] == "string_pattern_mismatch" and error["ctx"]["pattern"] == METRIC_PATTERN:
        ranking = ", ".join(f"{name}_K" for name in RANKING_METRICS)
        message = "no such metric"
        remedy = f"use one of {', '.join(POINTWISE_METRICS)}, mrr, {ranking} (K: 1 to 999; _full: of all)"
    elif error["type"] == "union_tag_not_found":
        where, message = [*where, "kind"], "Field required"
    elif error["type"] == "union_tag_invalid":
        where, broken = [*where, "kind"], BROKEN_MODELS.get(str(error["ctx"]["tag"]))
        message, remedy = (broken, "") if broken else ("no such model", f"use one of {', '.join(MODELS)}")
    return FieldProblem(".".join(where), message, remedy)


def parse_dataset(document: Any, where: str = "dataset") -> DatasetSpec:
    """Return the dataset that a mapping of its fields describes.

    Args:
        document: The fields, as a YAML file has them.
        where: What an error names as its place.

    Raises:
        SpecError: A field is unknown, missing, or outside its bounds.

    Example:
        >>> from trainer.spec import parse_dataset
        >>> features = {"user": {"type": "id"}, "item": {"type": "id"}}
        >>> label = {"column": "click"}
        >>> dataset = parse_dataset({"name": "log", "uri": "log.parquet", "features": features, "label": label})
        >>> sorted(dataset.features)
        ['item', 'user']
    """
    return _parse(DatasetSpec, document, where)


def parse_job(document: Any, where: str = "job") -> JobSpec:
    """Return the job that a mapping of its fields describes.

    Args:
        document: The fields, as a YAML file or the REST interface has them.
        where: What an error names as its place.

    Raises:
        SpecError: A field is unknown, missing, or outside its bounds.

    Example:
        >>> from trainer.spec import parse_job
        >>> fields = {"name": "ctr", "dataset": {"name": "log"}, "model": {"kind": "dcnv2", "embedding_dim": 8}}
        >>> job = parse_job(fields)
        >>> job.model.kind, job.epochs
        ('dcnv2', 1)
        >>> parse_job(fields | {"epochs": 0})
        Traceback (most recent call last):
        ...
        trainer.spec.problems.SpecError: job: epochs: Input should be greater than or equal to 1
    """
    return _parse(JobSpec, document, where)


def load_documents(path: Path | str) -> tuple[DatasetSpec | None, JobSpec | None]:
    """Return the dataset and the job that a YAML file holds; either may be absent.

    Raises:
        SpecError: A document is not a valid spec, or the file is not valid YAML.

    Example:
        >>> from trainer.spec import load_documents
        >>> dataset, job = load_documents("examples/clicklog.yaml")
        >>> dataset.name, job.model.kind
        ('clicklog', 'dnn')
    """
    where = str(path)
    try:
        found = yaml_documents.load_all(Path(path).read_text("utf-8"))
        documents = [document for document in found if document is not None]
    except OSError as error:
        raise SpecError(where, [FieldProblem("", f"cannot be read: {error.strerror or error}")]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(where, [FieldProblem("", f"is not YAML: {error}")]) from None
    dataset: DatasetSpec | None = None
    job: JobSpec | None = None
    for document in documents:
        if not isinstance(document, dict):
            raise SpecError(where, [FieldProblem("", "a spec is a mapping of fields; see examples/")])
        if "model" in document or "spec_version" in document:
            if job is not None:
                raise SpecError(where, [FieldProblem("", "holds two jobs: one per file")])
            job = parse_job(document, where)
        else:
            if dataset is not None:
                raise SpecError(where, [FieldProblem("", "holds two datasets: one per file")])
            dataset = parse_dataset(document, where)
    if dataset is None and job is None:
        raise SpecError(where, [FieldProblem("", "is empty")])
    return dataset, job


SpecType = TypeVar("SpecType", bound=Spec)


def _parse(kind: type[SpecType], document: Any, where: str) -> SpecType:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise SpecError(where, problems_of(error.errors(include_url=False))) from None

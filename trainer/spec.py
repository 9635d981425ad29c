"""The two documents users write: DatasetSpec (what the rows mean) and JobSpec (one training run).

Frozen pydantic models, torch-free, so that the control plane validates exactly what the trainer will run. The schema is
whole: a field that this version cannot honour is refused with "not available yet" (:mod:`trainer.available`), never
ignored. A YAML file may hold a dataset and a job as two documents; :func:`load_documents` tells them apart.
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from trainer import available

NAME_PATTERN = r"^[a-z0-9][a-z0-9_-]{0,62}$"
FIRING_DATE = "{firing_date}"

Name = Annotated[str, StringConstraints(pattern=NAME_PATTERN)]
Column = Annotated[str, StringConstraints(min_length=1, max_length=255)]
Probability = Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
ShardingKind = Literal["table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise", "grid"]
LabelText = Annotated[str, StringConstraints(max_length=255)]


class Spec(BaseModel):
    """Base of every part of a spec: immutable, and a misspelt field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


# --- dataset ---------------------------------------------------------------------------------------------------------


class Join(Spec):
    """A column looked up in a second file: ``column`` of the row whose ``on`` equals this row's ``on``.

    ``take`` says what becomes of a list-valued column: its last element, its first, or all of them (an id_list).
    """

    uri: str = Field(min_length=1)
    on: Column
    column: Column
    take: Literal["last", "first", "all"] = "last"

    @model_validator(mode="before")
    @classmethod
    def _unquoted_on(cls, document: object) -> object:
        # YAML reads an unquoted key on as true.
        if isinstance(document, dict) and True in document and "on" not in document:
            return {"on" if key is True else key: value for key, value in document.items()}
        return document


class PreviousItems(Spec):
    """History: the last ``length`` values of ``previous`` that the same ``by`` had before this row, by ``order``.

    Rows with fewer than ``min_length`` previous values are left out of every split (SASRec's convention is 1).
    """

    previous: Column
    by: Column
    order: Column
    length: int = Field(ge=1, le=1000)
    min_length: int = Field(default=0, ge=0, le=1000)


class Feature(Spec):
    """One model input. ``id``: one categorical value per row; ``id_list``: a list per row, pooled.

    Without ``join`` or ``derive`` the feature reads ``column`` (default: the feature's own name). ``shares`` names the
    feature whose embedding table this one uses.
    """

    type: Literal["id", "id_list", "dense"] = "id"
    column: Column | None = None
    join: Join | None = None
    derive: PreviousItems | None = None
    shares: str | None = None
    pooling: Literal["sum", "mean"] = "mean"

    @model_validator(mode="after")
    def _one_source(self) -> Feature:
        if sum(source is not None for source in (self.column, self.join, self.derive)) > 1:
            raise ValueError("give at most one of column, join and derive")
        if self.derive is not None and self.type != "id_list":
            raise ValueError("a derived history is a list: set type: id_list")
        if self.join is not None and self.join.take == "all" and self.type != "id_list":
            raise ValueError("join with take: all gives a list: set type: id_list")
        return self


class Negatives(Spec):
    """Every row is a positive; for each, ``per_positive`` items that its user never had are drawn, once."""

    per_positive: int = Field(default=1, ge=1, le=100)
    of: str
    distribution: Literal["uniform", "popularity", "in_batch"] = "uniform"
    seed: int = Field(default=0, ge=0, lt=2**32)


class Label(Spec):
    """Where the target comes from: a 0/1 ``column``, a ``rule`` such as ``rating >= 4``, or drawn ``negatives``."""

    column: Column | None = None
    rule: str | None = None
    negatives: Negatives | None = None

    @field_validator("rule")
    @classmethod
    def _parsable(cls, rule: str | None) -> str | None:
        if rule is not None:
            parse_rule(rule)
        return rule

    @model_validator(mode="after")
    def _exactly_one(self) -> Label:
        if sum(source is not None for source in (self.column, self.rule, self.negatives)) != 1:
            raise ValueError("give exactly one of column, rule and negatives")
        return self


class Graph(Spec):
    """Edges between the ids of feature ``of``, for SSE-Graph."""

    uri: str = Field(min_length=1)
    source: Column
    target: Column
    of: str


class DatasetSpec(Spec):
    """A registered dataset: where its rows are and what their columns mean.

    ``uri`` is a file or a directory of Parquet or CSV; a relative one is taken from the working directory of whoever
    reads it. A ``join`` or ``graph`` uri without a directory is taken from beside ``uri``.
    """

    name: Name
    uri: str = Field(min_length=1)
    features: dict[Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,62}$")], Feature] = Field(
        min_length=1
    )
    label: Label
    order: Column | None = None
    timestamp: Column | None = None
    partition: Column | None = None
    graphs: dict[Name, Graph] = {}

    @model_validator(mode="after")
    def _consistent(self) -> DatasetSpec:
        for name, feature in self.features.items():
            if feature.shares is not None:
                target = self.features.get(feature.shares)
                if target is None:
                    raise ValueError(
                        f"features.{name}.shares: no feature '{feature.shares}' (there are {_list(self.features)})"
                    )
                if target.shares is not None:
                    raise ValueError(
                        f"features.{name}.shares: '{feature.shares}' itself shares a table; name that one instead"
                    )
            if feature.derive is not None and feature.shares is None and feature.derive.previous in self.features:
                raise ValueError(
                    f"features.{name}: a history of '{feature.derive.previous}' needs shares: {feature.derive.previous}"
                )
        negatives = self.label.negatives
        if negatives is not None and negatives.of not in self.features:
            raise ValueError(f"label.negatives.of: no feature '{negatives.of}' (there are {_list(self.features)})")
        if self.order is not None and self.timestamp is not None:
            raise ValueError("give order or timestamp, not both")
        for name, graph in self.graphs.items():
            if graph.of not in self.features:
                raise ValueError(f"graphs.{name}.of: no feature '{graph.of}' (there are {_list(self.features)})")
        available.refuse(available.dataset_problems(self))
        return self

    @property
    def ordering(self) -> str | None:
        """The column that orders rows in time, if any."""
        return self.order or self.timestamp


# --- job -------------------------------------------------------------------------------------------------------------


class Window(Spec):
    """Rows whose partition lies in ``[start - days + 1, start]``; schedules fill ``{firing_date}`` in."""

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
    """Warm start from the job behind a published version, or from a job. An id that the last ``retire_after_runs`` runs
    of the chain did not have, this one among them, loses its row; left out, none does."""

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


class Init(Spec):
    """Initial rows. ``hash``: normal from hash(id, seed), so an id starts alike in every run; ``normal``: by row."""

    kind: Literal["zero", "normal", "hash"] = "zero"
    std: float = Field(default=0.01, ge=0.0, allow_inf_nan=False)


class Model(Spec):
    """``window``: item2vec's targets are the items at most so many places away. ``negatives`` drawn for each target of
    item2vec (default 3) and sasrec (default 1). ``length``: sasrec reads so many items at most, by ``blocks`` of
    self-attention with ``heads`` heads."""

    kind: Literal[
        "dnn", "two_tower", "bpr",
        "wide_deep", "xdeepfm", "wukong", "dlrm", "dcnv2", "deepfm", "din", "mf", "item2vec", "sasrec",
    ]  # fmt: skip
    embedding_dim: int = Field(default=16, ge=1, le=4096)
    hidden: tuple[Annotated[int, Field(ge=1, le=65536)], ...] = (128, 64)
    init: Init | None = None
    window: int = Field(default=3, ge=1, le=100)
    negatives: int | None = Field(default=None, ge=1, le=100)
    length: int = Field(default=50, ge=1, le=1000)
    blocks: int = Field(default=2, ge=1, le=64)
    heads: int = Field(default=1, ge=1, le=64)
    loss: Literal["bce", "sampled_softmax"] = "bce"

    @property
    def effective_init(self) -> Init:
        """The init asked for, else zero for CTR towers (AdamAR paper) and hash where a dot product needs a start."""
        if self.init is not None:
            return self.init
        if self.kind == "sasrec":
            return Init(kind="hash", std=0.02)
        return Init(kind="hash", std=0.1) if self.kind in ("two_tower", "bpr", "mf", "item2vec") else Init()

    @property
    def num_negatives(self) -> int:
        """Draws for each target of a model of sequences."""
        return self.negatives or (3 if self.kind == "item2vec" else 1)


class LearningRateSchedule(Spec):
    """How a learning rate goes on with the steps, each of which is a batch of the job (embeddings.schedule).

    ``linear_warmup``: from ``start_factor`` up to 1 within ``warmup_steps`` steps. The others may begin with it:
    ``cosine``, from 1 down to ``final_factor`` within ``decay_steps``; ``step``, times ``gamma`` every ``every_steps``.
    Steps are those of the tables: a warm start goes on where its parent was, and does not warm up again.
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


class Optimizer(Spec):
    """Row optimizer of the embedding tables (embeddings.optim). What a kind does not have is refused if it is set.

    ``alpha`` is read by adam_ar and adagrad_ar (Li and Lyu), ``weight_decay`` by adamw and adagradw, ``first_touch`` by
    these four, ``moments`` and the betas by the Adam family. ``clip_norm`` bounds the norm of the step's gradient, that
    of all tables and dense parameters on all ranks together; ``clip_row_norm`` that of each row's.
    """

    kind: Literal["sgd", "adagrad", "adam", "adam_ar", "adamw", "adagrad_ar", "adagradw", "rowwise_adagrad"] = "adam_ar"
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


class DenseOptimizer(Spec):
    """torch's optimizer of what is not an embedding table."""

    kind: Literal["adam", "sgd"] = "adam"
    learning_rate: float = Field(default=0.001, ge=0.0, allow_inf_nan=False)
    schedule: LearningRateSchedule = LearningRateSchedule()


class Walk(Spec):
    """A random walk over neighbours that returns to its first id with probability ``restart`` at each step."""

    restart: float = Field(ge=0.01, le=1.0, allow_inf_nan=False)


class SSE(Spec):
    """Stochastic Shared Embeddings of one feature (Wu et al., equations 3 and 5): swap probability, graph and ratio.

    In ``JobSpec.sse`` a feature's name is the input side (p_x): its ids are swapped wherever the model looks them up,
    for ``item`` the drawn negatives of bpr too. With ``graph`` (of the dataset) neighbours are ``rho`` times as likely
    as other rows; with ``walk`` a swapped id becomes one that the walk from it visits. ``label`` is the output side
    (p_y): class labels flip (dnn, two_tower), or the items that are the targets are swapped (bpr, where that is
    ``item`` by another name: give one of the two).
    """

    probability: Probability = 0.01
    graph: Name | None = None
    rho: float = Field(default=1.0, ge=1.0, allow_inf_nan=False)
    walk: Walk | None = None


class Regularizers(Spec):
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0)


class Resources(Spec):
    """``memory_bytes_per_worker``: a job whose ranks are predicted to take more is refused (trainer.memory)."""

    num_workers: int = Field(default=1, ge=1, le=1024)
    cpus_per_worker: float = Field(default=1, gt=0, le=1024)
    gpus_per_worker: float = Field(default=0, ge=0, le=16)
    memory_bytes_per_worker: int | None = Field(default=None, gt=0)
    timeout_seconds: float | None = Field(default=None, gt=0)


DEFAULT_METRICS: tuple[Literal["auc", "logloss"], ...] = ("auc", "logloss")


class Split(Spec):
    kind: Literal["random", "per_user_last", "time"] = "random"
    validation: float = Field(default=0.1, ge=0.0, lt=1.0)
    test: float = Field(default=0.1, ge=0.0, lt=1.0)

    @model_validator(mode="after")
    def _leaves_rows(self) -> Split:
        if self.validation + self.test >= 1.0:
            raise ValueError("validation + test must stay below 1, or no row is left to train on")
        return self


class Evaluation(Spec):
    """``metrics`` left out are all that the model has: AUC and logloss; of models of sequences AUC, hit rate and NDCG
    at 10 against 100 negatives, and both among all items (``full``)."""

    split: Split = Split()
    metrics: tuple[
        Literal["auc", "logloss", "gauc", "hit_rate_10", "ndcg_10", "hit_rate_10_full", "ndcg_10_full"], ...
    ] = DEFAULT_METRICS


class Checkpoint(Spec):
    """``asynchronous``: training goes on while a checkpoint is written, from a copy that takes the memory of the rows
    and their state once more."""

    every_steps: int = Field(default=500, ge=1)
    keep_last: int = Field(default=3, ge=1)
    asynchronous: bool = True


class MovingAverage(Spec):
    """z = unit((1 - w) z + w h R); an item whose aligned cosine falls below the limit takes its new vector whole."""

    new_weight: float = Field(default=0.3, gt=0.0, le=1.0)
    reset_below_cosine: float = Field(default=0.65, ge=-1.0, le=1.0)


class Gate(Spec):
    mode: Literal["enforce", "report", "off"] = "enforce"

    @field_validator("mode", mode="before")
    @classmethod
    def _as_text(cls, mode: object) -> object:
        # YAML reads an unquoted off as false.
        return "off" if mode is False else mode


class View(Spec):
    """A view of a collection: ``rff`` maps h to phi of even size ``dim`` (default 2d); ``identity`` serves h."""

    name: Name
    kind: Literal["rff", "identity"] = "rff"
    dim: int | None = Field(default=None, ge=2, le=65536, multiple_of=2)
    sigma: float = Field(default=0.4, ge=1e-6, le=1e6, allow_inf_nan=False)
    seed: int = Field(default=0, ge=0, lt=2**32)
    frequencies: Literal["orthogonal", "gaussian"] = "orthogonal"
    materialized: bool = False


class Expire(Spec):
    """When an item that is carried, because runs do not find it any more, becomes missing: after more publications than
    the limit, or once its own vector is older than so many days; null: no such limit."""

    after_publications: int | None = Field(default=None, ge=1)
    after_days: int | None = Field(default=90, ge=1)


class Publish(Spec):
    collection: Name
    feature: str
    align: bool = True
    ema: MovingAverage | None = MovingAverage()
    gate: Gate = Gate()
    views: tuple[View, ...] = ()
    expire: Expire | None = Expire()


class JobSpec(Spec):
    """One training run. ``batch_size`` is global: ranks share it. Seeds are uint32.

    A step is one batch, whatever ``micro_batches`` says: into how many parts it is cut, of which each is looked up and
    differentiated before the next, to save memory. Their gradients add up, and one update follows.
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
    sharding: dict[
        str, Literal["table_wise", "row_wise", "column_wise", "data_parallel", "table_row_wise", "grid"]
    ] = {}
    evaluation: Evaluation = Evaluation()
    checkpoint: Checkpoint = Checkpoint()
    retries: int = Field(default=2, ge=0, le=100)
    labels: dict[Name, LabelText] = {}
    publish: Publish | None = None

    @model_validator(mode="after")
    def _available(self) -> JobSpec:
        available.refuse(available.job_problems(self))
        return self

    def against(self, dataset: DatasetSpec) -> JobSpec:
        """This job, checked against the dataset it names. Raises ValueError naming each field that does not fit."""
        available.refuse(available.fit_problems(self, dataset))
        return self


# --- reading ---------------------------------------------------------------------------------------------------------

_RULE = re.compile(r"^\s*([A-Za-z_][\w.-]*)\s*(>=|<=|==|!=|>|<)\s*(-?\d+(?:\.\d+)?)\s*$")


def parse_rule(rule: str) -> tuple[str, str, float]:
    """``"rating >= 4"`` -> ("rating", ">=", 4.0). The grammar is column, comparison, number: nothing is evaluated."""
    match = _RULE.match(rule)
    if match is None:
        raise ValueError(f"rule '{rule}' is not COLUMN COMPARISON NUMBER, such as 'rating >= 4'")
    return match[1], match[2], float(match[3])


class SpecError(ValueError):
    """A document that is not a valid spec. ``problems`` holds (field path, message)."""

    def __init__(self, where: str, problems: list[tuple[str, str]]):
        self.where = where
        self.problems = problems
        super().__init__(
            f"{where}: " + "; ".join(f"{field}: {message}" if field else message for field, message in problems)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return SpecError, (self.where, self.problems)


def problems_of(error: ValidationError) -> list[tuple[str, str]]:
    """(field path, message) for each error, in the words shown to users."""
    found = []
    for item in error.errors(include_url=False):
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            message = "no such field: check the spelling"
        found.append((".".join(str(part) for part in item["loc"]), message))
    return found


def parse_dataset(document: Any, where: str = "dataset") -> DatasetSpec:
    return _parse(DatasetSpec, document, where)


def parse_job(document: Any, where: str = "job") -> JobSpec:
    return _parse(JobSpec, document, where)


def load_documents(path: Path | str) -> tuple[DatasetSpec | None, JobSpec | None]:
    """The dataset and the job that a YAML file holds (either may be absent). Raises SpecError, also for bad YAML."""
    where = str(path)
    try:
        documents = [document for document in yaml.safe_load_all(Path(path).read_text("utf-8")) if document is not None]
    except OSError as error:
        raise SpecError(where, [("", f"cannot be read: {error.strerror or error}")]) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(where, [("", f"is not YAML: {error}")]) from None
    dataset: DatasetSpec | None = None
    job: JobSpec | None = None
    for document in documents:
        if not isinstance(document, dict):
            raise SpecError(where, [("", "a spec is a mapping of fields; see examples/")])
        if "model" in document or "spec_version" in document:
            if job is not None:
                raise SpecError(where, [("", "holds two jobs: one per file")])
            job = parse_job(document, where)
        else:
            if dataset is not None:
                raise SpecError(where, [("", "holds two datasets: one per file")])
            dataset = parse_dataset(document, where)
    if dataset is None and job is None:
        raise SpecError(where, [("", "is empty")])
    return dataset, job


SpecType = TypeVar("SpecType", bound=Spec)


def _parse(kind: type[SpecType], document: Any, where: str) -> SpecType:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise SpecError(where, problems_of(error)) from None


def _list(names: Any) -> str:
    return ", ".join(sorted(names))

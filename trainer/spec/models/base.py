"""Base classes of the kinds of models: the fields, traits and size that each declares. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import (
    Field,
    PrivateAttr,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from trainer.spec.base import STORED, May, Removed, Spec, later
from trainer.spec.losses import LOSSES, LossSettings
from trainer.spec.models.size import ModelSize, tower_size
from trainer.spec.problems import FieldProblem, InvalidFieldsError

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec

Size = Annotated[int, Field(ge=1, le=65536)]
Units = Annotated[tuple[Size, ...], May.GROW_ON_WARM_START]
"""Sizes of layers without ReLU between them."""
Layers = Annotated[Units, May.DEEPEN_ON_WARM_START]
"""Sizes of hidden layers, with ReLU."""


class Init(Spec):
    """Initial rows of tables: zeros, or normal numbers with standard deviation ``std``.

    ``hash`` draws them from hash(id, seed), so that an id has the same in every run; ``normal`` by number of the row.
    """

    kind: Literal["zero", "normal", "hash"] = "zero"
    std: float = Field(default=0.01, ge=0.0, allow_inf_nan=False)


OF_PRODUCTS = Init(kind="hash", std=0.1)
"""Initial values of rows that are multiplied with each other: they would never learn if they were zeros."""


if TYPE_CHECKING:
    LossName = str
else:
    LossName = Literal[tuple(LOSSES)]


_REMOVED_TRAITS = {
    "publishes_items": "leave it out: kinds that read sequences or rank all items publish vectors of the feature item",
    "has_dropout": "leave it out: a kind without a place for dropout yields a problem of regularizers.dropout",
    "has_constant_of_loss": "leave it out, and give the field loss without May.DIFFER_ON_WARM_START",
    "learns_products": "say multiplies_rows = 'always'",
    "learns_products_without_numbers": "say multiplies_rows = 'without_numbers'",
}
"""Class variables that earlier versions read -> remedy; a model kind that sets such a variable is refused."""


class ModelSpec(Spec):
    """Base of the kinds of models. ``embedding_dim``: length of an embedding vector; ``init``: its initial values.

    A kind is a subclass, registered in trainer.spec.models.registry; its torch module is registered in
    trainer.models.registry. A field that only other kinds have is refused, and the message names these kinds.
    """

    removed: ClassVar[dict[str, Removed]] = {
        "hard_negatives": Removed("no share of hard negatives improved recall", "leave it out"),
        "negative_window": Removed("only negative_distribution: recent used it", "leave it out", 10_000),
    }

    kind: str
    embedding_dim: int = Field(default=16, ge=1, le=4096)
    init: Annotated[Init | None, May.DIFFER_ON_WARM_START] = None
    loss: Annotated[LossName, May.DIFFER_ON_WARM_START] = "bce"

    losses: ClassVar[tuple[str, ...]] = ("bce",)
    """Valid values of ``loss``. The default ``bce`` is always accepted; if it is not listed, it means the first."""
    reads_numbers: ClassVar[bool] = False
    """True if it reads numeric features (type dense): its module takes ``num_dense``."""
    reads_vectors: ClassVar[bool] = False
    """True if it reads features of type vector; its module then uses RankingModel's ``lookup`` and ``numbers``."""
    reads_pairs: ClassVar[bool] = False
    """True if it reads only the features user and item, even if the dataset has others."""
    has_dense_parameters: ClassVar[bool] = True
    """True if it has parameters other than rows of tables."""
    reads_items: ClassVar[bool] = False
    """True if it reads features of the item table, and so has a vector even for an item without an embedding row."""
    defaults_with_items: ClassVar[Mapping[str, Any]] = {}
    """Defaults of fields if the dataset has an item table and the job names no loss."""
    defaults_of_pairs: ClassVar[Mapping[str, Any]] = {}
    """Settings like ``job_defaults`` if the dataset's rows are users and items alone, and each is a positive."""
    reads_sequences: ClassVar[bool] = False
    """True if it reads each user's items in order, and no other features, and ranks the next item."""
    reads_labels: ClassVar[bool] = False
    """True if it learns several labels of a row, and has a score for each."""
    draws_partner: ClassVar[bool] = False
    """True if each example has an item and a drawn negative item, and both are looked up."""
    keeps_rows_of_lists: ClassVar[bool] = False
    """True if its module gets the embedding row of each id in a list, not their sum or mean."""
    has_both_sides_in_rows: ClassVar[bool] = False
    """True if a row of the item table is an input vector followed by an output vector."""
    multiplies_rows: ClassVar[Literal["never", "without_numbers", "always"]] = "never"
    """Condition under which scores are only products of embedding rows; such rows never learn from zeros."""
    pools: ClassVar[bool] = True
    """True if its lookups give one pooled row for each bag of ids, not a row for each id."""
    ranks_all_items: ClassVar[bool] = False
    """True if its score is a product of a user vector and an item vector."""
    has_user_vectors: ClassVar[bool] = False
    """True if a user's scores are products of one vector with item vectors, so that users can be published."""
    has_dynamic_tables: ClassVar[bool] = False
    """True if it supports dynamic tables, because it reads only the table rows of ids in the batch."""
    determines_vectors: ClassVar[bool] = False
    """True if its loss determines its vectors up to a rotation; not if layers follow, which absorb any linear map."""
    has_distances: ClassVar[bool] = False
    """True if distances between its rows have a meaning, as when scores are products of two rows."""
    adds_features: ClassVar[Literal["any", "own_rows", "none"]] = "any"
    """Features that a warm start can add without changing the scores: ``any``, ``none`` (because the fields are
    normalised together), or ``own_rows``: only features with their own table, because rows enter scores unweighted."""
    counts_columns: ClassVar[str | None] = "its scores depend on the number of columns"
    """Reason why scores change if vectors get columns of zeros; None: scores do not change."""
    job_defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Settings of a job that names no ``model.loss``, for the fields that it leaves out (:func:`with_defaults`)."""
    defaults_of_any_loss: ClassVar[tuple[str, ...]] = ()
    """Fields of ``job_defaults`` that a job takes even if it names a loss."""
    has_context: ClassVar[bool] = False
    """True if items are trained against other parameters than item vectors, such as users' rows."""

    publishes_items: ClassVar[None]
    has_dropout: ClassVar[None]
    has_constant_of_loss: ClassVar[None]
    learns_products: ClassVar[None]
    learns_products_without_numbers: ClassVar[None]

    registry: ClassVar[Mapping[str, type[ModelSpec]]] = {}
    """All kinds, keyed by name, as trainer.spec.models.registry sets them."""

    _of_others: dict[str, Any] = PrivateAttr(default_factory=dict)

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        for name in _REMOVED_TRAITS.keys() & vars(cls).keys():
            raise TypeError(f"{cls.__name__}.{name} was removed: {_REMOVED_TRAITS[name]}")

    @model_validator(mode="wrap")
    @classmethod
    def _sort_out_fields(cls, document: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """Set fields of other kinds aside, so that :meth:`problems` can name those that are set."""
        if not isinstance(document, dict):
            return handler(document)
        others = {name: value for name, value in document.items() if name not in cls.model_fields and kinds_with(name)}
        spec = handler({name: value for name, value in document.items() if name not in others})
        spec._of_others = {name: value for name, value in others.items() if not _says_nothing(name, value)}
        return spec

    @property
    def effective_init(self) -> Init:
        """The init that the job sets, else that of the model kind."""
        return self.init or self.default_init

    @property
    def default_init(self) -> Init:
        """Zero: CTR towers in the AdamAR paper start so (Li and Lyu, Adaptive Regularization)."""
        return Init()

    @property
    def num_hidden(self) -> int:
        """Number of hidden layers of its tower."""
        return 0

    @property
    def num_negatives(self) -> int:
        """Number of negatives drawn for each target."""
        return 1

    @property
    def item_bias_weight(self) -> float | None:
        """Factor with which the column after an item's vector is added to its scores; None: it is not."""
        return None

    @property
    def scores_unit_items(self) -> bool:
        """True if item vectors are scaled to length 1 before they are multiplied with a user's."""
        return bool(getattr(self, "normalize", False))

    @property
    def history_length(self) -> int:
        """Number of a user's last items that a sequence model reads to rank the next item; 0 for other models."""
        return 0

    @property
    def is_softmax_of_batch(self) -> bool:
        """True if its loss is a softmax over the items of the whole batch."""
        return False

    @property
    def mixes_batch(self) -> bool:
        """True if a sample's score depends on other samples of the batch."""
        return False

    def reads_in_order(self, num_vectors: int) -> bool:
        """Return True if, with the same weights, the order of ``num_vectors`` features' vectors affects the scores."""
        return False

    @property
    def wider_vectors_problem(self) -> str | None:
        """Reason why scores change if vectors get columns of zeros, for this spec; None: scores do not change."""
        return self.counts_columns

    def learns_from_padding(self, has_numbers: bool) -> bool:
        """Return True if columns that start as zeros in all tables are trained nevertheless.

        ``has_numbers``: True if the model reads numeric features.
        """
        return self.multiplies_rows == "never"

    def looked_up(self, dataset: DatasetSpec) -> list[str]:
        """Return the names of features whose ids it looks up, of the dataset's rows and of its item table."""
        ids = [name for name, feature in dataset.joined_features.items() if feature.has_ids]
        only = ("item",) if self.reads_sequences else ("user", "item") if self.reads_pairs else tuple(ids)
        return [name for name in ids if name in only]

    def table_columns(self, table: str) -> int:
        """Return the number of columns of a table: ``embedding_dim``, plus columns that the kind adds to the vector."""
        return self.embedding_dim

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        """Return the size of the dense part of the model.

        Args:
            num_features: Number of features of ids.
            num_dense: Number of numeric features.
            num_lists: Number of lists that have a target (din).
            list_ids: Mean number of ids in all these lists of an example.
        """
        return ModelSize()

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        """Yield a problem with its remedy for each setting of the job that the model does not read or cannot use."""
        for name in self._of_others:
            if name == "hidden":
                yield FieldProblem("model.hidden", f"{self.kind} has no hidden layers", "leave it out")
            else:
                yield FieldProblem(
                    f"model.{name}", f"{self.kind} has none", f"use {' or '.join(kinds_with(name))}, or leave it out"
                )
        if self.effective_init.kind == "zero" and self.multiplies_rows == "always":
            why = f"zero gives {self.kind} no gradient, because all its scores are products"
            yield FieldProblem("model.init.kind", why, "use hash or normal")

    def inputs_in_words(self, dataset: DatasetSpec) -> str | None:
        """Return a sentence that names the features of each tower; None for a model without two towers."""
        return None

    def collapse_remedy(self, dataset: DatasetSpec) -> str:
        """Return the remedy for published vectors that lie along few directions."""
        if self.determines_vectors:
            return "train for more epochs, or with a larger optimizer.learning_rate"
        return "train for more epochs, or with a kind whose loss determines the vectors (bpr, two_tower)"

    def defaults_with(self, job: JobSpec, dataset: DatasetSpec) -> Mapping[str, Any]:
        """Return the settings that the dataset decides, for each place that the job leaves out."""
        if "loss" in self.model_fields_set:
            return {}
        is_pairs = (
            dataset.items is None
            and dataset.has_positives_alone
            and len(dataset.features) == 2
            and not job.dataset.one_pass
        )
        return self.defaults_of_pairs if is_pairs else {}

    def fit_problems(self, job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
        """Yield a problem with its remedy for each conflict between the job and the dataset."""
        features = dataset.features
        if dataset.items is not None and not self.reads_items:
            yield FieldProblem(
                "model.kind",
                f"{self.kind} reads no item table, and dataset '{dataset.name}' has one",
                f"use {' or '.join(kinds_that('reads_items'))}, or a dataset whose features join the file",
            )
        if not (self.reads_pairs or self.reads_sequences):
            for trait, unread, what in (
                ("reads_numbers", "dense", "numeric features, and '{}' is dense"),
                ("reads_vectors", "vector", "vectors, and '{}' is one"),
            ):
                remedy = f"use one of {', '.join(kinds_that(trait))}, or leave the feature out"
                for name, feature in features.items():
                    if feature.type == unread and not getattr(self, trait):
                        yield FieldProblem("model.kind", f"{self.kind} reads no {what.format(name)}", remedy)
        if self.multiplies_rows == "without_numbers" and not any(one.gives_numbers for one in features.values()):
            if self.effective_init.kind == "zero":
                yield FieldProblem(
                    "model.init.kind",
                    (
                        f"zero gives {self.kind} no gradient if no feature is dense, because its vectors "
                        "only occur in products of rows"
                    ),
                    "use hash or normal, or leave it out",
                )
            if len(features) < 2:
                names = ", ".join(sorted(features))
                yield FieldProblem(
                    "model.kind",
                    f"{self.kind} multiplies pairs of features, but there is only one ({names})",
                    "use dnn",
                )


def kinds_that(trait: str) -> list[str]:
    """Return the model kinds that have a trait, such as ``reads_vectors``."""
    return [kind for kind, spec in ModelSpec.registry.items() if getattr(spec, trait)]


def with_defaults(document: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a job's document with the ``job_defaults`` of its kind of model.

    With a ``model.loss`` only ``defaults_of_any_loss`` are filled in. What the document gives stands. A part with a
    ``kind`` of its own, such as an optimizer, gets no default of another kind. Jobs over a stream or in one pass get
    none at all: the defaults take several epochs.
    """
    model, dataset = document.get("model"), document.get("dataset")
    if not isinstance(model, Mapping):
        return document
    if isinstance(dataset, Mapping) and (dataset.get("one_pass") or dataset.get("follow")):
        return document
    kind = ModelSpec.registry.get(str(model.get("kind")))
    if kind is None:
        return document
    names = kind.defaults_of_any_loss if "loss" in model else kind.job_defaults
    return filled_in(document, {name: kind.job_defaults[name] for name in names})


def filled_in(document: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a job's document with ``defaults`` in the places that it leaves out.

    Without validation rows, no default of early stopping has rows to watch.
    """
    if not defaults:
        return document
    merged = dict(_merged(defaults, document))
    evaluation = merged.get("evaluation")
    split = evaluation.get("split") if isinstance(evaluation, Mapping) else None
    given, watches_nothing = (
        document.get("regularizers", {}),
        isinstance(split, Mapping) and split.get("validation") == 0,
    )
    if watches_nothing and "regularizers" in defaults and isinstance(given, Mapping) and "early_stopping" not in given:
        merged["regularizers"] = {**merged["regularizers"], "early_stopping": None}
    return merged


def _merged(defaults: Mapping[str, Any], given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``given`` and, for what it leaves out, ``defaults``; both are nested."""
    if "kind" in given and given["kind"] != defaults.get("kind", given["kind"]):
        return given
    merged = dict(defaults) | dict(given)
    for name in defaults.keys() & given.keys():
        if isinstance(defaults[name], Mapping) and isinstance(given[name], Mapping):
            merged[name] = _merged(defaults[name], given[name])
    return merged


def kinds_with(field: str) -> list[str]:
    return [kind for kind, spec in ModelSpec.registry.items() if field in spec.model_fields]


def default_of(field: str) -> Any:
    return ModelSpec.registry[kinds_with(field)[0]].model_fields[field].default


def _says_nothing(name: str, value: Any) -> bool:
    """Return True if a field that this kind lacks has its default: old stored specs have the fields of all kinds."""
    value = tuple(value) if isinstance(value, list) else value
    return bool(value == default_of(name)) or (name == "hidden" and value == ())


class TowerSpec(ModelSpec):
    """A model with a tower of ``hidden`` layers.

    ``residual``: a shortcut around each hidden layer. ``batch_norm``: batch normalisation in each hidden layer, with
    the moments of the global batch, or of each micro-batch if a step has several.
    """

    hidden: Layers = (128, 64)
    residual: bool = later(False)
    batch_norm: bool = later(False)

    @property
    def num_hidden(self) -> int:
        return len(self.hidden)

    @property
    def mixes_batch(self) -> bool:
        return self.batch_norm

    @property
    def default_init(self) -> Init:
        # From zeros batch normalisation makes every hidden unit 0, where ReLU has no gradient.
        return Init(kind="hash", std=0.02) if self.batch_norm else super().default_init

    def tower(self, inputs: int, *ends: int, logits: bool = True) -> ModelSize:
        """Return the size of the tower on ``inputs`` inputs, with layers of sizes ``ends`` after the hidden layers."""
        sizes = [inputs, *self.hidden, *ends]
        return tower_size(sizes, residual=self.residual, batch_norm=self.batch_norm, logits=logits)

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        if not self.hidden:
            for name in ("residual", "batch_norm"):
                if getattr(self, name):
                    yield FieldProblem(
                        f"model.{name}",
                        "it needs hidden layers, and there are none",
                        "set model.hidden, or leave it out",
                    )

    def fit_problems(self, job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
        yield from super().fit_problems(job, dataset)
        has_numbers = any(feature.gives_numbers for feature in dataset.features.values())
        if self.batch_norm and self.effective_init.kind == "zero" and not (self.residual or has_numbers):
            why = "zero with batch_norm gives a tower no gradient if no feature is dense and there is no residual"
            yield FieldProblem("model.init.kind", why, "use hash or normal, or leave it out")


class PointwiseSpec(ModelSpec, LossSettings):
    """Base of models that can be trained by any loss of a row's score and label; it has these losses' settings."""

    losses = tuple(name for name, loss in LOSSES.items() if loss.of_labels)
    reads_numbers = True
    has_dynamic_tables = True
    has_context = True
    counts_columns: ClassVar[str | None] = None


class ClickSpec(TowerSpec, PointwiseSpec):
    """A CTR model with a tower over all features."""

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        return self.tower(num_features * self.embedding_dim + num_dense, 1)


class FirstOrderSpec(ClickSpec):
    """A CTR model with a weight for each id in addition to its vector: one more column in every table."""

    adds_features = "own_rows"

    def table_columns(self, table: str) -> int:
        return self.embedding_dim + 1

    def size(self, num_features: int, *, num_dense: int = 0, num_lists: int = 0, list_ids: float = 0.0) -> ModelSize:
        return super().size(num_features, num_dense=num_dense) + ModelSize(parameters=num_dense)


class DrawingSpec(ModelSpec):
    """A model that draws new negatives in each epoch.

    ``negative_distribution``: with ``uniform`` all items of training are equally likely; with ``popularity`` an item's
    probability is proportional to its number of examples to the ``negative_power``. With ``in_batch`` negatives are the
    items of other examples of the global batch. All kinds but item2vec draw no item that the user had in training.
    """

    negative_distribution: Annotated[Literal["uniform", "popularity", "in_batch"] | None, May.DIFFER_ON_WARM_START] = (
        later(None)
    )
    negative_power: Annotated[float, May.DIFFER_ON_WARM_START] = later(0.75, ge=0.0, le=4.0, allow_inf_nan=False)

    default_sampling: ClassVar[str] = "uniform"

    @property
    def sampling(self) -> str:
        """The distribution that the job sets, else the one of the model's paper."""
        return self.negative_distribution or self.default_sampling

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        if self.sampling != "popularity" and self.negative_power != type(self).model_fields["negative_power"].default:
            remedy = "set negative_distribution: popularity, or leave it out"
            yield FieldProblem("model.negative_power", f"{self.sampling} has none", remedy)

    @field_validator("negative_distribution", mode="before")
    @classmethod
    def _not_recent(cls, distribution: object, info: ValidationInfo) -> object:
        if distribution != "recent":
            return distribution
        if (info.context or {}).get(STORED):
            return "popularity"
        why = "recent was removed: it was no better than popularity"
        raise InvalidFieldsError([FieldProblem("", why, "use popularity with negative_power: 1")])


def pair_fit_problems(kind: str, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield a problem for each reason why a model cannot read one user and one item from each row."""
    names = ", ".join(sorted(dataset.features))
    for feature in ("user", "item"):
        if feature not in dataset.features:
            yield FieldProblem("model.kind", f"{kind} needs a feature named '{feature}' (there are {names})")

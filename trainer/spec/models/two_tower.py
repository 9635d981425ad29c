"""Two towers: one over user and context; the other is the item's row, or a tower over that row and item features."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import SerializerFunctionWrapHandler, model_serializer

from trainer.spec.base import May, Positive, later
from trainer.spec.evaluation import ranking_parts
from trainer.spec.models.base import OF_PRODUCTS, Init, TowerSpec, pair_fit_problems
from trainer.spec.models.pairs import PartnerSpec
from trainer.spec.models.size import ModelSize
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec, Feature
    from trainer.spec.job import JobSpec


class TwoTowerSpec(TowerSpec):
    """Two towers. ``loss``: bce or mse of a label, or sampled_softmax over the items of the batch.

    With an item table, a job that names no loss has ``normalize``, ``temperature: 0.2``, no hidden layers and ``init:
    {kind: hash, std: 0.5}``; its loss is ``bce`` for ``label.column``, and otherwise ``sampled_softmax``.

    ``normalize``: outputs of both towers are scaled to length 1, and scores have a bias of the item. ``temperature``:
    number that scores are divided by. ``item_id_dropout``: the share of training examples whose item is looked up as
    the unknown id. The item tower so learns to score without the id (Volkovs, Yu and Poutanen, DropoutNet, NeurIPS
    2017). The setting needs an item table.
    """

    kind: Literal["two_tower"]
    reads_vectors = True

    normalize: bool = later(False)
    temperature: Positive = later(1.0)
    item_id_dropout: Annotated[float, May.DIFFER_ON_WARM_START] = later(0.0, ge=0.0, lt=1.0, allow_inf_nan=False)

    losses = ("bce", "mse", "sampled_softmax")
    # With hidden layers all outputs of a tower share a direction: published vectors would lie along few directions.
    # So they do if standardized numbers of items (deviation 1) drown the rows of ids beside them.
    defaults_with_items = MappingProxyType(
        {"normalize": True, "temperature": 0.2, "hidden": (), "init": {"kind": "hash", "std": 0.5}}
    )
    # Chosen on validation rows: docs/reports/published_tables.md.
    defaults_of_pairs = MappingProxyType(
        {
            **PartnerSpec.job_defaults,
            "model": {
                "embedding_dim": 64,
                "init": {"kind": "hash", "std": 0.01},
                "loss": "sampled_softmax",
                "normalize": True,
                "temperature": 0.1,
                "hidden": (),
            },
            "optimizer": {"kind": "adam", "learning_rate": 0.005, "moments": "dense"},
        }
    )
    determines_vectors = True
    reads_numbers = True
    reads_items = True
    ranks_all_items = True
    has_user_vectors = True
    has_dynamic_tables = True
    has_context = True
    has_distances = True
    counts_columns = None

    def defaults_with(self, job: JobSpec, dataset: DatasetSpec) -> Mapping[str, Any]:
        if dataset.items is None or "loss" in self.model_fields_set:
            return super().defaults_with(job, dataset)
        # A column of 0 and 1 has the items that were shown in vain. Rows of ratings have items that users chose.
        has_shown = dataset.label is not None and dataset.label.column is not None
        return {"model": {"loss": "bce" if has_shown else "sampled_softmax", **self.defaults_with_items}}

    @model_serializer(mode="wrap")
    def _with_settings_that_the_dataset_decides(self, serialize: SerializerFunctionWrapHandler) -> Any:
        """Keep ``later`` settings that a job names with their usual value: a dataset may decide another one."""
        document = serialize(self)
        if "loss" not in self.model_fields_set:
            named = self.model_fields_set & {"normalize", "temperature"}
            document |= {name: getattr(self, name) for name in sorted(named)}
        return document

    @property
    def default_init(self) -> Init:
        return OF_PRODUCTS

    @property
    def item_bias_weight(self) -> float | None:
        return 1.0 / self.temperature if self.normalize else None

    def table_columns(self, table: str) -> int:
        return self.embedding_dim + (table == "item" and self.normalize)

    def size(
        self,
        num_features: int,
        *,
        num_dense: int = 0,
        num_lists: int = 0,
        list_ids: float = 0.0,
        item_fields: int = 0,
        item_numbers: int = 0,
    ) -> ModelSize:
        """Return the size of the dense part.

        ``item_fields``, ``item_numbers``: numbers of id features and of numeric features of the item table.
        """
        dim = self.embedding_dim
        context = (num_features - 1 - item_fields) * dim + num_dense - item_numbers
        size = self.tower(context, dim) + ModelSize(1, dim, 0, 0, dim)
        if not (item_fields or item_numbers):
            return size
        return size + self.tower((1 + item_fields) * dim + item_numbers, dim)

    @property
    def wider_vectors_problem(self) -> str | None:
        return "normalize scales vectors by all their columns" if self.normalize else self.counts_columns

    def inputs_in_words(self, dataset: DatasetSpec) -> str | None:
        item = ["item", *(() if dataset.items is None else dataset.items.features)]
        user = [name for name in dataset.features if name != "item"]
        of_item = f"the item tower {', '.join(item)}" if len(item) > 1 else "an item is the row of its id"
        towers = f"the user tower reads {', '.join(user)}; {of_item}"
        if not self.is_softmax_of_batch or dataset.has_positives_alone:
            return towers
        judged = "judge the vectors by recall_20_full or a probe, as AUC of the label may stay near .5"
        return f"{towers}. The loss learns which items users take: {judged}"

    def collapse_remedy(self, dataset: DatasetSpec) -> str:
        if dataset.items is None:
            return super().collapse_remedy(dataset)
        raw = [
            f"items.features.{name}.transform: standardize"
            for name, feature in dataset.items.features.items()
            if feature.type == "dense" and feature.transform == "none"
        ]
        own = self.model_dump()
        better = [
            f"model.{name}: {_in_yaml(value)}"
            for name, value in self.defaults_with_items.items()
            if own.get(name) != value
        ]
        if raw or better:
            return f"set {', '.join([*raw, *better])}"
        return "divide optimizer.learning_rate by three, and double epochs"

    @property
    def is_softmax_of_batch(self) -> bool:
        return self.loss == "sampled_softmax"

    def problems(self, job: JobSpec) -> Iterator[FieldProblem]:
        yield from super().problems(job)
        if self.loss != "bce" and "label" in job.sse and job.sse["label"].probability:
            yield FieldProblem("sse.label", f"{self.loss} has no class labels to flip", "leave it out, or use loss bce")
        if self.is_softmax_of_batch and job.batch_size == 1:
            why = "sampled_softmax takes its negatives from the batch, and a batch of one row has none"
            yield FieldProblem("batch_size", why, "use a larger one")

    def fit_problems(self, job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
        yield from pair_fit_problems(self.kind, dataset)
        item = dataset.features.get("item")
        if self.normalize and item is not None and item.shares is not None:
            why = f"with normalize the item's table has a column of biases, and that of '{item.shares}' has none"
            yield FieldProblem("features.item.shares", why, f"let '{item.shares}' share the table of item instead")
        joined = [name for name, one in dataset.features.items() if one.join is not None and one.join.on == "item"]
        if joined:
            yield FieldProblem(
                "model.kind",
                f"features of the item ({', '.join(joined)}) by join are not available yet in two_tower",
                "name the file in items of the dataset",
            )
        yield from super().fit_problems(job, dataset)
        others = sorted(name for name, one in dataset.features.items() if not belongs_to_pair(name, one, dataset))
        if others and any(ranking_parts(name) is not None for name in job.evaluation.metrics):
            yield FieldProblem(
                "evaluation.metrics",
                "two_tower ranks all items for a user only where its features are user, item, and joins on the user",
                f"leave {', '.join(others)} out of the dataset, or use metrics without ranking",
            )
        if dataset.items is None:
            if self.item_id_dropout != type(self).model_fields["item_id_dropout"].default:
                why = f"dataset '{dataset.name}' has no item table, and the id is all that is known of an item"
                yield FieldProblem("model.item_id_dropout", why, "give the dataset items, or leave it out")
        else:
            yield from _item_table_problems(job)


def belongs_to_pair(name: str, feature: Feature, dataset: DatasetSpec) -> bool:
    """Return True if a feature is the item, or the same in all rows of a user."""
    if name in ("user", "item"):
        return True
    user = dataset.features.get("user")
    return feature.join is not None and user is not None and feature.join.on in ("user", user.column)


def _item_table_problems(job: JobSpec) -> Iterator[FieldProblem]:
    """Yield a problem for each setting about items' rows: vectors of an item tower are its outputs, not rows."""
    if job.publish is not None:
        for name in ("anchor", "frozen_context"):
            if getattr(job.publish, name) is not None:
                yield FieldProblem(
                    f"publish.{name}", "with an item table vectors are a tower's outputs, not rows", "leave it out"
                )
    for name, table in job.tables.items():
        if table.capacity is not None:
            yield FieldProblem(
                f"tables.{name}.capacity", "ids of an item table have no dynamic rows yet", "leave it out"
            )


def _in_yaml(value: Any) -> str:
    """Return a default as a spec has it: ``[]``, ``true`` or ``{kind: hash, std: 0.5}``."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {part}" for name, part in value.items()) + "}"
    return "[]" if value == () else str(value).lower()

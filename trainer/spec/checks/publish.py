"""Checks for jobs in which ``publish.anchor``, ``frozen_context`` or ``views`` have no meaning. Torch-free.

A part of trainer.spec.checks.supported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from embeddings.optim.registry import KINDS
from embeddings.rff.registry import feature_map
from trainer.spec.models.base import kinds_that
from trainer.spec.models.two_tower import belongs_to_pair
from trainer.spec.problems import FieldProblem

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec
    from trainer.spec.publish import View


def publish_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield settings of ``publish`` that the job's model, optimizer, start or regularizers cannot use."""
    target = None if spec.publish is None else spec.publish.collection
    if spec.init_from is not None and spec.init_from.held == "go_on" and spec.init_from.collection != target:
        yield FieldProblem(
            "init_from.held",
            f"the job publishes to {f'{target!r}' if target else 'no collection'}, but continues from versions held in "
            f"'{spec.init_from.collection}'",
            "name one collection in init_from and publish, or use skip",
        )
    if spec.publish is None:
        return
    if spec.publish.sink_wait_seconds is not None and not spec.publish.sinks:
        yield FieldProblem(
            "publish.sink_wait_seconds", "the job names no sink", "name some in publish.sinks, or leave it out"
        )
    yield from _view_problems(spec.publish.views, spec.model.embedding_dim)
    if spec.publish.users is not None:
        yield from _user_problems(spec)
    if not spec.model.determines_vectors and spec.model.effective_init.kind != "hash":
        yield FieldProblem(
            "model.init",
            f"the loss of {spec.model.kind} does not determine its vectors: other initial values give other vectors",
            "set model.init to {kind: hash, std: 0.1}: an id then starts alike in all jobs of one seed",
        )
    swapped = sorted(name for name, sse in spec.sse.items() if sse.probability)
    if spec.publish.anchor is not None and {spec.publish.feature, "label"} & set(swapped):
        yield FieldProblem(
            "publish.anchor",
            "sse would pull rows towards those of other items",
            f"leave sse of '{spec.publish.feature}' and 'label' out, or the anchor",
        )
    if spec.publish.frozen_context is None:
        return
    where, kind = "publish.frozen_context", spec.model.kind
    if not spec.model.has_context:
        yield FieldProblem(
            where,
            f"{kind} looks its items up on both sides, so no context is left to freeze",
            "use publish.anchor",
        )
    if spec.init_from is None:
        yield FieldProblem(where, "the context comes from a parent", "name the parent in init_from")
    if swapped:
        yield FieldProblem(
            where, f"sse of {', '.join(swapped)} would change frozen rows through swapped ids", "leave one of them out"
        )
    if spec.regularizers.meda:
        yield FieldProblem(where, "regularizers.meda would reset frozen rows at each epoch", "leave one of them out")
    if spec.optimizer.first_touch == "literal":
        yield FieldProblem(where, "with optimizer.first_touch literal frozen rows would decay", "use keep")
    if spec.model.has_both_sides_in_rows and KINDS[spec.optimizer.kind].takes("first_touch"):
        yield FieldProblem(
            where,
            f"a row of {kind} holds both sides, and {spec.optimizer.kind} decays it as a whole",
            "use optimizer.kind adam, adagrad or sgd",
        )
    if spec.model.mixes_batch:
        yield FieldProblem(
            where, "the moments of model.batch_norm follow the data, frozen or not", "leave one of them out"
        )


def _user_problems(spec: JobSpec) -> Iterator[FieldProblem]:
    """Yield the reasons why a job has no users to publish, whatever its dataset."""
    assert spec.publish is not None
    assert spec.publish.users is not None
    if not spec.model.has_user_vectors:
        kinds = ", ".join(kinds_that("has_user_vectors"))
        yield FieldProblem(
            "publish.users", f"scores of {spec.model.kind} are no products with a user's vector", f"use one of {kinds}"
        )
    if spec.publish.users.feature != "user":
        yield FieldProblem("publish.users.feature", f"users are the feature 'user' of {spec.model.kind}", "use user")
    if spec.dataset.one_pass:
        yield FieldProblem(
            "publish.users", "a one-pass job keeps no rows of its users", "leave it out, or dataset.one_pass"
        )


def _view_problems(views: Sequence[View], dim: int) -> Iterator[FieldProblem]:
    """Yield a problem for each view that vectors of ``dim`` columns do not allow, before the job is trained."""
    names = [view.name for view in views]
    for number, view in enumerate(views):
        where = f"publish.views.{number}"
        if view.name in names[:number]:
            yield FieldProblem(f"{where}.name", f"'{view.name}' is the name of two views", "name one of them otherwise")
        try:
            feature_map(view.kind).define(
                dim, dim=view.dim, sigma=view.sigma, seed=view.seed, frequencies=view.frequencies
            )
        except ValueError as error:
            yield FieldProblem(where, str(error), "leave dim out, or change the kind")
        if view.materialized and feature_map(view.kind).reads_items:
            why = f"vectors of kind {view.kind} are computed at fetch, from the version's own anchors"
            yield FieldProblem(f"{where}.materialized", why, "leave it out")


def publish_fit_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    if job.publish is None or job.publish.feature not in dataset.features:
        return
    items = job.publish.feature
    if job.publish.users is not None and not (job.model.reads_pairs or job.model.reads_sequences):
        yield from _user_fit_problems(dataset)
    if dataset.features[items].type not in ("id", "id_list"):
        yield FieldProblem(
            "publish.feature", f"'{items}' has no ids whose rows could be published", "name a feature that has ids"
        )
    if job.publish.frozen_context is not None and not (job.model.reads_pairs or job.model.reads_sequences):
        yield from _frozen_context_problems(items, dataset)
    if job.publish.anchor is not None and dataset.features[items].type != "id":
        yield FieldProblem(
            "publish.anchor", f"'{items}' has no single ids, so no row belongs to one item", "use type id"
        )
    if job.publish.anchor is not None:
        table = dataset.features[items].shares or items
        for name, feature in dataset.features.items():
            if name != items and (feature.shares or name) == table and name in job.sse and job.sse[name].probability:
                yield FieldProblem(
                    "publish.anchor",
                    f"sse of '{name}', which reads the table of '{items}', would pull rows to other items' rows",
                    f"leave sse of '{name}' out, or the anchor",
                )


def _user_fit_problems(dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield the features that differ between rows of a user, or that are no ids: the user has no one vector."""
    for name in ("user", "item"):
        if name in dataset.features and dataset.features[name].type != "id":
            what = f"'{name}' is {dataset.features[name].type}, and each row needs one {name}"
            yield FieldProblem("publish.users", what, "use type id, or leave users out")
    for name, feature in dataset.features.items():
        if name not in ("user", "item") and not (feature.has_ids and belongs_to_pair(name, feature, dataset)):
            yield FieldProblem(
                "publish.users",
                f"a user's vector depends on '{name}', and only ids that join on the user are the same in all its rows",
                f"leave {name} out of the dataset, or users out",
            )


def _frozen_context_problems(items: str, dataset: DatasetSpec) -> Iterator[FieldProblem]:
    """Yield the features whose rows cannot be frozen while those of ``items`` are trained."""
    table = dataset.features[items].shares or items
    for name, feature in dataset.features.items():
        if name != items and (feature.shares or name) == table:
            yield FieldProblem(
                "publish.frozen_context",
                f"'{name}' reads rows of '{items}', which are trained",
                "give it a table of its own",
            )
        if feature.is_list and feature.pooling == "mean":
            yield FieldProblem(
                "publish.frozen_context",
                f"a mean over '{name}' mixes frozen and trained rows",
                "use pooling sum, or the anchor",
            )

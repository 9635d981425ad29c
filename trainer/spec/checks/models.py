"""Which models there are, what each of them reads of a job, and what has no meaning for one: a part of
trainer.spec.checks.supported. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.spec.dataset import DatasetSpec
    from trainer.spec.job import JobSpec
    from trainer.spec.model import Model

PIECE_MODELS = ("sasrec", "gru4rec")
"""Models of sequences that read pieces of so many items (``length``), and predict what comes next at each of them."""
SEQUENCE_MODELS = ("item2vec", *PIECE_MODELS)
"""Models of users' items in order: they read the features user and item alone, and rank what comes next."""
PAIR_MODELS = ("bpr", "mf")
"""Models that read the features user and item alone, whatever else a dataset has."""
FIRST_ORDER_MODELS = ("fm", "wide_deep", "deepfm", "xdeepfm")
"""Models with a weight for each id beside its vector: one more column in every table."""
_CLICK_TOWERS = ("dnn", "wide_deep", "deepfm", "xdeepfm", "dcnv2", "dlrm", "wukong", "autoint", "finalmlp", "din")
DENSE_MODELS = ("fm", *_CLICK_TOWERS)
"""The CTR models. They read numeric features (type dense): they take ``num_dense`` (trainer.models.base)."""
TOWER_MODELS = (*_CLICK_TOWERS, "two_tower")
"""Models with a tower, of which ``hidden`` are the layers."""
MODELS = (*DENSE_MODELS, "two_tower", *PAIR_MODELS, *SEQUENCE_MODELS)
PRODUCT_MODELS = (*PAIR_MODELS, *SEQUENCE_MODELS)
"""Models whose scores are products of rows: from rows of zeros they never learn."""
ROW_PRODUCT_MODELS = ("dlrm", "fm")
"""Models whose vectors are in products with each other alone, unless there are numeric features."""
UNPOOLED_MODELS = ("din", *SEQUENCE_MODELS)
"""Models that take a row for each id, not one for each bag."""
PUBLISHING_MODELS = ("two_tower", *PAIR_MODELS, *SEQUENCE_MODELS)
_READ_BY = {
    "window": ("item2vec",),
    "negatives": SEQUENCE_MODELS,
    **dict.fromkeys(("residual", "batch_norm"), TOWER_MODELS),
    **dict.fromkeys(("negative_distribution", "negative_power"), ("bpr", *SEQUENCE_MODELS)),
    "length": PIECE_MODELS,
    **dict.fromkeys(("blocks", "heads"), ("sasrec",)),
    "gru_layers": ("gru4rec",),
    **dict.fromkeys(("structure", "cross_layers", "low_rank"), ("dcnv2",)),
    "biases": ("mf",),
    "cin_layers": ("xdeepfm",),
    **dict.fromkeys(("interaction_layers", "fm_vectors", "linear_vectors", "fm_rank", "fm_hidden"), ("wukong",)),
    **dict.fromkeys(("attention_hidden", "attention_activation"), ("din",)),
    **dict.fromkeys(("attention_layers", "attention_heads", "attention_units"), ("autoint",)),
    **dict.fromkeys(("second_hidden", "gate_hidden", "first_gate", "second_gate", "fusion_heads"), ("finalmlp",)),
}
"""Fields of ``model``, and the kinds that read them; ``loss`` is in trainer.spec.checks.evaluation."""
_UNPOOLED_SHARDINGS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def model_problems(spec: JobSpec) -> Iterator[str]:
    """What is set of the model that its kind has no use for, or cannot learn from."""
    model = spec.model
    kind, fields = model.kind, type(model).model_fields
    if kind not in MODELS:
        yield f"model.kind: {kind} is not available yet: use one of {', '.join(MODELS)}"
    if kind not in TOWER_MODELS and model.hidden not in ((), fields["hidden"].default):
        yield f"model.hidden: {kind} has no hidden layers: leave it out"
    for name, kinds in _READ_BY.items():
        if kind not in kinds and getattr(model, name) != fields[name].default:
            yield f"model.{name}: {kind} has none: use {' or '.join(kinds)}, or leave it out"
    if kind in TOWER_MODELS and not model.hidden:
        for name in ("residual", "batch_norm"):
            if getattr(model, name):
                yield f"model.{name}: it is of hidden layers, and there are none: set model.hidden, or leave it out"
    if model.negative_power != fields["negative_power"].default and model.sampling != "popularity":
        yield f"model.negative_power: {model.sampling} has none: set negative_distribution: popularity, or leave it out"
    if kind in PIECE_MODELS and model.loss == "sampled_softmax" and model.sampling != "uniform":
        yield (
            f"model.negative_distribution: sampled_softmax of {kind} counts on uniform draws, not {model.sampling}: "
            "use uniform, or loss bce"
        )
    if kind == "sasrec" and model.embedding_dim % model.heads:
        yield f"model.heads: {model.heads} heads do not divide embedding_dim {model.embedding_dim}: use a divisor"
    if kind == "wukong" and model.embedding_dim < 2:
        yield "model.embedding_dim: wukong normalises each vector, and of one column nothing is left: use 2 or more"
    if kind == "finalmlp":
        yield from _stream_problems(model)
    if model.effective_init.kind == "zero" and kind in PRODUCT_MODELS:
        yield f"model.init.kind: zero gives {kind} no gradient, all its scores being products: use hash or normal"
    if kind == "mf" and model.loss == "mse" and "label" in spec.sse and spec.sse["label"].probability:
        yield "sse.label.probability: mse is of numbers, not of classes that flip: use loss bce, or leave it out"
    if kind in UNPOOLED_MODELS:
        for table, sharding in spec.sharding.items():
            if sharding not in _UNPOOLED_SHARDINGS:
                yield (
                    f"sharding.{table}: {sharding} is of pooled rows, and {kind} takes each row by itself: use "
                    f"{', '.join(_UNPOOLED_SHARDINGS)}"
                )


def _stream_problems(model: Model) -> Iterator[str]:
    if not model.hidden:
        yield "model.hidden: finalmlp fuses the hidden layers of two streams: give at least one"
    for name in ("hidden", "second_hidden"):
        sizes = getattr(model, name)
        if sizes and sizes[-1] % model.fusion_heads:
            yield (
                f"model.fusion_heads: {model.fusion_heads} heads do not divide the last of {name}, {sizes[-1]}: use a "
                "divisor"
            )


def model_fit_problems(job: JobSpec, dataset: DatasetSpec) -> Iterator[str]:
    """What of the model does not fit the dataset."""
    kind, features = job.model.kind, dataset.features
    names = ", ".join(sorted(features))
    if kind in PUBLISHING_MODELS:
        for feature in ("user", "item"):
            if feature not in features:
                yield f"model.kind: {kind} needs a feature named '{feature}' (there are {names})"
        joined = [name for name, feature in features.items() if feature.join is not None and feature.join.on == "item"]
        if kind == "two_tower" and joined:
            yield f"model.kind: item-side features ({', '.join(joined)}) in two_tower are not available yet"
    if kind in PAIR_MODELS:
        for name in ("user", "item"):
            if name in features and features[name].type != "id":
                yield f"features.{name}.type: {kind} takes one {name} for each row, not {features[name].type}: use id"
    if kind in SEQUENCE_MODELS and dataset.ordering is None:
        yield f"model.kind: {kind} needs order or timestamp in dataset '{dataset.name}'"
    if kind == "din" and not _histories(dataset):
        yield (
            f"model.kind: din needs a list of ids that shares the table of a single id, such as a history with shares: "
            f"item (there are {names})"
        )
    if kind not in (*DENSE_MODELS, *PAIR_MODELS, *SEQUENCE_MODELS):
        for name, described in features.items():
            if described.type == "dense":
                yield (
                    f"model.kind: {kind} reads no numeric features, and '{name}' is dense: use one of "
                    f"{', '.join(DENSE_MODELS)}, or leave the feature out"
                )
    if kind == "din":
        for name, described in features.items():
            if described.weights is not None:
                yield f"features.{name}.weights: din weighs lists itself: leave them out, or use another model"
    for field in ("first_gate", "second_gate"):
        for name in getattr(job.model, field):
            if name not in features:
                yield f"model.{field}: no such feature '{name}' (there are {names})"
            elif features[name].type == "dense":
                yield f"model.{field}: '{name}' is a number, and gates read vectors of ids: name features of ids"
    has_dense = any(feature.type == "dense" for feature in features.values())
    if kind in ROW_PRODUCT_MODELS and not has_dense:
        if job.model.effective_init.kind == "zero":
            yield (
                f"model.init.kind: zero gives {kind} no gradient where no feature is dense, its vectors being in "
                "products of rows alone: use hash or normal, or leave it out"
            )
        if len(features) < 2:
            yield f"model.kind: {kind} multiplies pairs of features, and there is one ({names}): use dnn"

    if kind == "autoint" and not (has_dense or job.model.hidden) and job.model.effective_init.kind == "zero":
        yield (
            "model.init.kind: zero gives autoint no gradient where no feature is dense and there is no deep part, ReLU "
            "passing nothing at 0: use hash or normal, set model.hidden, or leave it out"
        )


def _histories(dataset: DatasetSpec) -> list[str]:
    """Lists of ids whose table a single id reads too."""
    single = {feature.shares or name for name, feature in dataset.features.items() if feature.type == "id"}
    return [
        name
        for name, feature in dataset.features.items()
        if feature.type == "id_list" and (feature.shares or name) in single
    ]

"""The keys of the batches' KeyedJaggedTensor: the features that a model looks up, with their tables. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.data.prepare.plan import NEGATIVE_SUFFIX
from trainer.data.prepare.sequences import SEQUENCE_KEYS
from trainer.spec import DatasetSpec, Feature, JobSpec


@dataclass(frozen=True)
class Key:
    """One key of the batches' KeyedJaggedTensor."""

    name: str
    table: str
    is_list: bool
    pooling: str
    weighted: bool = False
    of_item: bool = False
    """True if the key is a feature of the item table."""
    usual_ids: float | None = None
    """For a text feature, the expected number of n-gram ids in an example; None for other features."""


def keys_of(dataset: DatasetSpec, job: JobSpec) -> tuple[Key, ...]:
    """Return the keys in the order of the batches.

    The keys are the dataset's features and those of its item table, then ``item__negative`` for BPR; for a sequence
    model they are the keys of :mod:`trainer.data.batches.sequence_batches`.
    """
    features = dataset.joined_features
    if job.model.reads_sequences:
        table = features["item"].shares or "item"
        return tuple(Key(name, table, True, "none") for name in SEQUENCE_KEYS)
    keys = [
        Key(
            name,
            feature.shares or name,
            feature.is_list,
            feature.pooling,
            feature.weights is not None,
            name not in dataset.features,
            None if feature.effective_ngrams is None else feature.effective_ngrams.usual_number,
        )
        for name, feature in features.items()
        if feature.has_ids
    ]
    if job.model.draws_partner:
        item = features["item"]
        keys.append(Key("item" + NEGATIVE_SUFFIX, item.shares or "item", False, item.pooling))
    return tuple(keys)


def read_features(dataset: DatasetSpec, job: JobSpec) -> dict[str, Feature]:
    """Return the id features that the job's model reads, by name: of a sequence model only ``item``, as an id list."""
    features = dataset.joined_features
    if job.model.reads_sequences:
        return {"item": features["item"].model_copy(update={"type": "id_list"})}
    if job.model.reads_pairs:
        return {name: features[name] for name in ("user", "item")}
    return {name: feature for name, feature in features.items() if feature.has_ids}


def read_numeric_features(dataset: DatasetSpec, job: JobSpec) -> dict[str, Feature]:
    """Return the numeric features that the job's model reads, keyed by name."""
    if not job.model.reads_numbers:
        return {}
    return {name: feature for name, feature in dataset.features.items() if feature.type == "dense"}

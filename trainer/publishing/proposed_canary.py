"""The proposal of a canary: a column of the item table that a frozen consumer of the vectors can predict."""

from __future__ import annotations

import re
import shlex

import numpy as np

from embeddings.refresh.probe import MAX_CLASSES, MIN_ITEMS
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.jagged import Jagged
from trainer.data.sources.locations import beside
from trainer.runs.directory import Run
from trainer.spec.uri_schemes import is_object

MAX_SHARE = 0.9
"""Largest share of the items in one class: above it a consumer that names this class is hard to beat."""


def proposed_canary(run: Run) -> str | None:
    """Return a sentence that names a categorical column of the item table, with the command; None if there is none.

    The column is the first feature of type ``id`` with 2 to ``MAX_CLASSES`` classes on ``MIN_ITEMS`` items or more.
    """
    items, catalogue = run.dataset.items, PreparedData.open(run.data).catalogue
    if items is None or catalogue is None:
        return None
    uri = beside(items.uri, run.dataset.uri)
    for name, codes in catalogue.features.items():
        if is_object(uri) or isinstance(codes, Jagged) or items.features[name].calendar is not None:
            continue
        codes = codes[: catalogue.num_in_table]
        counts = np.unique(codes[codes >= NUM_SPECIAL_ROWS], return_counts=True)[1]
        if counts.sum() < MIN_ITEMS or not 2 <= len(counts) <= MAX_CLASSES or counts.max() > MAX_SHARE * counts.sum():
            continue
        assert run.job.publish is not None
        column = items.features[name].column or name
        words = [
            "evenkeel", "canaries", "add", run.job.publish.collection, _canary_name(name), uri,
            "--id-column", items.on, "--label-column", column,
        ]  # fmt: skip
        return (
            f"no canary watches {run.job.publish.collection}: to have each refresh tested by the column '{column}' of "
            f"the item table ({len(counts)} classes), add one: {shlex.join(words)}"
        )
    return None


def _canary_name(feature: str) -> str:
    return re.sub(r"^[^a-z0-9]+|[^a-z0-9_-]", "", feature.lower())[:63] or "canary"

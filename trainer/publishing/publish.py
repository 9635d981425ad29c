"""Publication of the item vectors of a run's checkpoint by the refresh stage (:mod:`embeddings.refresh`).

The driver calls it: after the ranks have ended, or while they train if the job publishes repeatedly.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from embeddings.optim.registry import KINDS
from embeddings.refresh.model_comparison import ModelComparison
from embeddings.refresh.probe import MAX_CLASSES, MIN_ITEMS
from embeddings.refresh.procrustes import min_shared
from embeddings.refresh.publish import RefreshRequest, publish_candidate
from embeddings.refresh.settings import Evidence, Expiry, Gate, MovingAverage, Settings, View
from embeddings.sinks.follow import attach, wait
from embeddings.store import Collection, Store, StoreError, StoreUnavailable, VersionReader, open_store
from embeddings.store.generation_maps import in_words
from embeddings.vectors.item_vectors import ItemVectors, arrow_of, keys_of, row_norms, shared_rows
from trainer.checkpoint.format import Checkpoint, CheckpointError
from trainer.checkpoint.record import TablesRecord, TrainingRecord
from trainer.checkpoint.select import newest_of
from trainer.checkpoint.warm_start import id_maps
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.dynamic_ids import NUM_SPECIAL_ROWS
from trainer.data.columns.hashing import id_keys
from trainer.data.columns.jagged import Jagged
from trainer.data.one_pass.position import Place
from trainer.data.sources.locations import beside
from trainer.distributed.dynamic_tables import codes_of, stored_counts, taken_rows
from trainer.distributed.materialize import CHUNK_ROWS, model_of_checkpoint, stored_rows
from trainer.distributed.towers import tower_outputs
from trainer.publishing.users import temporary_rows, user_vectors
from trainer.runs.directory import Run
from trainer.runs.lineage import lineage_of
from trainer.runs.model_comparison import read_comparison
from trainer.runs.published_epoch import quality_of
from trainer.runs.uplink import fence
from trainer.spec.publish import Publish
from trainer.spec.uri_schemes import is_object

NORM_FLOOR = 1e-12
MAX_CLASS_SHARE = 0.9
"""Largest share of the items in one class: above it a consumer that names this class is hard to beat."""


def publish(run: Run) -> dict[str, Any]:
    """Hand the item vectors of the run's last checkpoint to the refresh stage; return the publication event's fields.

    The version is published only if the served version is still ``run.parent_version``, the version that was served
    when the job started.

    Raises:
        CheckpointError: there is no valid checkpoint, or the newest valid checkpoint is not from the end of training.
        LeaseLostError: another attempt holds the run's lease; nothing is published.
    """
    checkpoint = newest_of(run, run.checkpoints)
    if checkpoint is None:
        raise CheckpointError(f"{run.checkpoints} holds no valid checkpoint to publish from: retry the job")
    _check_is_last(run, checkpoint)
    return publish_checkpoint(run, checkpoint)


def publish_checkpoint(run: Run, checkpoint: Checkpoint, store: Store | None = None) -> dict[str, Any]:
    """Hand the item vectors of a checkpoint to the refresh stage; return the fields of the publication event.

    If the job publishes repeatedly, the version belongs to the checkpoint's step, and is aligned onto the version that
    is served now. Such a job passes the same ``store`` each time, because a store caches versions; None: open the
    run's.
    """
    spec = run.job.publish
    assert spec is not None
    store, step = store or open_store(run.store_url), None
    parent_version = run.parent_version
    if spec.is_repeated:
        step, parent_version = TrainingRecord.of(checkpoint).position.step, store.collection(spec.collection).current()

    vectors = candidate_of(run, checkpoint)
    if run.start_version is not None:
        vectors = _with_held_rows(run, store.collection(spec.collection), vectors)
    num_evident, needed = int(vectors.evidence.sum()), min_shared(run.job.model.embedding_dim)
    few: dict[str, str] = {}
    if spec.align and num_evident < needed:
        fitting = max(1, num_evident // min_shared(1))
        few["shared"] = (
            f"{num_evident} items are fewer than the {needed} that alignment needs with model.embedding_dim: "
            f"{run.job.model.embedding_dim}: set publish.align: false, or begin anew with at most {fitting}"
        )
        print(
            f"{num_evident} ids have evidence, and {needed} are needed to align a version onto another one: the next "
            "version will begin a new generation; with publish.align: false, warm starts continue the generation",
            flush=True,
        )
    comparison = None if spec.is_repeated else comparison_of(run)
    remedy, record = run.job.model.collapse_remedy(run.dataset), TrainingRecord.of(checkpoint)
    label = record.labels[0] if record.labels else ""
    fence(run)
    publication = publish_candidate(
        store,
        spec.collection,
        RefreshRequest(
            vectors,
            settings_of(spec),
            job_id=run.run_id,
            parent_version=parent_version,
            start_version=run.start_version,
            model=run.job.model.kind,
            retired=_retired(run, checkpoint, store, parent_version),
            lineage=lineage_of(run),
            fence=lambda: fence(run),
            training_step=step,
            models=comparison,
            remedies={"effective_rank": f"the vectors lie along few directions: {remedy}"} | _if_moved(run) | few,
            quality=quality_of(record.history, record.position.evaluated, run.job.early_stopping, label),
            proposed_canary=proposed_canary(run),
            users=None if spec.users is None else user_vectors(run, checkpoint),
        ),
    )
    if spec.sinks is not None and publication.version is not None:
        attach(store.collection(spec.collection), spec.sinks)
    if publication.anchor_cosine is not None:
        print(f"mean cosine to the anchor generation's first version: {publication.anchor_cosine:.4f}", flush=True)
    for entry in publication.maps:
        print(in_words(entry), flush=True)
    return {
        **{name: getattr(publication, name) for name in ("status", "collection", "version", "reasons", "gate")},
        "anchor_generation": publication.anchor_generation,
        **({} if step is None else {"step": step}),
        **{name: getattr(publication, name) for name in ("diagnosis", "held_in_a_row", "held_since", "max_held")},
        **{name: getattr(publication, name) for name in ("released", "quality", "proposed_canary")},
        **({} if comparison is None else {"comparison": comparison.as_json()}),
    }


def _if_moved(run: Run) -> dict[str, str]:
    """Return the remedy of vectors that moved in a warm start, by metric, if the row optimizer can be the reason."""
    optimizer = run.job.optimizer
    # With an item table rows share the features of items, which have many examples.
    if (
        run.init_checkpoint is None
        or run.dataset.items is not None
        or not KINDS[optimizer.kind].takes("decay")
        or optimizer.decay != "by_epoch"
    ):
        return {}
    remedy = (
        f"the optimizer {optimizer.kind} learns rows of ids with few examples anew in each epoch, which may move their "
        f"vectors: set optimizer.kind: {optimizer.kind.removesuffix('_ar')}"
    )
    return dict.fromkeys(("cosine_mean", "cosine_low"), remedy)


def settings_of(publish: Publish) -> Settings:
    """Return the settings that the refresh stage needs."""
    return Settings(
        align=publish.align,
        ema=None if publish.ema is None else MovingAverage(**dict(publish.ema)),
        gate=Gate(**dict(publish.gate)),
        views=tuple(View(**dict(view)) for view in publish.views),
        expire=None if publish.expire is None else Expiry(**dict(publish.expire)),
        evidence=Evidence(**dict(publish.evidence)),
        keep_generations=publish.keep_generations,
    )


def wait_for_sinks(run: Run, pause: Callable[[], None]) -> None:
    """If the job says so, wait until its sinks have the served version; ``pause`` may raise.

    Raises:
        SinkBehind: a sink still lacks it after the job's ``sink_wait_seconds``.
    """
    spec = run.job.publish
    if spec is not None and spec.sinks and spec.sink_wait_seconds is not None:
        print(f"waiting for the sinks {', '.join(spec.sinks)}", flush=True)
        wait(open_store(run.store_url).collection(spec.collection), spec.sinks, spec.sink_wait_seconds, pause)


def comparison_of(run: Run) -> ModelComparison | None:
    """Return the comparison of the run's model with the served version's model, None if the ranks reported none."""
    return read_comparison(run.directory, run.parent_version)


def _check_is_last(run: Run, checkpoint: Checkpoint) -> None:
    """Check that this checkpoint was written at the end of training."""
    position = TrainingRecord.of(checkpoint).position
    if run.job.dataset.one_pass:
        is_last, of = Place.of_json(position.place).is_end, "those before the last row"
    else:
        last_step = run.job.epochs * PreparedData.open(run.data).steps_per_epoch
        is_last, of = position.step >= last_step, str(last_step)
    if not is_last and not position.stopped:
        raise CheckpointError(
            f"{checkpoint.path} is the newest valid checkpoint, of step {position.step} of {of}: later checkpoints are "
            "damaged; retry the job, which continues training from there"
        )


def candidate_of(run: Run, checkpoint: Checkpoint) -> ItemVectors:
    """Return the vectors that a run publishes: item rows, or item tower outputs if the dataset has an item table."""
    return item_vectors(run, checkpoint) if run.dataset.items is None else tower_vectors(run, checkpoint)


def item_vectors(run: Run, checkpoint: Checkpoint) -> ItemVectors:
    """Return one vector for each id that has a row in the published feature's table, sorted by id.

    The vector is the row with its idle momentum but without pending decay, which never changes a row's direction. The
    norm is that of the row as the model reads it, decay included; so is the bias, if the job publishes users. An id has
    evidence if this job has updated its row, the id occurs in the job's examples, and the norm is above NORM_FLOOR.
    (SSE also updates rows at random, for examples of other items.) Ids without evidence are served by the refresh stage
    as before, or not at all. The vectors are in an unnamed file of the run directory, which is freed with them, so
    memory holds one piece of the table at a time.
    """
    assert run.job.publish is not None
    data = PreparedData.open(run.data)
    table = next(key.table for key in data.keys if key.name == run.job.publish.feature)
    dim = run.job.model.embedding_dim
    # Steps are counted from the rows' last initial values, which MEDA may have reset later.
    first_step = max(0, TrainingRecord.of(checkpoint).position.first_step - TablesRecord.of(checkpoint).birth_step)
    ids, taken = id_maps(checkpoint)[table].ids, taken_rows(checkpoint, table)
    keys = keys_of(ids)
    order = np.argsort(keys, kind="stable")
    position = np.empty_like(order)
    position[order] = np.arange(len(order))
    rows_of_ids = (
        np.arange(NUM_SPECIAL_ROWS, NUM_SPECIAL_ROWS + len(ids)) if taken is None else taken[NUM_SPECIAL_ROWS:]
    )
    vectors = temporary_rows(run.directory, (len(ids), dim))
    norms = np.empty(len(vectors), dtype=np.float32)
    last = np.empty(len(vectors), dtype=np.int64)
    weight = _bias_weight(run)
    biases = None if weight is None else np.empty(len(vectors), dtype=np.float32)
    for start in range(NUM_SPECIAL_ROWS, checkpoint.tables[table], CHUNK_ROWS):
        count = min(CHUNK_ROWS, checkpoint.tables[table] - start)
        first, end = np.searchsorted(rows_of_ids, (start, start + count))
        if first == end:
            continue
        part, picked = position[first:end], torch.from_numpy(rows_of_ids[first:end] - start)
        rows = stored_rows(run.job, checkpoint, table, start, count)
        vectors[part] = _as_float32(rows.read(table, picked, decay=False)[:, :dim])
        served = rows.read(table, picked)
        norms[part] = _as_float32(torch.linalg.vector_norm(served[:, :dim].double(), dim=1))
        if biases is not None and weight is not None:
            biases[part] = weight * _as_float32(served[:, dim])
        last[part] = rows.state(table)["last_update_step"][picked].numpy()
    if run.job.dataset.one_pass:
        counts = occurrences = stored_counts(checkpoint, table)[order]
    else:
        codes = (codes_of(data, table, id_keys(ids)) if taken is not None else rows_of_ids)[order]
        counts, occurrences = data.example_counts(run.job.publish.feature)[codes], data.row_counts(table)[codes]
    return ItemVectors(
        keys[order],
        vectors,
        norms=norms,
        # A row that only histories or drawn negatives have trained has a new last step, too: hence occurrences > 0.
        evidence=(last > first_step) & (occurrences > 0) & (norms > NORM_FLOOR),
        counts=counts,
        biases=biases,
    )


def tower_vectors(run: Run, checkpoint: Checkpoint) -> ItemVectors:
    """Return the item tower's output for each item of the catalogue, sorted by id.

    The catalogue has the items of the item table, and other items that have a row. An item has evidence if its norm is
    above NORM_FLOOR, and its own id or an id of its features has a row, or it has a vector feature. So an item that
    nobody has clicked yet can be served. Rows that come only from a warm start count, because today's tower reads them.
    Items without evidence are served as before, or not at all. As in :func:`item_vectors`, vectors are in an unnamed
    file.
    """
    data = PreparedData.open(run.data)
    catalogue = data.catalogue
    assert catalogue is not None
    model = model_of_checkpoint(run.job, data, checkpoint)
    keys = keys_of(catalogue.ids)
    order = np.argsort(keys, kind="stable")
    dim, weight = run.job.model.embedding_dim, _bias_weight(run)
    vectors = temporary_rows(run.directory, (len(keys), dim))
    biases = None if weight is None else np.empty(len(keys), dtype=np.float32)
    for start in range(0, len(order), CHUNK_ROWS):
        places = order[start : start + CHUNK_ROWS]
        part = slice(start, start + len(places))
        outputs = tower_outputs(model, data, places, torch.device("cpu"))
        vectors[part] = _as_float32(outputs[:, :dim])
        if biases is not None and weight is not None:
            biases[part] = weight * _as_float32(outputs[:, dim])
    norms = row_norms(vectors)
    row_counts = data.example_counts("item")
    row_counts[:NUM_SPECIAL_ROWS] = 0
    counts = row_counts[catalogue.rows]
    return ItemVectors(
        keys[order],
        vectors,
        norms=norms,
        evidence=catalogue.is_known()[order] & (norms > NORM_FLOOR),
        counts=counts[order],
        biases=biases,
    )


def _bias_weight(run: Run) -> float | None:
    """Return the factor of item biases in scores; None if the run publishes no biases or no users."""
    assert run.job.publish is not None
    return None if run.job.publish.users is None else run.job.model.item_bias_weight


def _with_held_rows(run: Run, collection: Collection, vectors: ItemVectors) -> ItemVectors:
    assert run.start_version is not None
    try:
        return with_held_rows(vectors, collection.open(run.start_version))
    except StoreUnavailable:
        raise
    except StoreError as error:
        print(f"held version {run.start_version} cannot be read, so only this run has evidence: {error}", flush=True)
        return vectors


def with_held_rows(vectors: ItemVectors, held: VersionReader) -> ItemVectors:
    """Return the vectors of a run that continued from a held version, with that version's evidence and counts added.

    A held version was never served. So items with evidence in it have newer rows than the served version, even if they
    do not occur in this run's data.
    """
    old, new = shared_rows(held.keys, vectors.keys)
    found = held.items().renewed[old]
    old, new = old[found], new[found]
    evidence = vectors.evidence.copy()
    evidence[new] = True
    counts = vectors.counts
    if counts is not None and held.counts is not None:
        counts = counts.copy()
        counts[new] += held.counts[old].astype(counts.dtype)
    return replace(vectors, evidence=evidence, counts=counts)


def _retired(run: Run, checkpoint: Checkpoint, store: Store, parent_version: str | None) -> pa.Array:
    """Return the tombstones of the published feature's table: ids without a row, whose last vector must expire.

    For a job that publishes repeatedly they include ids that it has published itself in the served version; the stage
    ignores tombstones of ids that still have a row.
    """
    assert run.job.publish is not None
    keys = PreparedData.open(run.data).keys
    table = next(key.table for key in keys if key.name == run.job.publish.feature)
    retired = id_maps(checkpoint)[table].retired
    if not run.job.publish.is_repeated or parent_version is None:
        return retired
    parent = store.collection(run.job.publish.collection).open(parent_version)
    if parent.manifest.job != run.run_id:
        return retired
    # An id that has a row is no tombstone, whatever lists it as one.
    own = arrow_of(parent.keys[parent.items().renewed])
    return pa.concat_arrays([retired, own.cast(retired.type)])


def _as_float32(values: torch.Tensor) -> npt.NDArray[np.float32]:
    return values.float().numpy()


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
        if (
            counts.sum() < MIN_ITEMS
            or not 2 <= len(counts) <= MAX_CLASSES
            or counts.max() > MAX_CLASS_SHARE * counts.sum()
        ):
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

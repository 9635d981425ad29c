"""``evenkeel importance``: how much worse a job's model scores rows whose features are shuffled, one at a time.

``python -m trainer.inference.importance RUN_DIR ROWS.parquet [--metric auc] [--rows 100000] [--repeats 5]``.

Permutation importance (Breiman, Random Forests, 2001; for any model: Fisher, Rudin and Dominici 2019): the values of
one feature are shuffled among rows at random, and its importance is how much the metric then gets worse. Importance
measures how much this model uses the feature, not how much worse a model trained without it would be. If two features
carry the same information, each of them looks unimportant. Use rows that the model was not trained on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trainer.checkpoint.select import LAST
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.labels import labels_of, several_labels_of
from trainer.data.columns.row_encoder import EncodedRows
from trainer.data.errors import DataError
from trainer.data.prepare.bad_rows import GoodRows
from trainer.data.sources.source import Chunk, Source
from trainer.inference import command_line
from trainer.inference.parquet_scoring import chunk_of
from trainer.inference.predict import Predictor, run_of
from trainer.inference.scorer import Float32s
from trainer.metrics.classification import auc, logloss
from trainer.metrics.regression import mae, rmse
from trainer.runs.protocol import leave
from trainer.spec import DatasetSpec, SpecError
from trainer.spec.evaluation import is_lower_better
from trainer.spec.losses import LOSSES, Loss, loss_of
from trainer.spec.problems import FieldProblem

MAX_ROWS = 100_000
REPEATS = 5
METRICS = {"auc": auc, "logloss": logloss, "rmse": rmse, "mae": mae}
"""Metrics that importance can be measured by: functions of scores (or of exp(score)) and labels."""


def importance(
    run_dir: Path | str,
    rows: str,
    *,
    checkpoint: str = LAST,
    label: str | None = None,
    metric: str | None = None,
    max_rows: int = MAX_ROWS,
    repeats: int = REPEATS,
    seed: int = 0,
) -> dict[str, Any]:
    """Measure the metric's loss when each feature's values are permuted among rows.

    Args:
        run_dir: The run's directory.
        rows: A file or a directory of rows with features and label, such as those of a later day.
        checkpoint: ``last``, ``best`` or a step.
        label: Name of one label, if the dataset has several; else None.
        metric: a name in ``METRICS``; None: auc for classes, rmse for real-valued labels.
        max_rows: Number of rows that are read, from the first.
        repeats: Number of times each feature is shuffled.
        seed: Seed of the shuffles.

    Returns:
        The report that the command prints as JSON. Its field ``features`` is ordered by how much worse the metric gets
        in the mean (``loss``), with the sample standard deviation over the shuffles (``sd``).

    Raises:
        SpecError: The directory is no run, or its model has no score for a row.
        ValueError: The label, the metric or a number is not valid for the job.
        DataError: The rows lack a column, or have only one class.
    """
    if repeats < 2 or max_rows < 2:
        raise ValueError(f"--repeats and --rows are at least 2, not {repeats} and {max_rows}")
    model = run_of(run_dir).job.model
    if model.reads_sequences:
        kind = model.kind
        raise SpecError(str(run_dir), [FieldProblem("model.kind", f"{kind} ranks items and has no score for a row")])
    predictor = Predictor(run_dir, checkpoint)
    number, name, is_log = _metric_of(predictor, label, metric)
    coded, labels = _read(predictor, rows, number, max_rows)
    measure = partial(_measured, name, labels, is_log)
    whole = measure(predictor.scores(coded)[:, number])
    if np.isnan(whole):
        or_logloss = ", or --metric logloss" if "logloss" in _fitting(predictor, number) else ""
        raise DataError(f"has no {name}", where=rows, remedy=f"give rows of both classes{or_logloss}")
    drawn = np.random.default_rng(seed)
    orders = [drawn.permutation(coded.num_rows) for _ in range(repeats)]
    losses = {
        feature: [
            (value - whole if is_lower_better(name) else whole - value)
            for order in orders
            for value in [measure(predictor.scores(shuffled(coded, feature, order, predictor))[:, number])]
        ]
        for feature in _features(coded, predictor)
    }
    told = [
        {"feature": feature, "loss": statistics.mean(values), "sd": statistics.stdev(values)}
        for feature, values in losses.items()
    ]
    return {
        "job": predictor.run.run_id,
        "step": predictor.checkpoint.step,
        "metric": name,
        "value": whole,
        "rows": coded.num_rows,
        "repeats": repeats,
        "features": sorted(told, key=lambda one: -one["loss"]),
        "notes": [*predictor.notes, *predictor.encoder.warnings(coded.matches)],
    }


def _metric_of(predictor: Predictor, label: str | None, metric: str | None) -> tuple[int, str, bool]:
    """Return (number of the label, name of the metric, True if scores are logs of predictions)."""
    dataset: DatasetSpec = predictor.run.dataset
    names = list(dataset.labels)
    if label is not None and label not in names:
        raise ValueError(f"--label {label}: no such label (there are {', '.join(names) or 'none: leave it out'})")
    if names and label is None:
        raise ValueError(f"--label is needed because rows have several labels: {', '.join(names)}")
    number = names.index(label) if label is not None else 0
    fitting = _fitting(predictor, number)
    name = metric or fitting[0]
    if name not in fitting:
        raise ValueError(f"--metric {name} does not suit this label: use {' or '.join(fitting)}")
    return number, name, _loss(predictor, number).is_log


def _fitting(predictor: Predictor, number: int) -> tuple[str, ...]:
    """Return the metrics that suit label ``number``; the first is the default."""
    if getattr(_label(predictor.run.dataset, number), "value", None) is not None:
        return ("rmse", "mae")
    return ("auc", "logloss") if _loss(predictor, number).is_logit else ("auc",)


def _loss(predictor: Predictor, number: int) -> Loss:
    labels = list(predictor.run.dataset.labels.values())
    return LOSSES[labels[number].effective_loss if labels else loss_of(predictor.job)]


def _label(dataset: DatasetSpec, number: int) -> Any:
    return list(dataset.labels.values())[number] if dataset.labels else dataset.label


def _read(predictor: Predictor, rows: str, number: int, max_rows: int) -> tuple[EncodedRows, npt.NDArray[Any]]:
    """Return (encoded rows, labels) of the first ``max_rows`` rows; rows without the label are left out."""
    dataset = predictor.run.dataset
    label = _label(dataset, number)
    if label is None or label.source_column is None:
        why = "every row is a positive" if dataset.has_positives_alone else "its labels are drawn, not read"
        raise DataError(
            why, where=f"dataset '{dataset.name}'", remedy="give a job whose rows have labels of both classes"
        )
    may_be_bad = dataset.max_bad_rows is not None
    text = predictor.text_columns
    source = (
        GoodRows(dataset, predictor.job, rows, text)
        if may_be_bad
        else Source(rows, None, dataset.filter, text=text, ids=dataset.id_columns)
    )
    columns = [*predictor.columns(source.column_names(), source.uri), label.source_column, getattr(label, "mask", None)]
    read = list(dict.fromkeys(column for column in columns if column is not None))
    source.require(read)
    batches, found = [], 0
    for chunk in source.stream(read):
        batches.append(pa.RecordBatch.from_arrays([chunk.column(name) for name in read], names=read))
        found += len(chunk)
        if found >= max_rows:
            break
    chunk = chunk_of(pa.Table.from_batches(batches).slice(0, max_rows) if batches else pa.table({}), source.uri)
    if not len(chunk):
        raise DataError("has no rows", where=source.uri, remedy="give rows with features and label")
    labels = _labels(chunk, dataset, number)
    there = ~np.isnan(labels.astype(np.float64))
    kept = Chunk(chunk.file, chunk.rows[there], chunk.batch.filter(pa.array(there)))
    return predictor.encode(kept), labels[there]


def _labels(chunk: Chunk, dataset: DatasetSpec, number: int) -> npt.NDArray[Any]:
    if dataset.labels:
        name = list(dataset.labels)[number]
        return several_labels_of(chunk, {name: dataset.labels[name]}, {})[:, 0]
    assert dataset.label is not None
    return labels_of(chunk, dataset.label)


def _features(coded: EncodedRows, predictor: Predictor) -> Iterator[str]:
    yield from coded.rows
    yield from predictor.encoder.dense_columns


def shuffled(coded: EncodedRows, feature: str, order: npt.NDArray[np.int64], predictor: Predictor) -> EncodedRows:
    """Return the rows with the values of ``feature`` permuted: row i gets the value of row ``order[i]``, int64 [b]."""
    if feature in coded.rows:
        values = coded.rows[feature]
        taken = values.take(order) if isinstance(values, Jagged) else values[order]
        if feature not in coded.weights:
            return coded.replaced(**{feature: taken})
        assert isinstance(values, Jagged)
        weights = Jagged(coded.weights[feature], values.offsets).take(order).values
        return replace(coded.replaced(**{feature: taken}), weights={**coded.weights, feature: weights})
    assert coded.dense is not None
    columns = predictor.encoder.dense_columns[feature]
    dense = coded.dense.copy()
    dense[:, columns] = dense[order, columns]
    return replace(coded, dense=dense)


def _measured(name: str, labels: npt.NDArray[Any], is_log: bool, scores: Float32s) -> float:
    return float(METRICS[name](np.exp(scores, dtype=np.float64) if is_log else scores, labels))


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="evenkeel importance", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="the run directory of a job")
    parser.add_argument("rows", help="a file or a directory of any dataset format, with features and label")
    parser.add_argument("--checkpoint", default=LAST, help="best, last or a step (default: last)")
    parser.add_argument("--label", help="the label, if the job has several")
    parser.add_argument("--metric", choices=METRICS, help="default: auc of classes, rmse of values")
    parser.add_argument("--rows", dest="max_rows", type=int, default=MAX_ROWS, help=f"how many (default: {MAX_ROWS})")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"shuffles of each feature (default: {REPEATS})")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffles (default: 0)")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    return command_line.report(lambda: importance(options.pop("run_dir"), **options), in_words, as_json=as_json)


def in_words(report: dict[str, Any]) -> str:
    width = max(len(one["feature"]) for one in report["features"])
    lines = [
        *report["notes"],
        f"{report['metric']} {report['value']:.4f} on {report['rows']:,} rows; without a feature it loses",
    ]
    lines += [f"{one['feature']:<{width}}  {one['loss']:+.4f}  (sd {one['sd']:.4f})" for one in report["features"]]
    return "\n".join(lines)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))

"""``evenkeel predict``: scores files of rows by a job's model from a checkpoint.

``python -m trainer.inference.predict RUN_DIR ROWS.parquet [--output O] [--columns a,b] [--checkpoint best|last|STEP]
[--k 10]``. With ``--k``, or if the model reads sequences, each row is a user, and the output is the user's best items.

The command runs in this process, on the CPU, without Ray and without a process group, whatever machines wrote the
checkpoint.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from torchrec import KeyedJaggedTensor
from tqdm import tqdm

from trainer.checkpoint.format import Checkpoint, CheckpointError
from trainer.checkpoint.record import TrainingRecord
from trainer.checkpoint.select import LAST, pick
from trainer.checkpoint.warm_start import id_maps, numeric_features, vectors_read
from trainer.data.batches.keys import keys_of, read_features
from trainer.data.batches.prepared import PreparedData
from trainer.data.columns.jagged import Jagged
from trainer.data.columns.row_encoder import EncodedRows, RowEncoder
from trainer.data.errors import DataError
from trainer.data.prepare.bad_rows import GoodRows, bad_events
from trainer.data.prepare.plan import window_of
from trainer.data.sources.locations import is_object, local_path
from trainer.data.sources.source import Source
from trainer.data.sources.user_rows import are_events, users_of
from trainer.distributed.build import model_of
from trainer.distributed.materialize import ReadTables, load_dense
from trainer.inference import command_line
from trainer.inference.parquet_scoring import score_files
from trainer.inference.scorer import Float32s, RowScorer
from trainer.inference.top_items import TopItems
from trainer.inference.user_ranking import UserRanking
from trainer.models.next_item import NextItemModel
from trainer.output_calibration.base import Calibrator, Uncalibrated
from trainer.output_calibration.registry import of_json
from trainer.runs.directory import RUN_FILE, Run, read_run
from trainer.runs.protocol import leave
from trainer.spec import DatasetSpec, JobSpec, SpecError
from trainer.spec.label_tasks import label_tasks
from trainer.spec.problems import FieldProblem
from trainer.storage.destinations import written

NUM_ITEMS = 10
_TRIES = 3


class Predictor(RowScorer):
    """The model of a run at a checkpoint: embedding tables as they are read at its step, and the dense part.

    Scores equal those of evaluation; probabilities are calibrated if the job asks for it. Memory: float32 rows of all
    tables.

    Args:
        run_dir: the run's directory.
        checkpoint: ``last``, ``best`` or a step (:func:`trainer.checkpoint.select.pick`).
        k: number of items for each user, for a sequence model.

    Attributes:
        tables: rows of every embedding table, as the model reads them.
        candidates: for a sequence model, item vectors that queries are multiplied with, [rows of the item table, dim].
        numeric: the numeric features that it reads, with the statistics of training.
        calibrators: label -> the map from scores to probabilities, if the job asks for ``output_calibration``.
        history_source: function that opens the dataset's rows, in which histories are looked up; None without any.
        notes: remarks on the checkpoint for the user, in words.

    Raises:
        SpecError: the directory is no run directory.
        CheckpointError: there is no such checkpoint, or it is damaged.

    Example:
        >>> from trainer.inference.predict import Predictor
        >>> predictor = Predictor(run_directory, "last")  # such as $EVENKEEL_HOME/runs/ID
        >>> scores = predictor.predict(rows)  # a pyarrow table in, one out, in the same order
        >>> scores.column_names, scores.num_rows == rows.num_rows
        (['logit', 'probability'], True)
    """

    checkpoint: Checkpoint
    notes: list[str]

    def __init__(self, run_dir: Path | str, checkpoint: str = LAST, *, k: int = NUM_ITEMS):
        self.run = read_run(run_dir, stored=True)
        job, dataset = self.run.job, self.run.dataset
        self.keys = keys_of(dataset, job)
        read = self._open(checkpoint)
        self.tables = read.tables
        self.numeric = numeric_features(self.checkpoint)
        tasks = label_tasks(dataset)
        self.model = model_of(
            job, self.keys, read, num_dense=len(self.numeric), num_item_numbers=dataset.num_item_numbers,
            vectors=vectors_read(self.checkpoint), tasks=tasks,
        ).eval()  # fmt: skip
        load_dense(self.model, self.checkpoint)
        ids = {name: ids.ids for name, ids in id_maps(self.checkpoint).items()}
        self.candidates: Float32s | None = None
        top = None
        if isinstance(self.model, NextItemModel):
            with torch.no_grad():
                self.candidates = self.model.candidates(self.tables.weight(self.keys[0].table)).numpy()
            top = TopItems(self.candidates, ids[self.keys[0].table], k)
        if self.model.reads_training_rows:
            self.model.begin(_training_rows(self.run))
        derived = any(feature.derive is not None for feature in dataset.features.values())
        self.history_source = partial(_past, dataset, job) if derived else None
        encoder = RowEncoder(
            dataset, read_features(dataset, job), ids,
            numeric=self.numeric, vectors=vectors_read(self.checkpoint), history_source=self.history_source,
        )  # fmt: skip
        self.calibrators = calibrators_of(job, self.checkpoint)
        self.notes = [*self.notes, *calibration_notes(job.output_calibration, self.calibrators)]
        super().__init__(job, encoder, top, tasks, self.calibrators)

    def _open(self, which: str) -> ReadTables:
        """Open the rows of the checkpoint.

        A run that still trains may remove the checkpoint while it is read; a newer checkpoint is then opened.
        """
        for left in reversed(range(_TRIES)):
            self.checkpoint, self.notes = pick(self.run, which)
            try:
                return ReadTables(self.run.job, self.checkpoint, self.keys)
            except CheckpointError:
                if not left or self.checkpoint.path.exists():
                    raise
        raise AssertionError

    def features(self, coded: EncodedRows) -> KeyedJaggedTensor:
        """Return encoded rows as the features that the model looks up; keys that it does not score with have no ids."""
        lengths = np.zeros((len(self.keys), coded.num_rows), dtype=np.int64)
        parts: list[Any] = [np.empty(0, dtype=np.int64)]
        weights = [np.empty(0, dtype=np.float32)]
        for number, key in enumerate(self.keys):
            rows = coded.rows.get(key.name)
            if rows is not None:
                count = len(rows.values if isinstance(rows, Jagged) else rows)
                weights.append(coded.weights.get(key.name, np.ones(count, dtype=np.float32)))
            if isinstance(rows, Jagged):
                lengths[number] = rows.lengths
                parts.append(rows.values)
            elif rows is not None:
                lengths[number] = 1
                parts.append(rows)
        flat = lengths.ravel()
        return KeyedJaggedTensor(
            keys=[key.name for key in self.keys],
            values=torch.from_numpy(np.concatenate(parts, dtype=np.int64)),
            weights=torch.from_numpy(np.concatenate(weights)) if coded.weights else None,
            lengths=torch.from_numpy(flat),
            offsets=torch.from_numpy(np.append(0, np.cumsum(flat))),
            stride=coded.num_rows,
        )

    @torch.no_grad()
    def _forward(self, coded: EncodedRows) -> Float32s:
        features = self.features(coded)
        if isinstance(self.model, NextItemModel):
            return self.model.queries(self.model.embeddings(features)).numpy()
        if coded.dense is None:
            return self.model(features).numpy()
        return self.model(features, torch.from_numpy(coded.dense)).numpy()


def _training_rows(run: Run) -> PreparedData:
    try:
        return PreparedData.open(run.data)
    except DataError as error:
        raise DataError(
            f"{run.job.model.kind} scores with the graph of its training rows, which are gone: {error.what}",
            where=error.where,
            remedy="train the job again, or use bpr, which scores without them",
        ) from None


def _past(dataset: DatasetSpec, job: JobSpec) -> Source:
    """Open the rows of the run's dataset, in which histories are looked up."""
    try:
        if dataset.max_bad_rows is not None:
            return GoodRows(dataset, job)
        return Source(dataset.uri, window_of(dataset, job), dataset.filter, ids=dataset.id_columns)
    except DataError as error:
        raise DataError(
            f"histories are looked up in the dataset's rows, and {error.what}",
            where=error.where,
            remedy="put them there, or give the rows a column with the history",
        ) from None


def calibrators_of(job: JobSpec, checkpoint: Checkpoint) -> dict[str, Calibrator]:
    """Return {label: calibrator fitted to a checkpoint's scores}, "" for a single label; {} if the job asks for none.

    A checkpoint from within an epoch has no calibrators, because its scores of validation rows were not computed. The
    result is then :class:`Uncalibrated` with the reason, under "" for all labels.
    """
    if job.output_calibration == "none":
        return {}
    stored = TrainingRecord.of(checkpoint).position.calibration
    if stored is None:
        return {
            "": Uncalibrated(
                f"step {checkpoint.step} is inside an epoch, and validation rows are scored at its end: "
                "wait for that, or name the step of an epoch's end with --checkpoint"
            )
        }
    return {label: of_json(document) for label, document in stored.items()}


def calibration_notes(kind: str, calibrators: Mapping[str, Calibrator]) -> Iterator[str]:
    """Yield a sentence for each calibrator: that probabilities are calibrated, or that they are not and why."""
    for label, one in calibrators.items():
        what = f"probabilities of {label}" if label else "probabilities"
        if isinstance(one, Uncalibrated):
            yield f"{what} are not calibrated: {one.reason}"
        else:
            yield f"{what} are calibrated on validation rows ({kind})"


# --- the command -----------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="evenkeel predict", description=__doc__)
    parser.add_argument("run_dir", type=Path, help="the run directory of a job")
    parser.add_argument("rows", help="a file or a directory of any dataset format")
    parser.add_argument(
        "--output", help="where scores go, a path or a URI (default: ROWS.scores.parquet, of a directory ROWS.scores)"
    )
    parser.add_argument("--columns", help="columns of the rows to keep, separated by commas (default: all)")
    parser.add_argument("--checkpoint", default=LAST, help="best, last or a step (default: last)")
    parser.add_argument(
        "--k",
        type=int,
        help=f"rows are users: find so many items for each (default: {NUM_ITEMS} by models of sequences; others score "
        "rows of users and items)",
    )
    parser.add_argument("--json", action="store_true", help="print what was done as JSON")
    options = parser.parse_args(arguments)
    make = partial(
        predict,
        options.run_dir,
        options.rows,
        options.output,
        columns=options.columns.split(",") if options.columns is not None else None,
        checkpoint=options.checkpoint,
        k=options.k,
        bar=sys.stderr.isatty(),
    )
    return command_line.report(make, in_words, as_json=options.json)


def predict(
    run_dir: Path | str,
    rows: Path | str,
    output: Path | str | None = None,
    *,
    columns: Sequence[str] | None = None,
    checkpoint: str = LAST,
    k: int | None = None,
    bar: bool = False,
) -> dict[str, Any]:
    """Score files of rows by a run's model (:func:`trainer.inference.parquet_scoring.score_files`).

    ``k``: number of items to find for the user of each row; None: 10 for a sequence model; other models score the rows.

    Returns:
        The report that the command prints as JSON.
    """
    run = run_of(run_dir)
    job = run.job
    sequence = job.model.reads_sequences
    if k is not None and (k < 1 or not (sequence or job.model.ranks_all_items)):
        hint = (
            ""
            if k < 1
            else f": {job.model.kind} has no vectors of users, it scores rows of users and items; leave k out"
        )
        raise ValueError(f"--k is the number of items to find for each user, at least 1{hint}")
    source = Source(str(rows), ids=run.dataset.id_columns)
    output = output if output is not None else default_output(source)
    predictor = Predictor(run_dir, checkpoint, k=k or NUM_ITEMS)
    scorer = predictor if sequence or k is None else UserRanking(predictor, k)
    dataset = predictor.run.dataset
    with tempfile.TemporaryDirectory(prefix="evenkeel-predict-") as folder:
        if (sequence or k is not None) and are_events(source, dataset, timed=sequence):
            if isinstance(scorer, UserRanking):
                scorer.check_events(source)
            events = Source(str(rows), None, dataset.filter, text=scorer.text_columns, ids=dataset.id_columns)
            bad = bad_events if dataset.max_bad_rows is not None else None
            users = users_of(events, dataset, bad, timed=sequence)
            scored: Path | str = Path(folder) / "users.parquet"
            pq.write_table(users, scored)
            columns = columns if columns is not None else users.column_names[:1]
        else:
            scored = str(rows)
        with tqdm(unit=" rows", unit_scale=True, desc="predict", leave=False, disable=not bar) as shown:
            with written(output) as path:
                summary = score_files(scorer, scored, path, keep=columns, told=shown.update)
    return {
        "job": predictor.run.run_id,
        "model": predictor.job.model.kind,
        "checkpoint": str(predictor.checkpoint.path),
        "step": predictor.checkpoint.step,
        "output": str(output),
        "rows": summary.rows,
        "files": summary.files,
        "columns": list(scorer.outputs),
        "unknown": dict(summary.unknown),
        "missing": {name: count for name, count in summary.missing.items() if count},
        "seconds": round(summary.seconds, 3),
        "notes": [*predictor.notes, *scorer.encoder.warnings(summary.matches)],
    }


def run_of(run_dir: Path | str) -> Run:
    """Return the run in a directory that a user named.

    Raises:
        SpecError: The directory is no run directory.
    """
    if not (Path(run_dir) / RUN_FILE).is_file():
        raise SpecError(str(run_dir), [FieldProblem("", f"is no run directory: it has no {RUN_FILE}")])
    return read_run(run_dir, stored=True)


def default_output(source: Source) -> Path:
    """Return the default output: the file ROWS.scores.parquet, or the directory ROWS.scores for a directory.

    The file is in the same directory as the rows, or in the working directory if the rows are in object storage.
    """
    remote = is_object(source.uri)
    root = Path(source.uri.rstrip("/").rpartition("/")[2]) if remote else local_path(source.uri).resolve()
    name = root.name
    if not source.is_file:
        return root.with_name(f"{name}.scores")
    suffix = next(one for one in source.reader.suffixes if name.lower().endswith(one))
    return root.with_name(f"{name[: -len(suffix)]}.scores.parquet")


def in_words(report: dict[str, Any]) -> str:
    lines = [*report["notes"]]
    of = max(report["rows"], 1)
    for name in {**report["unknown"], **report["missing"]}:
        count, missing = report["unknown"].get(name), report["missing"].get(name, 0)
        if count is None:
            lines.append(f"{name}: {missing:,} of {of:,} rows have no value: scored with the value for missing ones")
        elif count or missing:
            lines.append(
                f"{name}: {count:,} ids that the model does not know"
                + (f", {missing:,} missing" if missing else "")
                + f", in {of:,} rows: scored as the unknown id"
            )
    lines.append(
        f"{report['rows']:,} rows scored by {report['model']}, step {report['step']}, in {report['seconds']:.1f} s: "
        f"{report['output']} ({', '.join(report['columns'])})"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    leave(main())

"""``evenkeel generalization SPEC.yaml``: trainings that show how a job's model generalizes, and their report.

``python -m trainer.generalization.command SPEC.yaml|RUN_DIR [--out D] [--seeds N] [--workers N]``. The command trains
the job, the job on permuted labels, on fair coins as labels, and on rows of which a few have another label. The same
command continues a report that was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from embeddings.durable_files import write_json
from trainer.data.errors import DataError
from trainer.generalization.trainings import MEASURES, Training, comparable, plan, why_no_labels
from trainer.launch.in_process import read_spec
from trainer.runs.directory import Run, read_run
from trainer.runs.failures import ResourceError
from trainer.runs.protocol import leave
from trainer.search.records import Record, record_of_run
from trainer.search.runs import Planned, TrialRun, alone, run_all
from trainer.spec import DatasetSpec, JobSpec
from trainer.storage.base import StorageError
from trainer.storage.storage_registry import open_storage

JOB_FILE = "job.json"
TITLE = "Generalization report"
SOURCE = "Mądry, Optimization and Generalization Challenges in Deep Learning (6.S979, lecture 3), sections 1 to 8"
PROTOCOL = """\
One training of the job; the same job on the same rows with their label column permuted, and with fair coins for labels;
and on rows of which a few have another label. Everything is measured on the model of the last epoch. Rows, splits,
order and draws are those of the job."""


def protocol(dataset: DatasetSpec, job: JobSpec) -> str:
    """Return the protocol of the report, with the reason if the job has no labels to change."""
    reason = why_no_labels(dataset, job)
    return PROTOCOL if reason is None else f"{PROTOCOL} Without permuted labels and neighbours: {reason}"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="evenkeel generalization", description=__doc__)
    parser.add_argument("of", type=Path, metavar="SPEC", help="YAML file with a dataset and a job, or a run directory")
    parser.add_argument("--out", type=Path, help="folder of the report (default: EVENKEEL_HOME/generalization/NAME)")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 .. N-1 (default: 1)")
    parser.add_argument("--workers", type=int, default=1, help="trainings at a time (default: 1)")
    parser.add_argument("--report", action="store_true", help="report on trainings that have ended; train nothing")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0: every training succeeded and every claim holds; 1: a training failed, a claim does not hold, or the arguments
        are bad; 130: interrupted.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(arguments)
    try:
        return _report(options, shlex.join(["evenkeel", "generalization", *arguments]))
    except KeyboardInterrupt:
        print("stopped; the same command continues from here", file=sys.stderr)
        return 130
    except (ValueError, OSError, DataError, ResourceError, StorageError) as error:
        print(error, file=sys.stderr)
        return 1


def _report(options: argparse.Namespace, command: str) -> int:
    if options.workers < 1 or options.seeds < 1:
        raise ValueError("--seeds and --workers: at least 1")
    run = read_run(options.of) if options.of.is_dir() else None
    dataset, job = read_spec(options.of) if run is None else (run.dataset, run.job)
    job = comparable(dataset, job)
    home = Path(os.environ.get("EVENKEEL_HOME", ".evenkeel"))
    out = (options.out or home / "generalization" / job.name).resolve()
    with alone(out):
        _claim_folder(out, dataset, job)
        trainings, write = plan(dataset, {job.name: job}, options.seeds, out / "rows")
        if not options.report:
            write()
            left = [one for one in trainings if _record(one, out).get("state") != "done"]
            _train(left, out, options.workers, command)
        is_good = _write(trainings, dataset, job, out)
    if run is not None and run.storage is not None:
        print(f"in the run's storage: {_put(run, out)}")
    return 0 if is_good else 1


def _claim_folder(out: Path, dataset: DatasetSpec, job: JobSpec) -> None:
    """Write the job into a new folder of a report; ValueError if the folder belongs to another job."""
    document = {"dataset": dataset.model_dump(mode="json"), "job": job.model_dump(mode="json")}
    path = out / JOB_FILE
    if not path.exists():
        write_json(path, document)
    elif json.loads(path.read_text("utf-8")) != document:
        raise ValueError(f"{out}: holds the report on another job: name another folder with --out")


def _path(training: Training, out: Path) -> Path:
    return out / "trainings" / f"{training.name}.json"


def _arrays(training: Training, out: Path) -> Path:
    return out / "trainings" / f"{training.name}.npz"


def _record(training: Training, out: Path) -> Record:
    """Return the record of a training; {} before it has ended."""
    try:
        record: Record = json.loads(_path(training, out).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return record


def _train(trainings: Sequence[Training], out: Path, workers: int, command: str) -> None:
    from trainer.launch.worker import use_threads

    use_threads(1)  # as its run has: sums depend on how they are split
    by_name = {one.name: one for one in trainings}
    (out / "trainings").mkdir(exist_ok=True)
    for planned, run in run_all([Planned(one.name, one.dataset, one.job) for one in trainings], out / "runs", workers):
        record = _measured(by_name[planned.name], run, out, command)
        print(f"{planned.name}: {record['error'] or record['state']}  ({record['seconds']:.0f} s)", flush=True)


def _measured(training: Training, run: TrialRun, out: Path, command: str) -> Record:
    """Measure the model of a run that has ended, write and return its record, and remove the run if it succeeded."""
    measure, arrays = MEASURES.get(training.measured_by), _arrays(training, out)
    record = record_of_run(
        run, training.name, training.name, command, measure and (lambda of: measure(of, arrays))
    )  # fmt: skip
    write_json(_path(training, out), record)
    if record["state"] == "done":
        shutil.rmtree(run.path, ignore_errors=True)
    return record


def _write(trainings: Sequence[Training], dataset: DatasetSpec, job: JobSpec, out: Path) -> bool:
    """Write the report; return True if all trainings succeeded and all claims hold."""
    from trainer.generalization.sections import Ended, curves, findings
    from trainer.report_pages.page import Report

    records = {one.name: record for one in trainings if (record := _record(one, out))}
    failed = tuple((name, record["error"]) for name, record in records.items() if record["error"])
    ended = [
        Ended(one, records[one.name], _arrays(one, out))
        for one in trainings
        if records.get(one.name, {}).get("state") == "done"
    ]
    found = findings(ended)
    sections = (*curves(ended), *found.sections)
    report = Report(f"{TITLE}: {job.name}", SOURCE, protocol(dataset, job), sections, found.claims, failed)
    page = report.write(out)
    print(report.markdown())
    print(f"\nreport: {page}")
    return report.is_good


def _put(run: Run, out: Path) -> str:
    """Put the files of the report into the run's storage, replacing an earlier report; return their URI."""
    assert run.storage is not None
    files = open_storage(run.storage)
    for path in sorted(out.iterdir()):
        if path.is_file() and path.suffix in (".md", ".html", ".png"):
            files.put_file(f"reports/generalization/{path.name}", path)
    return f"{run.storage}/reports/generalization"


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # runs that train write a checkpoint and end
    leave(main())

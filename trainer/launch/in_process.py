"""``evenkeel train SPEC.yaml``: a run in this process, without service and without Ray.

``python -m trainer.launch.in_process SPEC.yaml [--run-dir D] [--store S] [--set path=value ...]``. The file holds a
dataset and a job. A single worker trains inside this process, several workers in spawned processes. The same command
with the same ``--run-dir`` resumes the run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from embeddings.sinks.base import SinkError
from embeddings.sinks.configured import SINKS_VARIABLE, ConfiguredSink, read_sinks
from embeddings.sinks.follow import SinkFollower, sinks_of, sync_when_free
from trainer.launch.driver import RunBusyError
from trainer.runs.directory import RUN_FILE, read_run, write_run
from trainer.runs.events import read_events
from trainer.runs.protocol import leave
from trainer.spec import DatasetSpec, JobSpec, SpecError, load_documents, parse_job
from trainer.spec.problems import FieldProblem

HELD = 3
"""Exit code of the command if the gate held the version, as of ``evenkeel submit --wait``."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="evenkeel train", description=__doc__)
    parser.add_argument("spec", type=Path, help="YAML file with a dataset and a job")
    parser.add_argument(
        "--run-dir", type=Path, help="where it keeps its files (default: a new one under EVENKEEL_HOME)"
    )
    parser.add_argument(
        "--store", help="feature store to publish to (default: EVENKEEL_STORE_URL, else EVENKEEL_HOME/store)"
    )
    parser.add_argument("--init", type=Path, help="run directory or checkpoint to warm-start from")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="PATH=VALUE", help="a field of the job to change"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    try:
        dataset, job = read_spec(options.spec, options.changes)
        code, directory = _train(dataset, job, options.run_dir, options.store, options.init)
    except (ValueError, OSError, RunBusyError) as error:
        print(error, file=sys.stderr)
        return 1
    told = [event.fields for event in read_events(directory) if event.fields["type"] == "publication"]
    return HELD if code == 0 and told and told[-1]["status"] == "held" else code


def train(
    dataset: DatasetSpec,
    job: JobSpec,
    *,
    run_dir: Path | None = None,
    store: str | None = None,
    init: Path | None = None,
) -> int:
    """Run the job to its end and return the exit code (trainer.runs.protocol).

    Must be called on the main thread.

    ``run_dir``: folder of the run's files, whose run is resumed if it has begun; None: a new folder under
    EVENKEEL_HOME. ``store``: URL of the feature store; None: EVENKEEL_STORE_URL, else the store under EVENKEEL_HOME.
    ``init``: run directory or checkpoints to warm-start from; None: those that ``init_from`` names
    (trainer.runs.parents).

    Sinks of the job are brought up to date here, because no service does it.

    Raises:
        RunBusyError: another process works in ``run_dir``.
        ValueError: this host lacks the run or version that ``init_from`` names, or EVENKEEL_SINKS lacks a sink.
        StoreError: the store cannot be read.
        OSError: the run directory cannot be written.
    """
    return _train(dataset, job, run_dir, store, init)[0]


def _train(
    dataset: DatasetSpec, job: JobSpec, run_dir: Path | None, store: str | None, init: Path | None
) -> tuple[int, Path]:
    """Run the job as :func:`train` does, and return its exit code and the folder of its files."""
    from trainer.distributed.light_imports import import_torchrec
    from trainer.launch.driver import check_free, execute

    import_torchrec()
    from trainer.launch.on_host import default_directory, start_ranks

    home = Path(os.environ.get("EVENKEEL_HOME", ".evenkeel"))
    sinks = _sinks_of(job)
    directory = (run_dir or default_directory(job.name)).resolve()
    # Not only the directory's name: the store would take another job's publications under that name for this run's.
    run_id, attempt, parent_version = f"{directory.name}-{secrets.token_hex(4)}", 1, None
    init_checkpoint, start_version = None if init is None else str(_checkpoints(init)), None
    store_url = store or os.environ.get("EVENKEEL_STORE_URL") or str((home / "store").resolve())
    if (directory / RUN_FILE).exists():
        check_free(directory)  # before run.json names this attempt: a process at work on the run could not publish then
        before = read_run(directory, stored=True)
        job = _with_decay_of(before.job, job)
        run_id, attempt, parent_version = before.run_id, before.attempt + 1, before.parent_version
        init_checkpoint = init_checkpoint or before.init_checkpoint
        start_version = before.start_version
    elif job.publish is not None:
        from embeddings.store import open_store

        parent_version = open_store(store_url).collection(job.publish.collection).current()
    if job.init_from is not None and init_checkpoint is None:
        from trainer.runs.parents import start_of

        checkpoints, start_version = start_of(
            job.init_from, None if job.publish is None else job.publish.collection, store_url, home / "runs"
        )
        init_checkpoint = str(checkpoints)
        print(f"init_from: {init_checkpoint}", flush=True)
    served = None
    if job.publish is not None and parent_version is not None:
        from trainer.runs.parents import served_checkpoints

        served = served_checkpoints(store_url, job.publish.collection, parent_version, home / "runs", init_checkpoint)
    write_run(
        directory,
        run_id=run_id,
        attempt=attempt,
        job=job,
        dataset=dataset,
        store_url=store_url,
        parent_version=parent_version,
        init_checkpoint=init_checkpoint,
        start_version=start_version,
        served_checkpoint=served,
    )
    print(f"run directory: {directory}", flush=True)
    with _following(sinks, job, store_url):
        return execute(read_run(directory), start_ranks), directory


def _sinks_of(job: JobSpec) -> list[ConfiguredSink]:
    """Return the sinks that the job names."""
    named = () if job.publish is None else job.publish.sinks or ()
    configured = read_sinks(os.environ.get(SINKS_VARIABLE)) if named else {}
    missing = sorted(set(named) - configured.keys())
    if missing:
        raise SinkError(
            f"publish.sinks names {', '.join(missing)}: there is no such sink: name a file that has it in "
            f"{SINKS_VARIABLE}, or train with --set publish.sinks=null"
        )
    return [configured[name] for name in named]


@contextlib.contextmanager
def _following(sinks: Sequence[ConfiguredSink], job: JobSpec, store_url: str) -> Iterator[None]:
    """Keep the sinks up to date during the block, which may wait for them, and once more at its end."""
    if not sinks or job.publish is None:
        yield
        return
    from embeddings.store import open_store

    store = open_store(store_url)
    follower = SinkFollower(sinks, lambda tenant: store)
    follower.start()
    try:
        yield
    finally:
        follower.stop()
    collection = store.collection(job.publish.collection)
    following = {one["name"] for one in sinks_of(collection)}
    for sink in sinks:
        if sink.name not in following:  # nothing was published
            continue
        try:
            sync_when_free(collection, sink.name, sink.open())
        except Exception as error:  # an error of the sink's client: the version is published all the same
            print(f"sink '{sink.name}' lacks the version: {type(error).__name__}: {error}: run "
                  f"`evenkeel sinks sync {collection.name}`", file=sys.stderr)  # fmt: skip


def read_spec(path: Path, changes: Sequence[str] = ()) -> tuple[DatasetSpec, JobSpec]:
    """Return the dataset and the job of a file. ``changes`` such as ``a.b=value`` (YAML values) are applied to the job.

    Raises:
        SpecError: the file is no valid spec, or holds no dataset or no job.
        InvalidFieldsError: the job does not fit the dataset.
        ValueError: a change is not PATH=VALUE.
        OSError: the file cannot be read.
    """
    dataset, job = load_documents(path)
    missing = [name for name, document in (("dataset", dataset), ("job", job)) if document is None]
    if dataset is None or job is None:
        raise SpecError(str(path), [FieldProblem("", f"holds no {' and no '.join(missing)}: both are needed to train")])
    if changes:
        # Settings that are left out may depend on the changes and on the dataset.
        document: dict[str, Any] = job.model_dump(mode="json", exclude_unset=True)
        for change in changes:
            apply_change(document, change)
        job = parse_job(document, f"{path} with --set")
    return dataset, job.against(dataset)


def apply_change(document: dict[str, Any], change: str) -> None:
    """Change a job's document in place by a text such as ``optimizer.kind=adam``.

    Raises:
        ValueError: ``change`` is not PATH=VALUE, the value is not YAML, or a field on the way has no fields.
    """
    path, equals, value = change.partition("=")
    if not equals or not path:
        raise ValueError(f"--set {change}: not PATH=VALUE, such as optimizer.kind=adam")
    try:
        set_field(document, path, yaml.safe_load(value))
    except yaml.YAMLError as error:
        raise ValueError(f"--set {change}: the value is not YAML ({' '.join(str(error).split())}): quote it") from None
    except ValueError as error:
        raise ValueError(f"--set {change}: {error}") from None


def set_field(document: dict[str, Any], path: str, value: Any) -> None:
    """Set the field at a path such as ``optimizer.kind`` in place; missing parent fields are made.

    Raises:
        ValueError: a parent field is a plain value, which cannot have fields.
    """
    *parents, last = path.split(".")
    target = document
    for name in parents:
        child = target.setdefault(name, {})
        if child is None:
            child = target[name] = {}
        if not isinstance(child, dict):
            raise ValueError(f"'{name}' is not a part with fields")
        target = child
    target[last] = value


def _with_decay_of(before: JobSpec, job: JobSpec) -> JobSpec:
    """Return the job with the ``optimizer.decay`` that its run began with, if the job does not set it.

    An earlier version of evenkeel, with another default, may have begun the run.
    """
    decay = before.optimizer.decay
    if "decay" in job.optimizer.model_fields_set or before.optimizer.kind != job.optimizer.kind:
        return job
    if decay != job.optimizer.decay:
        print(f"optimizer.decay: {decay}, with which the run began", flush=True)
    return job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"decay": decay})})


def _checkpoints(init: Path) -> Path:
    """Return the folder of checkpoints: ``init`` itself, or its folder ``checkpoints`` if it is a run directory."""
    path = init.resolve()
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


if __name__ == "__main__":
    leave(main())

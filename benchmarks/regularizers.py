"""CPU time of a training step with each method of recipe ``dropout``, SAM and l2, compared with no regularizer.

``python -m benchmarks.regularizers [--data data] [--quick] [--steps 20] [--methods ...]``. The jobs are those of the
recipe, on epinions in the folder ``--data`` (``--quick``: small jobs on a generated click log). The methods take turns,
step by step, in one process and one thread, each on the batches of its own training; the first steps are not counted.

Prints one JSON line per method: ``ours_ms`` and ``peer_ms`` are medians of CPU milliseconds, for its step and for a
step without a regularizer, ``ratio`` is the first divided by the second. Unlike wall time, CPU time does not count
waiting for a core that another program uses; other programs still slow it down through caches and memory bandwidth.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.papers.data.quick_data import write_quick_data
from benchmarks.papers.dropout import recipe as dropout
from benchmarks.support.harness import Seconds, interleave, line
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build, choose_alpha
from trainer.launch.on_host import single_rank_group
from trainer.launch.worker import quiet, use_threads
from trainer.report_pages.section import table_of
from trainer.runs.protocol import leave
from trainer.spec import DatasetSpec, JobSpec, parse_job
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.loop import Trainer

PLAIN = "none"
WARM_UP = 3
OTHERS: dict[str, dict[str, Any]] = {"SAM": {"sam": {"rho": 0.05}}, dropout.L2: {"l2": 1e-3}}
"""Regularizers that are not rows of the recipe's main table."""


def jobs_of(data: Path, is_quick: bool) -> tuple[DatasetSpec, dict[str, JobSpec]]:
    """Return the dataset and the jobs by method."""
    trials = dropout.recipe(data, 1, is_quick).jobs
    main_table = [trial for trial in trials if trial.table == trials[0].table]
    jobs = {trial.row: trial.job for trial in main_table}
    plain = jobs[PLAIN].model_dump(mode="json", exclude_unset=True)
    others = {name: parse_job(plain | {"regularizers": changes}) for name, changes in OTHERS.items()}
    return trials[0].dataset, jobs | others


def stepper(job: JobSpec, data: PreparedData) -> Callable[[Any], Seconds]:
    """Return a function that trains the job by one more step and returns its CPU time."""
    sharded = build(job, data, alpha=choose_alpha(job, data.steps_per_epoch))
    trainer = Trainer(job, data, sharded, dense_optimizer(job, sharded))
    sharded.train()
    parts = trainer.batches()

    def step(_: Any) -> Seconds:
        batch = next(parts)
        start = time.process_time()
        trainer.train_step(batch)
        return Seconds(time.process_time() - start)

    return step


def measure(dataset: DatasetSpec, jobs: Mapping[str, JobSpec], steps: int, folder: Path) -> dict[str, np.ndarray]:
    """Return CPU milliseconds [steps, 2] for each method: with it and without a regularizer."""
    data = prepare(dataset, jobs[PLAIN], folder)
    most = jobs[PLAIN].epochs * data.steps_per_epoch - WARM_UP
    if steps > most:
        raise ValueError(f"--steps {steps}: the training has no more than {most}")
    steppers = {name: stepper(job, data) for name, job in jobs.items()}
    times = interleave(lambda: None, *steppers.values(), iterations=steps, warm_up=WARM_UP)
    plain = times[:, list(jobs).index(PLAIN)]
    return {name: np.stack([times[:, place], plain], axis=1) for place, name in enumerate(jobs)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regularizers", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of epinions.parquet")
    parser.add_argument("--quick", action="store_true", help="the recipe's small form, on generated rows")
    parser.add_argument("--steps", type=int, default=20, help="steps of each method that are counted")
    parser.add_argument("--methods", help="comma-separated rows of the recipe's table; default: all of them")
    options = parser.parse_args(arguments)
    quiet()
    use_threads(1)
    with tempfile.TemporaryDirectory(prefix="evenkeel-regularizers-") as folder, single_rank_group():
        if options.quick:
            write_quick_data(Path(folder))
        dataset, jobs = jobs_of(Path(folder) if options.quick else options.data, options.quick)
        if options.methods is not None:
            names = [PLAIN, *(name for name in options.methods.split(",") if name != PLAIN)]
            unknown = [name for name in names if name not in jobs]
            if unknown:
                parser.error(f"no such method: {', '.join(unknown)} (there are {', '.join(jobs)})")
            jobs = {name: jobs[name] for name in names}
        found = measure(dataset, jobs, options.steps, Path(folder) / "prepared")
    case = f"{dataset.name} B{next(iter(jobs.values())).batch_size}"
    lines = {
        name: line("regularizers", f"{case} {name}", PLAIN, times) for name, times in found.items() if name != PLAIN
    }
    print()
    rows = [(name, f"{one['ours_ms']:.1f}", f"{one['ratio']:.2f}") for name, one in lines.items()]
    print(table_of(("method", "CPU ms of a step", "by that of none"), rows))
    return 0


if __name__ == "__main__":
    leave(main())

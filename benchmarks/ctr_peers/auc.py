"""Comparison of the libraries' AUC: the search for each learning rate, the seeds, the table and the conditions."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.ctr_peers.tasks import Task
from benchmarks.ctr_peers.training import (
    HALF_DECADE,
    LIBRARIES,
    MIDDLE,
    OURS,
    PEERS,
    SAME_OPTIMIZER,
    Line,
    Place,
    train,
)
from benchmarks.support.harness import Condition, climbed, mean_and_deviation
from trainer.report_pages.section import table_of

SAME_WITHIN = 0.005
"""Largest difference of AUC, in either direction, from a peer with the same optimizer: initial values differ."""


def at_best_epoch(line: Line) -> tuple[float, float]:
    """Return (validation, test) AUC of the epoch that is best on validation."""
    best = int(np.argmax(line["validation"]))
    return line["validation"][best], line["test"][best]


def learning_rate(library: str, n: int) -> float:
    return MIDDLE[library] * HALF_DECADE**n


def compare_auc(
    task: Task, libraries: Sequence[str], models: Sequence[str], seeds: int, known: Sequence[Line], place: Place
) -> Iterator[Line]:
    """Yield an output line for each training of the comparison, except those in ``known``, which are not run again."""
    made = {_key(line): line for line in known if line["case"] == "auc"}

    def line(library: str, model: str, seed: int, n: int) -> Line:
        rate = learning_rate(library, n)
        fields = {"case": "auc", "task": task.name, "library": library, "model": model, "seed": seed}
        fields |= {"learning_rate": float(f"{rate:.3g}"), "batch_size": task.batch_size, "epochs": task.epochs}
        if _key(fields) not in made:
            started, cpu_started = time.perf_counter(), time.process_time()
            aucs = train(task, library, model, seed, rate, place)
            spent = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu_started}
            made[_key(fields)] = fields | aucs | {name: round(value, 1) for name, value in spent.items()}
            place.tell(made[_key(fields)])
        return made[_key(fields)]

    for model in models:
        for library in libraries:

            def validation_auc(n: int, library: str = library, model: str = model) -> float:
                return at_best_epoch(line(library, model, 0, n))[0]

            chosen = climbed(validation_auc)
            for seed in range(seeds):
                yield line(library, model, seed, chosen)


def _key(line: Line) -> tuple[Any, ...]:
    names = ("task", "library", "model", "seed", "learning_rate", "batch_size", "epochs")
    return tuple(line[name] for name in names)


def auc_verdicts(lines: Sequence[Line]) -> list[Condition]:
    """Check that ours is not below a peer by more than noise: twice the standard error of the seeds' differences."""
    found = []
    for task, model in _cases(lines):
        ours = _test_aucs(lines, task, model, OURS)
        for peer in PEERS:
            theirs = _test_aucs(lines, task, model, peer)
            seeds = sorted(ours.keys() & theirs.keys())
            if len(seeds) < 2:
                continue
            gain = np.array([ours[seed] - theirs[seed] for seed in seeds])
            noise = 2 * float(gain.std(ddof=1)) / math.sqrt(len(gain))
            found.append(
                Condition(
                    f"{task} {model}: AUC compared with {peer}",
                    float(gain.mean()) >= -noise,
                    f"{gain.mean():+.4f}, noise {noise:.4f}, {len(gain)} seeds",
                )
            )
        for own, peer in SAME_OPTIMIZER.items():
            ours, theirs = _test_aucs(lines, task, model, own), _test_aucs(lines, task, model, peer)
            if ours and theirs:
                apart = float(np.mean(list(ours.values())) - np.mean(list(theirs.values())))
                what = f"{task} {model}: {own} within {SAME_WITHIN} of {peer}"
                found.append(Condition(what, abs(apart) <= SAME_WITHIN, f"{apart:+.4f}"))
    return found


def auc_table(lines: Sequence[Line]) -> str:
    """Return test AUC, mean and sample standard deviation over seeds, with the learning rate that was chosen."""
    rows = []
    for task, model in _cases(lines):
        cells = []
        for library in LIBRARIES:
            values = np.array(list(_test_aucs(lines, task, model, library).values()))
            rates = {line["learning_rate"] for line in _of(lines, task, model, library)}
            told = ", ".join(f"{rate:.1e}" for rate in sorted(rates))
            cells.append(f"{mean_and_deviation(values)} ({told})" if len(values) else "")
        rows.append((f"{task}, {model}", *cells))
    return table_of(("test AUC", *LIBRARIES), rows)


def _cases(lines: Sequence[Line]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((line["task"], line["model"]) for line in lines))


def _of(lines: Sequence[Line], task: str, model: str, library: str) -> list[Line]:
    return [line for line in lines if (line["task"], line["model"], line["library"]) == (task, model, library)]


def _test_aucs(lines: Sequence[Line], task: str, model: str, library: str) -> dict[int, float]:
    return {line["seed"]: at_best_epoch(line)[1] for line in _of(lines, task, model, library)}

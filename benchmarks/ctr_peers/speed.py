"""Comparison of the libraries' examples a second, each in its own process, in turns; the table and the conditions."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.ctr_peers import ours
from benchmarks.ctr_peers.tasks import Task
from benchmarks.ctr_peers.training import (
    DEEPCTR,
    MIDDLE,
    OURS,
    PEERS,
    SAME_OPTIMIZER,
    TORCHREC,
    Line,
    Place,
    prepared,
    request,
)
from benchmarks.support.harness import Condition
from trainer.report_pages.section import table_of

BARS = {DEEPCTR: 5.0, TORCHREC: 0.5}
"""Our lowest accepted examples per second, as a multiple of each peer's."""


def compare_speed(
    task: Task, libraries: Sequence[str], models: Sequence[str], rounds: int, steps: dict[str, int], place: Place
) -> Iterator[Line]:
    """Yield a line for each library, variant and model in each round."""
    for _ in range(rounds):
        for model in models:
            for library in (name for name in libraries if name not in SAME_OPTIMIZER):
                for variant in ("",) if library == OURS else PEERS[library].VARIANTS:
                    fields = {"case": "speed", "task": task.name, "library": library, "variant": variant}
                    found = fields | {"model": model, "examples_per_second": round(
                        _own_process(task, library, variant, model, steps, place))}  # fmt: skip
                    place.tell(found)
                    yield found


def _own_process(task: Task, library: str, variant: str, model: str, steps: dict[str, int], place: Place) -> float:
    if library == OURS:
        job = task.job(model, 0, MIDDLE[OURS], place.threads)
        module, asked = ours, ours.specs_to_json(task.dataset, job, place.folder, prepared(task, 0, place))
    else:
        warm = 0 if library == DEEPCTR else steps[library] // 4
        more = {"variant": variant, "warm_steps": warm, "timed_steps": steps[library]}
        module, asked = PEERS[library], request(task, model, 0, MIDDLE[library], place, **more).to_json()
    done = subprocess.run([sys.executable, "-m", module.__name__, asked], stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["examples_per_second"])


def speed_verdicts(lines: Sequence[Line]) -> list[Condition]:
    """Compare ours with the fastest variant of each peer, by medians over rounds."""
    found = []
    for model in dict.fromkeys(line["model"] for line in lines):
        rates = speeds(lines, model)
        for peer, bar in BARS.items():
            variants = {variant: rate for (library, variant), rate in rates.items() if library == peer}
            if not variants or (OURS, "") not in rates:
                continue
            fastest = max(variants, key=lambda name: variants[name])
            times = rates[OURS, ""] / variants[fastest]
            what = f"{model}: examples/s of {peer} ({fastest}), at least {bar:g} times"
            found.append(Condition(what, times >= bar, f"{times:.2f}"))
    return found


def speeds(lines: Sequence[Line], model: str) -> dict[tuple[str, str], float]:
    """Return the median examples a second by library and variant."""
    by_variant: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        if line["model"] == model:
            by_variant.setdefault((line["library"], line["variant"]), []).append(line["examples_per_second"])
    return {name: float(np.median(rates)) for name, rates in by_variant.items()}


def speed_table(lines: Sequence[Line]) -> str:
    models = list(dict.fromkeys(line["model"] for line in lines))
    rows = []
    columns = {model: speeds(lines, model) for model in models}
    for name in dict.fromkeys((line["library"], line["variant"]) for line in lines):
        cells = [f"{columns[model][name]:,.0f}" if name in columns[model] else "" for model in models]
        rows.append((" ".join(filter(None, name)), *cells))
    return table_of(("examples/s", *models), rows)

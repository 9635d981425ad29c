"""Our DNN, DCNv2 and DeepFM beside DeepCTR-Torch's and beside TorchRec with fused rowwise Adagrad.

``.venv/bin/pip install --no-deps deepctr-torch==0.3.0`` (extra ``bench``; left out, so is that peer), then
``python -m benchmarks.ctr_peers auc [--out lines.jsonl]`` and ``python -m benchmarks.ctr_peers speed``. Same rows,
vocabularies, split, dimension, tower, batch size and epochs for all; ours is a job of ``trainer.launch.in_process``, as
``evenkeel train`` runs it, with AdamAR and its whole state, and for ``auc`` also with the peers' optimizers, Adam and
rowwise Adagrad; how each peer is run is said in its file (ctr_deepctr, ctr_torchrec).

``auc``: each library's learning rate is chosen on the *validation* split with seed 0, on a grid of half decades which
is climbed from the middle until the best has worse on both sides; then seeds 0 .. N-1, each at its own best validation
epoch, and the test AUC of that epoch. Seeds have their own order and initial values, and one split. ``speed``: tables
of 500,000 rows; examples a second while training, after a warm-up, of each library in processes of their own, in turns.
One JSON line for each training, a table, and the goals as PASS or FAIL; exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import ctr_deepctr, ctr_ours, ctr_torchrec
from benchmarks.ctr_tasks import HELD_OUT, MODELS, Request, Task, quality_tasks, quick_task, speed_task
from benchmarks.harness import Condition, climbed, cpu, mean_and_deviation, versions
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.launch.on_host import leave
from trainer.recipes.pages.markdown import table_of

OURS, DEEPCTR, TORCHREC = "ours", "deepctr_torch", "torchrec"
OPTIMIZERS = {OURS: "adam_ar", "ours_adam": "adam", "ours_rowwise_adagrad": "rowwise_adagrad"}
LIBRARIES = (*OPTIMIZERS, DEEPCTR, TORCHREC)
SAME_OPTIMIZER = {"ours_adam": DEEPCTR, "ours_rowwise_adagrad": TORCHREC}
SAME_WITHIN = 0.005
"""AUC by which ours may differ from a peer with its optimizer, either way: initial values differ."""
PEERS: dict[str, Any] = {DEEPCTR: ctr_deepctr, TORCHREC: ctr_torchrec}
HALF_DECADE = math.sqrt(10.0)
ADAM_MIDDLE, ADAGRAD_MIDDLE = 1e-3, HALF_DECADE * 1e-2
MIDDLE = dict.fromkeys((OURS, "ours_adam", DEEPCTR), ADAM_MIDDLE) | dict.fromkeys(
    ("ours_rowwise_adagrad", TORCHREC), ADAGRAD_MIDDLE
)
"""Where the search for a learning rate begins: Adam's own default, and what rowwise Adagrad is used with."""
BARS = {DEEPCTR: 5.0, TORCHREC: 0.5}
"""At least so many times the peer's examples a second."""

Line = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where runs keep files, and what is reported of each."""

    folder: Path
    tell: Callable[[Line], None]
    threads: int


# --- one training ----------------------------------------------------------------------------------------------------


def prepared(task: Task, seed: int, place: Place) -> Path:
    """Return the folder of a seed's rows, coded and split as a job of ours prepares them, once."""
    folder = place.folder / f"{task.name}-{seed}"
    prepare(task.dataset, task.job(MODELS[0], seed, MIDDLE[OURS], place.threads), folder)
    return folder


def request(task: Task, model: str, seed: int, rate: float, place: Place, **more: Any) -> Request:
    common = (task.dim, task.hidden, task.batch_size, task.epochs, rate, seed, place.threads)
    return Request(str(prepared(task, seed, place)), model, *common, **more)


def train(task: Task, library: str, model: str, seed: int, rate: float, place: Place) -> Line:
    """Train, and return the AUC after each epoch, by held-out split."""
    if library in OPTIMIZERS:
        job = task.job(model, seed, rate, place.threads, OPTIMIZERS[library])
        events = ctr_ours.events_of(task.dataset, job, place.folder, prepared(task, seed, place))
        return {split: ctr_ours.aucs(events, split) for split in HELD_OUT}
    asked = request(task, model, seed, rate, place)
    found: Line = PEERS[library].run(asked, PreparedData.open(asked.prepared))
    return found


# --- AUC -------------------------------------------------------------------------------------------------------------


def at_best_epoch(line: Line) -> tuple[float, float]:
    """Return (validation, test) AUC of the epoch that is best on validation."""
    best = int(np.argmax(line["validation"]))
    return line["validation"][best], line["test"][best]


def learning_rate(library: str, n: int) -> float:
    return MIDDLE[library] * HALF_DECADE**n


def compare_auc(
    task: Task, libraries: Sequence[str], models: Sequence[str], seeds: int, known: Sequence[Line], place: Place
) -> Iterator[Line]:
    """Yield a line for each training of the comparison, except those in ``known``, which are not run again."""
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
    """Compare ours with each peer: not below by more than noise, twice the standard error of the seeds' differences."""
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
                    f"{task} {model}: AUC beside {peer}",
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


# --- speed -----------------------------------------------------------------------------------------------------------


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
        module, asked = ctr_ours, ctr_ours.specs_to_json(task.dataset, job, place.folder, prepared(task, 0, place))
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


# --- command ---------------------------------------------------------------------------------------------------------


def installed() -> tuple[str, ...]:
    """Return the libraries that are installed."""
    return tuple(name for name in LIBRARIES if name != DEEPCTR or importlib.util.find_spec("deepctr_torch"))


def read_lines(path: Path | None) -> list[Line]:
    if path is None or not path.exists():
        return []
    return [json.loads(text) for text in path.read_text("utf-8").splitlines()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ctr_peers", description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", default="all", choices=["all", "auc", "speed", "quick"])
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets, for auc")
    parser.add_argument("--tasks", default="amazon_sports,ml1m", help="for auc")
    parser.add_argument("--libraries", default=",".join(installed()))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="for speed")
    parser.add_argument("--rows", type=int, default=1_500_000, help="for speed")
    parser.add_argument("--features", type=int, default=26, help="for speed")
    parser.add_argument("--ids", type=int, default=500_000, help="for speed: of each feature")
    parser.add_argument("--batch-size", type=int, default=2048, help="for speed")
    parser.add_argument("--steps", default="deepctr_torch=8,torchrec=200", help="timed steps of peers, for speed")
    parser.add_argument("--folder", type=Path, help="where rows are kept (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="file of JSON lines: added to, and trainings in it are not made again")
    options = parser.parse_args(arguments)
    libraries, models = options.libraries.split(","), options.models.split(",")
    common = {"bench": "ctr_peers", "threads": options.threads, "versions": _versions(), "cpu": cpu()}

    def tell(line: Line) -> None:
        text = json.dumps(common | line)
        print(text, flush=True)
        if options.out is not None:
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(text + "\n")

    with tempfile.TemporaryDirectory(prefix="evenkeel-ctr-") as temporary:
        place = Place(options.folder or Path(temporary), tell, options.threads)
        place.folder.mkdir(parents=True, exist_ok=True)
        verdicts: list[Condition] = []
        if options.what != "speed":
            tasks = {} if options.what == "quick" else quality_tasks(options.data)
            asked = [tasks[name] for name in options.tasks.split(",")] if tasks else [quick_task(place.folder)]
            known = read_lines(options.out)
            lines = [
                line
                for task in asked
                for line in compare_auc(task, libraries, models, options.seeds, known, place)
            ]  # fmt: skip
            print(f"\n{auc_table(lines)}\n")
            verdicts += auc_verdicts(lines)
        if options.what in ("all", "speed"):
            steps = {name: int(number) for name, number in (one.split("=") for one in options.steps.split(","))}
            task = speed_task(place.folder, options.rows, options.features, options.ids, options.batch_size)
            lines = list(compare_speed(task, libraries, models, options.rounds, steps, place))
            print(f"\n{speed_table(lines)}\n")
            verdicts += speed_verdicts(lines)
        for verdict in verdicts:
            print(verdict)
    return 0 if all(verdict.holds for verdict in verdicts) else 1


def _versions() -> dict[str, str]:
    found = versions()
    for package in ("torchrec", "deepctr-torch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


if __name__ == "__main__":
    leave(main())

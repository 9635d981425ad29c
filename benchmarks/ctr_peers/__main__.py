"""Our DNN, DCNv2 and DeepFM compared with DeepCTR-Torch and with TorchRec's fused rowwise Adagrad.

``.venv/bin/pip install --no-deps deepctr-torch==0.3.0`` (extra ``bench``; without it that peer is left out), then
``python -m benchmarks.ctr_peers auc [--out lines.jsonl]`` and ``python -m benchmarks.ctr_peers speed``. Same rows,
vocabularies, split, dimension, tower, batch size and epochs for all; ours is a job of ``trainer.launch.in_process``, as
``evenkeel train`` runs it, with AdamAR and its whole state, and for ``auc`` also with the peers' optimizers, Adam and
rowwise Adagrad. The files of the peers (deepctr, torchrec) describe how each is run, and speed how steps are timed.

``auc``: each library's learning rate is chosen on the *validation* split with seed 0, by hill climbing on a grid of
half decades from the middle until both neighbours are worse; then seeds 0 .. N-1 are trained, and the test AUC is that
of each seed's best validation epoch. Seeds differ in order and initial values, and share one split. ``speed``: steps of
ours with three optimizers and of TorchRec in one process, on the same batches in turn. Needs 9 GB of memory. One JSON
line for each training or contestant, a table, and the goals as PASS or FAIL; exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import importlib.util
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.ctr_peers.auc import auc_table, auc_verdicts, compare_auc
from benchmarks.ctr_peers.speed import compare_speed, speed_table, speed_verdicts
from benchmarks.ctr_peers.tasks import MODELS, quality_tasks, quick_task, speed_task
from benchmarks.ctr_peers.training import DEEPCTR, LIBRARIES, Line, Place
from benchmarks.support.harness import Condition, cpu, parse, versions
from trainer.runs.protocol import leave


def installed() -> tuple[str, ...]:
    """Return the libraries that are installed."""
    return tuple(name for name in LIBRARIES if name != DEEPCTR or importlib.util.find_spec("deepctr_torch"))


def read_lines(path: Path | None) -> list[Line]:
    if path is None or not path.exists():
        return []
    return [json.loads(text) for text in path.read_text("utf-8").splitlines()]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ctr_peers", description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="?", default="quick", choices=["all", "auc", "speed", "quick"])
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder of the data sets, for auc")
    parser.add_argument("--tasks", default="amazon_sports,ml1m", help="data sets of auc")
    parser.add_argument("--libraries", default=",".join(installed()), help="libraries of auc")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--seeds", type=int, default=1, help="seeds of auc")
    parser.add_argument("--threads", type=int, nargs="+", default=[1], help="threads, for auc the first")
    parser.add_argument("--dims", type=int, nargs="+", default=[16], help="dimensions of speed")
    parser.add_argument("--features", type=int, default=26, help="features of speed")
    parser.add_argument("--ids", type=int, default=500_000, help="ids of each feature of speed at dimension 16")
    parser.add_argument("--batch-size", type=int, default=2048, help="batch size of speed")
    parser.add_argument("--iterations", type=int, default=31, help="timed steps of each contestant of speed")
    parser.add_argument("--folder", type=Path, help="where rows are kept (default: a temporary folder)")
    parser.add_argument("--out", type=Path, help="file of JSON lines: added to, and trainings in it are not made again")
    options = parse(parser, arguments, what="all", seeds=3, dims=[16, 64], threads=[1, 2])
    libraries, models = options.libraries.split(","), options.models.split(",")
    common = {"bench": "ctr_peers", "threads": options.threads[0], "versions": _versions(), "cpu": cpu()}

    def tell(line: Line) -> None:
        text = json.dumps(common | line)
        print(text, flush=True)
        if options.out is not None:
            with open(options.out, "a", encoding="utf-8") as file:
                file.write(text + "\n")

    with tempfile.TemporaryDirectory(prefix="evenkeel-ctr-") as temporary:
        place = Place(options.folder or Path(temporary), tell, options.threads[0])
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
            compared = [
                # Tables take the same memory at every dimension.
                speed_task(place.folder, options.features, 16 * options.ids // dim, dim, options.batch_size)
                for dim in options.dims
            ]
            lines = list(compare_speed(compared, models, options.threads, options.iterations, place))
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

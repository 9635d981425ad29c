"""``evenkeel search SPEC.yaml SEARCH.yaml``: trials of a job with other values of its fields, by Ray Tune on this host.

``python -m trainer.search.command SPEC.yaml SEARCH.yaml [--directory D] [--json]``. SPEC.yaml has a dataset and a job,
SEARCH.yaml the fields to try, the metric and the number of trials. The same command with the same ``--directory``
continues a stopped search. Trials train on the same rows, which are prepared once, and publish nothing. The job of the
best trial, by the best of its epochs on validation rows, is written as ``best.yaml``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.launch.in_process import read_spec
from trainer.search.folder import SearchFolder, TrialResult
from trainer.search.spec import check_search, load_search

FINISHED = "finished"
"""File of the search's folder that exists once every trial has ended."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(prog="evenkeel search", description=__doc__)
    parser.add_argument("spec", type=Path, help="YAML file with a dataset and a job")
    parser.add_argument("search", type=Path, help="YAML file with the space of a search")
    parser.add_argument(
        "--directory", type=Path, help="folder of the search (default: EVENKEEL_HOME/searches/NAME of the job)"
    )
    parser.add_argument("--json", action="store_true", help="print the trials as JSON")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns: 0: some trial has a value of the metric, and best.yaml has the best trial's job; 1: no trial has a value,
        or the arguments are bad.
    """
    options = parser().parse_args(arguments)
    try:
        dataset, job = read_spec(options.spec)
        search = load_search(options.search)
        check_search(search, job, dataset)
        home = Path(os.environ.get("EVENKEEL_HOME", ".evenkeel"))
        folder = SearchFolder.begin(options.directory or home / "searches" / job.name, search, job, dataset)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"search directory: {folder.path}", file=sys.stderr, flush=True)
    if not (folder.path / FINISHED).exists():
        from trainer.search import tuner

        tuner.run(folder, lambda line: print(line, file=sys.stderr, flush=True))
        (folder.path / FINISHED).touch()
    results = folder.results()
    best = next((one for one in results if one.best is not None), None)
    path = None if best is None else folder.write_best(best)
    print(json.dumps(_as_json(folder, results, path)) if options.json else in_words(folder, results, path))
    return 0 if best is not None else 1


def _as_json(folder: SearchFolder, results: list[TrialResult], best: Path | None) -> dict[str, Any]:
    return {
        "directory": str(folder.path),
        "metric": folder.metric,
        "best": None if best is None else str(best),
        "trials": [one._asdict() for one in results],
    }


def in_words(folder: SearchFolder, results: list[TrialResult], best: Path | None) -> str:
    """Return a text with a table of the trials, the best first, and the path of the best job."""
    paths = list(folder.search.space)
    header = ["trial", *paths, folder.metric, "epoch", "epochs", "state"]
    rows = [header, *(_cells(one, paths) for one in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{one.trial_id}: {one.error}" for one in results if one.error]
    lines.append(f"best job: {best}" if best else f"no trial has a figure: see log.txt in {folder.path / 'trials'}")
    return "\n".join(lines)


def _cells(one: TrialResult, paths: Sequence[str]) -> list[str]:
    values = [one.values.get(path) for path in paths]
    shown = [f"{value:.4g}" if isinstance(value, float) else json.dumps(value) for value in values]
    figure = "" if one.best is None else f"{one.best:.5f}"
    return [one.trial_id, *shown, figure, "" if one.epoch is None else str(one.epoch), str(one.epochs), one.state]


if __name__ == "__main__":
    sys.exit(main())

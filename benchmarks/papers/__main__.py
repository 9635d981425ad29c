"""``python -m benchmarks.papers NAME``: a paper's tables, trained here, with the published figures next to ours."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers.adamar import alpha
from benchmarks.papers.adamar import recipe as adamar
from benchmarks.papers.data.quick_data import write_quick_data
from benchmarks.papers.dropout import language
from benchmarks.papers.dropout import recipe as dropout
from benchmarks.papers.lecture import towers
from benchmarks.papers.lecture.recipe import recipe as generalization
from benchmarks.papers.rff.recipe import recipe as rff
from benchmarks.papers.sse import language as masked_language
from benchmarks.papers.sse.recipe import recipe as sse
from benchmarks.papers.trials.trial import Recipe
from trainer.data.errors import DataError
from trainer.runs.failures import ResourceError
from trainer.storage.base import StorageError

RECIPES: dict[str, Callable[..., Recipe]] = {
    "adamar": adamar.recipe,
    "alpha": alpha.recipe,
    "sse": sse,
    "dropout": dropout.recipe,
    "language": language.recipe,
    "masked_language": masked_language.recipe,
    "rff": rff,
    "generalization": generalization,
    "towers": towers.recipe,
}
"""``recipe(data, seeds, quick)``; those of MAKE_ROWS take the folder ``rows`` of files that they write."""
MAKE_ROWS = ("adamar", "alpha", "dropout", "generalization", "rff", "sse", "towers")
DATA = Path("data")
SEEDS = {"rff": 10}
"""Default number of seeds of papers where it is not 3; the RFF paper reports variances over ten runs."""
QUICK_SEEDS = {"rff": 2}
"""Default number of seeds of the small form, if not 1."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        0: every trial ended well and every claim that could be judged holds; 1: not so, or bad arguments.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    command = shlex.join(["python", "-m", "benchmarks.papers", *arguments])
    try:
        return _run(options, command)
    except (ValueError, OSError, DataError, ResourceError, StorageError) as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.papers", description=__doc__)
    parser.add_argument("name", choices=sorted(RECIPES), metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--data", type=Path, default=DATA, help=f"folder of the real data sets (default: {DATA})")
    parser.add_argument("--out", type=Path, help="where results are kept (default: EVENKEEL_HOME/papers/NAME)")
    parser.add_argument("--seeds", type=int, help="seeds 0 .. N-1 (default: 3, of rff 10; with --quick 1, of rff 2)")
    parser.add_argument("--part", metavar="FILTER", help="only trials of these names: globs, with commas between them")
    parser.add_argument("--quick", action="store_true", help="the small form, on generated rows: seconds for a trial")
    parser.add_argument("--workers", type=int, default=1, help="jobs that train at a time (default: 1)")
    parser.add_argument("--list", action="store_true", help="print the trials and what they decide; run nothing")
    parser.add_argument("--report", action="store_true", help="report what has ended so far; run nothing")
    return parser


def _run(options: argparse.Namespace, command: str) -> int:
    default = QUICK_SEEDS.get(options.name, 1) if options.quick else SEEDS.get(options.name, 3)
    seeds = default if options.seeds is None else options.seeds
    if options.workers < 1 or seeds < 1:
        raise ValueError("--seeds and --workers: at least 1")
    home = Path(os.environ.get("EVENKEEL_HOME", ".evenkeel"))
    out = (options.out or home / "papers" / (options.name + ("-quick" if options.quick else ""))).resolve()
    data = out / "data" if options.quick else options.data.resolve()
    if options.quick:
        write_quick_data(data)
    more: dict[str, Any] = {"rows": out / "rows"} if options.name in MAKE_ROWS else {}
    recipe = RECIPES[options.name](data, seeds, options.quick, **more)
    trials = recipe.part(options.part)
    if options.list:
        for trial in trials:
            decides = [str(n) for n, claim in enumerate(recipe.claims, 1) if claim.decided_by(trial)]
            print(trial.name + (f"  (claim {', '.join(decides)})" if decides else ""))
        for number, claim in enumerate(recipe.claims, 1):
            print(f"claim {number}: {claim.text}")
        return 0
    if recipe.prepare is not None:
        recipe.prepare()
    from benchmarks.papers.trials.grid import run_grid
    from benchmarks.papers.trials.run_trial import read_record

    if options.report:
        records = [record for trial in trials if (record := read_record(trial, out)) is not None]
    else:
        try:
            records = run_grid(trials, out, workers=options.workers, command=command)
        except KeyboardInterrupt:
            print("stopped; the same command goes on from here", file=sys.stderr)
            return 130
    from benchmarks.papers.pages.layout import write_report

    report = write_report(recipe, records, out)
    print(report.markdown())
    print(f"\nreport: {out / 'report.html'}")
    return 0 if report.is_good else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # runs that train write a checkpoint and end
    code = main()
    from trainer.runs.protocol import leave

    leave(code)

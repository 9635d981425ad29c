"""``python -m tests.mutations [--only ID ...] [--all-tests] [--jobs N]``: is each mutation caught?

Tests run in a copy of the working tree, subprocesses too: it comes first on PYTHONPATH, before an editable install. All
tests named run once without a mutation first, and must pass. Exit code 1 if a mutation survives or cannot be made.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.mutations import ROOT, DoesNotApply, Mutation, load

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "__pycache__", ".*_cache", ".hypothesis", ".evenkeel", "*.egg-info")
"""What is built into the tree and git ignores, such as a compiled kernel, is needed."""
TEST_SECONDS = 120
"""A mutation that makes a test wait for ever is caught then."""
NO_TESTS = (4, 5)
"""pytest's exit codes for a name that is no test, and for no test at all."""


class Outcome(NamedTuple):
    verdict: str
    seconds: float
    output: str = ""

    @property
    def is_caught(self) -> bool:
        return self.verdict == "caught"


def copy_tree(folder: Path) -> Path:
    """A copy of the working tree in ``folder``, with this tree's environment and real data sets."""
    tree = folder / "tree"
    shutil.copytree(ROOT, tree, ignore=LEFT_OUT, symlinks=True)
    (tree / ".venv").symlink_to(ROOT / ".venv")
    (folder / "shared").symlink_to(ROOT.parent / "shared")
    return tree


def run_tests(tree: Path, tests: Iterable[str], *options: str) -> subprocess.CompletedProcess[str]:
    # Schemathesis' plugin, which no test uses, is a third of the start of pytest.
    python_path = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:schemathesis",
         f"--timeout={TEST_SECONDS}", *options, *tests],
        check=False, cwd=tree, env={**os.environ, "PYTHONPATH": python_path}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip


def imports_from(tree: Path) -> None:
    """Raises RuntimeError unless subprocesses of tests import the packages of ``tree``, wherever they run."""
    code = "import embeddings, service, trainer; print(embeddings.__file__, service.__file__, trainer.__file__)"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd="/", env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True,
        text=True, check=True,
    ).stdout.split()  # fmt: skip
    elsewhere = [path for path in found if not Path(path).is_relative_to(tree)]
    if elsewhere:
        raise RuntimeError(f"not imported from the copy at {tree}, where mutations are made: {', '.join(elsewhere)}")


def forget_compiled(path: Path) -> None:
    """Python takes a compiled module for that of any source of the same size and second."""
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)


def try_mutation(tree: Path, mutation: Mutation, tests: Iterable[str]) -> Outcome:
    """Whether one of ``tests`` fails with it; the tree is as before afterwards."""
    began = time.monotonic()
    path = tree / mutation.file
    try:
        mutation.apply(tree)
    except DoesNotApply as error:
        return Outcome("no longer applies", 0.0, str(error))
    forget_compiled(path)
    try:
        result = run_tests(tree, tests, "-x")
    finally:
        shutil.copy2(ROOT / mutation.file, path)
        forget_compiled(path)
    verdict = "SURVIVED" if result.returncode == 0 else "no such test" if result.returncode in NO_TESTS else "caught"
    return Outcome(verdict, time.monotonic() - began, result.stdout)


def report(mutation: Mutation, outcome: Outcome, verbose: bool) -> None:
    print(f"{outcome.verdict:<17} {outcome.seconds:6.1f} s  {mutation.id}: {mutation.fault}", flush=True)
    if verbose or not outcome.is_caught:
        print("    " + "\n    ".join(outcome.output.splitlines()[-40:]), flush=True)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description="Is each mutation caught?")
    parser.add_argument("--only", nargs="+", metavar="ID", help="these mutations alone")
    parser.add_argument("--all-tests", action="store_true", help="the whole suite, not the tests that the list names")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many at once, each in its own copy")
    parser.add_argument("--verbose", action="store_true", help="the end of pytest's output for each, caught or not")
    options = parser.parse_args(arguments)
    mutations = load()
    if unknown := set(options.only or ()) - {mutation.id for mutation in mutations}:
        parser.error(f"no such mutation: {', '.join(sorted(unknown))}")
    chosen = [mutation for mutation in mutations if not options.only or mutation.id in options.only]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="evenkeel-mutations-") as folder:
        trees: queue.Queue[Path] = queue.Queue()
        for number in range(options.jobs):
            (place := Path(folder) / str(number)).mkdir()
            trees.put(copy_tree(place))
        first = trees.queue[0]
        imports_from(first)
        wanted = ["tests"] if options.all_tests else sorted({test for mutation in chosen for test in mutation.tests})
        sound = run_tests(first, wanted)
        print(f"without a mutation: {sound.stdout.splitlines()[-1]}", flush=True)
        if sound.returncode:
            print(f"{sound.stdout}\nThe tests must pass without a mutation: mend them, or the names in the list.")
            return 1

        def judge(mutation: Mutation) -> Outcome:
            tree = trees.get()
            try:
                return try_mutation(tree, mutation, wanted if options.all_tests else mutation.tests)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(options.jobs) as pool:
            outcomes = []
            for mutation, outcome in zip(chosen, pool.map(judge, chosen), strict=True):
                report(mutation, outcome, options.verbose)
                outcomes.append(outcome)
    num_caught = sum(outcome.is_caught for outcome in outcomes)
    print(f"{num_caught} of {len(outcomes)} caught, {(time.monotonic() - began) / 60:.1f} minutes")
    return 0 if num_caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())

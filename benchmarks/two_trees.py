"""Compare two checkouts: whether a change made the tables slower.

``python -m benchmarks.two_trees BEFORE AFTER [--case lookup/adam_ar ...] [--starts 4] [--rounds 40] [--calls 10]``.
Both arguments are folders of checkouts whose CPU kernel is built (``python embeddings/kernels/cpu/build.py``). Each
checkout has a process with one thread, both on the same core. They take turns of 10 calls each, of which the fastest
counts. They are started again four times, since memory addresses differ from process to process.

Prints one JSON line for each case: ``ratio`` is the median over starts of the median over rounds of after / before,
``starts`` the ratio of each start. Given the same tree twice, it shows how far two equal trees differ.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.support.harness import say

WORKER = Path(__file__).parent / "support" / "timed_tree.py"
SIZE = {"dim": 64, "num_rows": 200_000, "num_ids": 8192, "num_steps": 500}
"""Sizes of the table and of a call, and the steps before timing: most rows are then idle for longer than momentum."""
CASES = tuple(
    f"{what}/{optimizer}"
    for what in ("lookup", "step")
    for optimizer in ("sgd", "adam", "adam_inside", "adam_ar", "adam_lazy")
)


class Tree:
    """A timing process of one checkout."""

    def __init__(self, tree: Path, case: str) -> None:
        self._tree = tree
        what, _, optimizer = case.partition("/")
        environment = os.environ | {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-P", str(WORKER)], cwd=tree, env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._ask({"what": what, "optimizer": optimizer} | SIZE)

    def fastest(self, calls: int) -> float:
        """Return the milliseconds of the fastest of ``calls`` calls."""
        return min(self._ask(calls))

    def end(self) -> None:
        self._process.communicate()

    def _ask(self, question: object) -> list[float]:
        pipe = self._process
        assert pipe.stdin is not None
        assert pipe.stdout is not None
        print(json.dumps(question), file=pipe.stdin, flush=True)
        answer = pipe.stdout.readline()
        if not answer:
            self.end()
            raise RuntimeError(f"the process of {self._tree} ended; its own message stands above")
        found: list[float] = json.loads(answer)
        return found


def compare(before: Path, after: Path, case: str, rounds: int, calls: int) -> tuple[float, float, float]:
    """Return the milliseconds of both and the ratio after / before, medians over the rounds of one start."""
    trees = [Tree(before, case), Tree(after, case)]
    try:
        # The order alternates from round to round.
        times = []
        for number in range(rounds):
            pair = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                pair[which] = trees[which].fastest(calls)
            times.append(pair)
    finally:
        for tree in trees:
            tree.end()
    first, second = (statistics.median(pair[which] for pair in times) for which in (0, 1))
    return first, second, statistics.median(pair[1] / pair[0] for pair in times)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_trees", description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--case", nargs="*", default=CASES, choices=CASES)
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args(arguments)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    before, after = options.before.resolve(), options.after.resolve()
    for case in options.case:
        starts = [compare(before, after, case, options.rounds, options.calls) for _ in range(options.starts)]
        middle = [round(statistics.median(of), 4) for of in zip(*starts, strict=True)]
        say({
            "bench": "two_trees", "case": case, "before_ms": middle[0], "after_ms": middle[1], "ratio": middle[2],
            "starts": [round(one[2], 3) for one in starts], **SIZE,
        })  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())

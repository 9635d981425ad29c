"""AdamAR on rare rows and AdamW on frequent ones: the ablation of Li and Lyu, and Proposition 1's decay by frequency.

``python -m benchmarks.by_frequency examples/epinions.yaml --alpha 3.2e-5 [--seeds 0,1,2]``. One committed spec; runs
differ in ``optimizer`` alone: same rows, order, initial values, MLP and its optimizer. Buckets are those of the metric
``frequency_buckets``, of each table's rows. Rows of the table:

==============  =======================================================================================================
AdamW           AdamW on all rows
AR 1..k         AdamAR on buckets 1 to k, AdamW on the others (``optimizer.by_frequency``)
AdamAR          AdamAR on all rows
proposition 1   AdamW whose decay is mu / m in each bucket, m the mean occurrences of its rows in training
==============  =======================================================================================================

AdamW's decay, and proposition 1's of bucket 1, are chosen on the *validation* split with the first seed, unless they
are given, and kept for the others; alpha is given. Prints one JSON line per run and a Markdown table of test AUC.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.one_epoch import Replayed, Result, train
from benchmarks.support.harness import mean_and_deviation
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build, row_buckets
from trainer.launch.in_process import read_spec
from trainer.launch.on_host import leave, single_rank_group
from trainer.launch.worker import quiet, use_threads
from trainer.recipes.pages.markdown import table_of
from trainer.spec import DatasetSpec, FrequencyRule, JobSpec
from trainer.spec.optimizer import NUM_BUCKETS

DECAYS = (0.3, 1.0, 3.0)
"""weight_decay of AdamW, as in the recipe ``adamar``."""
RARE_DECAYS = (1.0, 3.0, 10.0)
"""weight_decay of bucket 1 under proposition 1."""
METHODS = ("AdamW", *(f"AR 1..{k}" for k in range(1, NUM_BUCKETS)), "AdamAR", "proposition 1")


def settings(method: str, alpha: float, decay: float, occurrences: Sequence[float]) -> dict[str, Any]:
    """Return the changes to ``optimizer``. ``occurrences``: mean of the rows of each bucket, 1 to NUM_BUCKETS."""
    if method == "AdamAR":
        return {"kind": "adam_ar"}
    rules: tuple[FrequencyRule, ...] = ()
    if method.startswith("AR"):
        rare = tuple(range(1, int(method[-1]) + 1))
        rules = (FrequencyRule(buckets=rare, kind="adam_ar", alpha=alpha),)
    if method == "proposition 1":
        rules = tuple(
            FrequencyRule(buckets=(bucket,), kind="adamw", weight_decay=decay * occurrences[0] / mean)
            for bucket, mean in enumerate(occurrences, 1)
        )
    return {"kind": "adamw", "weight_decay": decay, "by_frequency": rules}


def mean_occurrences(data: Any) -> list[float]:
    """Return the mean training occurrences of the rows of each bucket, over all tables."""
    rows, sums = np.zeros(NUM_BUCKETS + 1), np.zeros(NUM_BUCKETS + 1)
    for table in data.tables:
        buckets = row_buckets(data, table)
        rows += np.bincount(buckets, minlength=NUM_BUCKETS + 1)
        sums += np.bincount(buckets, data.row_counts(table), NUM_BUCKETS + 1)
    return [float(mean) for mean in sums[1:] / np.maximum(rows[1:], 1)]


def run(job: JobSpec, data: Any, method: str, alpha: float, decay: float, tell: Callable[..., None]) -> Result:
    """Train and evaluate once."""
    changes = settings(method, alpha, decay, mean_occurrences(data))
    job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update=changes)})
    result = train(job, data, build(job, data, alpha=alpha), Result(method, job.seed, alpha))
    auc = {name: [round(value, 5) for value in getattr(result, name)] for name in ("test", "validation")}
    tell(case=method, seed=job.seed, alpha=alpha, decay=decay, seconds=round(result.seconds, 1), **auc)
    return result


def compare(
    dataset: DatasetSpec,
    job: JobSpec,
    alpha: float,
    decays: dict[str, float],
    seeds: Sequence[int],
    folder: Path,
    tell: Any,
) -> list[Result]:
    """Run every method with every seed; ``decays`` that are not there have the first seed's best validation AUC."""
    results, chosen = [], dict(decays)
    for seed in seeds:
        seeded = job.model_copy(update={"seed": seed})
        data = Replayed(prepare(dataset, seeded, folder / f"seed-{seed}"))
        tell(case="buckets", seed=seed, mean_occurrences=mean_occurrences(data))
        for method in METHODS:
            base = method if method == "proposition 1" else "AdamW"
            if base not in chosen:
                tried = DECAYS if base == "AdamW" else RARE_DECAYS
                runs = {one: run(seeded, data, base, alpha, one, tell) for one in tried}
                chosen[base] = max(runs, key=lambda one: runs[one].validation[-1])
                tell(case="chosen", method=base, decay=chosen[base])
                if method == base:
                    results.append(runs[chosen[base]])
                    continue
            results.append(run(seeded, data, method, alpha, chosen[base], tell))
    return results


def table(results: Sequence[Result]) -> str:
    """Return the mean test AUC over seeds, and its sample standard deviation, as Markdown."""
    lines = []
    for method in METHODS:
        runs = [one for one in results if one.method == method]
        auc = np.array([one.test for one in runs])
        lines.append((method, *(mean_and_deviation(of_epoch) for of_epoch in auc.T)))
    return table_of(("rows", *(f"epoch {epoch}" for epoch in range(1, len(lines[0])))), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.by_frequency", description=__doc__.split("\n")[0])
    parser.add_argument("spec", type=Path, help="YAML file with dataset and job")
    parser.add_argument("--alpha", type=float, required=True, help="AdamAR's")
    parser.add_argument("--decay", type=float, help="AdamW's weight_decay, instead of choosing it on validation")
    parser.add_argument(
        "--rare-decay", type=float, help="proposition 1's weight_decay of bucket 1, instead of choosing it"
    )
    parser.add_argument("--seeds", default="0,1,2", help="comma-separated: of split, order, MLP and negatives")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="PATH=VALUE", help="job field to change"
    )
    options = parser.parse_args(arguments)
    dataset, job = read_spec(options.spec, options.changes)
    given = {"AdamW": options.decay, "proposition 1": options.rare_decay}
    decays = {method: decay for method, decay in given.items() if decay is not None}
    quiet()
    use_threads(int(job.resources.cpus_per_worker))

    def tell(**fields: Any) -> None:
        print(json.dumps({"bench": "by_frequency", "dataset": dataset.name, **fields}), flush=True)

    with tempfile.TemporaryDirectory(prefix="evenkeel-by-frequency-") as folder, single_rank_group():
        seeds = [int(seed) for seed in options.seeds.split(",")]
        results = compare(dataset, job, options.alpha, decays, seeds, Path(folder), tell)
    print(f"\n{table(results)}")
    return 0


if __name__ == "__main__":
    leave(main())

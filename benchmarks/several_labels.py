"""Several labels of MovieLens-1M in one job, compared with a job for each: test AUC of each label, mean over seeds.

``python -m benchmarks.several_labels [--data data/ml1m.parquet] [--full] [--seeds 1] [--epochs 1] [--methods ...]``.
The labels are ``like`` (rating >= 4) and ``love`` (rating == 5). Rows, order, batch, optimizers and tables are the same
for every method; each label has hidden layers of the same width and depth as in the models that learn it alone:

==============  =====================================================================================================
alone           dnn, a job for each label, as the peer
shared_bottom   one hidden layer for both labels, one for each
mmoe            three such layers as experts, mixed for each label
ple             an expert for each label and one for both, in one level
esmm            a tower for each label; love is conditional on like
==============  =====================================================================================================

Prints one JSON line per run, and a Markdown table. The epoch is that with the best validation AUC; with several labels
their mean AUC counts, since a job ends with one set of parameters.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.support.harness import mean_and_deviation, parse
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build, choose_alpha
from trainer.launch.on_host import single_rank_group
from trainer.launch.worker import quiet, use_threads
from trainer.report_pages.section import table_of
from trainer.runs.protocol import leave
from trainer.spec import DatasetSpec, JobSpec, parse_dataset, parse_job
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.loop import Trainer

LABELS = {"like": {"rule": "rating >= 4"}, "love": {"rule": "rating == 5"}}
TOWERS: dict[str, Any] = {"hidden": [128], "tower_hidden": [64]}
MODELS: dict[str, dict[str, Any]] = {
    "alone": {"kind": "dnn", "hidden": [128, 64]},
    "shared_bottom": {"kind": "shared_bottom", **TOWERS},
    "mmoe": {"kind": "mmoe", "experts": 3, **TOWERS},
    "ple": {"kind": "ple", "label_experts": 1, "shared_experts": 1, "levels": 1, **TOWERS},
    "esmm": {"kind": "esmm", "hidden": [128, 64], "tasks": {"love": {"given": "like"}}},
}


class Result(NamedTuple):
    """Result of one seed of one method: test AUC by label at the best epoch, that epoch (of the last training)."""

    method: str
    seed: int
    auc: dict[str, float]
    epoch: int
    seconds: float


def dataset_of(path: str, labels: dict[str, Any]) -> DatasetSpec:
    """Return the data set with these labels."""
    features = {"user": {"type": "id"}, "item": {"type": "id"}}
    one = {"label": labels[next(iter(labels))]} if len(labels) == 1 else {"labels": labels}
    return parse_dataset({"name": "ml1m", "uri": path, "features": features, "order": "pos", **one})


def job_of(method: str, seed: int, epochs: int) -> JobSpec:
    """Return the job of a method."""
    return parse_job(
        {
            "name": f"several-labels-{method.replace('_', '-')}",
            "dataset": {"name": "ml1m"},
            "model": {"embedding_dim": 16, **MODELS[method]},
            "optimizer": {"kind": "adam_ar", "learning_rate": 0.001, "decay": "at_read"},
            "dense_optimizer": {"learning_rate": 0.001},
            "batch_size": 2048,
            "epochs": epochs,
            "seed": seed,
            "evaluation": {"split": {"kind": "random", "validation": 0.1, "test": 0.1}, "metrics": ["auc"]},
        }
    )


def trained(job: JobSpec, data: PreparedData, names: Sequence[str]) -> tuple[dict[str, float], int]:
    """Return the test AUC of each label after the epoch with the best validation AUC, and that epoch."""
    sharded = build(job, data, alpha=choose_alpha(job, data.steps_per_epoch))
    trainer = Trainer(job, data, sharded, dense_optimizer(job, sharded))
    trainer.train()
    figures = {(one["epoch"], one["split"]): one for one in trainer.history}
    metrics = {name: f"auc/{name}" if len(names) > 1 else "auc" for name in names}

    def validation(epoch: int) -> float:
        return float(np.mean([figures[epoch, "validation"][metric] for metric in metrics.values()]))

    best = max(range(1, job.epochs + 1), key=validation)
    return {name: float(figures[best, "test"][metric]) for name, metric in metrics.items()}, best


def compare(
    path: str, methods: Sequence[str], num_seeds: int, epochs: int, folder: Path, tell: Callable[..., None]
) -> list[Result]:
    """Run every method with every seed; ``alone`` trains once for each label."""
    results = []
    for seed in range(num_seeds):
        for method in methods:
            job, started = job_of(method, seed, epochs), time.perf_counter()
            together = [tuple(LABELS)] if method != "alone" else [(name,) for name in LABELS]
            auc: dict[str, float] = {}
            epoch = 0
            for names in together:
                dataset = dataset_of(path, {name: LABELS[name] for name in names})
                data = prepare(dataset, job, folder / f"{'-'.join(names)}-{seed}")
                found, epoch = trained(job, data, names)
                auc |= found
            results.append(Result(method, seed, auc, epoch, time.perf_counter() - started))
            tell(case=method, seed=seed, test_auc={k: round(v, 5) for k, v in auc.items()}, epoch=epoch,
                 seconds=round(results[-1].seconds, 1))  # fmt: skip
    return results


def table(results: Sequence[Result]) -> str:
    """Return the mean test AUC of each label over seeds, with its sample standard deviation, as Markdown."""
    lines = []
    for method in dict.fromkeys(one.method for one in results):
        own = [one for one in results if one.method == method]
        by_label = [np.array([one.auc[name] for one in own]) for name in LABELS]
        cells = [mean_and_deviation(values) for values in by_label]
        lines.append((method, *cells, f"{np.mean([one.seconds for one in own]):.0f}"))
    return table_of(("method", *LABELS, "seconds"), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.several_labels", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--data", default="data/ml1m.parquet", help="Parquet file with user, item, rating, pos")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 .. N-1: split, order and initial weights")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--methods", default=",".join(MODELS), help=f"comma-separated, of {', '.join(MODELS)}")
    options = parse(parser, arguments, seeds=3, epochs=8)
    methods = [name for name in options.methods.split(",") if name]
    unknown = [name for name in methods if name not in MODELS]
    if unknown:
        parser.error(f"no such method: {', '.join(unknown)} (there are {', '.join(MODELS)})")
    quiet()
    use_threads(1)

    def tell(**fields: Any) -> None:
        print(json.dumps({"bench": "several_labels", **fields}), flush=True)

    with tempfile.TemporaryDirectory(prefix="evenkeel-several-labels-") as folder, single_rank_group():
        results = compare(options.data, methods, options.seeds, options.epochs, Path(folder), tell)
    print()
    print(table(results))
    return 0


if __name__ == "__main__":
    leave(main())

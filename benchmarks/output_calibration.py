"""Output calibration: ECE, logloss and AUC of test rows by the model's own probabilities, Platt scaling and isotonic.

``python -m benchmarks.output_calibration [--data data] [--seeds 3] [--epochs 4] [--cases ml1m,...]``. One training for
each case and seed; all kinds are fitted to the same scores of its validation rows and measured on those of its test
rows, after the last epoch:

==================  =================================================================================================
ml1m                MovieLens-1M, rating >= 4, dnn with AdamAR, a random tenth of the pairs validates and one tests
amazon_sports       examples/amazon_sports.yaml: dnn with AdamAR, a user's last rows held out
amazon_sports_adam  the same with torch's Adam rule, which overfits from its second epoch on
==================  =================================================================================================

Prints one JSON line per training, and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.support.harness import mean_and_deviation
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build, choose_alpha
from trainer.evaluation.evaluator import Columns
from trainer.launch.on_host import leave, single_rank_group
from trainer.launch.worker import quiet, use_threads
from trainer.metrics import auc, ece, logloss
from trainer.output_calibration.registry import CALIBRATORS, fit
from trainer.report_pages.markdown import table_of
from trainer.spec import DatasetSpec, JobSpec, load_documents, parse_dataset, parse_job
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.loop import Trainer

EXAMPLE = Path(__file__).parents[1] / "examples" / "amazon_sports.yaml"
CASES = ("ml1m", "amazon_sports", "amazon_sports_adam")
FIGURES = ("ece", "logloss", "auc")


class Result(NamedTuple):
    """One seed of one case: by kind of calibrator its figures on test rows, in the order of ``FIGURES``."""

    case: str
    seed: int
    figures: dict[str, tuple[float, ...]]


def spec_of(case: str, data: Path, seed: int, epochs: int) -> tuple[DatasetSpec, JobSpec]:
    """Return the data set and the job of a case."""
    if case == "ml1m":
        features = {"user": {"type": "id"}, "item": {"type": "id"}}
        uri, label = str(data / "ml1m.parquet"), {"rule": "rating >= 4"}
        dataset = parse_dataset({"name": "ml1m", "uri": uri, "features": features, "label": label, "order": "pos"})
        job = parse_job(
            {
                "name": "ml1m",
                "dataset": {"name": "ml1m"},
                "model": {"kind": "dnn", "embedding_dim": 16},
                "optimizer": {"kind": "adam_ar", "learning_rate": 0.001, "decay": "at_read"},
                "evaluation": {"split": {"kind": "random", "validation": 0.1, "test": 0.1}},
            }
        )
        return dataset, job.model_copy(update={"seed": seed, "epochs": epochs})
    example, job_of_example = load_documents(EXAMPLE)
    assert example is not None
    assert job_of_example is not None
    dataset = example.model_copy(update={"uri": str(data / "amazon_sports.parquet")})
    document: dict[str, Any] = job_of_example.model_dump(mode="json") | {"seed": seed, "epochs": epochs}
    document["optimizer"] = {"kind": "adam_ar", "learning_rate": 0.001, "alpha": 1e-4, "decay": "at_read"}
    if case == "amazon_sports_adam":
        document["optimizer"] = {"kind": "adam", "learning_rate": 0.001}
    return dataset, parse_job(document)


def trained(dataset: DatasetSpec, job: JobSpec, folder: Path) -> dict[str, Columns]:
    """Return scores and labels of the held-out splits after the last epoch."""
    data = prepare(dataset, job, folder)
    sharded = build(job, data, alpha=choose_alpha(job, data.steps_per_epoch))
    trainer = Trainer(job, data, sharded, dense_optimizer(job, sharded))
    trainer.train()
    sharded.eval()
    with torch.no_grad():
        batches = {split: list(data.eval_batches(split, 8192)) for split in ("validation", "test")}
        return {
            split: Columns.joined([trainer.evaluator.scored(batch, 0) for batch in own])
            for split, own in batches.items()
        }


def figures_of(validation: Columns, test: Columns) -> dict[str, tuple[float, ...]]:
    """Return by kind the figures of test rows, fitted to validation rows."""
    figures: dict[str, tuple[float, ...]] = {}
    for kind in CALIBRATORS:
        probabilities = fit(kind, validation.scores, validation.labels).probabilities(test.scores)
        inside = np.clip(probabilities, 1e-12, 1.0 - 1e-12)
        logits = np.log(inside / (1.0 - inside))
        labels = test.labels
        figures[kind] = (ece(probabilities, labels), logloss(logits, labels), auc(probabilities, labels))
    return figures


def compare(
    cases: Sequence[str], data: Path, num_seeds: int, epochs: int, folder: Path, tell: Callable[..., None]
) -> list[Result]:
    """Train every case with every seed."""
    results = []
    for case in cases:
        for seed in range(num_seeds):
            dataset, job = spec_of(case, data, seed, epochs)
            rows = trained(dataset, job, folder / f"{case}-{seed}")
            figures = figures_of(rows["validation"], rows["test"])
            results.append(Result(case, seed, figures))
            numbers = {kind: dict(zip(FIGURES, own, strict=True)) for kind, own in figures.items()}
            tell(case=case, seed=seed, rows={split: len(own.scores) for split, own in rows.items()}, **numbers)
    return results


def table(results: Sequence[Result]) -> str:
    """Return the mean of each figure over seeds, with its sample standard deviation, as Markdown."""
    lines = []
    for case in dict.fromkeys(one.case for one in results):
        for kind in CALIBRATORS:
            own = np.array([one.figures[kind] for one in results if one.case == case])
            lines.append((case, kind, *(mean_and_deviation(column) for column in own.T)))
    return table_of(("case", "output_calibration", *FIGURES), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.output_calibration", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="folder of ml1m.parquet and amazon_sports*.parquet"
    )
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0 .. N-1: order, initial weights, a random split")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--cases", default=",".join(CASES), help=f"comma-separated, of {', '.join(CASES)}")
    options = parser.parse_args(arguments)
    cases = [name for name in options.cases.split(",") if name]
    unknown = [name for name in cases if name not in CASES]
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)} (there are {', '.join(CASES)})")
    quiet()
    use_threads(1)

    def tell(**fields: Any) -> None:
        print(json.dumps({"bench": "output_calibration", **fields}), flush=True)

    with tempfile.TemporaryDirectory(prefix="evenkeel-output-calibration-") as folder, single_rank_group():
        results = compare(cases, options.data, options.seeds, options.epochs, Path(folder), tell)
    print()
    print(table(results))
    return 0


if __name__ == "__main__":
    leave(main())

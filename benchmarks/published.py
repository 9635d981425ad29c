"""Recommenders on the public data sets that published tables use: our figures compared with the published figures.

``python -m benchmarks.published [--data ../shared/data] [--rows gowalla_bpr ...] [--seeds 1] [--full]``.
All items of the catalogue are ranked for each user, and no metric uses sampled negatives. Sequences: each user's last
item is the test item, and the item before it the validation item. gowalla: the file's own test rows. The epoch is
chosen only on validation rows. Prints one JSON line per training and, at the end, a Markdown table of means and sample
standard deviations over seeds. The settings of each row are ROWS; ``--epochs`` bounds a quick look.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.support.harness import cpu, mean_and_deviation, parse
from trainer.launch.in_process import train
from trainer.report_pages.section import table_of
from trainer.runs.events import read_events
from trainer.runs.protocol import leave
from trainer.spec import parse_dataset, parse_job

LAST_ITEMS = {"kind": "per_user_last"}


class Row(NamedTuple):
    """Settings of one row of the table, and the published figures that it is compared with.

    A model without a loss takes the defaults of its kind. ``changes``: other parts of the job.
    """

    dataset: str
    model: Mapping[str, Any]
    published: str
    changes: Mapping[str, Any] = MappingProxyType({})

    @property
    def is_sequence(self) -> bool:
        return self.dataset != "gowalla"

    @property
    def metrics(self) -> tuple[str, str]:
        """Names of recall and NDCG; of one test item for each user, recall is the hit rate."""
        return ("hit_rate_10_full", "ndcg_10_full") if self.is_sequence else ("recall_20_full", "ndcg_20_full")

    def dataset_document(self, data: Path) -> dict[str, Any]:
        return {
            "name": self.dataset,
            "uri": str(data.resolve() / f"{self.dataset}.parquet"),
            "features": {"user": {"type": "id"}, "item": {"type": "id"}},
            "label": {"positive": "every_row"},
            **({"order": "pos"} if self.is_sequence else {}),
        }

    def job_document(self, seed: int, epochs: int | None = None, validation: float = 0.1) -> dict[str, Any]:
        """Return the job; ``epochs``: number of epochs to train, instead of stopping by the validation rows."""
        split = LAST_ITEMS if self.is_sequence else {"kind": "column", "column": "is_test", "validation": validation}
        document = {
            "name": self.dataset,
            "dataset": {"name": self.dataset},
            "model": dict(self.model),
            "seed": seed,
            "evaluation": {"split": split, "metrics": list(self.metrics)},
            **self.changes,
        }
        if epochs is not None:
            document["epochs"] = epochs
            document["regularizers"] = {**document.get("regularizers", {}), "early_stopping": None}
        return document


def trained(learning_rate: float, batch_size: int, epochs: int, dropout: float) -> dict[str, Any]:
    """Return the parts of a job that train it with these settings."""
    return {
        "optimizer": {"kind": "adam", "moments": "dense", "learning_rate": learning_rate},
        "dense_optimizer": {"kind": "adam", "learning_rate": learning_rate},
        "regularizers": {"dropout": dropout, "early_stopping": {"patience": 10}},
        "epochs": epochs,
        "batch_size": batch_size,
    }


WHOLE_SOFTMAX = {"embedding_dim": 64, "length": 200, "loss": "softmax"}
ROWS = {
    "ml1m_sasrec": Row(
        "ml1m", {"kind": "sasrec"}, "SASRec, full softmax .3152/.1821; unit length .2853/.1603", {"epochs": 30}
    ),
    "ml1m_sasrec_softmax": Row(
        "ml1m", {"kind": "sasrec", **WHOLE_SOFTMAX}, "SASRec, full softmax .3152/.1821", trained(0.001, 128, 70, 0.2)
    ),
    "ml1m_hstu": Row("ml1m", {"kind": "hstu"}, "HSTU, positions alone .3023/.1718", {"epochs": 30}),
    "ml1m_hstu_softmax": Row(
        "ml1m", {"kind": "hstu", **WHOLE_SOFTMAX}, "HSTU, positions alone .3023/.1718", trained(0.001, 128, 24, 0.2)
    ),
    "amazon_sports_sasrec": Row(
        "amazon_sports", {"kind": "sasrec"}, "SASRec, sampled softmax .0569/.0314; HSTU .0437/.0243"
    ),
    "amazon_sports_hstu": Row("amazon_sports", {"kind": "hstu"}, "HSTU .0437/.0243"),
    "amazon_beauty_sasrec": Row(
        "amazon_beauty", {"kind": "sasrec"}, "SASRec, full softmax .0533/.0327", trained(0.002, 256, 26, 0.4)
    ),
    "amazon_beauty_sasrec_defaults": Row("amazon_beauty", {"kind": "sasrec"}, "SASRec, full softmax .0533/.0327"),
    "amazon_beauty_sasrec_adam_ar": Row(
        "amazon_beauty", {"kind": "sasrec"}, "Adam: amazon_beauty_sasrec",
        trained(0.002, 256, 26, 0.4) | {"optimizer": {"kind": "adam_ar", "learning_rate": 0.002}},
    ),
    "amazon_beauty_sasrec_sse": Row(
        "amazon_beauty", {"kind": "sasrec"}, "without SSE: amazon_beauty_sasrec",
        trained(0.002, 256, 26, 0.4) | {"sse": {"item": {"probability": 0.05}}},
    ),
    "gowalla_bpr": Row("gowalla", {"kind": "bpr"}, "MF-BPR .1627/.1378; SimpleX .1872/.1557"),
    "gowalla_two_tower": Row("gowalla", {"kind": "two_tower"}, "YoutubeDNN .1754/.1473"),
    "gowalla_lightgcn": Row("gowalla", {"kind": "lightgcn"}, "LightGCN .1820/.1547"),
}  # fmt: skip


class Found(NamedTuple):
    """Figures of one training: its best epoch by the validation rows, and the test metrics of that epoch."""

    epoch: int
    recall: float
    ndcg: float
    seconds: float


def run(row: Row, data: Path, seed: int, most_epochs: int | None = None) -> Found:
    """Train once, or twice where validation rows are taken from the training rows: then all of them are trained on.

    Raises:
        RuntimeError: a training failed.
    """
    document = row.job_document(seed)
    if most_epochs is not None:
        job = parse_job(document).against(parse_dataset(row.dataset_document(data)))
        document["epochs"] = min(most_epochs, job.epochs)
    found = _train(row, data, document)
    if row.is_sequence:
        return found
    again = _train(row, data, row.job_document(seed, found.epoch, validation=0.0))
    return again._replace(seconds=found.seconds + again.seconds)


def _train(row: Row, data: Path, document: Mapping[str, Any]) -> Found:
    dataset = parse_dataset(row.dataset_document(data))
    job = parse_job(document).against(dataset)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="evenkeel-published-") as scratch:
        if train(dataset, job, run_dir=Path(scratch) / "run", store=f"{scratch}/store"):
            raise RuntimeError(f"the training of {document['name']} failed")
        told = [event.fields for event in read_events(Path(scratch) / "run")]
    return Found(*best(row, told), round(time.perf_counter() - started, 1))


def best(row: Row, events: Sequence[Mapping[str, Any]]) -> tuple[int, float, float]:
    """Return the epoch with the best NDCG of the validation rows, and its test recall and NDCG.

    Without validation rows it is the last epoch. ``events``: a run's events.
    """
    metrics = [event for event in events if event["type"] == "metric"]
    test = {event["epoch"]: event for event in metrics if event["split"] == "test"}
    watched = [event for event in metrics if event["split"] == "validation"]
    recall, ndcg = row.metrics
    epoch = max(watched, key=lambda event: event[ndcg])["epoch"] if watched else max(test)
    return epoch, float(test[epoch][recall]), float(test[epoch][ndcg])


def table(results: Mapping[str, Sequence[Found]]) -> str:
    """Return means and sample standard deviations over seeds as Markdown."""
    lines = []
    for name, found in results.items():
        figures = (mean_and_deviation(values) for values in ([f.recall for f in found], [f.ndcg for f in found]))
        epochs = ", ".join(str(f.epoch) for f in found)
        seconds = f"{sum(f.seconds for f in found) / len(found):.0f}"
        lines.append((name, str(len(found)), *figures, epochs, seconds, ROWS[name].published))
    return table_of(("row", "seeds", "recall", "NDCG", "epochs", "seconds", "published"), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.published", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the data sets")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=1, help="most epochs of a training; --full: the row's own")
    options = parse(parser, arguments, seeds=[0, 1, 2], epochs=None)
    results: dict[str, list[Found]] = {}
    for name in options.rows:
        for seed in options.seeds:
            found = run(ROWS[name], options.data, seed, options.epochs)
            results.setdefault(name, []).append(found)
            line = {"bench": "published", "row": name, "seed": seed, **found._asdict(), "cpu": cpu()}
            print(json.dumps(line), flush=True)
    print()
    print(table(results))
    return 0


if __name__ == "__main__":
    leave(main())

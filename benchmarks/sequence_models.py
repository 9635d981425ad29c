"""Comparison of sequence models on MovieLens-1M, with the same rows, sizes, loss, draws and optimizer.

``python -m benchmarks.sequence_models [--data ../shared/data] [--full] [--seeds 1] [--epochs 1] [--kinds ...]``.
It trains ``examples/ml1m_sasrec.yaml`` with each kind of model, with the dropout, dimension and length given there, and
ranks the last item of each user after the last epoch. Prints one JSON line per training, and a Markdown table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.harness import mean_and_deviation, parse
from trainer.launch.in_process import train
from trainer.launch.on_host import leave
from trainer.report_pages.section import table_of
from trainer.spec import load_documents, parse_job

KINDS: dict[str, dict[str, Any]] = {
    "sasrec": {"blocks": 2, "heads": 1},
    "gru4rec": {"gru_layers": 1},
    "hstu": {"blocks": 2, "heads": 1},
}
METRICS = ("hit_rate_10", "ndcg_10", "hit_rate_10_full", "ndcg_10_full")
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "ml1m_sasrec.yaml"


def run(data: Path, kind: str, loss: str, negatives: int, seed: int, epochs: int) -> dict[str, float]:
    """Train once; return the metrics of the test split after the last epoch.

    Raises:
        RuntimeError: the run failed.
    """
    dataset, example = load_documents(EXAMPLE)
    assert dataset is not None
    assert example is not None
    shared = {name: getattr(example.model, name) for name in ("embedding_dim", "length")}
    model = {"kind": kind, "loss": loss, "negatives": negatives, **shared, **KINDS[kind]}
    document = example.model_dump(mode="json", exclude_unset=True)
    evaluation = document["evaluation"] | {"metrics": list(METRICS)}
    document |= {"model": model, "seed": seed, "epochs": epochs, "publish": None, "evaluation": evaluation}
    here = dataset.model_copy(update={"uri": str(data / "ml1m.parquet")})
    with tempfile.TemporaryDirectory(prefix="evenkeel-sequences-") as scratch:
        if train(here, parse_job(document).against(here), run_dir=Path(scratch) / "run", store=f"{scratch}/store"):
            raise RuntimeError(f"the training of {kind} failed")
        events = [json.loads(line) for line in (Path(scratch) / "run" / "events.jsonl").read_text("utf-8").splitlines()]
    test = [event for event in events if event["type"] == "metric" and event["split"] == "test"][-1]
    return {name: float(test[name]) for name in METRICS}


def table(results: Sequence[dict[str, Any]]) -> str:
    """Return means and sample standard deviations over seeds as a Markdown table."""
    lines = []
    for kind in dict.fromkeys(one["kind"] for one in results):
        own = [one for one in results if one["kind"] == kind]
        figures = (mean_and_deviation([one[name] for one in own]) for name in METRICS)
        lines.append((kind, str(len(own)), *figures))
    return table_of(("model", "seeds", *METRICS), lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sequence_models", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the data sets")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 .. N-1")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--loss", choices=("bce", "sampled_softmax"), default="bce")
    parser.add_argument("--negatives", type=int, default=1, help="negatives drawn for each target")
    options = parse(parser, arguments, seeds=3, epochs=8)
    results = []
    for seed in range(options.seeds):
        for kind in options.kinds:
            started = time.perf_counter()
            found = run(options.data, kind, options.loss, options.negatives, seed, options.epochs)
            seconds = round(time.perf_counter() - started, 1)
            results.append({"kind": kind, "seed": seed, **found, "seconds": seconds})
            print(json.dumps({"bench": "sequence_models", **results[-1]}), flush=True)
    print()
    print(table(results))
    return 0


if __name__ == "__main__":
    leave(main())

"""Test AUC by epoch where the item table of epinions grows: how many rows it has, and who is let in.

Two thirds of the items occur once. Jobs of examples/epinions.yaml (AdamAR, four epochs), which differ in ``tables`` and
seed alone; a JSON line for each, as soon as it is there. ``--out``: lines that are in this file are not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from trainer.launch.in_process import train
from trainer.runs.events import read_events
from trainer.spec import load_documents, parse_job

MANIFEST = Path(__file__).resolve().parents[1] / "examples" / "epinions.yaml"
ALL = 260_000
CASES: dict[str, dict[str, int]] = {
    "every id has a row": {},
    "capacity 260,000": {"capacity": ALL},
    **{f"capacity 260,000, admission_threshold {k}": {"capacity": ALL, "admission_threshold": k} for k in (2, 3, 5)},
    **{f"capacity {n:,}": {"capacity": n} for n in (110_000, 55_000, 27_500)},
    **{f"capacity {n:,}, admission_threshold 2": {"capacity": n, "admission_threshold": 2} for n in (55_000, 27_500)},
}


def test_auc(table: dict[str, int], seed: int, data: Path) -> list[float]:
    """Return the test AUC after each epoch."""
    dataset, job = load_documents(MANIFEST)
    assert dataset is not None
    assert job is not None
    dataset = dataset.model_copy(update={"uri": str(data / "epinions.parquet"), "graphs": {}})
    document = job.model_dump(mode="json") | {"seed": seed, "tables": {"item": table} if table else {}}
    document["optimizer"] = {"kind": "adam_ar", "learning_rate": 0.001, "alpha": 3e-5, "decay": "at_read"}
    document["checkpoint"] = {"every_steps": 10**6, "asynchronous": False}
    with tempfile.TemporaryDirectory(prefix="evenkeel-growth-") as folder:
        directory = Path(folder) / "run"
        with contextlib.redirect_stdout(sys.stderr):
            assert train(dataset, parse_job(document), run_dir=directory, store=f"{folder}/store") == 0
        events = [event.fields for event in read_events(directory)]
        return [event["auc"] for event in events if event["type"] == "metric" and event["split"] == "test"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data"), help="folder with epinions.parquet")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("growth_auc.jsonl"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    lines = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {(line["case"], line["seed"]) for line in lines}
    for seed in range(options.seeds):
        for case, table in CASES.items():
            if options.case in case and (case, seed) not in done:
                found: dict[str, Any] = {"bench": "growth_auc", "case": case, "seed": seed}
                found["test_auc"] = [round(auc, 5) for auc in test_auc(table, seed, options.data)]
                print(json.dumps(found), flush=True)
                with options.out.open("a") as file:
                    file.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()

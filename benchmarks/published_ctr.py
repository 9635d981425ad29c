"""CTR models on MovieLens-1M: ours compared with RecBole and FuxiCTR on the same rows.

``python -m benchmarks.published_ctr [--data ../shared/data] [--models deepfm ...] [--libraries ours recbole ...]
[--seeds 0 1 2] [--peers build/ctr-peers] [--full]``. The recipe is RecBole's: ratings of 3 are left out, 4 and 5 are
positive; the fields are user, item, gender, age, occupation, release year and genres. A seed of its own splits the rows
8:1:1, once for all libraries and seeds. SETTINGS are the same for all. The epoch is chosen by validation AUC. Peers
run in an environment of their own, which ``--peers`` names, and which is made there if it is missing. Prints one JSON
line per training, and at the end a Markdown table of means and sample standard deviations over seeds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
import time
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

import benchmarks.support
from benchmarks.support.harness import cpu, mean_and_deviation, parse
from trainer.launch.in_process import train
from trainer.report_pages.section import table_of
from trainer.runs.events import read_events
from trainer.runs.protocol import leave
from trainer.spec import parse_dataset, parse_job

SETTINGS: dict[str, Any] = {
    "dim": 16, "hidden": [128, 128, 128], "dropout": 0.2, "cross_layers": 3, "attention_layers": 3,
    "attention_heads": 2, "attention_units": 8, "learning_rate": 0.005, "batch_size": 4096, "patience": 3,
}  # fmt: skip
"""Settings of all libraries: RecBole's defaults of DeepFM, the batch and rate of its own search on these rows."""
MODELS: dict[str, dict[str, Any]] = {
    "deepfm": {},
    "dcnv2": {"structure": "stacked", "cross_layers": SETTINGS["cross_layers"], "batch_norm": True},
    "autoint": {name: SETTINGS[name] for name in SETTINGS if name.startswith("attention")},
    "wide_deep": {},
}
ADAM_AR = {"optimizer": {"kind": "adam_ar", "learning_rate": SETTINGS["learning_rate"]}}
SSE = {"sse": {"user": {"probability": 0.01}, "item": {"probability": 0.01}}}
OURS: dict[str, dict[str, Any]] = {
    "ours": {}, "ours_adam_ar": ADAM_AR, "ours_sse": SSE, "ours_adam_ar_sse": {**ADAM_AR, **SSE},
}  # fmt: skip
"""Changes of our job, by the name of the row."""
PEERS = ("recbole", "fuxictr")
REQUIREMENTS = (
    # In this order: torch from the machine's index, so that no other package chooses its build.
    ("torch==2.13.0",),
    ("--no-deps", "recbole==1.2.1", "fuxictr==2.3.10"),  # RecBole wants ray of 2023, FuxiCTR a newer one
    ("numpy", "pandas<3", "pyarrow", "scipy", "scikit-learn", "pyyaml", "tqdm", "polars", "h5py", "pydantic", "psutil",
     "colorlog==4.7.2", "colorama==0.4.4", "tensorboard", "texttable", "ray[data]>=2.52.0"),
)  # fmt: skip


class Found(NamedTuple):
    """Best epoch of a training by validation AUC, that AUC, the epoch's test figures, processor seconds of an epoch.

    With evaluation; ours also with reading the rows, once.
    """

    epoch: int
    validation: float
    auc: float
    logloss: float
    seconds: float


def write_rows(data: Path, path: Path) -> None:
    """Write the rows of the recipe to a Parquet file, with ``label`` and ``fold``."""
    rows = pq.read_table(data / "ml1m.parquet", columns=["user", "item", "rating"])
    rows = rows.filter(pc.not_equal(rows["rating"], 3)).sort_by([("user", "ascending"), ("item", "ascending")])
    users = _of_each(rows["user"], data / "ml1m_users.parquet", "user")
    movies = _of_each(rows["item"], data / "ml1m_movies.parquet", "item")
    place = np.random.default_rng(0).permutation(len(rows)) * 10 // len(rows)
    columns = {
        "user": rows["user"],
        "item": rows["item"],
        **{name: users[name] for name in ("gender", "age", "occupation")},
        "year": pc.struct_field(pc.extract_regex(movies["title"], r"\((?P<year>\d{4})\)$"), "year"),
        "genres": pc.split_pattern(movies["genres"], "|"),
        "label": pc.greater(rows["rating"], 3).cast(pa.int8()),
        "fold": np.array(["validation", "test"] + 8 * ["train"])[place],
    }
    pq.write_table(pa.table(columns), path)


def _of_each(ids: pa.ChunkedArray, path: Path, key: str) -> pa.Table:
    """Return the file's row of each id."""
    table = pq.read_table(path).sort_by(key)
    return table.take(np.searchsorted(table[key].to_numpy(), ids.to_numpy()))


def job_document(library: str, model: str, seed: int, epochs: int) -> dict[str, Any]:
    adam = {"kind": "adam", "learning_rate": SETTINGS["learning_rate"]}
    return {
        "name": model.replace("_", "-"),
        "dataset": {"name": "ml1m"},
        "model": {"kind": model, "embedding_dim": SETTINGS["dim"], "hidden": SETTINGS["hidden"], **MODELS[model]},
        "optimizer": adam,
        "dense_optimizer": adam,
        # Of the tower's input too, as in RecBole: without it validation AUC of deepfm was .0015 lower.
        "regularizers": {
            "dropout": SETTINGS["dropout"],
            "dropout_layers": "both",
            "early_stopping": {"patience": SETTINGS["patience"]},
        },
        "epochs": epochs,
        "batch_size": SETTINGS["batch_size"],
        "seed": seed,
        "evaluation": {"split": {"kind": "column", "column": "fold"}},
        **OURS[library],
    }


def dataset_document(rows: Path) -> dict[str, Any]:
    features = {name: {"type": "id"} for name in ("user", "item", "gender", "age", "occupation", "year")}
    return {
        "name": "ml1m",
        "uri": str(rows),
        "features": {**features, "genres": {"type": "id_list"}},
        "label": {"column": "label"},
    }


def ours(library: str, model: str, seed: int, epochs: int, rows: Path) -> Found:
    """Train our job.

    Raises:
        RuntimeError: the training failed.
    """
    dataset = parse_dataset(dataset_document(rows))
    job = parse_job(job_document(library, model, seed, epochs)).against(dataset)
    with tempfile.TemporaryDirectory(prefix="evenkeel-ctr-") as scratch:
        begun = time.process_time()
        if train(dataset, job, run_dir=Path(scratch) / "run", store=f"{scratch}/store"):
            raise RuntimeError(f"the training of {library} {model} failed")
        seconds = time.process_time() - begun
        return best([event.fields for event in read_events(Path(scratch) / "run")], seconds)


def best(events: Sequence[Mapping[str, Any]], seconds: float) -> Found:
    """Return the figures of a run of ours from its events; ``seconds``: of all its epochs."""
    metrics = [event for event in events if event["type"] == "metric"]
    validation, test = ({e["epoch"]: e for e in metrics if e["split"] == split} for split in ("validation", "test"))
    epoch = max(validation, key=lambda one: validation[one]["auc"])
    figures = test[epoch]["auc"], test[epoch]["logloss"]
    return Found(epoch, validation[epoch]["auc"], *figures, seconds / len(validation))


def peer(library: str, model: str, seed: int, epochs: int, rows: Path, environment: Path) -> Found:
    """Train a peer's model in its environment, which is made if it is missing.

    Raises:
        RuntimeError: the training or a package's installation failed; the message is the last line that it wrote.
    """
    whole = environment / "whole"
    if not whole.exists():
        venv.create(environment, with_pip=True)
        for requirements in REQUIREMENTS:
            _output_of(environment, rows.parent, "-m", "pip", "install", "--quiet", *requirements)
        whole.touch()
    settings = json.dumps({**SETTINGS, "model": model, "seed": seed, "epochs": epochs})
    script = Path(benchmarks.support.__path__[0]).absolute() / "ctr_library_peers.py"
    with tempfile.TemporaryDirectory(prefix="evenkeel-ctr-") as scratch:
        told = _output_of(environment, Path(scratch), str(script), library, str(rows), scratch, settings)
    return Found(**json.loads(told.splitlines()[-1]))


def _output_of(environment: Path, folder: Path, *arguments: str) -> str:
    """Return the output of the environment's Python; ``folder``: its working directory."""
    command = [str(environment.absolute() / "bin" / "python"), "-W", "ignore", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it wrote nothing"])[-1])
    return done.stdout


def table(results: Mapping[tuple[str, str], Sequence[Found]], failures: Mapping[tuple[str, str], str]) -> str:
    """Return means and sample standard deviations over seeds, or the message of a failure, as Markdown."""
    lines = []
    for name, found in results.items():
        figures = (mean_and_deviation(values) for values in ([f.auc for f in found], [f.logloss for f in found]))
        seconds = sum(f.seconds for f in found) / len(found)
        lines.append((*name, *figures, ", ".join(str(f.epoch) for f in found), f"{seconds:.1f}"))
    lines += [(*name, message, "", "", "") for name, message in failures.items()]
    return table_of(("model", "library", "test AUC", "logloss", "epochs", "processor s of an epoch"), sorted(lines))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.published_ctr", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"), help="folder of the data sets")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["deepfm"])
    parser.add_argument("--libraries", nargs="+", choices=[*OURS, *PEERS], default=["ours"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--epochs", type=int, default=2, help="most epochs of a training")
    parser.add_argument("--peers", type=Path, default=Path("build/ctr-peers"), help="environment of the peers")
    everything = {"models": list(MODELS), "libraries": [*OURS, *PEERS], "seeds": [0, 1, 2], "epochs": 50}
    options = parse(parser, arguments, **everything)
    results: dict[tuple[str, str], list[Found]] = {}
    failures: dict[tuple[str, str], str] = {}
    with tempfile.TemporaryDirectory(prefix="evenkeel-ctr-") as scratch:
        rows = Path(scratch) / "rows.parquet"
        write_rows(options.data, rows)
        for model in options.models:
            for library in options.libraries:
                for seed in options.seeds:
                    given = (library, model, seed, options.epochs, rows)
                    try:
                        found = ours(*given) if library in OURS else peer(*given, options.peers)
                    except RuntimeError as error:
                        if library in OURS:
                            raise
                        failures[model, library] = str(error)
                        break
                    results.setdefault((model, library), []).append(found)
                    line = {"bench": "published_ctr", "model": model, "library": library, "seed": seed}
                    print(json.dumps({**line, **found._asdict(), "cpu": cpu()}), flush=True)
    print()
    print(table(results, failures))
    return 0


if __name__ == "__main__":
    leave(main())

"""One-epoch overfitting on real data: the same job with seven ways of training its embeddings, test AUC by epoch.

``python -m benchmarks.one_epoch [SPEC] [--full] [--seeds 1] [--methods ...]``. One committed spec; runs differ
only in the embeddings' optimizer: same rows, same order, same initial values, same MLP and its optimizer. Methods:

=============  ======================================================================================================
adam           Adam with ``moments: dense`` (ours)
adam_lazy      Adam with ``moments: lazy`` (ours)
meda           the same, with rows and moments reset at the start of each epoch (``regularizers.meda``)
adam_ar        AdamAR with dense moments (ours), alpha chosen on the *validation* split: see :func:`choose_alpha`
by_epoch       AdamAR with ``decay: by_epoch`` and ``alpha: default``
torch_adam     torch.optim.Adam on the dense gradients of torch.nn.EmbeddingBag: the peer
frozen         embeddings frozen at random normal values, only the MLP is trained: a lower bound
=============  ======================================================================================================

Prints one JSON line per run and epoch, a Markdown table of means over seeds, and the conditions under test as PASS or
FAIL with their numbers; exit code 1 if one fails.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.support.baselines import TorchModel
from benchmarks.support.harness import Condition, climbed, mean_and_deviation, parse
from trainer.data.batches.prepared import PreparedData
from trainer.data.prepare.preparation import prepare
from trainer.distributed.build import build, default_alpha
from trainer.launch.in_process import read_spec
from trainer.launch.on_host import single_rank_group
from trainer.launch.worker import quiet, use_threads
from trainer.report_pages.section import table_of
from trainer.runs.protocol import leave
from trainer.spec import DatasetSpec, JobSpec
from trainer.training.dense_parameters import dense_optimizer
from trainer.training.hooks import Hooks
from trainer.training.loop import Trainer

METHODS = ("adam", "adam_lazy", "meda", "adam_ar", "by_epoch", "torch_adam", "frozen")
PROTOCOLS = ("epinions", "amazon_sports")
FROZEN_STD = 1.0
"""Standard deviation of torch.nn.Embedding's initial values."""
HALF_DECADE = math.sqrt(10.0)


@dataclass
class Result:
    """AUC by epoch, [epochs] each."""

    method: str
    seed: int
    alpha: float | None
    validation: list[float] = field(default_factory=list)
    test: list[float] = field(default_factory=list)
    seconds: float = 0.0


class Replayed:
    """Prepared data whose training batches are made once and kept, so that every method gets the same batches."""

    def __init__(self, data: PreparedData):
        self._data = data
        self._epochs: dict[int, list[Any]] = {}
        self._splits: dict[str, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def train_batches(
        self, epoch: int, start: int = 0, rank: int = 0, world_size: int = 1, micro_batches: int = 1
    ) -> Iterator[Any]:
        assert micro_batches == 1
        if epoch not in self._epochs:
            self._epochs[epoch] = list(self._data.train_batches(epoch))
        return iter(self._epochs[epoch][start:])

    def eval_batches(self, split: str, batch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        if split not in self._splits:
            self._splits[split] = list(self._data.eval_batches(split, batch_size))
        return iter(self._splits[split])


def run(job: JobSpec, data: Any, method: str, alpha: float | None = None) -> Result:
    """Train and evaluate once."""
    result = Result(method, job.seed, alpha)
    kind = "adam_ar" if method in ("adam_ar", "by_epoch") else "adam"
    moments = "lazy" if method == "adam_lazy" else "dense"
    decay = "by_epoch" if method == "by_epoch" else "at_read"
    optimizer = job.optimizer.model_copy(update={"kind": kind, "moments": moments, "decay": decay})
    regularizers = job.regularizers.model_copy(update={"meda": method == "meda"})
    job = job.model_copy(update={"optimizer": optimizer, "regularizers": regularizers})
    if method == "by_epoch":
        alpha = result.alpha = default_alpha(data.steps_per_epoch, decay)
    model: Any = build(job, data, alpha=alpha)
    if method in ("torch_adam", "frozen"):
        model = TorchModel.like(job, data, model, frozen_std=FROZEN_STD if method == "frozen" else None)
    return train(job, data, model, result)


def train(job: JobSpec, data: Any, model: Any, result: Result) -> Result:
    """Train the model, and write its AUC by epoch into ``result``."""
    started = time.perf_counter()

    def emit(event: str, **fields: Any) -> None:
        if event == "metric" and fields["split"] in ("validation", "test"):
            getattr(result, fields["split"]).append(fields["auc"])

    Trainer(job, data, model, dense_optimizer(job, model), hooks=Hooks(emit)).train()
    result.seconds = time.perf_counter() - started
    return result


def choose_alpha(job: JobSpec, data: Any, tell: Any) -> float:
    """Return the alpha of the grid 10^(n/2) with the highest validation AUC after the last epoch, one seed.

    The curve over alpha has one hump, so the search starts at the half decade nearest to the default and climbs.
    """
    start = round(2 * math.log10(default_alpha(data.steps_per_epoch)))
    known: dict[int, float] = {}

    def score(n: int) -> float:
        if n not in known:
            result = run(job, data, "adam_ar", HALF_DECADE**n)
            known[n] = result.validation[-1]
            tell({"case": "alpha", "alpha": HALF_DECADE**n, "validation_auc": result.validation, "seed": job.seed})
        return known[n]

    return HALF_DECADE ** climbed(score, start)


# --- conditions ------------------------------------------------------------------------------------------------------


def conditions(dataset: str, auc: dict[str, np.ndarray]) -> list[Condition]:
    """Return the conditions that the given methods allow to be judged. ``auc``: mean test AUC by method, [epochs].

    On data sets other than PROTOCOLS, where Adam may well fall below frozen embeddings, runs are judged by their best.
    """
    found = []

    def add(name: str, value: float, limit: float, what: str, above: bool = True) -> None:
        holds = value >= limit if above else value <= limit
        found.append(
            Condition(name, holds, f"{what} = {value:+.4f} ({'at least' if above else 'at most'} {limit:.3f})")
        )

    have = auc.keys()
    if dataset == "epinions" and "adam" in have:
        add("i. Adam falls", auc["adam"].max() - auc["adam"][-1], 0.01, "its best - its last epoch")
    if "adam_ar" in have:
        add(
            "ii. AdamAR stays",
            auc["adam_ar"].max() - auc["adam_ar"][-1],
            0.01,
            "its best - its last epoch",
            above=False,
        )
    if {"adam", "adam_ar"} <= have and dataset == "amazon_sports":
        add("iii. AdamAR wins", auc["adam_ar"].max() - auc["adam"].max(), 0.012, "best of AdamAR - best of Adam")
    if {"adam", "adam_ar"} <= have and dataset == "epinions":
        first = f"AdamAR - Adam after the last epoch (after the first: {auc['adam_ar'][0] - auc['adam'][0]:+.4f})"
        add("iii. AdamAR ends above", auc["adam_ar"][-1] - auc["adam"][-1], 0.01, first)
    if {"adam", "by_epoch"} <= have and dataset in PROTOCOLS:
        what = "its last epoch - Adam's best"
        add("vi. by_epoch keeps Adam's best", auc["by_epoch"][-1] - auc["adam"].max(), -0.003, what)
    if {"adam", "torch_adam"} <= have:
        gap = float(np.abs(auc["adam"] - auc["torch_adam"]).max())
        add("iv. Dense moments are torch's", gap, 0.005, "largest gap to torch.optim.Adam over the epochs", above=False)
    if {"adam", "adam_lazy"} <= have and dataset in PROTOCOLS:
        gain = float((auc["adam"] - auc["adam_lazy"])[:2].min())
        found.append(
            Condition("iv. Dense above lazy", gain > 0, f"smaller gain of epochs 1 and 2 = {gain:+.4f} (above 0)")
        )
    if "frozen" in have:
        for method in auc:
            if method != "frozen":
                which, of_run = ("worst", auc[method].min()) if dataset in PROTOCOLS else ("best", auc[method].max())
                what = f"its {which} epoch - best with frozen embeddings"
                add(f"v. {method} learns embeddings", of_run - auc["frozen"].max(), 0.01, what)
    return found


def table(results: Sequence[Result]) -> str:
    """Return the mean test AUC over seeds (and their sample standard deviation) as Markdown."""
    epochs = max(len(result.test) for result in results)
    lines = []
    for method, runs in by_method(results).items():
        auc = np.array([result.test for result in runs])
        cells = [mean_and_deviation(of_epoch) for of_epoch in auc.T]
        alpha = "" if runs[0].alpha is None else f" (alpha {runs[0].alpha:.1e})"
        lines.append((f"{method}{alpha}", *cells, f"{np.mean([one.seconds for one in runs]):.0f}"))
    return table_of(("method", *(f"epoch {e + 1}" for e in range(epochs)), "seconds"), lines)


def by_method(results: Sequence[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.method, []).append(result)
    return {method: found[method] for method in METHODS if method in found}


# --- command ---------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_epoch", description=__doc__.split("\n")[0])
    parser.add_argument("spec", type=Path, nargs="?", default=Path("examples/epinions.yaml"), help="dataset and job")
    parser.add_argument("--seeds", type=int, default=1, help="seeds 0 .. N-1: order, MLP and negatives, of one split")
    parser.add_argument("--methods", default="adam,by_epoch", help=f"comma-separated, of {', '.join(METHODS)}")
    parser.add_argument("--alpha", type=float, help="AdamAR's alpha, instead of choosing it on validation")
    parser.add_argument(
        "--set", dest="changes", action="append", default=[], metavar="PATH=VALUE", help="a field of the job to change"
    )
    parser.add_argument("--work", type=Path, help="folder for prepared data (default: a temporary one)")
    options = parse(parser, arguments, seeds=3, methods=",".join(METHODS))
    methods = [name for name in options.methods.split(",") if name]
    unknown = [name for name in methods if name not in METHODS]
    if unknown:
        parser.error(f"no such method: {', '.join(unknown)} (there are {', '.join(METHODS)})")
    dataset, job = read_spec(options.spec, options.changes)
    quiet()
    use_threads(int(job.resources.cpus_per_worker))

    def tell(fields: dict[str, Any]) -> None:
        print(json.dumps({"bench": "one_epoch", "dataset": dataset.name, **fields}), flush=True)

    with tempfile.TemporaryDirectory(prefix="evenkeel-one-epoch-") as folder, single_rank_group():
        results = compare(dataset, job, methods, options.seeds, options.alpha, options.work or Path(folder), tell)
    print()
    print(table(results))
    print()
    means = {name: np.array([result.test for result in runs]).mean(0) for name, runs in by_method(results).items()}
    judged = conditions(dataset.name, means)
    for condition in judged:
        print(condition)
    return 0 if all(condition.holds for condition in judged) else 1


def compare(
    dataset: DatasetSpec,
    job: JobSpec,
    methods: Sequence[str],
    num_seeds: int,
    alpha: float | None,
    folder: Path,
    tell: Any,
) -> list[Result]:
    """Run every method with every seed. alpha is chosen with the first seed, on validation, and kept for the others."""
    results = []
    for seed in range(num_seeds):
        seeded = job.model_copy(update={"seed": seed})
        data = Replayed(prepare(dataset, seeded, folder / f"seed-{seed}"))
        if "adam_ar" in methods and alpha is None:
            alpha = choose_alpha(seeded, data, tell)
        for method in methods:
            result = run(seeded, data, method, alpha if method == "adam_ar" else None)
            results.append(result)
            tell(
                {
                    "case": method,
                    "seed": seed,
                    "alpha": result.alpha,
                    "test_auc": [round(value, 5) for value in result.test],
                    "validation_auc": [round(value, 5) for value in result.validation],
                    "seconds": round(result.seconds, 1),
                }
            )
    return results


if __name__ == "__main__":
    leave(main())

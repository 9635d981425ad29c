"""``adamar``: one-epoch overfitting, and remedies (Li and Lyu, Adaptive Regularization, tables 1, 2)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.papers.data import documents
from benchmarks.papers.data.click_tasks import ClickTask, click_tasks, write_click_log
from benchmarks.papers.pages import published
from benchmarks.papers.trials.trial import Claim, Column, Recipe, Table, Trial

MODELS = {"dnn": "DNN", "wide_deep": "WDL", "xdeepfm": "xDeepFM", "wukong": "WuKong"}
SAM = {"sam": {"rho": 0.05}}
DECAYS = (0.3, 1.0, 3.0)
"""weight_decay of AdamW and AdagradW, times a learning rate of .001: half-lives of 230 to 2,300 steps."""
FIVE_BUCKETS = tuple(range(1, 6))
SLIDES_SIZE = "amazon_sports_d32"
"""Amazon Sports at the authors' dimension and batch size."""
SLIDES_DIM, SLIDES_BATCH_SIZE = 32, 2048
SLIDES_DECAYS = (*DECAYS, 10.0)
"""More decay in each step, because there are a quarter of the steps."""
ALPHAS = (1e-5, 3.2e-5, 1e-4, 3.2e-4)
"""Half decades around the alphas that validation chooses at the batch sizes of the tables."""
SLIDES_ALPHAS = (3.2e-4, 1e-3, 3.2e-3, 1e-2)
"""Sixteen times as much, for the same half-life in epochs with a quarter of the steps."""

Method = tuple[str, str, dict[str, Any], dict[str, Any]]
"""(row, tried, optimizer, regularizers)."""


def methods(family: str, decays: Sequence[float] = DECAYS, alphas: Sequence[float] = ALPHAS) -> Iterator[Method]:
    """Yield the five methods of a family, ``adam`` or ``adagrad``; candidates of those that decay.

    Args:
        family: The optimizer.
        decays: Decays of AdamW. AdagradW, whose rate is ten times as high, has a tenth of these decays.
        alphas: Alphas of AdamAR and AdagradAR.
    """
    rate, parts = (0.001, 1) if family == "adam" else (0.01, 10)
    plain = {"kind": family, "learning_rate": rate}
    label = family.capitalize()
    yield label, "", plain, {}
    for decay in decays:
        row, weight_decay = f"{label}W", decay / parts
        yield row, f"decay {weight_decay:g}", plain | {"kind": f"{family}w", "weight_decay": weight_decay}, {}
    yield "MEDA", "", plain, {"meda": True}
    yield "SAM", "", plain, SAM
    for alpha in alphas:
        # Algorithm 1, whatever the default of jobs is.
        adaptive = {"kind": f"{family}_ar", "alpha": alpha, "decay": "at_read"}
        yield f"{label}AR", f"alpha {alpha:g}" if len(alphas) > 1 else "", plain | adaptive, {}


def recipe(data: Path, seeds: int = 3, quick: bool = False, *, rows: Path = Path("rows")) -> Recipe:
    """Return both families on four models and four data sets; ``quick``: Adam and AdamAR on a small click log.

    Amazon Sports has the authors' dimension and batch size too. ``rows``: the folder that the synthetic click log is
    written to.
    """
    if quick:
        return _quick(data, seeds)
    tasks = click_tasks(data, rows)
    trials = [
        trial
        for name, task in tasks.items()
        for family in ("adam", "adagrad")
        for trial in _trials(f"{name}_{family}", task, family, tuple(MODELS), seeds)
    ]
    tables = [table for name in tasks for family in ("adam", "adagrad") for table in _tables(name, family)]
    claims = [claim for name in tasks for claim in _claims(name)]
    large = replace(tasks["amazon_sports"], batch_size=SLIDES_BATCH_SIZE)
    for family in ("adam", "adagrad"):
        trials += _trials(
            f"{SLIDES_SIZE}_{family}", large, family, tuple(MODELS), seeds, SLIDES_DIM,
            decays=SLIDES_DECAYS, alphas=SLIDES_ALPHAS,
        )  # fmt: skip
        tables += _tables(SLIDES_SIZE, family)
    claims += _claims(SLIDES_SIZE)
    prepare = partial(write_click_log, rows)
    return Recipe("adamar", _TITLE, _SOURCE, _PROTOCOL, tuple(trials), tuple(tables), tuple(claims), prepare)


def _trials(
    table: str,
    task: ClickTask,
    family: str,
    models: tuple[str, ...],
    seeds: int,
    dim: int = 16,
    hidden: tuple[int, ...] = (128, 64),
    decays: Sequence[float] = DECAYS,
    alphas: Sequence[float] = ALPHAS,
) -> Iterator[Trial]:
    cells = itertools.product(range(seeds), models, methods(family, decays, alphas))
    for seed, model, (row, tried, optimizer, regularizers) in cells:
        yield documents.trial(
            table, model, row, task.of, tried=tried, name=f"{table} {model} {row} {tried}", seed=seed,
            optimizer=optimizer, regularizers=regularizers or None, batch_size=task.batch_size,
            evaluation=task.evaluation | {"metrics": ["auc", "logloss", "frequency_buckets"]},
            **documents.tower(dim, hidden, {"kind": "zero"}, model),
        )  # fmt: skip


def _tables(name: str, family: str) -> Iterator[Table]:
    labels = {label: model for model, label in MODELS.items()}
    figures = published.ADAM_ON_AMAZON if family == "adam" else published.ADAGRAD_ON_AMAZON
    shown = name.startswith("amazon_sports")
    size = ", dimension 32, batch 2048" if name != SLIDES_SIZE else ""
    yield Table(
        f"{name}_{family}",
        f"{name}, {family.capitalize()} family: test AUC after epochs 1/2/3/4",
        tuple(Column(label, model, "auc") for label, model in labels.items()),
        "epochs",
        "auc",
        published={place: cells for place, cells in figures.items() if shown and place[1] in labels},
        published_is=f"the paper's own cut of Amazon, three seeds{size}: levels are not comparable" if shown else "",
        comparable=False,
    )
    yield Table(
        f"{name}_{family}:training",
        f"{name}, {family.capitalize()} family: training loss of epochs 1/2/3/4",
        tuple(Column(label, model, "loss", "train") for label, model in labels.items()),
        "epochs",
        "auc",
    )
    yield Table(
        f"{name}_{family}:buckets",
        f"{name}, {family.capitalize()} family, DNN, last epoch: test AUC and norm of rows by the item's frequency in "
        "training, rarest first",
        tuple(Column(f"AUC {n}", "dnn", f"bucket_{n}_auc") for n in FIVE_BUCKETS)
        + tuple(Column(f"norm {n}", "dnn", f"bucket_{n}_norm") for n in FIVE_BUCKETS),
        "last",
        "auc",
    )


def _claims(name: str) -> Iterator[Claim]:
    for model, label in MODELS.items():
        if name == "ml1m":
            text = f"{label}: no one-epoch overfitting, AdamAR costs nothing (at most .002)"
            yield Claim(text, f"{name}_adam", model, ("AdamAR", "best"), ("Adam", "best"), -0.002)
        elif name.startswith("amazon_sports"):
            if name == SLIDES_SIZE:
                label = f"{label}, dimension {SLIDES_DIM}, batch {SLIDES_BATCH_SIZE}"
            margin = 0.012 if model == "dnn" else 0.0
            text = f"{label}: AdamAR's epoch 4 is above Adam's best epoch by {margin:g}"
            yield Claim(text, f"{name}_adam", model, ("AdamAR", "last"), ("Adam", "best"), margin)
            if model == "dnn":
                text = f"{label}: AdamAR's epoch 4 is within .003 of its own best"
                yield Claim(text, f"{name}_adam", model, ("AdamAR", "last"), ("AdamAR", "best"), -0.003)
        else:
            text = f"{label}: AdamAR's epoch 4 is .010 above Adam's epoch 4"
            yield Claim(text, f"{name}_adam", model, ("AdamAR", "last"), ("Adam", "last"), 0.010)


def _quick(data: Path, seeds: int) -> Recipe:
    task = ClickTask(documents.click_log(data), 128, documents.RANDOM)
    log = _trials("quick_adam", task, "adam", ("dnn",), seeds, dim=8, hidden=(32,), alphas=(0.01,))
    trials = [trial for trial in log if trial.row in ("Adam", "AdamAR")]
    table = Table(
        "quick_adam", "own log, small: test AUC after epochs 1/2/3/4", (Column("DNN", "dnn", "auc"),), "epochs", "auc"
    )
    claims = (
        Claim("Adam falls after its best epoch", "quick_adam", "dnn", ("Adam", "best"), ("Adam", "last"), 0.01),
        Claim("AdamAR ends above Adam", "quick_adam", "dnn", ("AdamAR", "last"), ("Adam", "last"), 0.01),
    )
    return Recipe("adamar", _TITLE, _SOURCE, _PROTOCOL, tuple(trials), (table,), claims)


_TITLE = "One-epoch overfitting: Adam and Adagrad, and what is done about it"
_SOURCE = "Li and Lyu, Adaptive Regularization, tables 1 and 2"
_PROTOCOL = """\
Zero initial rows, dimension 16, tower 128-64, dense moments, learning rate .001 (Adagrad .01), 4 epochs; the dense
part is trained by Adam in every row. alpha of AdamAR and AdagradAR, decay of AdamW and AdagradW: of four and of three
the one with the best validation AUC, never by test. AdamAR and AdagradAR decay as Algorithm 1 does (`at_read`). SAM
with rho .05. Amazon Sports: the last row of each user tests and the one before validates, one uniform negative for each
positive; epinions, ml1m and our own log: a random tenth each. amazon_sports_d32: the same rows at the authors'
dimension 32 and batch 2048, by the same rates, with larger alphas and a fourth decay of AdamW and AdagradW. The slides'
data are others: their Amazon is not this one."""

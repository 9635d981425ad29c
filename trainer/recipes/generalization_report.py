"""``generalization``: the generalization report of a job, of any job or of Adam and AdamAR side by side.

Mądry, Optimization and Generalization Challenges in Deep Learning, lecture 3 of 6.S979, sections 1, 2 and 5 to 8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from trainer.recipes.generalization.bounds import DELTA, SIGMAS, rademacher_bound
from trainer.recipes.generalization.compression import SHARES
from trainer.recipes.generalization.label_randomization import at, changed, coins, label_column, permuted
from trainer.recipes.generalization.measures import LEVELS
from trainer.recipes.generalization.stability import distance
from trainer.recipes.pages import documents
from trainer.recipes.pages.layout import NOT_RUN, facts
from trainer.recipes.pages.section import Findings, Panel, Section, Verdict, verdict
from trainer.recipes.trials.run_trial import kept_path
from trainer.recipes.trials.trial import Claim, Column, Recipe, Table, Trial
from trainer.spec import DatasetSpec, JobSpec, SpecError, parse_job
from trainer.spec.losses import loss_of
from trainer.spec.problems import FieldProblem

CHANGED, QUICK_CHANGED = (4, 256), (64,)
"""Rows with another label in the neighbours of the data; a share of them is held out and does not count."""
BASE, PERMUTED, COINS, NEIGHBOURS = "original", "permuted", "coins", "neighbours"
Record = dict[str, Any]
_KNOWN_IDS = "the report compares rows of known ids: leave capacity out"


def recipe(
    data: Path,
    seeds: int = 3,
    quick: bool = False,
    *,
    rows: Path = Path("rows"),
    of: tuple[DatasetSpec, JobSpec] | None = None,
) -> Recipe:
    """Return the report of the job ``of``, or of a DNN on epinions; ``quick``: on a small click log.

    ``rows``: the folder of data sets with other labels.
    """
    dataset, jobs, claims = _given(*of) if of is not None else _own(data, quick)
    prepare = None
    trials = [
        Trial(BASE, job.model.kind, row, dataset, _with_seed(job, dataset, seed), measured_by="generalization")
        for seed in range(seeds)
        for row, job in jobs.items()
    ]
    why_not = _why_no_labels(dataset, next(iter(jobs.values())))
    if why_not is None:
        others = {"permuted": rows / f"{dataset.name}_permuted.parquet"}
        counts = QUICK_CHANGED if quick else CHANGED
        others |= {str(count): rows / f"{dataset.name}_{count}.parquet" for count in counts}
        classes = all(loss_of(job) == "bce" for job in jobs.values())
        if classes:
            others["coins"] = rows / f"{dataset.name}_coins.parquet"
        prepare = partial(_write, dataset, others)
        for seed in range(seeds):
            for row, job in jobs.items():
                spec, kind = _with_seed(job, dataset, seed), job.model.kind
                trials.append(Trial(PERMUTED, kind, row, at(dataset, others["permuted"]), spec))
                if classes:
                    trials.append(Trial(COINS, kind, row, at(dataset, others["coins"]), spec, measured_by="random_fit"))
                trials += [
                    Trial(
                        NEIGHBOURS,
                        kind,
                        f"{row}, {count}",
                        at(dataset, others[str(count)]),
                        spec,
                        measured_by="outputs",
                    )
                    for count in counts
                ]
    protocol = _PROTOCOL if why_not is None else f"{_PROTOCOL} Without permuted labels and neighbours: {why_not}"
    kinds: dict[str, str] = {job.model.kind: loss_of(job) for job in jobs.values()}
    tables = tuple(_tables(dataset.name, kinds)) if why_not is None else ()
    return Recipe("generalization", _TITLE, _SOURCE, protocol, tuple(trials), tables, tuple(claims), prepare, findings)


def _own(data: Path, quick: bool) -> tuple[DatasetSpec, dict[str, JobSpec], list[Claim]]:
    """Return the jobs of Adam, which overfits in its second epoch, and AdamAR, which does not."""
    if quick:
        of = documents.click_log(data)
        size: dict[str, Any] = {"dim": 8, "hidden": [16, 8], "batch_size": 128, "alpha": 1e-3}
    else:
        of = documents.epinions(data, {"rule": "rating >= 4"})
        size = {"dim": 16, "hidden": [128, 64], "batch_size": 1024, "alpha": 3e-5}
    optimizers: dict[str, dict[str, Any]] = {
        "Adam": {"kind": "adam", "learning_rate": 0.001},
        "AdamAR": {"kind": "adam_ar", "learning_rate": 0.001, "alpha": size["alpha"]},
    }
    jobs = {
        row: documents.job(
            f"generalization {row}",
            of,
            optimizer=optimizer,
            batch_size=size["batch_size"],
            evaluation=documents.RANDOM | {"metrics": ["auc", "logloss"], "training": True},
            **documents.tower(size["dim"], size["hidden"], {"kind": "hash", "std": 0.01}),
        )
        for row, optimizer in optimizers.items()
    }  # fmt: skip
    claims = [
        Claim("AdamAR ends with a smaller gap than Adam", f"{BASE}:gap", "dnn",
              ("AdamAR", "last"), ("Adam", "last"), 0.0),
        Claim("Adam fits permuted labels, AdamAR less: training AUC is .05 apart", PERMUTED, "dnn",
              ("Adam", "last"), ("AdamAR", "last"), 0.05),
    ]  # fmt: skip
    return of, jobs, claims


def _given(dataset: DatasetSpec, job: JobSpec) -> tuple[DatasetSpec, dict[str, JobSpec], list[Claim]]:
    """Return a user's job from initial values, on one rank, unpublished, evaluated on its training rows too."""
    growing = [
        FieldProblem(f"tables.{name}.capacity", _KNOWN_IDS)
        for name, table in job.tables.items()
        if table.capacity is not None
    ]
    if growing:
        raise SpecError(job.name, growing)
    if dataset.labels or dataset.weight is not None:
        why = "the report is of one label whose rows count alike"
        raise SpecError(
            job.name, [FieldProblem("dataset", why, "leave labels and weight out, in a copy of the dataset")]
        )
    document = job.model_dump(mode="json", exclude_unset=True)
    for field in ("publish", "init_from", "resources", "sharding"):
        document.pop(field, None)
    evaluation = {"split": document.get("evaluation", {}).get("split", {})}
    if _why_no_labels(dataset, job) is None:
        evaluation["training"] = True
    spec = parse_job(document | {"evaluation": evaluation}, job.name).against(dataset)
    return dataset, {job.name: spec}, []


def _why_no_labels(dataset: DatasetSpec, job: JobSpec) -> str | None:
    """Return why a job cannot be trained on other labels; None where it can."""
    if job.model.reads_sequences or loss_of(job) not in ("bce", "mse"):
        return f"{job.model.kind} trained by {loss_of(job)} has no log loss or squared error of a row."
    try:
        label_column(dataset)
    except ValueError as error:
        return f"{error}."
    return None


def _with_seed(job: JobSpec, dataset: DatasetSpec, seed: int) -> JobSpec:
    document = job.model_dump(mode="json", exclude_unset=True) | {"seed": seed}
    return parse_job(document, job.name).against(dataset)


def _write(dataset: DatasetSpec, others: Mapping[str, Path]) -> None:
    for name, path in others.items():
        if name == "permuted":
            permuted(dataset, path)
        elif name == "coins":
            coins(dataset, path)
        else:
            changed(dataset, path, int(name))


def _tables(name: str, kinds: Mapping[str, str]) -> Sequence[Table]:
    """Return the tables of the report; ``kinds``: the loss of each model."""
    tables = []
    for kind, loss in kinds.items():
        metric, lost = ("rmse", "rmse") if loss == "mse" else ("auc", "logloss")
        lower = metric == "rmse"
        pair = (Column(f"train {metric}", kind, metric, "train"), Column(f"test {metric}", kind, metric))
        what = "permuted labels (section 5): the same job where labels say nothing of their rows"
        tables += [
            Table(BASE, f"{name}: training and test {metric} after each epoch", pair, "epochs", metric, lower=lower),
            Table(f"{BASE}:gap", f"{name}: the gap, test less training {lost} (section 2)",
                  (Column("gap", kind, lost, "gap"),), "epochs", lost, lower=True),
            Table(PERMUTED, f"{name}, {what}", pair, "epochs", metric, lower=lower),
        ]  # fmt: skip
    return tables


# --- what is measured beside tables ----------------------------------------------------------------------------------


def findings(recipe: Recipe, records: Mapping[str, Record], out: Path) -> Findings:
    ended = [
        (trial, records[trial.key])
        for trial in recipe.jobs
        if records.get(trial.key, {}).get("state") == "done"
    ]  # fmt: skip
    bases = {_label(trial, recipe): (trial, record) for trial, record in ended if trial.table == BASE}
    measured = {label: record["measured"] for label, (_, record) in bases.items()}
    if not measured:
        return Findings()
    said = facts([record for _, record in bases.values()])
    neighbours = [(trial, record) for trial, record in ended if trial.table == NEIGHBOURS]
    fits = {_label(trial, recipe): record["measured"] for trial, record in ended if trial.table == COINS}
    sections = [_sharpness(measured, said), *_spectra(measured), _gradients(measured), *_bounds(measured, fits)]
    stability = _stability(bases, neighbours, out)
    return Findings((*sections, *stability), tuple(_claims(measured)))


def _label(trial: Trial, recipe: Recipe) -> str:
    several = len({one.seed for one in recipe.jobs}) > 1
    return f"{trial.row}, seed {trial.seed}" if several else trial.row


SHARPNESS = ("lambda_max", "ascent", "noise", "relative lambda_max", "relative ascent", "relative noise")


def _sharpness(measured: Mapping[str, Record], said: str) -> Section:
    lines = []
    for label, record in measured.items():
        for how, figures in record["sharpness"].items():
            lines.append((label, how, *(f"{figures[name]:.4g}" for name in SHARPNESS)))
    notes = []
    for label, record in measured.items():
        rescaling = record.get("rescaling")
        if rescaling is None:
            notes.append(f"{label}: no two linear layers with a ReLU between them: nothing to rescale.")
            continue
        notes.append(
            f"{label}, rescaled: {rescaling['pairs']} pairs of layers, the first times {rescaling['alpha']:g} and the "
            f"second divided by it; the loss of an example changed by at most "
            f"{rescaling['largest change of a loss']:.1e}."
        )
    sample = next(iter(measured.values()))["sample"]
    return Section(
        "sharpness",
        "Sharpness, and the reparametrisation check (sections 6 and 6.1)",
        ("", "", *SHARPNESS),
        tuple(lines),
        (
            f"Of the training loss of {sample} training rows, as a function of all dense weights and of the rows that "
            "they look up. lambda_max: the largest eigenvalue of the Hessian; ascent: the rise after a step of length "
            ".05 along the gradient (SAM); noise: the mean rise under Gaussian noise of deviation .01. Relative: the "
            "same with every parameter's own magnitude as its unit (radius .5, deviation .1), which rescaled layers "
            "leave as it is. A figure that is not relative is one of the parametrisation that it was measured in.",
            *notes,
            said,
        ),
    )


def _spectra(measured: Mapping[str, Record]) -> list[Section]:
    lines, panels = [], []
    for label, record in measured.items():
        curves = {}
        for name, one in record["matrices"].items():
            if "values" not in one:
                continue
            bounds = [
                f"{above} ({one['stable_rank'] / t**2:.0f})" for above, t in zip(one["above"], LEVELS, strict=True)
            ]
            lines.append(
                (label, name, " x ".join(map(str, one["shape"])), f"{one['stable_rank']:.2f}", *bounds,
                 *(f"{error:.3f}" for error in one["error"][:-1]))
            )  # fmt: skip
            curves[name] = [(rank + 1.0, max(value, 1e-6)) for rank, value in enumerate(one["values"])]
        panels.append(Panel(label, "number", "singular value / largest", curves, "y"))
    spectra = Section(
        "spectra",
        "Spectra of weight matrices and tables (sections 7 and 7.2)",
        ("", "matrix", "shape", "stable rank", *(f"above {t:g} (bound)" for t in LEVELS),
         *(f"error, {share:.4g} of rank" for share in SHARES[:-1])),
        tuple(lines),
        (
            "Stable rank: |M|_F^2 / |M|_2^2. Above t: singular values above t of the largest, of which there are at "
            "most stable rank / t^2. Error: |M - M_r|_F / |M|_F.",
        ),
        tuple(panels),
    )  # fmt: skip
    lines, panels = [], []
    for label, record in measured.items():
        lost = {name: one["loss"] for name, one in record["matrices"].items() if "loss" in one}
        if not lost:
            continue
        lines += [(label, name, *(f"{value:.4f}" for value in losses)) for name, losses in lost.items()]
        curves = {name: list(zip(SHARES, losses, strict=True)) for name, losses in lost.items()}
        panels.append(Panel(label, "share of rank kept", "test loss", curves, "x"))
    if not lines:
        return [spectra]
    compressed = Section(
        "compression",
        "Compression by truncated SVD: mean test loss with a share of the rank (section 7)",
        ("", "matrix", *(f"{share:.4g}" for share in SHARES)),
        tuple(lines),
        ("One matrix at a time, the others whole; all: all of them at once.",),
        tuple(panels),
    )
    return [spectra, compressed]


def _gradients(measured: Mapping[str, Record]) -> Section:
    lines = [
        (label, name, f"{length:.3g}", NOT_RUN if math.isnan(ratio) else f"{ratio:.3g}")
        for label, record in measured.items()
        for name, (length, ratio) in record["gradients"].items()
    ]
    return Section(
        "gradients",
        "Norms of gradients after the last epoch (section 1)",
        ("", "parameter", "gradient", "gradient / parameter"),
        tuple(lines),
        ("Of the mean training loss of the same rows; Euclidean norms.",),
    )


def _bounds(measured: Mapping[str, Record], fits: Mapping[str, Record]) -> list[Section]:
    lines = []
    for label, record in measured.items():
        one = record.get("bounds")
        if one is None:
            continue
        fit, bayes = fits.get(label), one["pac_bayes"]
        signs = (NOT_RUN, NOT_RUN)
        if fit is not None:
            signs = (f"{fit['fit']:.3f}", f"{rademacher_bound(fit['fit'], fit['rows']):.3f}")
        gap = f"{one['test'] - one['train']:+.4f}" if "test" in one else NOT_RUN
        lines.append(
            (label, f"{one['rows']:,}", f"{one['train']:.4f}", gap, *signs, f"{bayes['sigma']:.2g}",
             f"{bayes['divergence']:,.0f}", f"{bayes['loss']:.3f}", f"{bayes['gap']:.3f}", f"{bayes['bound']:.3f}",
             f"{one['norm_bound']:,.3g}" if "norm_bound" in one else NOT_RUN, f"{one['massart']:.3g}")
        )  # fmt: skip
    if not lines:
        return []
    return [
        Section(
            "bounds",
            "Bounds on the gap: Rademacher complexity and PAC-Bayes (sections 3 and 4)",
            ("", "training rows", "training loss", "gap", "fit of signs", "Rademacher bound", "sigma", "KL",
             "loss under noise", "PAC-Bayes gap", "bound", "complexity by norms", "Massart"),
            tuple(lines),
            (
                "The loss is the probability given to the wrong label, in [0, 1]; gap: of the test split less that of "
                "training. Fit of signs: the mean of sign times 2 p - 1 over the rows of the same job on fair coins, "
                "which is what this training reaches of the supremum in the Rademacher complexity: the bound that "
                f"follows is too low by what it misses. Both hold with probability {1 - DELTA:g} over rows drawn "
                "independently.",
                "PAC-Bayes: P and Q are normal around the initial and the trained parameters, dense weights and all "
                f"rows, with the sigma, of {len(SIGMAS)}, whose bound is smallest (paid for); loss under noise: of "
                "the rows that sharpness is measured on. A bound of .5 or more says nothing: a fair coin has it.",
                "Complexity by norms: a bound on the empirical Rademacher complexity of an MLP over embeddings by the "
                "Frobenius norms of its layers and tables (Li and Lyu, preliminaries), of `dnn` without numbers. It is "
                "of the logit; above 1 it says nothing of the gap, and what it is for is to be compared. Massart: the "
                "complexity of as many functions as the parameters' bits can say (section 5): above 1 nothing too.",
            ),
        )
    ]  # fmt: skip


def _stability(
    bases: Mapping[str, tuple[Trial, Record]],
    neighbours: Sequence[tuple[Trial, Record]],
    out: Path,
) -> list[Section]:
    places = {(trial.row, trial.seed): (label, trial) for label, (trial, _) in bases.items()}
    lines, behind = [], []
    for trial, record in neighbours:
        label, base = places.get((trial.row.rpartition(", ")[0], trial.seed), ("", None))
        if base is None:
            continue
        with np.load(kept_path(base, out)) as file, np.load(kept_path(trial, out)) as other:
            names = [name for name in ("dense", "rows") if name in file]
            distances = distance(
                file["losses"], other["losses"],
                {name: file[name] for name in names}, {name: other[name] for name in names},
            )  # fmt: skip
            count = int((file["train_labels"] != other["train_labels"]).sum())
            total = len(file["train_labels"])
        apart = " / ".join(f"{distances.parameters[name]:.4f}" for name in names)
        figures = (f"{distances.epsilon:.4f}", f"{distances.mean:.5f}", f"{distances.risk:+.6f}", apart)
        lines.append((label, f"{count} of {total}", *figures))
        behind.append(record)
    if not lines:
        return []
    return [
        Section(
            "stability",
            "Uniform stability: the same training with a few labels changed (section 8)",
            ("", "labels changed", "epsilon", "mean", "difference of test losses", "dense / rows apart"),
            tuple(lines),
            (
                "epsilon: the largest difference of the loss of one test row between both models, a lower bound of "
                "that of the definition; mean: the mean one. Apart: |a - b| / |a| of the parameters. Order and draws "
                "are the same: with no label changed all of it is 0.",
                facts(behind),
            ),
        )
    ]


def _claims(measured: Mapping[str, Record]) -> list[Verdict]:
    verdicts = []
    for label, one in measured.items():
        if "rescaled" not in one["sharpness"]:
            continue
        plain, rescaled = one["sharpness"]["as trained"], one["sharpness"]["rescaled"]
        ratio, relative = (rescaled[name] / plain[name] for name in ("lambda_max", "relative lambda_max"))
        same = one["rescaling"]["largest change of a loss"] < 1e-9
        holds = same and abs(relative - 1) < 0.01 and not 0.5 < ratio < 2
        text = f"{label}: rescaled layers are the same function with another sharpness, and the same relative one"
        verdicts.append(verdict(text, holds, f"lambda_max times {ratio:.3g}, relative lambda_max times {relative:.4f}"))
    return verdicts


_TITLE = "Generalization report"
_SOURCE = "Mądry, Optimization and Generalization Challenges in Deep Learning (6.S979, lecture 3), sections 1 to 8"
_PROTOCOL = """\
One training of the job; the same job on the same rows with their label column permuted, and with fair coins for labels;
and on rows of which a few have another label. Everything is measured on the model of the last epoch. Rows, splits,
order and draws are those of the job."""

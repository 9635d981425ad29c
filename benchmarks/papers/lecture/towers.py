"""``towers``: towers by depth, with corrupted labels and with one changed example; sparse linear classifiers.

Mądry, Optimization and Generalization Challenges in Deep Learning, lecture 3 of 6.S979: sections 1, 7.1 and 8, figures
1 and 7.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.papers.data import documents
from benchmarks.papers.data.quick_texts import write_quick_sentences
from benchmarks.papers.lecture import changed_example
from benchmarks.papers.lecture.corrupted_labels import corrupted, part
from benchmarks.papers.lecture.jacobians import LARGE
from benchmarks.papers.lecture.linear_margin import NUM_DRAWS, QUANTILES
from benchmarks.papers.trials.experiments import SENTENCES
from benchmarks.papers.trials.trial import AnyTrial, Claim, Column, Recipe, Table, TextTrial, Trial
from trainer.generalization.label_randomization import at
from trainer.report_pages.section import NOT_RUN, Findings, Panel, Section, Verdict, verdict
from trainer.search.records import facts
from trainer.spec import DatasetSpec

DEPTH, CORRUPTED, BATCHES, MARGIN = "depth", "corrupted", "batches", "margin"
FITTED = 0.99
"""Training AUC from which a job counts as having fitted its labels."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "batch norm": {"batch_norm": True}, "shortcuts": {"residual": True},
}  # fmt: skip
REGULARIZED: dict[str, dict[str, Any]] = {
    "dropout .5": {"dropout": 0.5, "dropout_layers": "both"}, "l2 1e-4": {"l2": 1e-4},
}  # fmt: skip
"""Regularizers with which true and permuted labels are fitted as well (section 5)."""
Record = dict[str, Any]


class Size(NamedTuple):
    """Size of the full or quick form of the recipe.

    ``shares``: shares of permuted labels; those in ``regularized`` are also run with regularizers; ``rate``: Adam's
    learning rate for rows and tower.
    """

    num_rows: int
    depths: tuple[int, ...]
    width: int
    depth_epochs: int
    shares: tuple[float, ...]
    regularized: tuple[float, ...]
    epochs: int
    batch_size: int
    batch_sizes: tuple[int, ...]
    rate: float


WHOLE = Size(60_000, (2, 8, 16), 64, 6, (0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 1.0), 30, 512, (64, 512, 4096), 0.001)
QUICK = Size(2_000, (2, 6), 8, 2, (0.0, 1.0), (1.0,), 6, 64, (32, 256), 0.01)


def recipe(data: Path, seeds: int = 3, quick: bool = False, *, rows: Path = Path("rows")) -> Recipe:
    """Return DNNs on a part of epinions (``quick``: of a small click log). ``rows``: the folder for written files."""
    size = QUICK if quick else WHOLE
    source = documents.click_log(data) if quick else documents.epinions(data, {"rule": "rating >= 4"})
    of = at(source, rows / f"{source.name}_part.parquet")
    files = {share: rows / f"{source.name}_corrupted_{share:g}.parquet" for share in size.shares}
    trials: list[AnyTrial] = []
    for seed in range(seeds):
        trials += [*_by_depth(of, seed, size), *_by_share(of, files, seed, size), *_by_batch_size(of, seed, size)]
        trials.append(TextTrial(MARGIN, "linear", "words", "linear_margin", data, (SENTENCES,), {}, seed))
        trials += changed_example.trials(data, seed, quick)
    prepare = partial(_write, source, of, files, size, data if quick else None)
    return Recipe("towers", _TITLE, _SOURCE, _PROTOCOL, tuple(trials), _tables(size), _claims(size), prepare, _findings)


def _write(
    source: DatasetSpec, of: DatasetSpec, files: Mapping[float, Path], size: Size, sentences: Path | None
) -> None:
    if sentences is not None:
        write_quick_sentences(sentences)
    part(source, Path(of.uri), size.num_rows)
    for share, path in files.items():
        corrupted(of, path, share)


def _trial(
    table: str, column: str, row: str, of: DatasetSpec, seed: int, size: Size, model: dict[str, Any], epochs: int,
    measured_by: str = "", regularizers: dict[str, Any] | None = None,
) -> Trial:  # fmt: skip
    init = {"kind": "hash", "std": 0.01}
    adam = {"kind": "adam", "learning_rate": size.rate}
    return documents.trial(
        table, column, row, of, measured_by=measured_by, model={"kind": "dnn", "init": init, **model}, optimizer=adam,
        dense_optimizer=adam, epochs=epochs, batch_size=size.batch_size, seed=seed,
        regularizers=regularizers,
        evaluation={
            "split": {"kind": "column", "column": "is_test"}, "metrics": ["auc", "logloss"], "training": True,
        },
    )  # fmt: skip


def _by_depth(of: DatasetSpec, seed: int, size: Size) -> Iterator[Trial]:
    for depth in size.depths:
        for row, more in KINDS.items():
            model = {"embedding_dim": 16, "hidden": [size.width] * depth, **more}
            yield _trial(DEPTH, _column(depth), row, of, seed, size, model, size.depth_epochs, "tower_by_depth")


def _by_share(of: DatasetSpec, files: Mapping[float, Path], seed: int, size: Size) -> Iterator[Trial]:
    model = {"embedding_dim": 16, "hidden": [2 * size.width, size.width]}
    for share, path in files.items():
        yield _trial(CORRUPTED, "dnn", _share(share), at(of, path), seed, size, model, size.epochs)
    for share in size.regularized:
        for what, regularizers in REGULARIZED.items():
            row, rows = f"{_share(share)}, {what}", at(of, files[share])
            yield _trial(CORRUPTED, "dnn", row, rows, seed, size, model, size.epochs, regularizers=regularizers)


def _by_batch_size(of: DatasetSpec, seed: int, size: Size) -> Iterator[Trial]:
    model = {"embedding_dim": 16, "hidden": [2 * size.width, size.width]}
    for batch_size in size.batch_sizes:
        row, sized = f"batch {batch_size}", size._replace(batch_size=batch_size)
        yield _trial(BATCHES, "dnn", row, of, seed, sized, model, size.depth_epochs, "sharpness")


def _column(depth: int) -> str:
    return f"depth {depth}"


def _share(share: float) -> str:
    return f"{share:.0%}"


def _tables(size: Size) -> tuple[Table, ...]:
    return (
        Table(
            DEPTH, "Test AUC at the best epoch of towers by their number of hidden layers (section 1)",
            tuple(Column(_column(depth), _column(depth), "auc") for depth in size.depths), "best", "auc",
        ),
        Table(
            f"{DEPTH}:training", "Training logloss after the last epoch of the same towers",
            tuple(Column(_column(depth), _column(depth), "logloss", "train") for depth in size.depths), "last",
            "logloss", lower=True,
        ),
        Table(
            BATCHES, "Logloss after the last epoch by batch size, at one rate (section 6)",
            (Column("training", "dnn", "logloss", "train"), Column("test", "dnn", "logloss"),
             Column("gap", "dnn", "logloss", "gap")), "last", "logloss", lower=True,
        ),
        Table(
            CORRUPTED, "AUC after the last epoch by the share of training labels that are permuted (figure 1)",
            (Column("training AUC", "dnn", "auc", "train"), Column("test AUC", "dnn", "auc")), "last", "auc",
        ),
    )  # fmt: skip


def _claims(size: Size) -> tuple[Claim, ...]:
    none, all_ = _share(size.shares[0]), _share(size.shares[-1])
    return (
        Claim(
            "true labels are no harder to fit than permuted ones: training AUC no lower by .02", CORRUPTED, "dnn",
            (none, "last"), (all_, "last"), -0.02,
        ),
    )  # fmt: skip


# --- measurements besides tables -------------------------------------------------------------------------------------


def _findings(recipe: Recipe, records: Mapping[str, Record], out: Path) -> Findings:
    ended: dict[tuple[str, str, str], list[Record]] = {}
    for trial in recipe.trials:
        if records.get(trial.key, {}).get("state") == "done":
            ended.setdefault((trial.table, trial.column, trial.row), []).append(records[trial.key])
    by_depth = {place[1:]: of_seeds for place, of_seeds in ended.items() if place[0] == DEPTH}
    by_share = {place[2]: of_seeds for place, of_seeds in ended.items() if place[0] == CORRUPTED}
    by_margin = [record for place, of_seeds in ended.items() if place[0] == MARGIN for record in of_seeds]
    by_descent = {place[1:]: of_seeds for place, of_seeds in ended.items() if place[0] == changed_example.TABLE}
    by_batch_size = {place[2]: of_seeds for place, of_seeds in ended.items() if place[0] == BATCHES}
    sections = (
        *_jacobians(by_depth), *_shifts(by_depth), *_flatness(by_batch_size), *_time(by_share), *_margins(by_margin),
        *changed_example.sections(by_descent),
    )  # fmt: skip
    return Findings(sections, tuple(_promises(by_margin)))


def _jacobians(records: Mapping[tuple[str, str], Sequence[Record]]) -> Iterator[Section]:
    if not records:
        return
    lines, curves = [], {}
    deepest = max((column for column, _ in records), key=lambda column: int(column.split()[1]))
    for (column, row), of_seeds in records.items():
        means = {
            when: [
                statistics.fmean(one) for one in zip(*(record["measured"][when] for record in of_seeds), strict=True)
            ]
            for when in ("initial", "large", "trained")
        }
        lines.append((column, row, *(f"{means[when][-1]:.3g}" for when in means)))
        if column == deepest:
            for when, norms in means.items():
                curves[f"{row}, {when}"] = [(float(layer), max(norm, 1e-12)) for layer, norm in enumerate(norms, 1)]
    yield Section(
        "jacobians", "Jacobian of the last hidden layer by the first one's output (equation 1)",
        ("", "", "initial", f"initial, weights times {LARGE:g}", "trained"), tuple(lines),
        (
            "Frobenius norm, as a root mean square over rows and directions: 1 for the identity. Initial towers read "
            "the trained rows; batch normalisation uses the moments of these rows.",
            facts([record for of_seeds in records.values() for record in of_seeds]),
        ),
        (Panel(deepest, "hidden layer", "norm of the Jacobian", curves, "y"),),
    )  # fmt: skip


def _shifts(records: Mapping[tuple[str, str], Sequence[Record]]) -> Iterator[Section]:
    if not records:
        return
    names = ("initial cosine", "initial difference", "trained cosine", "trained difference")
    lines = []
    for (column, row), of_seeds in records.items():
        means = [statistics.fmean(statistics.fmean(record["measured"][name]) for record in of_seeds) for name in names]
        lines.append((column, row, *(f"{mean:.3g}" for mean in means)))
    yield Section(
        "shifts", "Internal covariate shift: how a step of the layers below turns a layer's gradient (section 1.1)",
        ("", "", *names), tuple(lines),
        (
            "Mean over all hidden layers except the first, on the sample of training rows: cosine of the gradients "
            "before and after, and the length of their difference divided by that of the first. The step is Adam's "
            "first one at the job's rate.",
            facts([record for of_seeds in records.values() for record in of_seeds]),
        ),
    )  # fmt: skip


def _flatness(records: Mapping[str, Sequence[Record]]) -> Iterator[Section]:
    if not records:
        return
    names = ("lambda_max", "noise", "relative lambda_max", "relative noise")
    lines = [
        (row, *(f"{statistics.fmean(record['measured'][name] for record in of_seeds):.3g}" for name in names))
        for row, of_seeds in records.items()
    ]
    yield Section(
        "flatness", "Sharpness of the trained model by batch size (section 6)", ("", *names), tuple(lines),
        (
            "lambda_max: of the Hessian of the training loss; noise: mean rise of the loss under Gaussian noise; "
            "relative: noise in the scale of the parameters.",
            facts([record for of_seeds in records.values() for record in of_seeds]),
        ),
    )  # fmt: skip


def _time(records: Mapping[str, Sequence[Record]]) -> Iterator[Section]:
    if not records:
        return
    lines = []
    for row, of_seeds in records.items():
        when = [_fitted(record["metrics"]) for record in of_seeds]
        fitted = [epoch for epoch in when if epoch is not None]
        said = f"{statistics.fmean(fitted):.1f}" if len(fitted) == len(when) else NOT_RUN
        gap = statistics.fmean(
            one["auc"] for record in of_seeds for one in record["metrics"][-1:] if one["split"] == "gap"
        )
        lines.append((row, said, f"{gap:.4f}"))
    yield Section(
        "time", f"Epochs until the training AUC is {FITTED:g}, and the gap of AUC after the last one",
        ("labels permuted", "epochs", "training AUC - test AUC"), tuple(lines),
        (
            f"{NOT_RUN}: not in every seed.",
            facts([record for of_seeds in records.values() for record in of_seeds]),
        ),
    )  # fmt: skip


def _margins(records: Sequence[Record]) -> Iterator[Section]:
    if not records:
        return
    lines = []
    for of_seeds in _by_gamma(records):
        mean = {name: statistics.fmean(one[name] for one in of_seeds) for name in of_seeds[0] if name != "split"}
        lines.append(
            (f"{mean['margin']:.4f}", f"{mean['words']:,.0f}", f"{mean['expected']:,.0f}", f"{mean['bound']:,.0f}",
             f"{mean['kept']:.4f}", f"{mean['accuracy']:.4f}", f"{mean['whole']:.4f}")
        )  # fmt: skip
    yield Section(
        "margins", "A linear classifier of sentences, made sparse by its margin (section 7.1)",
        ("gamma", "words", "words left", "8 / gamma^2", "signs kept beyond gamma", "test accuracy", "whole"),
        tuple(lines),
        (
            f"Logistic regression on the words of a sentence. Gamma: the {', '.join(f'{q:.0%}' for q in QUANTILES)} "
            f"quantiles of the margins of training rows; each is drawn {NUM_DRAWS} times.",
            facts(records),
        ),
    )  # fmt: skip


def _by_gamma(records: Sequence[Record]) -> list[tuple[Mapping[str, Any], ...]]:
    return list(zip(*([one for one in record["metrics"] if one["split"] == "test"] for record in records), strict=True))


def _promises(records: Sequence[Record]) -> Iterator[Verdict]:
    """Yield the verdicts on equations 3 and 5; by Chebyshev's inequality at most one sign in eight is lost."""
    figures = [one for of_seeds in _by_gamma(records) for one in of_seeds]
    if figures:
        kept, most = min(one["kept"] for one in figures), max(one["expected"] / one["bound"] for one in figures)
        text = "a classifier that is made sparse keeps 7 of 8 signs beyond its margin, with 8 / gamma^2 words at most"
        yield verdict(text, kept >= 7 / 8 and most <= 1, f"{kept:.4f} at least, {most:.3f} of the bound at most")


def _fitted(metrics: Sequence[Mapping[str, Any]]) -> int | None:
    return next((one["epoch"] for one in metrics if one["split"] == "train" and one.get("auc", 0.0) >= FITTED), None)


_TITLE = "Towers by depth, on corrupted labels and with one changed example, and a sparse linear classifier"
_SOURCE = (
    "Mądry, Optimization and Generalization Challenges in Deep Learning (6.S979, lecture 3), sections 1, 5, 7.1, 8"
)
_PROTOCOL = """\
A DNN is trained on a random part of the rows. A tenth of them are test rows with their own labels; a tenth of the
others are validation rows. Rows and towers are trained by Adam. Labels are permuted among a share of the rows that are
not test rows, validation rows included. The linear classifier reads sentences, a fifth of which are held out."""

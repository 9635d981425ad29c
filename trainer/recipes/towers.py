"""``towers``: what deep towers do with depth, and with labels that are corrupted (Mądry's lecture, 1 and figure 1)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from trainer.recipes.generalization.label_randomization import at, corrupted, part
from trainer.recipes.pages import documents
from trainer.recipes.pages.layout import NOT_RUN, facts
from trainer.recipes.pages.section import Findings, Panel, Section
from trainer.recipes.trials.trial import Claim, Column, Recipe, Table, Trial
from trainer.spec import DatasetSpec

DEPTH, CORRUPTED = "depth", "corrupted"
FITTED = 0.99
"""Training AUC from which on a job counts as having fitted its labels."""
KINDS: dict[str, dict[str, Any]] = {
    "plain": {}, "batch norm": {"batch_norm": True}, "shortcuts": {"residual": True},
}  # fmt: skip
Record = dict[str, Any]


class Size(NamedTuple):
    """How large a form of the recipe is; ``rate``: Adam's, of rows and of the tower."""

    num_rows: int
    depths: tuple[int, ...]
    width: int
    depth_epochs: int
    shares: tuple[float, ...]
    epochs: int
    batch_size: int
    rate: float


WHOLE = Size(60_000, (2, 8, 16), 64, 6, (0.0, 0.25, 0.5, 0.75, 1.0), 30, 512, 0.001)
QUICK = Size(2_000, (2, 6), 8, 2, (0.0, 1.0), 6, 64, 0.01)


def recipe(data: Path, seeds: int = 3, quick: bool = False, *, rows: Path = Path("rows")) -> Recipe:
    """Return DNNs on a part of epinions; ``quick``: of a small click log. ``rows``: the folder of files it writes."""
    size = QUICK if quick else WHOLE
    source = documents.click_log(data) if quick else documents.epinions(data, {"rule": "rating >= 4"})
    of = at(source, rows / f"{source.name}_part.parquet")
    files = {share: rows / f"{source.name}_corrupted_{share:g}.parquet" for share in size.shares}
    trials = [
        trial
        for seed in range(seeds)
        for trial in (*_by_depth(of, seed, size), *_by_share(of, files, seed, size))
    ]  # fmt: skip
    prepare = partial(_write, source, of, files, size)
    return Recipe("towers", _TITLE, _SOURCE, _PROTOCOL, tuple(trials), _tables(size), _claims(size), prepare, _findings)


def _write(source: DatasetSpec, of: DatasetSpec, files: Mapping[float, Path], size: Size) -> None:
    part(source, Path(of.uri), size.num_rows)
    for share, path in files.items():
        corrupted(of, path, share)


def _trial(
    table: str, column: str, row: str, of: DatasetSpec, seed: int, size: Size, model: dict[str, Any], epochs: int,
    measured_by: str = "",
) -> Trial:  # fmt: skip
    init = {"kind": "hash", "std": 0.01}
    adam = {"kind": "adam", "learning_rate": size.rate}
    return documents.trial(
        table, column, row, of, measured_by=measured_by, model={"kind": "dnn", "init": init, **model}, optimizer=adam,
        dense_optimizer=adam, epochs=epochs, batch_size=size.batch_size, seed=seed,
        evaluation={
            "split": {"kind": "column", "column": "is_test"}, "metrics": ["auc", "logloss"], "training": True,
        },
    )  # fmt: skip


def _by_depth(of: DatasetSpec, seed: int, size: Size) -> Iterator[Trial]:
    for depth in size.depths:
        for row, more in KINDS.items():
            model = {"embedding_dim": 16, "hidden": [size.width] * depth, **more}
            yield _trial(DEPTH, _column(depth), row, of, seed, size, model, size.depth_epochs, "jacobians")


def _by_share(of: DatasetSpec, files: Mapping[float, Path], seed: int, size: Size) -> Iterator[Trial]:
    model = {"embedding_dim": 16, "hidden": [2 * size.width, size.width]}
    for share, path in files.items():
        yield _trial(CORRUPTED, "dnn", _share(share), at(of, path), seed, size, model, size.epochs)


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


# --- what is measured beside tables ----------------------------------------------------------------------------------


def _findings(recipe: Recipe, records: Mapping[str, Record], out: Path) -> Findings:
    ended: dict[tuple[str, str, str], list[Record]] = {}
    for trial in recipe.jobs:
        if records.get(trial.key, {}).get("state") == "done":
            ended.setdefault((trial.table, trial.column, trial.row), []).append(records[trial.key])
    by_depth = {place[1:]: of_seeds for place, of_seeds in ended.items() if place[0] == DEPTH}
    by_share = {place[2]: of_seeds for place, of_seeds in ended.items() if place[0] == CORRUPTED}
    return Findings((*_jacobians(by_depth), *_time(by_share)))


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
            for when in ("initial", "trained")
        }
        lines.append((column, row, *(f"{means[when][-1]:.3g}" for when in means)))
        if column == deepest:
            for when, norms in means.items():
                curves[f"{row}, {when}"] = [(float(layer), max(norm, 1e-12)) for layer, norm in enumerate(norms, 1)]
    yield Section(
        "jacobians", "Jacobian of the last hidden layer by the first one's output (equation 1)",
        ("", "", "initial", "trained"), tuple(lines),
        (
            "Frobenius norm, as a root mean square over rows and directions: 1 for the identity. Initial towers read "
            "the trained rows; batch normalisation has their moments.",
            facts([record for of_seeds in records.values() for record in of_seeds]),
        ),
        (Panel(deepest, "hidden layer", "norm of the Jacobian", curves, "y"),),
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


def _fitted(metrics: Sequence[Mapping[str, Any]]) -> int | None:
    return next((one["epoch"] for one in metrics if one["split"] == "train" and one.get("auc", 0.0) >= FITTED), None)


_TITLE = "Towers: depth and corrupted labels"
_SOURCE = (
    "Mądry, Optimization and Generalization Challenges in Deep Learning (6.S979, lecture 3), section 1 and figure 1"
)
_PROTOCOL = """\
A DNN on a random part of the rows, of which a tenth tests with its own labels; of the others a tenth validates. Adam
for rows and towers. Labels are permuted among a share of the rows that do not test, validation rows included."""

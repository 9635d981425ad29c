"""Plots of test metrics from epoch to epoch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deploy.site.plots.charts import curves, dots, tell_start
from deploy.site.plots.figure import BLACK, BLUE, GREEN, GREY, ORANGE, PINK, RED, SKY, panels
from deploy.site.plots.tables import Measured, Table

EPOCHS = (1, 2, 3, 4)


def _of_epochs(axes: Any, title: str, lines: dict[str, tuple[str, list[Measured]]], *, what: str = "test AUC") -> None:
    curves(axes, EPOCHS, lines)
    axes.set(xticks=EPOCHS, xlabel="epoch", ylabel=what, title=title)
    tell_start(axes, "y")


def _listed(table: Table, row: str, column: str, deviations: str | None = None) -> list[Measured]:
    """Return the figures in a cell; their deviations are read from row ``deviations`` of the column, if given."""
    values = table.numbers(row, column)
    spread: Sequence[float | None] = [None] * len(values) if deviations is None else table.numbers(deviations, column)
    return [Measured(value, deviation) for value, deviation in zip(values, spread, strict=True)]


def one_epoch(*tables: Table) -> Any:
    figure, places = panels(3, 3.3)
    methods = {
        "Adam, dense moments": ("Adam", RED),
        "MEDA": ("MEDA", ORANGE),
        "AdamAR, alpha": ("AdamAR", SKY),
        "AdamAR, decay: by_epoch": ("by_epoch", BLUE),
    }
    for axes, table, data in zip(places, tables, ("epinions", "amazon_sports", "ml1m"), strict=True):
        lines = {}
        for begins, (name, colour) in methods.items():
            row = next(row for row in table.rows if row.startswith(begins))
            lines[name] = (colour, [table.measured(row, f"epoch {epoch}") for epoch in EPOCHS])
        _of_epochs(axes, data, lines)
    return figure


def alpha(table: Table) -> Any:
    figure, (axes,) = panels(1, 2.9)
    lines = {
        name: (colour, [table.measured(row, column) for column in table.columns])
        for name, row, colour in (
            ("largest loss", "most", RED),
            ("mean loss", "AUC lost against the best of each case, mean", BLUE),
        )
    }
    curves(axes, [float(column) for column in table.columns], lines)
    axes.set(xscale="log", ylabel="AUC lost to each case's best", ylim=(0, None))
    axes.set_xticks([float(column) for column in table.columns], table.columns)
    axes.minorticks_off()
    axes.set_xlabel("half-life of an untouched row, in epochs (logarithmic)")
    return figure


def towers(table: Table) -> Any:
    figure, (axes,) = panels(1, 2.6)
    shares = [float(row.removesuffix(" %")) for row in table.rows]
    axes.set(ylim=(0.48, 0.64))
    curves(axes, shares, {"test AUC": (BLUE, [table.measured(row, "test AUC") for row in table.rows])})
    axes.set(xticks=shares, xlabel="training labels that are permuted, %", ylabel="test AUC")
    tell_start(axes, "y")
    return figure


def dropout(table: Table) -> Any:
    shown = {
        "none": BLACK,
        "DROPOUT_32": GREY,
        "DROPOUT_8": SKY,
        "DROPOUT_8 + xi_approx": BLUE,
        "DROPOUT_1": ORANGE,
        "R_approx": GREEN,
        "R_approx + xi_approx": PINK,
        "identity for the Hessian": RED,
    }
    figure, (axes,) = panels(1, 3.6)
    _of_epochs(
        axes, "", {row: (colour, _listed(table, row, "ours")) for row, colour in shown.items()}, what="test logloss"
    )
    return figure


def dynamic_tables(table: Table) -> Any:
    figure, (axes,) = panels(1, 3.6)
    best = [[table.measured(row, "best")] for row in table.rows]
    last = [[table.measured(row, "4")] for row in table.rows]
    dots(axes, list(table.rows), {"epoch 4": (ORANGE, "s", last), "best epoch": (BLUE, "o", best)})
    axes.set(xlabel="test AUC on epinions")
    axes.legend(loc="upper left")
    tell_start(axes)
    return figure


def generalization(table: Table) -> Any:
    figure, places = panels(2, 2.8)
    rows = {
        "test AUC": "test AUC after epochs 1/2/3/4",
        "gap of the logloss": "gap of the logloss after epochs 1/2/3/4",
    }
    for axes, (what, row) in zip(places, rows.items(), strict=True):
        lines = {name: (colour, _listed(table, row, name)) for name, colour in (("Adam", RED), ("AdamAR", BLUE))}
        _of_epochs(axes, "", lines, what=what)
    return figure

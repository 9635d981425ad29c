"""Plots of the quality of models, compared with other libraries and with other settings."""

from __future__ import annotations

from typing import Any

from deploy.site.plots.charts import bars, curves, dots, tell_start
from deploy.site.plots.figure import BLUE, GREY, ORANGE, RED, SKY, panels
from deploy.site.plots.tables import Measured, Table


def sse(table: Table) -> Any:
    rows = [row for row in table.rows if not row.startswith("graph Laplacian by genres")]
    figure, (axes,) = panels(1, 3.6)
    ours = [
        [Measured(table.numbers(row, "RMSE")[0], table.numbers(row, "sd")[0] if table.cell(row, "sd") else None)]
        for row in rows
    ]
    published = [[Measured(table.numbers(row, "published")[0])] if table.cell(row, "published") else [] for row in rows]
    dots(axes, rows, {"here": (BLUE, "o", ours), "published": (ORANGE, "D", published)})
    axes.set(xlabel="test RMSE, lower is better")
    axes.legend(loc="lower right")
    tell_start(axes)
    return figure


def sse_complexity(table: Table) -> Any:
    figure, (axes,) = panels(1, 2.9)
    colours = {"labels of the rows swapped to": BLUE, "own labels": RED}
    lines = {row: (colours[row], [table.measured(row, column) for column in table.columns]) for row in table.rows}
    axes.set(ylim=(0, 9))
    curves(axes, [float(column.removeprefix("p ")) for column in table.columns], lines)
    axes.set(xlabel="probability of a swap, p", ylabel="|mean of sign times loss|\ntimes 1,000")
    return figure


def sse_rows(table: Table) -> Any:
    figure, (axes,) = panels(1, 2.9)
    lines = {
        row: (colour, [table.measured(row, column) for column in table.columns])
        for row, colour in zip(table.rows, (RED, BLUE, ORANGE), strict=True)
    }
    axes.set(ylim=(0, 0.22))
    curves(axes, [float(column) for column in table.columns], lines)
    axes.set(xlabel="1st principal component / radius", ylabel="share of the items")
    return figure


def ctr_libraries(table: Table) -> Any:
    drawn = (
        ("Evenkeel, AdamAR", BLUE, "o"),
        ("Evenkeel, rowwise Adagrad", RED, "o"),
        ("TorchRec, rowwise Adagrad", RED, "s"),
        ("Evenkeel, Adam", ORANGE, "o"),
        ("DeepCTR-Torch, Adam, L2 on embeddings", ORANGE, "D"),
    )
    series = {
        name: (colour, marker, [[table.measured(row, model)] for model in ("DNN", "DCNv2", "DeepFM")])
        for row, (name, colour, marker) in zip(table.rows, drawn, strict=True)
    }
    figure, (axes,) = panels(1, 2.5)
    dots(axes, ["DNN", "DCNv2", "DeepFM"], series)
    axes.set(xlabel="test AUC on amazon_sports at each one's best validation epoch")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    tell_start(axes)
    return figure


def several_labels(four: Table, eight: Table) -> Any:
    figure, places = panels(2, 2.7, share_y=True)
    for axes, label in zip(places, ("like", "love"), strict=True):
        rows = list(eight.rows)
        series = {
            name: (colour, marker, [[table.measured(row, label)] for row in rows])
            for name, table, colour, marker in (("4 epochs", four, ORANGE, "s"), ("8 epochs", eight, BLUE, "o"))
        }
        dots(axes, rows, series)
        axes.set(xlabel="test AUC", title=label)
        tell_start(axes)
    figure.legend(*places[0].get_legend_handles_labels(), loc="outside upper center", ncols=2)
    return figure


def kernel_error(table: Table) -> Any:
    figure, (axes,) = panels(1, 4.2)
    series: dict[str, tuple[str, list[Measured | None]]] = {
        name: (colour, [Measured(table.numbers(row, name)[0]) for row in table.rows])
        for name, colour in (("orthogonal", BLUE), ("structured", SKY), ("Gaussian", GREY))
    }
    labels = [f"d {row.split(', ')[0]}, m {row.split(', ')[1].replace(' / ', ', sigma ')}" for row in table.rows]
    bars(axes, labels, series, form="{:.4f}")
    axes.set(xlabel="rms error of the kernel")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3)
    return figure
